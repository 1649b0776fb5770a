"""The door to the extension: registers its handlers and makes JAX primitives of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_fp4 import _compat, _core


def _register() -> None:
    built, running = _core.FFI_API_VERSION, _compat.runtime_ffi_api_version()
    if running is not None and built > running:
        # XLA would refuse the handlers and with them the whole CPU backend of this process.
        raise ImportError(
            f"jax_fp4 was built for XLA FFI {built[0]}.{built[1]}, but jaxlib "
            f"{jaxlib.version.__version__} offers {running[0]}.{running[1]}; "
            "update jaxlib, or rebuild with `pip install .`"
        )
    for target, handler in _core.cpu_handlers().items():
        jax.ffi.register_ffi_target(target, handler, platform="cpu")


_register()


def make_primitive(
    name: str,
    abstract: Callable[..., Sequence[Any]],
    batch: Callable[..., tuple[Sequence[Any], Sequence[int | None]]],
    parameters: tuple[str, ...],
    advice: str,
    attributes: Callable[..., dict[str, Any]] = dict,
) -> Primitive:
    """A JAX primitive that lowers to the custom call of the same name.

    Args:
        name: primitive and call target.
        abstract: ``(*avals, **params) -> avals of the results``.
        batch: the batching rule, ``(args, dims, **params) -> (results, dims)``.
        parameters: names of the static parameters.
        advice: what the error says when somebody differentiates the primitive.
        attributes: makes the custom call's attributes (str, int, bool) from the parameters.

    Returns:
        The primitive; it has several results, works eagerly, under jit and under vmap.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract)
    compiled = jax.jit(primitive.bind, static_argnames=parameters)

    def evaluate(*operands: Any, **params: Any) -> Any:
        with jax.disable_jit(False):  # a custom call exists only compiled
            return compiled(*operands, **params)

    primitive.def_impl(evaluate)
    batching.primitive_batchers[primitive] = batch

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        return jax.ffi.ffi_lowering(name)(ctx, *operands, **attributes(**params))

    def refuse_platform(ctx: Any, *operands: Any, **params: Any) -> Any:
        platforms = ", ".join(ctx.module_context.platforms)
        raise ValueError(
            f"{name} has no implementation for platform {platforms}, only for cpu; run it "
            'there, for example with JAX_PLATFORMS=cpu or jax.default_device(jax.devices("cpu")[0])'
        )

    mlir.register_lowering(primitive, refuse_platform)
    mlir.register_lowering(primitive, lower, platform="cpu")

    def refuse(primals: Any, tangents: Any, **params: Any) -> Any:
        raise TypeError(
            f"{name} cannot be differentiated: {advice} Second derivatives of jax_fp4.dot do not "
            "exist either, except with recipe=jax_fp4.recipes.BF16."
        )

    ad.primitive_jvps[primitive] = refuse
    return primitive


def cpu_level() -> str:
    """The CPU level in use: ``"portable"``, ``"avx512"``, ``"amx"`` or ``"model"``."""
    return _core.cpu_level()


def best_cpu_level() -> str:
    """The highest CPU level that processor and operating system offer."""
    return _core.best_cpu_level()


def force_cpu_level(name: str) -> None:
    """Uses one CPU level for all later calls; ``""`` goes back to the best one. For tests."""
    _core.force_cpu_level(name)


def cpu_peak_flops(seconds: float) -> float:
    """Multiply-accumulate FLOP/s of this core with operands in registers; 0 below AVX-512."""
    return _core.cpu_peak_flops(seconds)

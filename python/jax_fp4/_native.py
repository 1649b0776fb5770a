"""The door to the extension: registers its handlers and makes JAX primitives of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_fp4 import _compat, _core, automatic


def _register() -> None:
    built, running = _core.FFI_API_VERSION, _compat.runtime_ffi_api_version()
    if running is not None and built > running:
        # XLA would refuse the handlers and with them the whole CPU backend of this process.
        raise ImportError(
            f"jax_fp4 was built for XLA FFI {built[0]}.{built[1]}, but jaxlib "
            f"{jaxlib.version.__version__} offers {running[0]}.{running[1]}; "
            "update jaxlib, or rebuild with `pip install .`"
        )
    cpu = _core.sim_handlers() if SIMULATED else _core.cpu_handlers()
    for platform, handlers in (("cpu", cpu), ("CUDA", _core.cuda_handlers())):
        for target, stages in handlers.items():
            jax.ffi.register_ffi_target(target, stages, platform=platform)


def _simulated() -> bool:
    driver = os.environ.get("JAX_FP4_DRIVER", "")
    if driver not in ("", "sim"):
        raise ImportError(
            f"JAX_FP4_DRIVER: expected 'sim' (JAX's CPU platform runs the GPU kernels in the PTX "
            f"machine) or nothing, got {driver!r}"
        )
    return driver == "sim"


SIMULATED = _simulated()
"""Whether JAX's CPU platform runs the kernels of GPUs, in the PTX machine (JAX_FP4_DRIVER=sim)."""

_register()


def make_primitive(
    name: str,
    abstract: Callable[..., Sequence[Any]],
    batch: Callable[..., tuple[Sequence[Any], Sequence[int | None]]],
    parameters: tuple[str, ...],
    advice: str,
    attributes: Callable[..., dict[str, Any]] = dict,
    workspace: Callable[..., int] | None = None,
) -> Primitive:
    """A JAX primitive that lowers to the custom call of the same name.

    Args:
        name: primitive and call target.
        abstract: ``(*avals, **params) -> avals of the results``.
        batch: the batching rule, ``(args, dims, **params) -> (results, dims)``.
        parameters: names of the static parameters.
        advice: what the error says when somebody differentiates the primitive.
        attributes: makes the custom call's attributes (str, int, bool) from the parameters.
        workspace: ``(*avals, **params) -> bytes`` of scratch memory that a GPU needs. It is one
            more result of the custom call: XLA then owns it, also while a CUDA graph is replayed.

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

    def lower_for_gpu(ctx: Any, *operands: Any, **params: Any) -> Any:
        if workspace is None:
            return lower(ctx, *operands, **params)
        size = workspace(*ctx.avals_in, **params)
        scratch = _compat.result_aval((size,), "uint8", ())
        extended = ctx.replace(avals_out=[*ctx.avals_out, scratch])
        return lower(extended, *operands, **params)[:-1]

    def refuse_platform(ctx: Any, *operands: Any, **params: Any) -> Any:
        platforms = ", ".join(ctx.module_context.platforms)
        raise ValueError(
            f"{name} has no implementation for platform {platforms}, only for cpu and cuda; run it "
            'there, for example with JAX_PLATFORMS=cpu or jax.default_device(jax.devices("cpu")[0])'
        )

    mlir.register_lowering(primitive, refuse_platform)

    def partitioned(lowering: Callable[..., Any]) -> Callable[..., Any]:
        def lower_on_mesh(ctx: Any, *operands: Any, **params: Any) -> Any:
            results = automatic.lower(ctx, primitive, operands, params)
            return lowering(ctx, *operands, **params) if results is None else results

        return lower_on_mesh

    _compat.requires_devices(primitive)
    on_cpu = lower_for_gpu if SIMULATED else lower
    mlir.register_lowering(primitive, partitioned(on_cpu), platform="cpu")
    mlir.register_lowering(primitive, partitioned(lower_for_gpu), platform="cuda")

    def refuse(primals: Any, tangents: Any, **params: Any) -> Any:
        raise TypeError(
            f"{name} cannot be differentiated: {advice} Second derivatives of jax_fp4.dot do not "
            "exist either, except with recipe=jax_fp4.recipes.BF16."
        )

    ad.primitive_jvps[primitive] = refuse
    return primitive


def cpu_level() -> str:
    """The CPU level in use.

    One of ``"portable"``, ``"avx2"``, ``"avx512"``, ``"avx512_bf16"``, ``"amx"`` and ``"model"``.
    """
    return _core.cpu_level()


def best_cpu_level() -> str:
    """The highest CPU level that processor and operating system offer."""
    return _core.best_cpu_level()


def force_cpu_level(name: str) -> None:
    """Uses one CPU level for all later calls; ``""`` goes back to the best one. For tests."""
    _core.force_cpu_level(name)


def search_nvfp4(x: np.ndarray, amax: float, scales: np.ndarray, values: np.ndarray) -> None:
    """The best NVFP4 scale of each block among a few candidates (csrc/cpu/search.h), in place.

    Args:
        x: float32, bfloat16 or float16 [rows, length], contiguous, length a multiple of 16.
        amax: of the tensor.
        scales: uint8 [rows, blocks], those of rounding to nearest; replaced.
        values: uint8 [rows, row bytes], written: the codes that belong to them.
    """
    _core.search_nvfp4(x.view(np.uint8), x.dtype.name, amax, scales, values)


def squares(
    x: np.ndarray, format: str, values: np.ndarray, scales: np.ndarray, global_scale: float
) -> tuple[float, float]:
    """Sums of (value - x)**2 and of x**2 (csrc/cpu/squares.h).

    Args:
        x: float32, bfloat16 or float16 [rows, length], contiguous, length a multiple of the block.
        format: the block format's attribute.
        values: uint8 [rows, length * bits / 8], codes without padding, contiguous.
        scales: uint8 [rows, blocks], contiguous.
        global_scale: of the tensor.
    """
    return _core.squares(x.view(np.uint8), x.dtype.name, format, values, scales, global_scale)


def cpu_peak_flops(seconds: float) -> float:
    """Multiply-accumulate FLOP/s of this core with operands in registers; 0 below AVX2."""
    return _core.cpu_peak_flops(seconds)


def gemm_workspace(
    a: str,
    b: str,
    shape: tuple[int, int, int, int],
    batched: tuple[bool, bool],
    out_dtype: str,
    grouping: str = "",
) -> int:
    """Bytes of scratch memory of a product [batch, M, N] over K on a GPU.

    Args:
        a: operand_attribute of A.
        b: that of B.
        shape: batch, M, N, K.
        batched: whether A and B have the batch, or share one matrix.
        out_dtype: name of the result's dtype.
        grouping: "rows" or "k" where the batch are groups whose sizes the device knows; B has a
            matrix for each group of rows.
    """
    return _core.gemm_workspace(a, b, *shape, *batched, out_dtype, grouping)


def plan_gemm(
    a: str,
    b: str,
    shape: tuple[int, int, int, int],
    batched: tuple[bool, bool],
    out_dtype: str,
    chip: int,
    multiprocessors: int,
    grouping: str = "",
) -> dict[str, Any]:
    """What runs for a product on a GPU: kernel, splits, workspace; "text" says all of it in words.

    Arguments as for `gemm_workspace`; chip is the compute capability, 100 for 10.0.
    """
    return _core.plan_gemm(a, b, *shape, *batched, out_dtype, grouping, chip, multiprocessors)


def kernel_images() -> list[tuple[str, str]]:
    """(kernel, image) for every compiled kernel of this build; an image is "cubin sm_100a"."""
    return _core.kernel_images()


def launch_counts() -> dict[str, int]:
    """Launches of each GPU kernel in this process, simulated ones included."""
    return dict(_core.launch_counts())


def reset_sim_driver(devices: str = "100a", seed: int = 0) -> None:
    """A new simulated driver (JAX_FP4_DRIVER=sim) with these devices, "100a,103a", and schedule."""
    _core.reset_sim_driver(devices, seed)


def fail_sim_driver(function: str, nth: int, error: int) -> None:
    """The nth call of a driver function from now on fails with a CUresult; 0: every call."""
    _core.fail_sim_driver(function, nth, error)


def sim_driver_reports() -> list[str]:
    """Reports of faults and warnings of the simulated driver since its reset."""
    return _core.sim_driver_reports()

"""The case `dot`: y = x w of bfloat16 operands, quantized in the call; and dx and dw."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp4
from jax_fp4.cli.bench import check
from jax_fp4.cli.bench.check import PRODUCT_OF, Oracle, ProductCheck
from jax_fp4.cli.bench.inputs import Inputs, optional, row, to_torch
from jax_fp4.cli.bench.measure import Case, Peer
from jax_fp4.cli.bench.shapes import Product


def dot(product: Product, backward: bool) -> Case:
    """Quantization and product, and their gradients."""
    inputs = Inputs(product)
    m, n, k = product.m, product.n, product.k
    columns = functools.cache(lambda: inputs.each(lambda w: w.T.copy(), n * k * 2))

    def gradient_oracles() -> list[Oracle]:
        weights = [check.bfloat16(w) for w in columns()]

        def transposed(x: jax.Array) -> np.ndarray:
            return np.ascontiguousarray(check.bfloat16_values(x).T)

        return [
            Oracle(
                (m, k),
                lambda s: (check.bfloat16_values(inputs.gradients(s)), inputs.weight(s, weights)),
            ),
            Oracle(
                (k, n),
                lambda s: (
                    transposed(inputs.activations(s)),
                    check.dense(transposed(inputs.gradients(s))),
                ),
            ),
        ]

    oracles = [inputs.exact, *(gradient_oracles() if backward else [])]

    def unpack(result: Any) -> Sequence[Any]:
        return result if backward else [result]

    def of(function: Callable[[Any, Any], Any], format: str, dtype: Any = jnp.bfloat16) -> Any:
        """A peer that is a differentiable function of x [M, K] and w [K, N]."""

        def both(x: Any, w: Any, dy: Any) -> Any:
            y, pull = jax.vjp(function, x, w)
            return y, *pull(dy.astype(y.dtype))

        call = jax.jit(both if backward else function)
        size = jnp.dtype(dtype).itemsize

        def make(name: str) -> Peer:
            weights = columns()
            if dtype != jnp.bfloat16:
                weights = inputs.each(lambda w: w.T.astype(dtype), n * k * size)

            def arguments(s: int) -> tuple[Any, ...]:
                x, w = inputs.activations(s).astype(dtype), inputs.weight(s, weights)
                return (x, w, inputs.gradients(s).astype(dtype)) if backward else (x, w)

            return Peer(
                name,
                arguments,
                call,
                ProductCheck(oracles, PRODUCT_OF[format], unpack),
                inputs.traffic(size, size, size) * (3 if backward else 1),
                ours=name.startswith("jax_fp4"),
            )

        return make

    def ours(recipe: jax_fp4.Recipe) -> Callable[[Any, Any], Any]:
        return lambda x, w: jax_fp4.dot(x, w, preferred_element_type=jnp.bfloat16, recipe=recipe)

    def torch(name: str) -> Peer:
        module = optional("torch")
        weights = inputs.each(lambda w: to_torch(module, w), n * k * 2)

        def arguments(s: int) -> tuple[Any, ...]:
            x, w = to_torch(module, inputs.activations(s)), inputs.weight(s, weights)
            if not backward:
                return x, w
            w = w.detach().requires_grad_()
            return x.requires_grad_(), w, to_torch(module, inputs.gradients(s))

        def call(x: Any, w: Any, dy: Any = None) -> Any:
            y = module.nn.functional.linear(x, w)
            return (y, *module.autograd.grad(y, (x, w), dy)) if backward else y

        def to_numpy(result: Any) -> Sequence[Any]:
            outputs = [r.detach().float().numpy() for r in unpack(result)]
            return [*outputs[:2], *(dw.T for dw in outputs[2:])]

        return Peer(
            name,
            arguments,
            call,
            ProductCheck(oracles, PRODUCT_OF["bfloat16"], to_numpy),
            inputs.traffic(2, 2, 2) * (3 if backward else 1),
        )

    def imported(make: Callable[[], Any]) -> Callable[[str], Peer]:
        return lambda name: of(make(), "nvfp4")(name)

    peers: list[tuple[str, Callable[[str], Peer]]] = [
        ("jax_fp4 NVFP4", of(ours(jax_fp4.recipes.NVFP4), "nvfp4")),
        ("jax_fp4 MXFP8", of(ours(jax_fp4.recipes.MXFP8), "mxfp8")),
        (
            "jnp.dot bf16 -> f32",
            of(lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32), "bfloat16"),
        ),
        ("jnp.dot bf16 -> bf16", of(jnp.dot, "bfloat16")),
        ("jnp.dot f32", of(jnp.dot, "float32", jnp.float32)),
        ("qwix nvfp4", imported(qwix_dot)),
        ("Transformer Engine NVFP4", imported(lambda: transformer_engine_dot(n))),
        ("torch bf16", torch),
    ]
    case = "forward + backward" if backward else "forward"
    return row("dot", case, product, product.flops * (3 if backward else 1), peers)


def qwix_dot() -> Callable[[Any, Any], Any]:
    """Qwix's product for training: operands and gradients in NVFP4 in all three products."""
    optional("qwix")
    module = optional("qwix._src.core.dot_general_qt")
    config = module.DotGeneralQtConfig(
        lhs_qtype="nvfp4", rhs_qtype="nvfp4", tile_size=16,
        dlhs_grad_qtype="nvfp4", dlhs_tile_size=16, drhs_grad_qtype="nvfp4", drhs_tile_size=16,
    )  # fmt: skip

    def function(x: Any, w: Any) -> Any:
        dimensions = (((x.ndim - 1,), (0,)), ((), ()))
        return module.dot_general_qt(x, w, dimensions, config)

    return function


def transformer_engine_dot(features: int) -> Callable[[Any, Any], Any]:
    """Transformer Engine's dense layer under its NVFP4 recipe."""
    optional("transformer_engine")
    engine = optional("transformer_engine.jax")
    flax = optional("transformer_engine.jax.flax")
    recipe = optional("transformer_engine.common.recipe").NVFP4BlockScaling()
    layer = flax.DenseGeneral(features=features, use_bias=False)

    def function(x: Any, w: Any) -> Any:
        rngs = {"sr_rng": jax.random.key(0)}
        with engine.autocast(enabled=True, recipe=recipe):
            return layer.apply({"params": {"kernel": w}}, x, rngs=rngs)

    return function

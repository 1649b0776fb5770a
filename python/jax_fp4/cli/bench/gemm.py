"""The case `gemm`: D = A B^T of operands that are quantized already, the product alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
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

_NT = (((1,), (1,)), ((), ()))  # contract the last axes of both
_NVFP4_BYTES = 0.5625  # of an element: a code, and a sixteenth of a scale


def gemm(product: Product) -> Case:
    """The product alone."""
    inputs = Inputs(product)
    k, nk = product.k, product.n * product.k
    quantize = jax.jit(lambda x: jax_fp4.quantize(x))
    packed = functools.cache(lambda: inputs.each(quantize, nk * _NVFP4_BYTES))
    transposed = functools.cache(lambda: inputs.each(lambda w: w.T.copy(), nk * 2))

    @functools.cache
    def of_codes() -> Oracle:
        rows = [check.nvfp4(q) for q in packed()]

        def operands(s: int) -> tuple[np.ndarray, check.Rows]:
            a = check.nvfp4(quantize(inputs.activations(s)))
            return a.decode(slice(None)), inputs.weight(s, rows)

        return Oracle(inputs.exact.shape, operands)

    def ours(name: str, dtype: Any, out_bits: int) -> Peer:
        call = jax.jit(lambda a, b: jax_fp4.scaled_matmul(a, b, out_dtype=dtype))
        weights = packed()
        return Peer(
            name,
            lambda s: (quantize(inputs.activations(s)), inputs.weight(s, weights)),
            call,
            ProductCheck([of_codes()], check.exact_sum(k, out_bits)),
            inputs.traffic(_NVFP4_BYTES, _NVFP4_BYTES, jnp.dtype(dtype).itemsize),
            ours=True,
        )

    def xla(name: str, dtype: Any, out: Any) -> Peer:
        size = jnp.dtype(dtype).itemsize
        weights = transposed()
        if dtype == jnp.float32:
            weights = inputs.each(lambda w: w.T.astype(dtype), nk * 4)
        call = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=out))
        claim = check.exact_sum(k, 24 if out == jnp.float32 else 8)
        if out != jnp.float32:
            claim = PRODUCT_OF["bfloat16"]  # what XLA sums in is its own business
        return Peer(
            name,
            lambda s: (inputs.activations(s).astype(dtype), inputs.weight(s, weights)),
            call,
            ProductCheck([inputs.exact], claim),
            inputs.traffic(size, size, jnp.dtype(out).itemsize),
        )

    def scaled(name: str, format: str) -> Peer:
        from jax_fp4.formats import MXFP8_E4M3, NVFP4

        element, scale, block = (
            (jnp.float4_e2m1fn, jnp.float8_e4m3fn, NVFP4)
            if format == "nvfp4"
            else (jnp.float8_e4m3fn, jnp.float8_e8m0fnu, MXFP8_E4M3)
        )

        def operand(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            q = jax_fp4.quantize(x, block)
            values = q.as_float4() if format == "nvfp4" else q.values
            bitcast = jax.lax.bitcast_convert_type
            if format != "nvfp4":
                values = bitcast(values, element)
            return values[None], bitcast(q.scales, scale)[None]

        make = jax.jit(operand)
        call = jax.jit(
            lambda a, b: jax.nn.scaled_matmul(
                a[0], b[0], a[1], b[1], preferred_element_type=jnp.float32
            )[0]
        )
        jax.eval_shape(call, make(inputs.activations(0)), make(inputs.weights[0][:128]))
        weights = inputs.each(make, nk * 1.1)
        # It is given our codes without the scale of the whole tensor, as its arguments have none.
        factor = _tensor_scales(inputs, quantize) if format == "nvfp4" else None
        size = _NVFP4_BYTES if format == "nvfp4" else 1 + 1 / 32
        return Peer(
            name,
            lambda s: (make(inputs.activations(s)), inputs.weight(s, weights)),
            call,
            _Rescaled([inputs.exact], PRODUCT_OF[format], factor),
            inputs.traffic(size, size, 4),
        )

    def qwix(name: str, out: Any) -> Peer:
        module = optional("qwix")
        make = jax.jit(lambda x: module.quantize(x, "nvfp4", tiled_axes={1: 16}))
        call = jax.jit(lambda a, b: module.dot_general(a, b, _NT, preferred_element_type=out))
        weights = inputs.each(make, nk * 1.1)
        return Peer(
            name,
            lambda s: (make(inputs.activations(s)), inputs.weight(s, weights)),
            call,
            ProductCheck([inputs.exact], PRODUCT_OF["nvfp4"]),
            inputs.traffic(_NVFP4_BYTES, _NVFP4_BYTES, 4 if out is jnp.float32 else 2),
        )

    def torch(name: str) -> Peer:
        module = optional("torch")
        weights = inputs.each(lambda w: to_torch(module, w), nk * 2)
        return Peer(
            name,
            lambda s: (to_torch(module, inputs.activations(s)), inputs.weight(s, weights)),
            module.nn.functional.linear,
            ProductCheck([inputs.exact], PRODUCT_OF["bfloat16"], lambda r: [r.float().numpy()]),
            inputs.traffic(2, 2, 2),
        )

    peers: list[tuple[str, Callable[[str], Peer]]] = [
        ("jax_fp4 NVFP4 -> f32", lambda name: ours(name, jnp.float32, 24)),
        ("jax_fp4 NVFP4 -> bf16", lambda name: ours(name, jnp.bfloat16, 8)),
        ("jnp.dot bf16 -> f32", lambda name: xla(name, jnp.bfloat16, jnp.float32)),
        ("jnp.dot bf16 -> bf16", lambda name: xla(name, jnp.bfloat16, jnp.bfloat16)),
        ("jnp.dot f32", lambda name: xla(name, jnp.float32, jnp.float32)),
        ("jax.nn.scaled_matmul NVFP4", lambda name: scaled(name, "nvfp4")),
        ("jax.nn.scaled_matmul MXFP8", lambda name: scaled(name, "mxfp8")),
        ("qwix nvfp4 -> f32", lambda name: qwix(name, jnp.float32)),
        ("qwix nvfp4, default", lambda name: qwix(name, None)),
        ("torch bf16 -> bf16", torch),
    ]
    return row("gemm", "", product, product.flops, peers)


class _Rescaled(ProductCheck):
    """A check of results that lack the operands' tensor scales."""

    def __init__(self, oracles: Any, claim: Any, factor: Callable[[int], float] | None) -> None:
        super().__init__(oracles, claim)
        self._factor = factor

    def take(self, index: int, result: Any) -> None:
        factor = 1.0 if self._factor is None else self._factor(index)
        super().take(index, np.asarray(result) * np.float32(factor))


def _tensor_scales(inputs: Inputs, quantize: Callable[..., Any]) -> Callable[[int], float]:
    weights = [float(quantize(weight).global_scale) for weight in inputs.weights]
    return lambda s: float(quantize(inputs.activations(s)).global_scale) * inputs.weight(s, weights)

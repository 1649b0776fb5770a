"""The cases `gemm` and `dot`: this package's products beside those of others.

    gemm  D = A B^T of operands that are quantized already: the product alone
    dot   y = x w of bfloat16 operands: quantization and product; with backward, dx and dw too

Activations are new for every sample. There are two sets of weights, used in turn, or one where that
would take too much memory: between two uses the probes have copied more than the caches hold.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp4
from jax_fp4.cli.bench import check, conditions
from jax_fp4.cli.bench.check import PRODUCT_OF, Oracle, ProductCheck
from jax_fp4.cli.bench.measure import Case, Peer
from jax_fp4.cli.bench.shapes import Product

_NT = (((1,), (1,)), ((), ()))  # contract the last axes of both
_NN = (((1,), (0,)), ((), ()))
_NVFP4_BYTES = 0.5625  # of an element: a code, and a sixteenth of a scale
_WEIGHT_SETS = 2


class Inputs:
    """Random operands of one product, bfloat16: standard normal, so that no code is rare."""

    def __init__(self, product: Product) -> None:
        """Args: product: whose operands these are."""
        self.product = product
        m, n, k = product.m, product.n, product.k
        large = 2 * n * k * _WEIGHT_SETS > conditions.available_memory() / 16
        self.sets = 1 if large else _WEIGHT_SETS
        self.weights = [self._normal(("weight", i), n, k) for i in range(self.sets)]
        self._seen: dict[int, check.Rows] = {}
        self.activations = functools.lru_cache(2)(lambda s: self._normal(("x", s), m, k))
        self.gradients = functools.lru_cache(2)(lambda s: self._normal(("dy", s), m, n))

    def _normal(self, name: tuple[str, int], rows: int, columns: int) -> jax.Array:
        seed = [ord(name[0][0]), name[1], rows, columns]
        x = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
        return jnp.asarray(x, jnp.bfloat16)

    def weight(self, s: int, sets: Sequence[Any] | None = None) -> Any:
        """The weight of input set s, or what was made of it."""
        return (self.weights if sets is None else sets)[s % self.sets]

    def each(self, make: Callable[[jax.Array], Any], bytes_each: float) -> list[Any]:
        """``make`` of every weight.

        Args:
            make: of [N, K] bfloat16.
            bytes_each: of what it makes.

        Raises:
            MemoryError: if a third of the memory would not hold them.
        """
        needed, free = bytes_each * self.sets, conditions.available_memory()
        if needed > free / 3:
            raise MemoryError(f"weights of {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free")
        return [jax.block_until_ready(make(weight)) for weight in self.weights]

    @functools.cached_property
    def rows(self) -> list[check.Rows]:
        """The weights for an oracle."""
        return [check.bfloat16(weight) for weight in self.weights]

    @functools.cached_property
    def exact(self) -> Oracle:
        """A B^T of the bfloat16 operands."""
        p = self.product
        return Oracle(
            (p.m, p.n),
            lambda s: (check.bfloat16_values(self.activations(s)), self.weight(s, self.rows)),
        )

    def traffic(self, a: float, b: float, d: float) -> float:
        """Bytes of one product with elements of a, b and d bytes."""
        p = self.product
        return a * p.m * p.k + b * p.n * p.k + d * p.m * p.n


def optional(name: str) -> Any:
    """A module that may be missing.

    Raises:
        ImportError: if it is not installed, saying so.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"not installed ({error})") from None


# ---- gemm ----------------------------------------------------------------------------------------


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
        return Peer(
            name,
            lambda s: (make(inputs.activations(s)), inputs.weight(s, weights)),
            call,
            _Rescaled([inputs.exact], PRODUCT_OF[format], factor),
            inputs.traffic(*(2 * [_NVFP4_BYTES if format == "nvfp4" else 1.03]), 4),
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
        weights = inputs.each(lambda w: _to_torch(module, w), nk * 2)
        return Peer(
            name,
            lambda s: (_to_torch(module, inputs.activations(s)), inputs.weight(s, weights)),
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
    return _case("gemm", "", product, product.flops, peers)


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
    return lambda s: (
        float(quantize(inputs.activations(s)).global_scale) * inputs.weight(s, weights)
    )


def _to_torch(torch: Any, x: jax.Array) -> Any:
    return torch.from_numpy(np.array(x).view(np.int16)).view(torch.bfloat16)


def _case(
    op: str,
    case: str,
    product: Product,
    flops: float,
    peers: Sequence[tuple[str, Callable[[str], Peer]]],
) -> Case:
    makers = [(name, functools.partial(make, name)) for name, make in peers]
    if product.m == 1 and op == "gemm":
        work, unit = product.n * product.k / 1e9, "Gweight/s"
    else:
        work, unit = flops / 1e9, "GFLOP/s"
    return Case(op, case, product.label, unit, work, flops, makers)


# ---- dot -----------------------------------------------------------------------------------------


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
        weights = inputs.each(lambda w: _to_torch(module, w), n * k * 2)

        def arguments(s: int) -> tuple[Any, ...]:
            x, w = _to_torch(module, inputs.activations(s)), inputs.weight(s, weights)
            if not backward:
                return x, w
            w = w.detach().requires_grad_()
            return x.requires_grad_(), w, _to_torch(module, inputs.gradients(s))

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
    return _case("dot", case, product, product.flops * (3 if backward else 1), peers)


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

"""What `verify` runs: every kernel family, at sizes below, at and above its tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to run.

    Attributes:
        name: what the report calls it: kernel family and shape class.
        kernels: beginnings of the names of GPU kernels; one of each has to be launched.
        compute: makes the arrays. A product is a group "D", "exact", "bound": see `_differences`.
    """

    name: str
    kernels: tuple[str, ...]
    compute: Callable[[], Arrays]


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _parts(q: Any) -> Arrays:
    return {name: np.asarray(getattr(q, name)) for name in ("values", "scales", "global_scale")}


def _quantize(format: Any, shape: tuple[int, ...], dtype: str, options: dict[str, Any]) -> Arrays:
    import jax.numpy as jnp

    import jax_fp4

    x = jnp.asarray(_normal(len(shape), *shape) * np.float32(11)).astype(dtype)
    x = x.at[..., -1, -1].set(jnp.inf)
    row, col = jax_fp4.quantize_both(x, format, **options)
    decoded = np.asarray(jax_fp4.dequantize(row, jnp.float32))
    result: Arrays = {"decoded": decoded}
    for copy, q in (("row", row), ("col", col)):
        result |= {f"{copy} {name}": array for name, array in _parts(q).items()}
    return result


def _product(
    formats: tuple[Any, Any], shape: tuple[int, int, int, int], out: str, extras: bool
) -> Arrays:
    import jax.numpy as jnp

    import jax_fp4

    batch, m, n, k = shape
    a = jax_fp4.quantize(jnp.asarray(_normal(1, batch, m, k)), formats[0])
    b = jax_fp4.quantize(jnp.asarray(_normal(2, batch, n, k)), formats[1])
    bias = jnp.asarray(_normal(3, n)) if extras else None
    c = jnp.asarray(_normal(4, batch, m, n)).astype(jnp.bfloat16) if extras else None
    d = jax_fp4.scaled_matmul(a, b, out_dtype=out, bias=bias, accumulate=c)
    left, right = (np.asarray(jax_fp4.dequantize(q)).astype(np.float64) for q in (a, b))
    exact = np.einsum("bmk,bnk->bmn", left, right)
    size = np.einsum("bmk,bnk->bmn", np.abs(left), np.abs(right))
    bound = _sum_bound(k, size)
    if extras:
        exact = exact + np.asarray(bias).astype(np.float64) + np.asarray(c).astype(np.float64)
        bound = bound + 2.0**-22 * (np.abs(exact) + size)
    bound = _rounded(bound, exact, out)
    return {"D": np.asarray(d).astype(np.float32), "exact": exact, "bound": bound}


def _sum_bound(k: Any, size: np.ndarray) -> np.ndarray:
    """How far alpha * sum may be off: docs/numerics.md sections 8 and 9.

    Each of at most K additions loses 2^-22 of the terms' sum, ``size``, then the tensor scales
    round; decoding rounds each factor once.
    """
    return (k + 4) * 2.0**-22 * size


def _rounded(bound: np.ndarray, exact: np.ndarray, dtype: str) -> np.ndarray:
    """The bound when the result has been rounded to its dtype."""
    last = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    return bound + last * (np.abs(exact) + bound) + (2.0**-25 if dtype == "float16" else 0.0)


def _ragged(format: Any, sizes: tuple[int, ...], rows: int, k: int, n: int) -> Arrays:
    """ragged_dot and both gradients, one after the other in D."""
    import jax
    import jax.numpy as jnp

    import jax_fp4

    one = jax_fp4.Operand(format)
    recipe = jax_fp4.Recipe("verify", one, one, one, one, one, one)
    x, w = jnp.asarray(_normal(1, rows, k)), jnp.asarray(_normal(2, len(sizes), k, n))
    dy = jnp.asarray(_normal(3, rows, n))

    @jax.jit
    def products(x: Any, w: Any, dy: Any, sizes: Any) -> Any:
        y, back = jax.vjp(lambda x, w: jax_fp4.ragged_dot(x, w, sizes, recipe=recipe), x, w)
        return y, *back(dy)

    got = [np.asarray(v) for v in products(x, w, dy, jnp.array(sizes))]

    # Each group alone, in zeros: they change no scale, and no sum.
    groups, most = len(sizes), max(sizes)
    ends = np.cumsum(sizes)
    parts = [slice(end - count, end) for end, count in zip(ends, sizes, strict=True)]
    own_x, own_dy = np.zeros((groups, most, k), np.float32), np.zeros((groups, most, n), np.float32)
    for g, (part, count) in enumerate(zip(parts, sizes, strict=True)):
        own_x[g, :count], own_dy[g, :count] = x[part], dy[part]

    @jax.jit
    def operands(x: Any, w: Any, dy: Any) -> Any:
        def both(v: Any) -> Any:
            return [jax_fp4.dequantize(q) for q in jax_fp4.quantize_both(v, format)]

        return both(x), both(w), both(dy)

    decoded = jax.tree.map(lambda v: np.asarray(v).astype(float), operands(own_x, w, own_dy))
    (x_k, x_m), (w_n, w_k), (dy_n, dy_m) = decoded
    exact, size, terms = ([np.zeros(v.shape) for v in got] for _ in range(3))
    for g, (part, count) in enumerate(zip(parts, sizes, strict=True)):
        for i, where, a, b, summed in (
            (0, part, x_k[g, :count], w_k[g], k),
            (1, part, dy_n[g, :count], w_n[g].T, n),
            (2, g, x_m[g].T, dy_m[g], count),
        ):
            exact[i][where], size[i][where], terms[i][where] = a @ b, abs(a) @ abs(b), summed
    flat = [np.concatenate([v.ravel() for v in group]) for group in (got, exact, size, terms)]
    bound = _rounded(_sum_bound(flat[3], flat[2]), flat[1], "float32")
    return {"D": flat[0], "exact": flat[1], "bound": bound}


def cases() -> Iterator[Case]:
    """Every kernel family, at sizes below, at and above its tiles."""
    import jax.numpy as jnp

    import jax_fp4

    shapes = {"1 x 1": (1, 1), "33 x 129": (33, 129), "3 x 128 x 256": (3, 128, 256)}
    options: dict[str, dict[str, Any]] = {
        "": {},
        ", stochastic": {"rounding": "stochastic", "seed": jnp.array([5, 6], jnp.uint32)},
        ", rotated": {"col": {"hadamard": True}},
        ", 2-D": {"scaling": "2d"},
        ", four over six": {"four_over_six": True},
    }
    for format in jax_fp4.FORMATS:
        bits = "nvfp4" if format.block == 16 else f"mx{format.bits}"
        for option, chosen in options.items():
            if option and (format.block != 16 and option not in (", stochastic", ", rotated")):
                continue
            for size, shape in shapes.items():
                for dtype in ("float32", "bfloat16") if len(shape) == 3 else ("float32",):
                    name = f"quantize {format.name} from {dtype}{option}, {size}"
                    amax = ("amax",) if format.tensor_scaled else ()
                    yield Case(
                        name,
                        (*amax, f"quantize_{bits}", f"dequantize_{format.bits}"),
                        lambda f=format, s=shape, d=dtype, c=chosen: _quantize(f, s, d, c),
                    )
    four, six, eight = jax_fp4.MXFP4, jax_fp4.MXFP6_E2M3, jax_fp4.MXFP8_E4M3
    pairs = [
        (jax_fp4.NVFP4, jax_fp4.NVFP4),
        (four, four),
        (eight, eight),
        (six, four),
        (four, eight),
    ]
    products = {
        "decode, 1 x 256 x 512": ((1, 1, 256, 512), "bfloat16", False),
        "edges, 129 x 65 x 97": ((1, 129, 65, 97), "float32", True),
        "batch, 2 x 40 x 136 x 256": ((2, 40, 136, 256), "float16", True),
        "tiles, 300 x 260 x 320": ((1, 300, 260, 320), "bfloat16", False),
    }
    for pair in pairs:
        for size, (shape, out, extras) in products.items():
            yield Case(
                f"product {pair[0].name} x {pair[1].name}, {size}",
                ("gemm_",),
                lambda p=pair, s=shape, o=out, e=extras: _product(p, s, o, e),
            )
    yield Case(
        "ragged_dot and gradients NVFP4, groups of 130, 0, 1 and 70 of 209 rows",
        ("gemm_", "quantize_nvfp4"),
        lambda: _ragged(jax_fp4.NVFP4, (130, 0, 1, 70), 209, 72, 40),
    )

"""What the public functions must return, from the oracles: leading dimensions, recipes, seeds.

The oracles work on one matrix. Here are the rules that the JAX layer adds to them: leading
dimensions have an amax each and running block numbers, a dot is three products of canonical
matrices [B, free, K], and a seed may come from the bits of the cotangent. Everything is NumPy.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp4 as fp4
from oracles import gemm, pack, quantizer, tables

DTYPES = ("float32", "bfloat16", "float16")
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
OPTION_NAMES = ("scaling", "rounding", "hadamard", "scale_rule", "four_over_six")


def encode(x: np.ndarray, dtype: str) -> jax.Array:
    """float32 values as a JAX array of `dtype`, rounded by the oracle, not by JAX or ml_dtypes."""
    if dtype == "float32":
        return jnp.asarray(np.asarray(x, np.float32))
    words = tables.f32_to_bf16(x) if dtype == "bfloat16" else tables.f32_to_f16(x)
    return jax.lax.bitcast_convert_type(jnp.asarray(words), jnp.dtype(dtype))


def bits(x: Any) -> np.ndarray:
    """The bit patterns of a float array, uint16 or uint32."""
    array = np.ascontiguousarray(np.asarray(x))
    return array.view(np.uint32 if array.dtype.itemsize == 4 else np.uint16)


def widen(x: Any) -> np.ndarray:
    """The values of a float32, bfloat16 or float16 array as float32, exactly."""
    name = np.asarray(x).dtype.name
    if name == "float32":
        return np.asarray(x)
    return (tables.bf16_to_f32 if name == "bfloat16" else tables.f16_to_f32)(bits(x))


def gaussian(seed: int, shape: Sequence[int], dtype: str = "float32") -> jax.Array:
    """Normal values, a new generator for each seed."""
    return encode(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), dtype)


# ---- quantize ------------------------------------------------------------------------------------


def quantize_leads(x: np.ndarray, name: str, *, axis: int, **options: Any) -> list[Any]:
    """x [L, R, C] along -1 or -2: one oracle result a lead, block numbers running on."""
    results = []
    for lead, matrix in enumerate(x):
        rows = matrix.shape[0 if axis == -1 else 1]
        own = {**options}
        if own.get("amax") is not None:
            own["amax"] = np.broadcast_to(own["amax"], x.shape[:1])[lead]
        with np.errstate(invalid="ignore"):  # a signalling NaN is an input like any other
            results.append(
                quantizer.quantize(matrix, name, axis=axis % 2, row_offset=lead * rows, **own)
            )
    return results


def assert_bytes(q: fp4.BlockScaledArray, x: Any, axis: int = -1, **options: Any) -> None:
    """`q` is what the oracle makes of `x`: packed codes, scales, global scale and amax, in bits."""
    values = widen(x)
    if axis % values.ndim < values.ndim - 2:
        values, axis = np.moveaxis(values, axis, -1), -1
    axis = axis % values.ndim - values.ndim
    lead = values.shape[:-2]
    flat = values.reshape(math.prod(lead), *values.shape[-2:])
    wanted = quantize_leads(flat, q.format.name, axis=axis, **options)
    n = len(wanted)
    packed = np.asarray(q.values).reshape(n, *q.values.shape[len(lead) :])
    scales = np.asarray(q.linear_scales()).reshape(n, *q.linear_scales().shape[len(lead) :])
    assert q.values.shape[: len(lead)] == q.scales.shape[: len(lead)] == lead
    assert q.global_scale.shape == lead
    for i, one in enumerate(wanted):
        np.testing.assert_array_equal(packed[i], pack.pack(one.codes, q.format.bits))
        np.testing.assert_array_equal(scales[i], one.scales)
    expect_f32(q.global_scale, [one.global_scale for one in wanted])
    if q.format.scale == "ue8m0":
        assert q.amax is None
    else:
        assert q.amax is not None
        expect_f32(q.amax, [one.amax for one in wanted])


def expect_f32(got: Any, wanted: Sequence[Any]) -> None:
    """Equal bits of float32 values."""
    np.testing.assert_array_equal(bits(got).reshape(-1), bits(np.asarray(wanted, np.float32)))


def same_bytes(left: Any, right: Any) -> None:
    """Two pytrees have the same structure, dtypes, shapes and bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(
            np.ascontiguousarray(a).reshape(-1).view(np.uint8),
            np.ascontiguousarray(b).reshape(-1).view(np.uint8),
        )


# ---- dot -----------------------------------------------------------------------------------------


def fingerprint(x: Any) -> int:
    """Sum over elements of bits * (2 * index + 1), modulo 2**32."""
    words = bits(x).reshape(-1).astype(np.uint64)
    return int((words * (2 * np.arange(words.size, dtype=np.uint64) + 1)).sum() & 0xFFFFFFFF)


def data_seed(dy: Any) -> tuple[int, int]:
    """The seed of a cotangent [B, M, N]: its fingerprint, salted with its shape and mixed."""

    def mix(h: int) -> int:
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
        return h ^ (h >> 16)

    low = mix(fingerprint(dy) ^ zlib.crc32(repr(tuple(np.shape(dy))).encode()))
    return low, mix((low + 0x9E3779B9) & 0xFFFFFFFF)


def _copies(
    x: np.ndarray, operand: fp4.Operand | None, axis: int, seed: Any = (0, 0), stream: int = 0
) -> list[Any]:
    """One operand of a product, [B, R, C] along axis -1 or -2, contracted axis last."""
    if operand is None:
        rounded = tables.round_to_bf16(x)
        return list(rounded if axis == -1 else rounded.swapaxes(1, 2))
    options = {name: getattr(operand, name) for name in OPTION_NAMES}
    return quantize_leads(x, operand.format.name, axis=axis, seed=seed, stream=stream, **options)


def _product(a: Sequence[Any], b: Sequence[Any], out: str) -> list[gemm.Interval]:
    intervals = []
    for one, other in zip(a, b, strict=True):
        if isinstance(one, np.ndarray):
            exact = gemm.exact_product(one.astype(np.float64), other.astype(np.float64))
            intervals.append(gemm.output_interval(exact, out=SHORT[out]))
            continue
        exact = gemm.exact_product(one.values(), other.values())
        alpha = np.float32(one.global_scale) * np.float32(other.global_scale)
        intervals.append(gemm.output_interval(exact, alpha=float(alpha), out=SHORT[out]))
    return intervals


def product_reference(
    lhs: Any, rhs: Any, out: str, recipe: fp4.Recipe, *, has_batch: bool
) -> list[gemm.Interval]:
    """The forward product of canonical lhs [B, M, K] and rhs [B, N, K], in dtype ``out``."""
    w = recipe.fprop_w
    if has_batch and recipe.weight == "auto" and w is not None:
        w = dataclasses.replace(w, scaling="1d")
    return _product(_copies(widen(lhs), recipe.fprop_x, -1), _copies(widen(rhs), w, -1), out)


@dataclasses.dataclass(frozen=True)
class Dot:
    """What y, and the gradients of lhs and rhs, may be: an interval for each batch element."""

    y: list[gemm.Interval]  # [M, N]
    dlhs: list[gemm.Interval]  # [M, K]
    drhs: list[gemm.Interval]  # [N, K]


def dot_reference(
    lhs: Any,
    rhs: Any,
    dy: Any,
    recipe: fp4.Recipe,
    *,
    has_batch: bool,
    seed: tuple[int, int] | None = None,
) -> Dot:
    """The three products of canonical lhs [B, M, K], rhs [B, N, K] and cotangent dy [B, M, N].

    Args:
        lhs: array of the operand's dtype, which is also its gradient's.
        rhs: like lhs.
        dy: cotangent; its dtype is that of y.
        recipe: what is quantized how.
        has_batch: whether B are batch dimensions; then "auto" takes no operand for the weight.
        seed: of stochastic rounding; None takes it from the bits of dy.
    """
    fprop_w, dgrad_w = recipe.fprop_w, recipe.dgrad_w
    if recipe.weight == "auto" and has_batch and fprop_w is not None and dgrad_w is not None:
        fprop_w = dataclasses.replace(fprop_w, scaling="1d")
        dgrad_w = dataclasses.replace(dgrad_w, scaling="1d")
    x_role = (recipe.fprop_x, recipe.wgrad_x, recipe.dgrad_dy, 0)
    w_role = (fprop_w, dgrad_w, recipe.wgrad_dy, 1)
    left, right = (w_role, x_role) if recipe.weight == "lhs" else (x_role, w_role)
    seed = data_seed(dy) if seed is None else seed
    a, b, ct = widen(lhs), widen(rhs), widen(dy)
    out, lhs_dtype, rhs_dtype = (np.asarray(v).dtype.name for v in (dy, lhs, rhs))
    return Dot(
        y=_product(_copies(a, left[0], -1), _copies(b, right[0], -1), out),
        dlhs=_product(_copies(ct, left[2], -1, seed, left[3]), _copies(b, right[1], -2), lhs_dtype),
        drhs=_product(
            _copies(ct, right[2], -2, seed, right[3]), _copies(a, left[1], -2), rhs_dtype
        ),
    )


def require(intervals: Sequence[gemm.Interval], got: Any) -> None:
    """Every batch element of `got` lies in its interval."""
    for interval, one in zip(intervals, widen(got), strict=True):
        interval.require(one)

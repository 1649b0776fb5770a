"""Post-training quantization of the rows of a matrix, a slab of them at a time.

Everything here is a function of a row and of the tensor's amax: the slabs change nothing.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_fp4 import _native
from jax_fp4.block_array import BlockScaledArray
from jax_fp4.checkpoint.conventions import fill_zero_scales
from jax_fp4.formats import NVFP4, Format
from jax_fp4.quantize import dequantize, quantize

_UE4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_CHUNK_BLOCKS = 2048  # a block's 16 f32 times this: 128 KiB, so that a chunk stays in the L2 cache


@dataclasses.dataclass(frozen=True)
class Slab:
    """Some rows of a quantized matrix.

    Attributes:
        format: the block format.
        codes: uint8 [rows, stored bytes of a row].
        scales: uint8 [rows, blocks].
        global_scale: float32, of the tensor.
        bad_blocks: blocks that hold NaN or Inf.
    """

    format: Format
    codes: np.ndarray
    scales: np.ndarray
    global_scale: np.float32
    bad_blocks: int


def amax(x: np.ndarray) -> np.float32:
    """The largest finite magnitude of a contiguous x, float32, bfloat16 or float16."""
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    # Magnitudes compare like their bits.
    infinite = np.array(np.inf, x.dtype).view(unsigned)
    bits = x.view(unsigned) & unsigned.type(np.iinfo(unsigned).max >> 1)
    largest = bits.max(initial=0)
    if largest >= infinite:
        largest = np.where(bits < infinite, bits, 0).astype(unsigned).max(initial=0)
    return np.float32(np.array(largest, unsigned).view(x.dtype).astype(np.float32))


@functools.partial(jax.jit, static_argnames=("format", "four_over_six", "scale_rule"))
def _nearest(
    x: jax.Array, amax: jax.Array, format: Format, four_over_six: bool, scale_rule: str
) -> BlockScaledArray:
    given = amax if format.tensor_scaled else None
    return quantize(x, format, four_over_six=four_over_six, scale_rule=scale_rule, amax=given)


@jax.jit
def _block_errors(x: jax.Array, q: BlockScaledArray) -> jax.Array:
    """Sums of (value - x)**2 over each block, f32 [rows, blocks]."""
    difference = dequantize(q, jnp.float32) - x.astype(jnp.float32)
    return jnp.sum((difference * difference).reshape(x.shape[0], -1, q.format.block), axis=-1)


# Values of one stored byte: two E2M1 codes, or an FP8 code. Six-bit codes lie across bytes.
_BYTES = np.arange(256, dtype=np.uint8)
_E2M1 = _BYTES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
_VALUES = {
    "e2m1": np.stack([_E2M1[_BYTES & 15], _E2M1[_BYTES >> 4]], axis=-1).view(np.uint64)[:, 0],
    "e4m3": _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "e5m2": _BYTES.view(ml_dtypes.float8_e5m2).astype(np.float32),
}
_UE8M0 = _BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def squares(x: np.ndarray, slab: Slab) -> tuple[float, float]:
    """Sums of (value - x)**2 and of x**2, for the report: in f32, but for the last sum.

    Args:
        x: the rows.
        slab: what `quantize_rows` made of them.

    Returns:
        (squared error, squared norm).
    """
    sums = np.zeros(2)
    step = max(1, _CHUNK_BLOCKS * 16 // x.shape[1])
    for first in range(0, len(x), step):
        part = slice(first, first + step)
        sums += _squares(
            x[part], slab.format, slab.codes[part], slab.scales[part], slab.global_scale
        )
    return float(sums[0]), float(sums[1])


def _squares(
    x: np.ndarray, format: Format, codes: np.ndarray, scales: np.ndarray, factor: np.float32
) -> tuple[float, float]:
    if x.dtype == ml_dtypes.bfloat16:
        bits = x.view(np.uint16).astype(np.uint32)
        wide = np.left_shift(bits, 16, out=bits).view(np.float32)
    else:
        wide = x.astype(np.float32)
    if format.bits == 6:
        groups = codes.reshape(len(x), -1, 3).astype(np.uint32)
        word = groups[..., 0] | groups[..., 1] << 8 | groups[..., 2] << 16
        six = np.stack([word >> 6 * i & 63 for i in range(4)], axis=-1).astype(np.uint8)
        kind = ml_dtypes.float6_e2m3fn if format.element == "e2m3" else ml_dtypes.float6_e3m2fn
        value = six.view(kind).astype(np.float32).reshape(x.shape)
    else:
        value = _VALUES[format.element].take(codes).view(np.float32).reshape(x.shape)
    table = _UE8M0 if format.scale == "ue8m0" else _UE4M3
    scale = table.take(scales) * factor
    value *= np.repeat(scale, format.block, axis=1)
    value -= wide
    error, norm = value.reshape(-1), wide.reshape(-1)
    return float(np.dot(error, error)), float(np.dot(norm, norm))


def quantize_rows(
    x: np.ndarray, format: Format, method: str, amax: np.float32, convention: str
) -> Slab:
    """Quantizes rows.

    Args:
        x: float32, bfloat16 or float16 [rows, length], length a multiple of the block.
        format: the block format.
        method: "nearest"; "four-over-six" (NVFP4); "mse": for each block the scale with the
            smallest squared error, among eight for NVFP4 and the two rules "rceil" and "floor" for
            MX formats.
        amax: of the tensor; ignored for MX formats.
        convention: whose scale zero blocks get.

    Returns:
        The rows as a file stores them.
    """
    rows = jnp.asarray(x)
    four_over_six = method == "four-over-six"
    q = _nearest(rows, amax, format, four_over_six, "rceil")
    if method == "mse":
        q = _search(x, q, amax) if format is NVFP4 else _better_rule(rows, q, amax)
    filled = fill_zero_scales(q, convention)
    scales = np.asarray(filled.scales)
    nan_scale = 0x7F if format.scale == "ue4m3" else 0xFF
    bad = int(np.count_nonzero(scales == nan_scale))
    return Slab(
        format=format,
        codes=np.asarray(filled.values)[:, : x.shape[1] * format.bits // 8],
        scales=scales,
        global_scale=np.float32(filled.global_scale),
        bad_blocks=bad,
    )


def _better_rule(x: jax.Array, q: BlockScaledArray, amax: Any) -> BlockScaledArray:
    """For each block of an MX format the scale rule with the smaller squared error."""
    other = _nearest(x, amax, q.format, False, "floor")
    better = np.asarray(_block_errors(x, other)) < np.asarray(_block_errors(x, q))
    width = q.format.block * q.format.bits // 8
    blocks = better.shape[1]
    values = np.array(q.values)
    view = values[:, : blocks * width].reshape(-1, blocks, width)
    chosen = np.asarray(other.values)[:, : blocks * width].reshape(-1, blocks, width)
    values[:, : blocks * width] = np.where(better[..., None], chosen, view).reshape(len(values), -1)
    scales = np.where(better, np.asarray(other.scales), np.asarray(q.scales))
    return dataclasses.replace(q, values=jnp.asarray(values), scales=jnp.asarray(scales))


def _search(x: np.ndarray, q: BlockScaledArray, amax: np.float32) -> BlockScaledArray:
    """NVFP4 with the best scale of each block, and the codes that `quantize` makes with it."""
    scales, values = np.array(q.scales), np.array(q.values)
    x = np.ascontiguousarray(x)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    step = max(1, -(-len(x) // (cores or 1)))

    def work(first: int) -> None:
        part = slice(first, first + step)
        _native.search_nvfp4(x[part], float(amax), scales[part], values[part])

    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        list(pool.map(work, range(0, len(x), step)))
    return dataclasses.replace(q, values=jnp.asarray(values), scales=jnp.asarray(scales))

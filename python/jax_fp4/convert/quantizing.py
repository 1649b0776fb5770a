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
import numpy as np

from jax_fp4 import _native
from jax_fp4.block_array import BlockScaledArray
from jax_fp4.checkpoint.conventions import fill_zero_scales
from jax_fp4.formats import NVFP4, Format
from jax_fp4.quantize import dequantize, quantize


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


def squares(x: np.ndarray, slab: Slab) -> tuple[float, float]:
    """Sums of (value - x)**2 and of x**2, for the report.

    Args:
        x: the rows.
        slab: what `quantize_rows` made of them.

    Returns:
        (squared error, squared norm).
    """
    return _native.squares(
        np.ascontiguousarray(x),
        slab.format.attribute(),
        np.ascontiguousarray(slab.codes),
        np.ascontiguousarray(slab.scales),
        float(slab.global_scale),
    )


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

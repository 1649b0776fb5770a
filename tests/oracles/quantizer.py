"""Amax, scales and codes of every format: the definition, one array operation a line.

NumPy's float32 operations are IEEE with one rounding each, subnormals kept, which is exactly what
the NVFP4 chain is made of. Everything is vectorized over blocks.

Rules that all formats share:
* A block that holds NaN or Inf (after the rotation, if any; with 2-D scaling: a tile) stores the
  NaN scale and zero codes. amax is the maximum over finite values.
* Random bits belong to groups of 16 along the quantized axis: group number
  row * ceil(K / 16) + k // 16, whatever the block size of the format.
* The rotated copy of a row of K elements has round_up(K, 16): zeros are appended before the
  rotation, and dropping rotated values would change the product.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oracles import tables

F32_MAX = np.finfo(np.float32).max
ONE = np.float32(1)
# Transformer Engine's signs of the 16-point random Hadamard transform.
DEFAULT_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@dataclass(frozen=True)
class Format:
    """Element kind, kind of block scale ("ue4m3", "ue8m0", or "unit": none), block length."""

    element: str
    scale: str
    block: int

    @property
    def nan_scale(self) -> int:
        """The scale byte of a block that holds NaN or Inf."""
        return 0x7F if self.scale == "ue4m3" else 0xFF


FORMATS = {
    "NVFP4": Format("e2m1", "ue4m3", 16),
    "MXFP4": Format("e2m1", "ue8m0", 32),
    "MXFP6_E2M3": Format("e2m3", "ue8m0", 32),
    "MXFP6_E3M2": Format("e3m2", "ue8m0", 32),
    "MXFP8_E4M3": Format("e4m3", "ue8m0", 32),
    "MXFP8_E5M2": Format("e5m2", "ue8m0", 32),
    "FP8_E4M3": Format("e4m3", "unit", 32),
    "FP8_E5M2": Format("e5m2", "unit", 32),
}


@dataclass(frozen=True)
class Quantized:
    """One quantized copy, its quantized axis last."""

    format: Format
    codes: np.ndarray  # uint8 [R, K], one code per byte
    scales: np.ndarray  # uint8 [R, ceil(K / block)]
    amax: np.float32
    global_scale: np.float32

    def values(self) -> np.ndarray:
        """code * scale, float64 [R, K]: exact, without the per-tensor scale."""
        table = tables.VALUES["ue4m3" if self.format.scale == "ue4m3" else "ue8m0"]
        scales = np.repeat(table[self.scales], self.format.block, axis=1)
        return tables.VALUES[self.format.element][self.codes] * scales[:, : self.codes.shape[1]]

    def dequantize(self) -> np.ndarray:
        """fl(fl(code * scale) * global_scale), float32 [R, K]."""
        with np.errstate(over="ignore"):
            return self.values().astype(np.float32) * self.global_scale


def philox4x32_10(counter: Sequence[np.ndarray | int], key: tuple[int, int]) -> np.ndarray:
    """Ten rounds of Philox4x32 (Salmon et al., SC 2011); counters broadcast; uint32 [..., 4]."""
    mask = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c, np.uint64) for c in counter))
    for r in range(10):
        k0 = np.uint64((key[0] + r * 0x9E3779B9) & 0xFFFFFFFF)
        k1 = np.uint64((key[1] + r * 0xBB67AE85) & 0xFFFFFFFF)
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ k0,
            p1 & mask,
            (p0 >> np.uint64(32)) ^ c3 ^ k1,
            (p0 & mask),
        )
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def random_bytes(groups: np.ndarray, seed: tuple[int, int], stream: int) -> np.ndarray:
    """The 16 rounding bytes of each group: byte j % 4 of word j // 4. uint8 [..., 16]."""
    groups = np.asarray(groups, np.uint64)
    low, high = groups & np.uint64(0xFFFFFFFF), groups >> np.uint64(32)
    words = philox4x32_10((low, high, stream, 0), seed)
    return words.astype("<u4").view(np.uint8).reshape(*groups.shape, 16)


def rotate(x: np.ndarray, signs: Sequence[int] = DEFAULT_SIGNS) -> np.ndarray:
    """Rotates each 16 elements of a row: x * diag(signs) * H16 / 4, rounded to bf16 (as f32).

    Butterflies in f32 with strides 1, 2, 4, 8 in this order, then times 0.25. Rows are padded
    with zeros to a multiple of 16.
    """
    rows, k = x.shape
    groups = -(-k // 16)
    h = np.zeros((rows, groups * 16), np.float32)
    h[:, :k] = x
    h = h.reshape(rows * groups, 16) * np.asarray(signs, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for stride in (1, 2, 4, 8):
            pairs = h.reshape(-1, 16 // (2 * stride), 2, stride)
            a, b = pairs[:, :, 0], pairs[:, :, 1]
            h = np.stack([a + b, a - b], axis=2).reshape(-1, 16)
        h = h * np.float32(0.25)
    return tables.round_to_bf16(h).reshape(rows, groups * 16)


def finite_amax(x: np.ndarray) -> np.float32:
    """The largest finite magnitude, 0 if there is none."""
    magnitude = np.abs(x[np.isfinite(x)])
    return np.float32(magnitude.max()) if magnitude.size else np.float32(0)


def tensor_scales(fmt: Format, amax: np.float32, four_over_six: bool) -> tuple[np.float32, ...]:
    """(encode scale S, global_scale): S = min(fl(T / amax), FLT_MAX), or 1 where amax is 0."""
    if fmt.scale == "ue8m0":
        return ONE, ONE
    if fmt.scale == "unit":
        target = np.float32(tables.MAX[fmt.element])
    else:
        target = np.float32(6 * 256 if four_over_six else 6 * 448)
    if amax == 0:
        return ONE, np.float32(0)
    with np.errstate(over="ignore"):
        quotient = target / amax
    if quotient >= F32_MAX:
        return F32_MAX, ONE / F32_MAX
    return quotient, amax / target


def _nvfp4_multiplier(scale: np.ndarray, encode: np.float32) -> np.ndarray:
    """e = min(fl(1 / fl(s * fl(1/S))), FLT_MAX) for the stored scale byte."""
    decoded = tables.VALUES["ue4m3"][scale].astype(np.float32)
    with np.errstate(divide="ignore", over="ignore"):
        return np.minimum(ONE / (decoded * (ONE / encode)), F32_MAX)


def _mx_scales(element: str, block_amax: np.ndarray, rule: str) -> np.ndarray:
    if rule == "rceil":
        target = block_amax * (ONE / np.float32(tables.MAX[element]))
        exponent = tables.ceil_log2(np.where(target == 0, ONE, target))
        zero = target == 0
    elif rule == "floor":
        emax = int(np.floor(np.log2(tables.MAX[element])))
        exponent = tables.floor_log2(np.where(block_amax == 0, ONE, block_amax)) - emax
        zero = block_amax == 0
    else:
        raise ValueError(f"rule is 'rceil' or 'floor', got {rule!r}")
    return np.where(zero, 0, np.clip(exponent, -127, 127) + 127).astype(np.uint8)


def _scaled(x: np.ndarray, multiplier: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return x * multiplier[..., None]


def _four_over_six(
    x: np.ndarray, block_amax: np.ndarray, encode: np.float32, amax: np.float32, tile_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Scales and multipliers of blocks x [R, blocks, 16]; the smaller error sum wins, 6 on ties."""
    with np.errstate(over="ignore"):
        base = (block_amax / np.float32(6)) * encode
        wide = base * np.float32(1.5)
    limit = np.float32(448)
    scales = [tables.ue4m3_nearest(np.minimum(s, limit)) for s in (base, wide)]
    multipliers = [_nvfp4_multiplier(s, encode) for s in scales]
    errors = []
    for scale, multiplier in zip(scales, multipliers, strict=True):
        codes = tables.round_nearest("e2m1", _scaled(x, multiplier))
        value = tables.VALUES["e2m1"][codes].astype(np.float32)
        with np.errstate(over="ignore"):
            value = value * tables.VALUES["ue4m3"][scale].astype(np.float32)[..., None]
            value = (value * amax) / np.float32(6 * 256)
            error = np.abs(value - x)
            total = np.zeros(x.shape[:2], np.float32)
            for j in range(16):
                total = total + error[..., j]
            if tile_rows > 1:
                # Rows of a 16x16 tile pairwise: strides 8, 4, 2, 1; rows that do not exist add 0.
                padded = np.zeros((-(-len(total) // 16) * 16, total.shape[1]), np.float32)
                padded[: len(total)] = total
                tree = padded.reshape(len(padded) // 16, 16, total.shape[1])
                for stride in (8, 4, 2, 1):
                    tree = tree[:, :stride] + tree[:, stride : 2 * stride]
                total = np.repeat(tree[:, 0], 16, axis=0)[: len(total)]
        errors.append(total)
    four = errors[1] < errors[0]
    return np.where(four, scales[1], scales[0]), np.where(four, multipliers[1], multipliers[0])


def quantize(
    x: np.ndarray,
    fmt: str,
    *,
    axis: int = 1,
    scaling: str = "1d",
    rounding: str = "nearest",
    seed: tuple[int, int] = (0, 0),
    stream: int = 0,
    hadamard: bool | Sequence[int] = False,
    scale_rule: str = "rceil",
    four_over_six: bool = False,
    amax: float | None = None,
    row_offset: int = 0,
    group_offset: int = 0,
    logical_groups: int | None = None,
) -> Quantized:
    """Quantizes a matrix along one axis.

    Args:
        x: float32 [rows, cols], already widened from its own type.
        fmt: a name of `FORMATS`.
        axis: 1 quantizes along the columns; 0 along the rows, and the result is transposed.
        scaling: "1d", or "2d": one scale per block x block tile, repeated in every row of it.
        rounding: "nearest" or "stochastic".
        seed: the two words of the Philox key, low word first.
        stream: third word of the Philox counter.
        hadamard: True rotates with `DEFAULT_SIGNS`; or 16 signs of 1 and -1.
        scale_rule: of UE8M0 scales, "rceil" or "floor".
        four_over_six: NVFP4 only: per block the better of two scales.
        amax: of the logical tensor (after the rotation); None takes that of `x`.
        row_offset: logical number of the first row of the result, for a shard or a lead.
        group_offset: logical number of the first group of 16 of a row, for a shard.
        logical_groups: groups of 16 in a row of the logical tensor; None: as many as here.
    """
    f = FORMATS[fmt]
    h = np.ascontiguousarray(x if axis == 1 else x.T, np.float32)
    if hadamard is not False:
        h = rotate(h, DEFAULT_SIGNS if hadamard is True else hadamard)
    rows, k = h.shape
    blocks = -(-k // f.block)
    g = finite_amax(h) if amax is None else np.float32(amax)
    encode, global_scale = tensor_scales(f, g, four_over_six)

    padded = np.zeros((rows, blocks * f.block), np.float32)
    padded[:, :k] = h
    padded = padded.reshape(rows, blocks, f.block)
    bad = ~np.isfinite(padded).all(axis=-1)
    block_amax = np.abs(np.where(bad[..., None], np.float32(0), padded)).max(axis=-1, initial=0)
    if scaling == "2d":
        starts = np.arange(0, rows, f.block)
        tile = np.arange(rows) // f.block
        if rows:
            # A tile that is bad anywhere is bad everywhere, whatever its other blocks hold.
            bad = np.logical_or.reduceat(bad, starts, axis=0)[tile]
            block_amax = np.maximum.reduceat(block_amax, starts, axis=0)[tile]
    clean = np.where(bad[..., None], np.float32(0), padded)

    if f.scale == "unit":
        scales = np.full((rows, blocks), 127, np.uint8)
        multiplier = np.full((rows, blocks), encode, np.float32)
    elif f.scale == "ue8m0":
        scales = _mx_scales(f.element, block_amax, scale_rule)
        multiplier = np.ldexp(ONE, 127 - scales.astype(np.int64)).astype(np.float32)
    elif four_over_six:
        tile_rows = f.block if scaling == "2d" else 1
        scales, multiplier = _four_over_six(clean, block_amax, encode, g, tile_rows)
    else:
        with np.errstate(over="ignore"):
            t = np.minimum(block_amax * (encode * (ONE / np.float32(6))), F32_MAX)
        scales = tables.ue4m3_nearest(t)
        multiplier = _nvfp4_multiplier(scales, encode)
    scales = np.where(bad, f.nan_scale, scales).astype(np.uint8)

    y = _scaled(clean, multiplier).reshape(rows, blocks * f.block)[:, :k]
    if rounding == "nearest":
        codes = tables.round_nearest(f.element, y)
    else:
        groups = -(-k // 16)
        per_row = groups if logical_groups is None else logical_groups
        row_numbers = np.arange(row_offset, row_offset + rows, dtype=np.uint64)[:, None]
        numbers = row_numbers * np.uint64(per_row)
        numbers = numbers + np.arange(group_offset, group_offset + groups, dtype=np.uint64)
        random = random_bytes(numbers, seed, stream).reshape(rows, groups * 16)[:, :k]
        codes = tables.round_stochastic(f.element, y, random)
    bad_columns = np.repeat(bad, f.block, axis=1)[:, :k]
    codes = np.where(bad_columns, 0, codes).astype(np.uint8)
    return Quantized(f, codes, scales, g, global_scale)

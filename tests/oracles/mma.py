"""The tensor core's block-scaled dot product, bit for bit as its published model has it.

The model (MMA-Sim, arXiv 2511.10909; the vendor documents only "at least single precision") sums
fixed-point terms: every term is truncated toward zero at a fixed distance below the largest
exponent, the terms and the accumulator are added exactly, and the sum is truncated to float32.
One call is one instruction; a longer product feeds D back as C.

    kind              K   a term is                                          kept below max
    mxf4, mxf4nvf4    64  the exact sum of 16 products, times both scales    35 bits
    mxf8f6f4          32  one product, times both scales                     25 bits

A term's exponent is the sum of its factors' exponents (a subnormal's being the smallest), not
that of the normalized product; the 16-element sums have exponent 0 before scaling.
"""

import numpy as np

from oracles import tables

NAN_BITS = 0x7FFFFFFF


def _take_apart(kind: str) -> tuple[np.ndarray, np.ndarray, int]:
    """(significand, exponent) per code: value = significand * 2**(exponent - mantissa_bits)."""
    if kind == "ue8m0":
        return np.ones(256, np.int64), np.arange(256) - 127, 0
    k = tables.KINDS["e4m3" if kind == "ue4m3" else kind]
    codes = np.arange(256 if kind == "ue4m3" else 1 << k.bits)
    magnitude = codes % k.sign
    field, mantissa = magnitude >> k.mantissa_bits, magnitude % (1 << k.mantissa_bits)
    significand = np.where(field == 0, mantissa, mantissa + (1 << k.mantissa_bits))
    if kind != "ue4m3":
        significand = np.where(codes & k.sign, -significand, significand)
    return significand, np.maximum(field, 1) - k.bias, k.mantissa_bits


def _take_f32_apart(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """value = significand * 2**(exponent - 23), exponent >= -126."""
    bits = bits.astype(np.int64)
    field, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    significand = np.where(field == 0, mantissa, mantissa + 0x800000)
    return np.where(bits >> 31, -significand, significand), np.maximum(field, 1) - 127


def _shift_toward_zero(n: np.ndarray, left: np.ndarray) -> np.ndarray:
    """n * 2**left truncated toward zero; the result must fit in 62 bits."""
    magnitude = np.abs(n)
    up = magnitude << np.clip(left, 0, 62)
    down = magnitude >> np.clip(-left, 0, 63)
    return np.sign(n) * np.where(left >= 0, up, down)


def _to_f32_bits_toward_zero(n: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """Bits of n * 2**exponent (|n| < 2**53) truncated to float32; 0 is +0, overflow gives Inf."""
    magnitude = np.abs(n)
    length = np.frexp(magnitude.astype(np.float64))[1].astype(np.int64)  # bit length
    # The unit in the last place of the result is 2**(binade - 23).
    binade = np.maximum(length - 1 + exponent, -126)
    significand = _shift_toward_zero(magnitude, exponent - (binade - 23))
    subnormal = significand < 0x800000
    bits = np.where(subnormal, significand, ((binade + 127) << 23) + (significand - 0x800000))
    bits = np.where(binade > 127, 0x7F800000, bits)
    return np.where(magnitude == 0, 0, bits | np.where(n < 0, 0x80000000, 0)).astype(np.uint32)


def _accumulate(
    terms: np.ndarray,
    exponents: np.ndarray,
    zero: np.ndarray,
    c: np.ndarray,
    *,
    fraction: int,
    kept: int,
    zero_exponent: int,
) -> np.ndarray:
    """Bits of c + sum over the last axis of terms * 2**(exponents - fraction).

    `zero` marks terms that count as zero for the largest exponent. (A group whose products cancel
    is not among them.)
    """
    c_significand, c_exponent = _take_f32_apart(c)
    exponents = np.where(zero, zero_exponent, exponents)
    c_exponent = np.where(c_significand == 0, zero_exponent, c_exponent)
    largest = np.maximum(exponents.max(axis=-1), c_exponent)
    aligned = _shift_toward_zero(terms, exponents - largest[..., None] + (kept - fraction))
    aligned_c = _shift_toward_zero(c_significand, c_exponent - largest + (kept - 23))
    return _to_f32_bits_toward_zero(aligned.sum(axis=-1) + aligned_c, largest - kept)


def _special(d: np.ndarray, c: np.ndarray, nan: np.ndarray, inf: np.ndarray) -> np.ndarray:
    """NaN and Inf results; `inf` [..., T] is the sign of each infinite product, else 0."""
    magnitude = c & np.uint32(0x7FFFFFFF)
    c_inf = np.where(magnitude == 0x7F800000, np.where(c >> 31, -1, 1), 0)
    plus = (inf == 1).any(axis=-1) | (c_inf == 1)
    minus = (inf == -1).any(axis=-1) | (c_inf == -1)
    nan = nan | (magnitude > 0x7F800000) | (plus & minus)
    d = np.where(plus, 0x7F800000, np.where(minus, 0xFF800000, d))
    return np.where(nan, NAN_BITS, d).astype(np.uint32)


def mma_k64(
    a: np.ndarray, b: np.ndarray, sa: np.ndarray, sb: np.ndarray, c: np.ndarray, scale: str
) -> np.ndarray:
    """One step of kind mxf4 or mxf4nvf4: bits of c + sum over 64 of a * b, with scales.

    Args:
        a: E2M1 codes, uint8 [..., 64].
        b: like `a`; leading dimensions broadcast.
        sa: scale bytes, uint8 [..., 4] (one per 16 elements) or [..., 2] (one per 32).
        sb: like `sa`.
        c: accumulator, uint32 bits [...].
        scale: "ue4m3" or "ue8m0".
    """
    significand, exponent, fraction = _take_apart(scale)
    halves = (tables.VALUES["e2m1"] * 2).astype(np.int64)
    products = halves[a] * halves[b]
    groups = products.reshape(*products.shape[:-1], 4, 16)
    sa, sb = (np.repeat(s, 4 // s.shape[-1], axis=-1) for s in (sa, sb))
    scales = significand[sa] * significand[sb]
    d = _accumulate(
        groups.sum(axis=-1) * scales,
        exponent[sa] + exponent[sb],
        (groups == 0).all(axis=-1) | (scales == 0),
        c,
        fraction=2 + 2 * fraction,
        kept=35,
        zero_exponent=-139,
    )
    nan = np.isnan(tables.VALUES[scale])
    return _special(d, c, (nan[sa] | nan[sb]).any(axis=-1), np.zeros(1, np.int64))


def mma_k32(
    a: np.ndarray,
    b: np.ndarray,
    sa: np.ndarray,
    sb: np.ndarray,
    c: np.ndarray,
    kinds: tuple[str, str],
) -> np.ndarray:
    """One step of kind mxf8f6f4: bits of c + sum over 32 of a * b, with UE8M0 scales.

    Args:
        a: codes of kinds[0], one per byte, uint8 [..., 32].
        b: codes of kinds[1]; leading dimensions broadcast.
        sa: scale bytes, uint8 [...].
        sb: like `sa`.
        c: accumulator, uint32 bits [...].
        kinds: names of `tables.KINDS`.
    """
    (significand_a, exponent_a, fraction_a) = _take_apart(kinds[0])
    (significand_b, exponent_b, fraction_b) = _take_apart(kinds[1])
    products = significand_a[a] * significand_b[b]
    shift = sa.astype(np.int64) + sb.astype(np.int64) - 254
    d = _accumulate(
        products,
        exponent_a[a] + exponent_b[b] + shift[..., None],
        products == 0,
        c,
        fraction=fraction_a + fraction_b,
        kept=25,
        zero_exponent=-133,
    )
    with np.errstate(invalid="ignore"):
        exact = tables.VALUES[kinds[0]][a] * tables.VALUES[kinds[1]][b]
    nan = np.isnan(exact).any(axis=-1) | (sa == 255) | (sb == 255)
    return _special(d, c, nan, np.where(np.isinf(exact), np.sign(exact), 0))


def product_k64(
    a: np.ndarray, b: np.ndarray, sa: np.ndarray, sb: np.ndarray, scale: str
) -> np.ndarray:
    """uint32 bits [M, N] of a [M, K] times b [N, K] transposed, K in steps of 64 from 0.

    The last step is padded with zero codes and zero scale bytes, as the hardware's operands are.
    """
    steps = -(-a.shape[1] // 64)
    block = -(-a.shape[1] // sa.shape[1]) if sa.shape[1] else 16
    per_step = 64 // (16 if block <= 16 else 32)
    a, b = (_padded(v, steps * 64).reshape(len(v), steps, 64) for v in (a, b))
    sa, sb = (_padded(v, steps * per_step).reshape(len(v), steps, per_step) for v in (sa, sb))
    c = np.zeros((len(a), len(b)), np.uint32)
    for s in range(steps):
        c = mma_k64(a[:, None, s], b[None, :, s], sa[:, None, s], sb[None, :, s], c, scale)
    return c


def product_k32(
    a: np.ndarray, b: np.ndarray, sa: np.ndarray, sb: np.ndarray, kinds: tuple[str, str]
) -> np.ndarray:
    """uint32 bits [M, N] of a [M, K] times b [N, K] transposed, K in steps of 32 from 0."""
    steps = -(-a.shape[1] // 32)
    a, b = (_padded(v, steps * 32).reshape(len(v), steps, 32) for v in (a, b))
    c = np.zeros((len(a), len(b)), np.uint32)
    for s in range(steps):
        c = mma_k32(a[:, None, s], b[None, :, s], sa[:, None, s], sb[None, :, s], c, kinds)
    return c


def _padded(v: np.ndarray, columns: int) -> np.ndarray:
    return np.pad(v, ((0, 0), (0, columns - v.shape[1])))

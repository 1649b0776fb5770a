"""The tensor-core product without block scales, bit for bit, and sums that round otherwise.

The model (MMA-Sim, arXiv 2511.10909): a step adds its products and the accumulator as
fixed-point numbers, truncated toward zero `kept` bits below the largest exponent; the sum is
truncated to f32 or rounded to nearest-even f16. A product's exponent is the sum of its
factors', a zero's is `-108 - kept` (f32) or `4 - kept` (f16).

    chip          K of a step    kept                     E4M3, E5M2
    8.x           16 bytes       24                       kept 13, f32 results cut to 13 bits
    9.0 ... 11.x  32 bytes       25                       as f16: k % 4 < 2, then the others, + C
    12.x          32 bytes       25                       as the others
"""

from fractions import Fraction

import numpy as np

from oracles import mma

# Exponent bits, mantissa bits; the bias is the usual one. E4M3 has one NaN and no infinity.
FORMATS = {
    "f32": (8, 23), "f16": (5, 10), "bf16": (8, 7), "tf32": (8, 10), "e4m3": (4, 3),
    "e5m2": (5, 2), "e2m3": (2, 3), "e3m2": (3, 2), "e2m1": (2, 1),
}  # fmt: skip
NAN = {"f32": 0x7FFFFFFF, "f16": 0x7FFF}
_NO_INF = ("e4m3", "e2m3", "e3m2", "e2m1")


def bits_of(kind: str) -> int:
    """Width of a code."""
    return 1 + sum(FORMATS[kind])


def take_apart(
    kind: str, codes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(significand, exponent, inf, nan): value = significand * 2**(exponent - mantissa bits)."""
    exponent_bits, mantissa_bits = FORMATS[kind]
    codes = codes.astype(np.int64)
    field = codes >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = codes & (1 << mantissa_bits) - 1
    significand = np.where(field == 0, mantissa, mantissa + (1 << mantissa_bits))
    top = field == (1 << exponent_bits) - 1
    nan, inf = top & (mantissa != 0), top & (mantissa == 0)
    if kind in _NO_INF:
        inf = np.zeros_like(top)
        nan = top & (mantissa == 7) if kind == "e4m3" else inf
    significand = np.where(inf | nan, 1, significand)
    negative = codes >> (exponent_bits + mantissa_bits) & 1
    bias = (1 << (exponent_bits - 1)) - 1
    return np.where(negative, -significand, significand), np.maximum(field, 1) - bias, inf, nan


def _specials(
    kinds: tuple[str, str], a: np.ndarray, b: np.ndarray, c: np.ndarray, result: str
) -> tuple[np.ndarray, np.ndarray]:
    """(NaN, sign of an infinite result or 0) of each output."""
    (sa, _, inf_a, nan_a), (sb, _, inf_b, nan_b) = (
        take_apart(kind, x) for kind, x in zip(kinds, (a, b), strict=True)
    )
    sc, _, inf_c, nan_c = take_apart(result, c)
    infinite = np.where(inf_a | inf_b, np.sign(sa * sb), 0)
    plus = (infinite > 0).any(-1) | (inf_c & (sc > 0))
    minus = (infinite < 0).any(-1) | (inf_c & (sc < 0))
    nan = (nan_a | nan_b | ((inf_a | inf_b) & (sa * sb == 0))).any(-1) | nan_c | (plus & minus)
    return nan, np.where(plus, 1, np.where(minus, -1, 0))


def _with_specials(d: np.ndarray, nan: np.ndarray, sign: np.ndarray, result: str) -> np.ndarray:
    exponent_bits, mantissa_bits = FORMATS[result]
    inf = ((1 << exponent_bits) - 1) << mantissa_bits
    negative = 1 << (exponent_bits + mantissa_bits)
    d = np.where(sign > 0, inf, np.where(sign < 0, inf | negative, d))
    return np.where(nan, NAN[result], d).astype(np.uint32)


def _step(
    kinds: tuple[str, str], a: np.ndarray, b: np.ndarray, c: np.ndarray, result: str,
    kept: int, zero: int,
) -> np.ndarray:  # fmt: skip
    (sa, ea, *_), (sb, eb, *_) = (
        take_apart(kind, x) for kind, x in zip(kinds, (a, b), strict=True)
    )
    sc, ec, *_ = take_apart(result, c)
    products = sa * sb
    exponents = np.where(products == 0, zero, ea + eb)
    ec = np.where(sc == 0, zero, ec)
    largest = np.maximum(exponents.max(-1), ec)
    fraction = sum(FORMATS[kind][1] for kind in kinds)
    shift = mma._shift_toward_zero
    total = shift(products, exponents - largest[..., None] + kept - fraction).sum(-1)
    total += shift(sc, ec - largest + kept - FORMATS[result][1])
    if result == "f32":
        d = mma._to_f32_bits_toward_zero(total, largest - kept)
    else:
        # Fewer than 53 bits and no subnormals of f64: NumPy rounds once.
        with np.errstate(over="ignore"):
            d = np.ldexp(total.astype(np.float64), largest - kept).astype(np.float16)
        d = (d + np.float16(0)).view(np.uint16)
    return _with_specials(d, *_specials(kinds, a, b, c, result), result)


def model(
    kinds: tuple[str, str], a: np.ndarray, b: np.ndarray, c: np.ndarray, result: str, chip: int
) -> np.ndarray:
    """Bits of c + sum over the last axis of a * b, as one instruction of the chip computes it.

    Args:
        kinds: names of FORMATS, of the codes a and b.
        a: codes [..., K].
        b: codes [..., K]; leading dimensions broadcast.
        c: bits of f32 or f16 [...].
        result: "f32" or "f16", of C and D.
        chip: compute capability times ten.
    """
    width = 8 if max(map(bits_of, kinds)) <= 8 else bits_of(kinds[0])
    kept, step_bytes = (24, 16) if chip < 90 else (25, 32)
    zero = -108 - kept if result == "f32" else 4 - kept
    if width == 8 and 90 <= chip < 120:
        return _as_f16(kinds, a, b, c, result, chip)
    if width == 8 and chip < 90:
        kept = 13
    step = step_bytes * 8 // (32 if kinds[0] == "tf32" else width)
    for k in range(0, a.shape[-1], step):
        c = _step(kinds, a[..., k : k + step], b[..., k : k + step], c, result, kept, zero)
        if kept == 13 and result == "f32":
            nan = (c & 0x7FFFFFFF) > 0x7F800000
            c = np.where(nan, c, c & 0xFFFFFC00).astype(np.uint32)
    return c


def _as_f16(
    kinds: tuple[str, str], a: np.ndarray, b: np.ndarray, c: np.ndarray, result: str, chip: int
) -> np.ndarray:
    def convert(kind: str, codes: np.ndarray) -> np.ndarray:
        significand, exponent, inf, nan = take_apart(kind, codes)
        value = np.ldexp(significand.astype(np.float32), exponent - FORMATS[kind][1])
        value = np.where(inf, np.copysign(np.inf, significand), np.where(nan, np.nan, value))
        return value.astype(np.float16).view(np.uint16)

    a, b = convert(kinds[0], a), convert(kinds[1], b)
    d = np.zeros_like(c)
    k = np.arange(a.shape[-1])
    for part in (k[k % 4 < 2], k[k % 4 >= 2]):
        d = model(("f16", "f16"), a[..., part], b[..., part], d, result, chip)
    dtype, view = (np.float32, np.uint32) if result == "f32" else (np.float16, np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        total = d.astype(view).view(dtype) + c.astype(view).view(dtype)
    return np.where(np.isnan(total), NAN[result], total.view(view)).astype(np.uint32)


def round_nearest(x: Fraction, result: str) -> int:
    """Bits of x rounded once to nearest even; 0 is +0."""
    exponent_bits, mantissa_bits = FORMATS[result]
    bias = (1 << (exponent_bits - 1)) - 1
    if x == 0:
        return 0
    magnitude = abs(x)
    binade = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    binade -= magnitude < Fraction(2) ** binade
    binade = max(binade, 1 - bias)
    steps = round(magnitude / Fraction(2) ** (binade - mantissa_bits))  # ties to even
    code = ((binade + bias - 1) << mantissa_bits) + steps
    code = min(code, ((1 << exponent_bits) - 1) << mantissa_bits)
    return code | (1 << (exponent_bits + mantissa_bits) if x < 0 else 0)


def fraction_of(kind: str, code: int) -> Fraction:
    """The value of a finite code."""
    significand, exponent, *_ = take_apart(kind, np.array(code))
    return Fraction(int(significand)) * Fraction(2) ** (int(exponent) - FORMATS[kind][1])


def otherwise(products: list[Fraction], c: Fraction, how: str, result: str) -> int:
    """Bits of the sum: "exact" rounds once, "f32-chain" after every product."""
    if how == "f32-chain":
        for product in products:
            bits = round_nearest(c + product, "f32")
            if bits & 0x7FFFFFFF == 0x7F800000:
                sign, infinity = bits >> 31, ((1 << FORMATS[result][0]) - 1) << FORMATS[result][1]
                return infinity | sign << (bits_of(result) - 1)
            c = fraction_of("f32", bits)
        return round_nearest(c, result)
    return round_nearest(sum(products, c), result)

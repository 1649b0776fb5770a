"""The value of every code, and how a number is rounded to a table of codes.

A table is built from the definition of its format (OCP Microscaling Formats v1.0; E4M3 and E5M2
from OCP FP8; UE4M3 and UE8M0 from the PTX ISA) with exact fractions. Rounding searches the table:
nothing here looks at exponent bits, except the conversions of 16-bit floats.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np


@dataclass(frozen=True)
class Kind:
    """A code format: sign bit (except UE*), exponent and mantissa widths, exponent bias."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    signed: bool = True
    nan_codes: tuple[int, ...] = ()  # magnitudes
    inf_codes: tuple[int, ...] = ()

    @property
    def bits(self) -> int:
        """Width of a code."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def sign(self) -> int:
        """The sign bit of a code."""
        return 1 << (self.exponent_bits + self.mantissa_bits)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("e2m1", 2, 1, 1),
        Kind("e2m3", 2, 3, 1),
        Kind("e3m2", 3, 2, 3),
        Kind("e4m3", 4, 3, 7, nan_codes=(0x7F,)),
        Kind("e5m2", 5, 2, 15, nan_codes=(0x7D, 0x7E, 0x7F), inf_codes=(0x7C,)),
    )
}


def exact_value(kind: str, code: int) -> Fraction | None:
    """The value of `code`, or None for NaN and Inf; the sign of zero is lost.

    Kinds: those of `KINDS`, `ue4m3` (bit 7 ignored) and `ue8m0` (2**(code - 127), 255 is NaN).
    """
    if kind == "ue8m0":
        return None if code == 255 else Fraction(2) ** (code - 127)
    if kind == "ue4m3":
        return exact_value("e4m3", code & 0x7F)
    k = KINDS[kind]
    magnitude = code % k.sign
    if magnitude in k.nan_codes or magnitude in k.inf_codes:
        return None
    exponent, mantissa = divmod(magnitude, 1 << k.mantissa_bits)
    fraction = Fraction(mantissa, 1 << k.mantissa_bits)
    if exponent == 0:
        value = fraction * Fraction(2) ** (1 - k.bias)
    else:
        value = (1 + fraction) * Fraction(2) ** (exponent - k.bias)
    return -value if code & k.sign else value


def _float_table(kind: str) -> np.ndarray:
    codes = 256 if kind.startswith("u") else 1 << KINDS[kind].bits
    table = np.empty(codes, np.float64)
    for code in range(codes):
        value = exact_value(kind, code)
        k = KINDS.get(kind)
        if value is not None:
            table[code] = float(value)
        elif k is not None and code % k.sign in k.inf_codes:
            table[code] = np.inf
        else:
            table[code] = np.nan
        if k is not None and code & k.sign:
            table[code] = np.copysign(table[code], -1.0)
    return table


# float64[number of codes]; every value of every format is exact in float64.
VALUES = {kind: _float_table(kind) for kind in (*KINDS, "ue4m3", "ue8m0")}

# E2M1 once more by hand: the table everything else of this project depends on.
E2M1_BY_HAND = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
assert tuple(VALUES["e2m1"][:8]) == E2M1_BY_HAND
assert tuple(VALUES["e2m1"][8:]) == tuple(-v for v in E2M1_BY_HAND)


def _magnitudes(kind: str) -> np.ndarray:
    """The finite values >= 0 in the order of their codes, which is ascending."""
    table = VALUES[kind][: KINDS[kind].sign]
    return table[np.isfinite(table)].astype(np.float32)


MAGNITUDES = {kind: _magnitudes(kind) for kind in KINDS}
MAX = {kind: float(MAGNITUDES[kind][-1]) for kind in KINDS}
# Halfway points; each needs one bit more than the format has, so f32 holds them exactly.
MIDPOINTS = {kind: (m[1:] + m[:-1]) / np.float32(2) for kind, m in MAGNITUDES.items()}


def _signed(kind: str, x: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    return (magnitude + np.where(np.signbit(x), KINDS[kind].sign, 0)).astype(np.uint8)


def round_nearest(kind: str, x: np.ndarray) -> np.ndarray:
    """Codes of the values nearest to f32 `x` (no NaN), ties to the even code, saturating."""
    magnitude = np.abs(x)
    midpoints = np.append(MIDPOINTS[kind], np.float32(np.nan))
    below = np.searchsorted(midpoints[:-1], magnitude, side="left")  # midpoints below magnitude
    tie = magnitude == midpoints[below]
    return _signed(kind, x, below + (tie & (below % 2 == 1)))


def round_stochastic(kind: str, x: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Codes of f32 `x` (no NaN) rounded up with probability floor(256 * fraction) / 256.

    `fraction` is the distance to the value below in steps; `random` holds bytes, and a carry out
    of floor(256 * fraction) + byte rounds away from zero.
    """
    grid = MAGNITUDES[kind].astype(np.float64)
    magnitude = np.minimum(np.abs(x).astype(np.float64), grid[-1])
    low = np.searchsorted(grid, magnitude, side="right") - 1
    step = np.append(np.diff(grid), 1.0)[low]
    # Exact: the difference of two f32 within a factor of two, scaled by a power of two.
    fraction = np.floor((magnitude - grid[low]) / step * 256.0).astype(np.int64)
    return _signed(kind, x, low + (fraction + random.astype(np.int64) >= 256))


def ue4m3_nearest(x: np.ndarray) -> np.ndarray:
    """UE4M3 bytes of f32 `x` >= 0: nearest, ties to even, at most 448."""
    return round_nearest("e4m3", x)


def ceil_log2(x: np.ndarray) -> np.ndarray:
    """The smallest integer e with 2**e >= x, for finite x > 0."""
    fraction, exponent = np.frexp(x.astype(np.float64))  # x = fraction * 2**exponent, in [.5, 1)
    return exponent - (fraction == 0.5)


def floor_log2(x: np.ndarray) -> np.ndarray:
    """The largest integer e with 2**e <= x, for finite x > 0."""
    return np.frexp(x.astype(np.float64))[1] - 1


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """Widens bf16 bit patterns, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """bf16 bit patterns of f32 `x`, nearest with ties to even, on integers; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    kept, dropped = bits >> 16, bits & 0xFFFF
    up = (dropped > 0x8000) | ((dropped == 0x8000) & (kept % 2 == 1))
    quiet_nan = kept | 0x40
    return np.where(np.isnan(x), quiet_nan, kept + up).astype(np.uint16)


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """f32 values rounded to bf16, as f32."""
    return bf16_to_f32(f32_to_bf16(x))


def f16_to_f32(bits: np.ndarray) -> np.ndarray:
    """Widens f16 bit patterns, exactly (NaN patterns by integers, so that they keep their bits)."""
    bits = bits.astype(np.uint32)
    sign, field, mantissa = bits >> 15, (bits >> 10) & 31, bits & 1023
    scale = np.where(field == 0, 1, field).astype(np.int64) - 25
    value = np.ldexp((mantissa + np.where(field == 0, 0, 1024)).astype(np.float64), scale)
    finite = value.astype(np.float32).view(np.uint32)
    magnitude = np.where(field == 31, 0x7F800000 | (mantissa << 13), finite)
    return (magnitude.astype(np.uint32) | (sign << 31)).view(np.float32)


def f32_to_f16(x: np.ndarray) -> np.ndarray:
    """f16 bit patterns of f32 `x`, nearest with ties to even; overflow gives Inf.

    A NaN becomes quiet and keeps its sign and the upper bits of its payload.
    """
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    quiet_nan = 0x7E00 | ((bits >> 13) & 0x3FF)
    nan = np.isnan(x)
    magnitude = np.abs(np.where(nan, np.float32(0), x)).astype(np.float64)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, -14)  # magnitude in [1, 2) * 2**exponent
    infinite = ~np.isfinite(magnitude)
    exponent = np.where(infinite, 0, np.where(magnitude == 0, -14, exponent))
    steps = np.rint(np.ldexp(np.where(infinite, 0.0, magnitude), 10 - exponent))  # ties to even
    # A code counts steps; in the binade of `exponent` it starts at (exponent + 14) * 1024.
    code = steps.astype(np.int64) + (exponent + 14) * 1024
    code = np.where(infinite, 0x7C00, np.minimum(code, 0x7C00))
    code = np.where(nan, quiet_nan, code)
    return (code | np.where(np.signbit(x), 0x8000, 0)).astype(np.uint16)

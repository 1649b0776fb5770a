"""Exact block-scaled products, and how far a correct float32 implementation may be from them.

Why float64 can be exact. Entries (code * block scale) are short: at most 8 significand bits. If
every entry of a row of A is a multiple of qa and every entry of a row of B of qb (powers of two),
every product and every partial sum, in any order and with or without fused multiply-add, is a
multiple of q = qa * qb. Such a sum is a float64 as long as its magnitude is at most 2**53 * q, so
where sum(|terms|) < 2**53 * q nothing rounds. (The test is safe although the magnitudes are
summed in float64 as well: rounding is monotonic, and 2**53 * q is a float64.) All other elements
are summed in Python integers.
"""

from dataclasses import dataclass

import numpy as np

from oracles import tables

F32_MAX = float(np.finfo(np.float32).max)
UNIT_ROUNDOFF = 2.0**-24  # of float32
SMALLEST = 2.0**-149  # subnormal float32


@dataclass(frozen=True)
class Exact:
    """Exact sums, as an unevaluated sum of two float64, and what bounds are made of."""

    high: np.ndarray  # [M, N] the float64 nearest to the exact sum
    low: np.ndarray  # exact - high, rounded to float64; 0 where `high` is exact
    magnitude: np.ndarray  # sum of |terms|, relative error below 2**-30
    quantum: np.ndarray  # every term is a multiple of it
    terms: int  # K

    def rounded_to_f32(self) -> np.ndarray:
        """The exact sums rounded once to float32."""
        # Rounding to odd first makes the second rounding see on which side of a tie it is.
        bits = self.high.view(np.int64)
        inexact = (self.low != 0) & np.isfinite(self.high)
        beyond = np.signbit(self.low) != np.signbit(self.high)  # |high| > |exact|
        truncated = np.where(inexact & beyond, bits - 1, bits)
        odd = np.where(inexact, truncated | 1, bits).view(np.float64)
        with np.errstate(over="ignore"):
            return odd.astype(np.float32)

    def sums_exactly_in_f32(self) -> np.ndarray:
        """Where additions in any order give the exact sum: sum(|terms|) < 2**24 quanta."""
        return (self.magnitude < 2.0**24 * self.quantum) & (self.quantum >= SMALLEST)


def row_quantum(values: np.ndarray) -> np.ndarray:
    """Per row the largest power of two that divides every finite entry; 1 for a row of zeros."""
    fraction, exponent = np.frexp(np.where(np.isfinite(values), values, 0.0))
    significand = np.abs(np.ldexp(fraction, 53)).astype(np.int64)
    trailing_zeros = np.frexp((significand & -significand).astype(np.float64))[1] - 1
    none = 1 << 20
    power = np.where(significand == 0, none, exponent - 53 + trailing_zeros)
    power = power.min(axis=1, initial=none)
    return np.ldexp(1.0, np.where(power == none, 0, power))


def _python_sum(a: np.ndarray, b: np.ndarray, qa: float, qb: float) -> tuple[float, float]:
    total = sum(int(x) * int(y) for x, y in zip(a / qa, b / qb, strict=True))
    high = float(total)  # to nearest
    return high * qa * qb, float(total - int(high)) * qa * qb


def exact_product(a: np.ndarray, b: np.ndarray) -> Exact:
    """a [M, K] times b [N, K] transposed, float64 entries of at most 26 significant bits.

    Rows that hold NaN or Inf get what IEEE arithmetic gives: NaN for a NaN anywhere.
    """
    with np.errstate(invalid="ignore"):
        high = a @ b.T
        magnitude = np.abs(a) @ np.abs(b).T
    qa, qb = row_quantum(a), row_quantum(b)
    quantum = qa[:, None] * qb[None, :]
    low = np.zeros_like(high)
    finite = np.isfinite(a).all(axis=1)[:, None] & np.isfinite(b).all(axis=1)[None, :]
    for m, n in np.argwhere(finite & ~(magnitude < 2.0**53 * quantum)):
        high[m, n], low[m, n] = _python_sum(a[m], b[n], qa[m], qb[n])
    return Exact(high, low, magnitude, quantum, a.shape[1])


def sum_bound(exact: Exact, roundings: int | None = None) -> np.ndarray:
    """How far a correct float32 sum may be from the exact one, per element.

    Products of codes have at most 8 significant bits and scales multiply them exactly, so only
    additions round (each by a factor 1 + d, |d| <= u = 2**-24), and multiplications where they
    underflow (by at most half of the smallest subnormal each, twice per term: two scales).
    If every term passes at most r additions, whatever their order,

        |error| <= ((1 + u)**r - 1) * sum(|terms|) + (1 + u)**r * K * 2**-149,

    and 0 where sum(|terms|) is below 2**24 quanta, since then no addition can round.

    Args:
        exact: the exact product.
        roundings: r; None: K, which holds for every order of additions.
    """
    growth = np.expm1((exact.terms if roundings is None else roundings) * UNIT_ROUNDOFF)
    bound = growth * exact.magnitude + (1 + growth) * exact.terms * SMALLEST
    # The factor covers the float64 arithmetic of this function and its caller.
    return np.where(exact.sums_exactly_in_f32(), 0.0, bound * (1 + 2.0**-20))


@dataclass(frozen=True)
class Interval:
    """What each output element may be; lower and upper are values of the output type."""

    lower: np.ndarray  # float64 [M, N]; NaN where the result has to be NaN
    upper: np.ndarray
    unbounded: np.ndarray  # where a partial sum may leave the range of float32: no demand

    def contains(self, output: np.ndarray) -> np.ndarray:
        """Per element, for the output widened to float64."""
        output = output.astype(np.float64)
        inside = (self.lower <= output) & (output <= self.upper)
        return np.where(np.isnan(self.lower), np.isnan(output), inside | self.unbounded)

    def require(self, output: np.ndarray) -> None:
        """Raises AssertionError with the worst elements unless all are contained."""
        wrong = np.argwhere(~self.contains(output))
        if len(wrong):
            lines = [
                f"  {tuple(map(int, i))}: {output[tuple(i)]!r} not in "
                f"[{self.lower[tuple(i)]!r}, {self.upper[tuple(i)]!r}]"
                for i in wrong[:8]
            ]
            total = self.lower.size
            raise AssertionError("\n".join([f"{len(wrong)} of {total} elements:", *lines]))


def round_to(dtype: str, x: np.ndarray) -> np.ndarray:
    """float32 values rounded once to "f32", "bf16" or "f16", as float32."""
    if dtype == "bf16":
        return tables.round_to_bf16(x)
    if dtype == "f16":
        return tables.f16_to_f32(tables.f32_to_f16(x))
    return x


def output_interval(
    exact: Exact,
    *,
    alpha: float = 1.0,
    bias: np.ndarray | None = None,
    accumulate: np.ndarray | None = None,
    out: str = "f32",
    roundings: int | None = None,
) -> Interval:
    """Bounds of cvt(fl(fl(alpha * sum) + bias) + C), given `sum_bound` for the sum.

    Every step is monotonic in the sum (alpha >= 0), so the ends of the sum's interval go through
    the same float32 steps and give the ends of the output's. Bias and C are float32 (widened).
    """
    bound = sum_bound(exact, roundings)

    def finish(s: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            s = np.float32(alpha) * s
            for addend in (bias, accumulate):
                if addend is not None:
                    s = s + np.asarray(addend, np.float32)
        return round_to(out, s).astype(np.float64)

    with np.errstate(over="ignore", invalid="ignore"):
        low, high = exact.high + (exact.low - bound), exact.high + (exact.low + bound)
        # The sum is a float32: round the ends inward.
        s_low, s_high = low.astype(np.float32), high.astype(np.float32)
        s_low = np.where(s_low < low, np.nextafter(s_low, np.float32(np.inf)), s_low)
        s_high = np.where(s_high > high, np.nextafter(s_high, np.float32(-np.inf)), s_high)
        unbounded = exact.magnitude + bound >= F32_MAX
    return Interval(finish(s_low), finish(s_high), unbounded)

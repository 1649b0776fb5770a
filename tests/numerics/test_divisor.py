"""Division by multiplication (csrc/kernels/divisor.h) is integer division for all x < 2^31."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support.numerics_library import NumericsLibrary

LAST = 2**31 - 1


def quotients(numerics: NumericsLibrary, d: int, x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    numerics.call("quotients", np.uint32(d), x, out, np.int64(x.size))
    return out


def around_multiples(d: int, factors: np.ndarray) -> np.ndarray:
    """The numbers at which a quotient that is too small or too large shows first."""
    x = (factors.astype(np.int64)[:, None] * d + np.array([-1, 0, 1, d - 1])).ravel()
    return x[(x >= 0) & (x <= LAST)].astype(np.uint32)


def check(numerics: NumericsLibrary, d: int, factors: np.ndarray) -> None:
    x = np.concatenate([around_multiples(d, factors), np.array([0, 1, LAST], np.uint32)])
    np.testing.assert_array_equal(quotients(numerics, d, x), x // np.uint32(d))


def test_small_divisors_and_powers_of_two(numerics: NumericsLibrary) -> None:
    """The first and the last multiples, where the error of the multiplier has added up."""
    for d in [*range(1, 2049), *(2**s + e for s in range(11, 31) for e in (-1, 0, 1)), 2**31]:
        most = LAST // d
        check(numerics, d, np.array([0, 1, 2, most // 2, most - 1, most]))


@given(d=st.integers(1, 2**31), seed=st.integers(0, 2**32 - 1))
def test_any_divisor(numerics: NumericsLibrary, d: int, seed: int) -> None:
    """Multiples anywhere."""
    check(numerics, d, np.random.default_rng(seed).integers(0, LAST // d + 1, 64))

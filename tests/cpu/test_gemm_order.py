"""The CPU GEMM: the order of additions of each vector level, hence which instruction it runs."""

import numpy as np
import pytest

from support import gemm_native as native
from support.gemm_native import NVFP4, gemm, random_operand


def _rounded_after_every_term(terms: np.ndarray, order: np.ndarray) -> np.ndarray:
    """f32 sums over the last axis of terms that f32 holds exactly, term by term."""
    total = np.zeros(terms.shape[:-1], np.float32)
    for k in order:
        total = total + terms[..., k].astype(np.float32)
    return total


@pytest.mark.parametrize("level", [x for x in native.levels() if x in ("avx512", "avx512_bf16")])
def test_every_level_adds_in_the_order_of_its_instruction(level: str) -> None:
    """FMA adds term by term, VDPBF16PS the odd one of each pair first (Intel's manual, volume 2).

    Both are within the contract; the order shows which instruction a level runs.
    """
    m, n, k = 18, 21, 600
    rng = np.random.default_rng(21)
    a, b = (random_operand(rng, NVFP4, rows, k, scales=(0x10, 0x70)) for rows in (m, n))
    terms = a.values()[:, None] * b.values()[None]
    in_order = np.arange(k)
    odd_first = in_order ^ 1
    expected, other = in_order, odd_first
    if level == "avx512_bf16":
        expected, other = other, expected
    out = gemm(a, b, level=level)[0]
    np.testing.assert_array_equal(out, _rounded_after_every_term(terms, expected))
    assert (out != _rounded_after_every_term(terms, other)).any()

"""The tensor-core accumulation model of the headers: golden bits, and the oracle on more cases."""

from pathlib import Path

import numpy as np
import pytest

from oracles import mma, pack, tables
from support.numerics_library import ELEMENTS, SCALES, NumericsLibrary

GOLDEN = np.load(Path(__file__).resolve().parents[1] / "golden" / "mma.npz")
K64_KINDS = {
    "mxf4nvf4_block16_ue4m3": "ue4m3",
    "mxf4nvf4_block16_ue8m0": "ue8m0",
    "mxf4_block32_ue8m0": "ue8m0",
}
FIELDS = ("a", "b", "sa", "sb", "c", "d")


def fp4_steps(
    numerics: NumericsLibrary,
    scale: str,
    a: np.ndarray,
    b: np.ndarray,
    sa: np.ndarray,
    sb: np.ndarray,
    c: np.ndarray,
) -> np.ndarray:
    sa, sb = (np.repeat(s, 4 // s.shape[1], axis=1) for s in (sa, sb))
    return numerics.map("mma_fp4_steps", SCALES.index(scale), a, b, sa, sb, c, dtype=np.uint32)


@pytest.mark.parametrize("kind", K64_KINDS)
def test_k64_steps_give_the_golden_bits(numerics: NumericsLibrary, kind: str) -> None:
    """Kinds mxf4 and mxf4nvf4, with every kind of accumulator and NaN scales."""
    a, b, sa, sb, c, d = (GOLDEN[f"{kind}/{field}"] for field in FIELDS)
    a, b = (pack.unpack(v, 4, 64) for v in (a, b))
    np.testing.assert_array_equal(fp4_steps(numerics, K64_KINDS[kind], a, b, sa, sb, c), d)


def accumulators(rng: np.random.Generator, n: int) -> np.ndarray:
    """Bits of f32 of moderate size, and any bits at all (NaN, Inf, subnormal) in every fourth."""
    moderate = (rng.standard_normal(n) * np.exp2(rng.integers(-40, 40, n))).astype(np.float32)
    any_bits = rng.integers(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32)
    return np.where(np.arange(n) % 4 == 0, any_bits, moderate.view(np.uint32))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("per_step", [2, 4])
def test_k64_steps_equal_the_oracle(numerics: NumericsLibrary, scale: str, per_step: int) -> None:
    """20,000 random steps: sparse and dense codes, scales of any size or close to each other."""
    rng = np.random.default_rng(per_step)
    n = 20_000
    a, b = (rng.integers(0, 16, (n, 64)).astype(np.uint8) for _ in "ab")
    a[rng.random((n, 64)) < rng.choice([0, 0.5, 0.97], (n, 1))] = 0
    # Groups whose products cancel keep the exponent of their scales.
    b[::5, 1::2] = b[::5, ::2]
    a[::5, 1::2] = a[::5, ::2] ^ 8
    sa, sb = (rng.integers(0, 256, (n, per_step)).astype(np.uint8) for _ in "ab")
    close = slice(0, n, 2)
    sa[close] = sa[close, :1] // 2 + rng.integers(0, 6, sa[close].shape)
    sb[close] = 120 - np.minimum(sa[close], 120)
    c = accumulators(rng, n)
    expected = mma.mma_k64(a, b, sa, sb, c, scale)
    np.testing.assert_array_equal(fp4_steps(numerics, scale, a, b, sa, sb, c), expected)
    assert (expected != mma.NAN_BITS).mean() > 0.5


def fp8_steps(
    numerics: NumericsLibrary,
    kinds: tuple[str, str],
    a: np.ndarray,
    b: np.ndarray,
    sa: np.ndarray,
    sb: np.ndarray,
    c: np.ndarray,
) -> np.ndarray:
    numbers = (ELEMENTS.index(kind) for kind in kinds)
    return numerics.map("mma_fp8_steps", *numbers, a, b, sa, sb, c, dtype=np.uint32)


@pytest.mark.parametrize("kind_a", ELEMENTS)
@pytest.mark.parametrize("kind_b", ELEMENTS)
def test_k32_steps_give_the_golden_bits_and_equal_the_oracle(
    numerics: NumericsLibrary, kind_a: str, kind_b: str
) -> None:
    """Kind mxf8f6f4 for every pair of elements: golden cases, then 4,000 random steps."""
    kinds = (kind_a, kind_b)
    a, b, sa, sb, c, d = (GOLDEN[f"mxf8f6f4/{kind_a}_{kind_b}/{field}"] for field in FIELDS)
    scales = (np.ascontiguousarray(s[:, 0]) for s in (sa, sb))
    np.testing.assert_array_equal(fp8_steps(numerics, kinds, a, b, *scales, c), d)

    rng = np.random.default_rng(ELEMENTS.index(kind_a) * 5 + ELEMENTS.index(kind_b))
    n = 4_000
    a, b = (
        rng.integers(0, 1 << tables.KINDS[kind].bits, (n, 32)).astype(np.uint8) for kind in kinds
    )
    # Random 8-bit codes are NaN or Inf somewhere in most rows: keep some rows free of them.
    for codes, kind in zip((a, b), kinds, strict=True):
        special = ~np.isfinite(tables.VALUES[kind][codes])
        codes[special & (np.arange(n) % 8 != 0)[:, None]] = 1
    sa, sb = (rng.integers(100, 156, n).astype(np.uint8) for _ in "ab")
    sa[::10] = rng.integers(0, 256, len(sa[::10]))
    c = accumulators(rng, n)
    expected = mma.mma_k32(a, b, sa, sb, c, kinds)
    np.testing.assert_array_equal(fp8_steps(numerics, kinds, a, b, sa, sb, c), expected)
    assert (expected != mma.NAN_BITS).mean() > 0.5


def test_a_step_truncates_toward_zero(numerics: NumericsLibrary) -> None:
    """2^24 + 1.5 becomes 2^24 and -(2^24 + 1.5) becomes -2^24: the model rounds toward zero."""
    a, b = (np.zeros((2, 64), np.uint8) for _ in "ab")
    a[:, 0], b[0, 0], b[1, 0] = 0x3, 0x2, 0xA  # 1.5 times 1 and -1
    one = np.full((2, 4), 0x38, np.uint8)
    c = np.array([2**24, -(2**24)], np.float32).view(np.uint32)
    d = fp4_steps(numerics, "ue4m3", a, b, one, one, c).view(np.float32)
    assert d.tolist() == [2.0**24, -(2.0**24)]


@pytest.mark.parametrize(("bits", "d"), [(25, 1), (26, 0)])
def test_terms_below_the_zero_exponent_of_k64(numerics: NumericsLibrary, bits: int, d: int) -> None:
    """A zero accumulator has exponent -139: below 2^(-139 - 35) nothing counts.

    The products are 2^-150 + ... + 2^-(149 + bits), and the last term once more: 2^-149, the
    smallest f32, unless the last terms are truncated away.
    """
    # Group sums of 511 = 3 * 144 + 72 + 4 + 3 quarters (nine ones), 127, 255, and 1.
    last = {25: [(12, 8), (12, 2), (4, 1), (3, 1)], 26: [(12, 12), (12, 8), (12, 1), (3, 1)]}
    nine_ones = [(12, 12)] * 3 + [(12, 6), (4, 1), (3, 1)]
    low = -149 - bits
    groups = [nine_ones, nine_ones, last[bits], [(1, 1)]]
    code = {halves: i for i, halves in enumerate((0, 1, 2, 3, 4, 6, 8, 12))}
    a, b = (np.zeros((1, 64), np.uint8) for _ in "ab")
    for g, group in enumerate(groups):
        for k, (left, right) in enumerate(group):
            a[0, 16 * g + k], b[0, 16 * g + k] = code[left], code[right]
    exponents = np.array([[-158, -167, low, low]]) + 2  # of a quarter
    sa = (exponents // 2 + 127).astype(np.uint8)
    sb = (exponents - exponents // 2 + 127).astype(np.uint8)
    c = np.zeros(1, np.uint32)
    assert fp4_steps(numerics, "ue8m0", a, b, sa, sb, c).tolist() == [d]
    assert mma.mma_k64(a, b, sa, sb, c, "ue8m0").tolist() == [d]


@pytest.mark.parametrize(("bits", "d"), [(9, 1), (10, 0)])
def test_terms_below_the_zero_exponent_of_k32(numerics: NumericsLibrary, bits: int, d: int) -> None:
    """The same for mxf8f6f4: exponent -133, and 25 bits below it."""
    a, b = (np.zeros((1, 32), np.uint8) for _ in "ab")
    # Powers of two from 2^0 to 2^(bits - 1), and 2^0 once more; E5M2 has them all.
    a[0, : bits + 1] = [0x3C + 4 * i for i in (*range(bits), 0)]
    b[0] = 0x3C
    exponent = -149 - bits
    sa = np.array([exponent // 2 + 127], np.uint8)
    sb = np.array([exponent - exponent // 2 + 127], np.uint8)
    c = np.zeros(1, np.uint32)
    kinds = ("e5m2", "e5m2")
    assert fp8_steps(numerics, kinds, a, b, sa, sb, c).tolist() == [d]
    assert mma.mma_k32(a, b, sa, sb, c, kinds).tolist() == [d]

"""Element codes, scale bytes and 16-bit floats: decoding, rounding to nearest, stochastic rounding.

Exhaustive where the domain has at most 2^16 members; for f32 inputs every rounding boundary and
its neighbours, and a million random bit patterns.
"""

import numpy as np
import pytest

from oracles import tables
from support.numerics_library import ELEMENTS, SCALES, NumericsLibrary

ALL_U16 = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
NAN_CODES = {"e2m1": 0x07, "e2m3": 0x1F, "e3m2": 0x1F, "e4m3": 0x7F, "e5m2": 0x7F}


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


def encode_nearest(numerics: NumericsLibrary, kind: str, x: np.ndarray) -> np.ndarray:
    return numerics.map("encode_codes_nearest", ELEMENTS.index(kind), x, dtype=np.uint8)


def expected_nearest(kind: str, x: np.ndarray) -> np.ndarray:
    nan = np.isnan(x)
    codes = tables.round_nearest(kind, np.where(nan, np.float32(0), x))
    return np.where(nan, NAN_CODES[kind], codes).astype(np.uint8)


def boundary_inputs(kind: str) -> np.ndarray:
    """Every value and midpoint of a kind with both neighbours, and the ends of f32; both signs."""
    points = np.concatenate([tables.MAGNITUDES[kind], tables.MIDPOINTS[kind]])
    f32 = np.finfo(np.float32)
    ends = np.array(
        [0, f32.smallest_subnormal, f32.tiny, 2 * tables.MAX[kind], f32.max, np.inf], np.float32
    )
    positive = np.concatenate(
        [points, np.nextafter(points, np.float32(0)), np.nextafter(points, f32.max), ends]
    )
    return np.concatenate([positive, -positive]).astype(np.float32)


def random_bit_patterns(seed: int, n: int = 1 << 20) -> np.ndarray:
    patterns = np.random.default_rng(seed).integers(0, 1 << 32, n, dtype=np.uint64)
    return patterns.astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("kind", ELEMENTS)
def test_every_code_decodes_to_its_value(numerics: NumericsLibrary, kind: str) -> None:
    """All codes, signed zeros, NaN and Inf included; bits above the format's width are ignored."""
    codes = np.arange(256, dtype=np.uint8)
    decoded = numerics.map("decode_codes", ELEMENTS.index(kind), codes, dtype=np.float32)
    expected = np.resize(tables.VALUES[kind], 256)
    np.testing.assert_array_equal(decoded.astype(np.float64), expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(decoded[numbers]), np.signbit(expected[numbers]))


@pytest.mark.parametrize("kind", SCALES)
def test_every_scale_byte_decodes_to_its_value(numerics: NumericsLibrary, kind: str) -> None:
    """All bytes: subnormal UE4M3, UE8M0 byte 0 (2^-127), 128.0, NaN; UE4M3 has no sign."""
    decoded = numerics.map(
        "decode_scales", SCALES.index(kind), np.arange(256, dtype=np.uint8), dtype=np.float32
    )
    np.testing.assert_array_equal(decoded.astype(np.float64), tables.VALUES[kind])


@pytest.mark.parametrize("kind", ELEMENTS)
def test_every_code_encodes_to_itself(numerics: NumericsLibrary, kind: str) -> None:
    """encode(decode(code)) = code for every finite code, -0 included."""
    finite = np.flatnonzero(np.isfinite(tables.VALUES[kind])).astype(np.uint8)
    x = tables.VALUES[kind][finite].astype(np.float32)
    np.testing.assert_array_equal(encode_nearest(numerics, kind, x), finite)


@pytest.mark.parametrize("kind", ELEMENTS)
def test_rounds_to_nearest_with_ties_to_even(numerics: NumericsLibrary, kind: str) -> None:
    """All bf16 and f16 inputs, every rounding boundary +-1 ulp, and a million bit patterns."""
    for x in (
        tables.bf16_to_f32(ALL_U16),
        tables.f16_to_f32(ALL_U16),
        boundary_inputs(kind),
        random_bit_patterns(ELEMENTS.index(kind)),
    ):
        np.testing.assert_array_equal(encode_nearest(numerics, kind, x), expected_nearest(kind, x))


def test_saturates_instead_of_becoming_nan(numerics: NumericsLibrary) -> None:
    """E4M3 of 448, 464, 465, 1000 and Inf is 448, unlike casts that give NaN from 465 on."""
    x = np.array([448, 464, 465, 1000, np.inf], np.float32)
    assert encode_nearest(numerics, "e4m3", x).tolist() == [0x7E] * 5
    assert encode_nearest(numerics, "e4m3", -x).tolist() == [0xFE] * 5


@pytest.mark.parametrize("kind", ELEMENTS)
def test_stochastic_rounding_follows_the_carry_rule(numerics: NumericsLibrary, kind: str) -> None:
    """All 256 random bytes for every boundary input and 2,000 random values, both signs."""
    rng = np.random.default_rng(7)
    spread = rng.standard_normal(1000) * np.exp2(rng.integers(-12, 4, 1000)) * tables.MAX[kind] / 8
    grid = tables.MAGNITUDES[kind].astype(np.float64)
    low = rng.integers(0, len(grid) - 1, 1000)
    # Fractions that are multiples of 1/256, where one unit decides.
    on_units = grid[low] + np.diff(grid)[low] * rng.integers(0, 257, 1000) / 256
    units = np.concatenate([on_units, spread]).astype(np.float32)
    x = np.concatenate([boundary_inputs(kind), units, np.nextafter(units, np.float32(0))])
    x, random = (np.ascontiguousarray(v) for v in np.broadcast_arrays(x[:, None], np.arange(256)))
    random = random.astype(np.uint8)
    codes = numerics.map("encode_codes_stochastic", ELEMENTS.index(kind), x, random, dtype=np.uint8)
    np.testing.assert_array_equal(codes, tables.round_stochastic(kind, x, random))


@pytest.mark.parametrize("kind", ELEMENTS)
def test_stochastic_rounding_never_moves_exact_values(numerics: NumericsLibrary, kind: str) -> None:
    """A value that has a code keeps it for all 256 random bytes; values above max saturate."""
    finite = np.flatnonzero(np.isfinite(tables.VALUES[kind])).astype(np.uint8)
    codes = np.repeat(finite, 256)
    random = np.tile(np.arange(256, dtype=np.uint8), len(finite))
    x = tables.VALUES[kind][codes].astype(np.float32)
    element = ELEMENTS.index(kind)
    encoded = numerics.map("encode_codes_stochastic", element, x, random, dtype=np.uint8)
    np.testing.assert_array_equal(encoded, codes)
    nan = np.full(256, np.nan, np.float32)
    encoded = numerics.map("encode_codes_stochastic", element, nan, random[:256], dtype=np.uint8)
    assert set(encoded.tolist()) == {NAN_CODES[kind]}


def test_ue4m3_scales_round_to_nearest(numerics: NumericsLibrary) -> None:
    """Every boundary +-1 ulp of f32 >= 0; above 448 saturates; NaN gives 0x7F."""
    x = np.abs(np.concatenate([boundary_inputs("e4m3"), random_bit_patterns(8)]))
    encoded = numerics.map("encode_scales_ue4m3", x, dtype=np.uint8)
    np.testing.assert_array_equal(encoded, expected_nearest("e4m3", x))


def test_ue8m0_scales_round_up_to_a_power_of_two(numerics: NumericsLibrary) -> None:
    """2^(byte - 127) is the smallest one not below x: all powers +-1 ulp, and random patterns."""
    powers = np.ldexp(np.float64(1), np.arange(-149, 128)).astype(np.float32)
    neighbours = [np.nextafter(powers, np.float32(end)) for end in (0, np.inf)]
    x = np.abs(np.concatenate([powers, *neighbours, random_bit_patterns(9)]))
    x = x[np.isfinite(x)]
    bytes_ = numerics.map("encode_scales_ue8m0_up", x, dtype=np.uint8)
    value = tables.VALUES["ue8m0"]
    saturated = x > 2.0**127
    assert (bytes_[saturated] == 254).all()
    assert (value[bytes_] >= x)[~saturated].all()
    lower = bytes_ > 0
    assert (value[bytes_[lower] - 1] < x[lower]).all()


def test_ue8m0_scales_of_known_inputs(numerics: NumericsLibrary) -> None:
    """0, the subnormal 2^-127, 0.006975, 1, Inf and NaN: no bits of one leak into another."""
    x = np.array([0, 2.0**-127, 0.006975, 1, 3.4e38, np.inf, np.nan], np.float32)
    encoded = numerics.map("encode_scales_ue8m0_up", x, dtype=np.uint8)
    assert encoded.tolist() == [0, 0, 120, 127, 254, 254, 255]


def test_bf16_widens_and_narrows_every_pattern(numerics: NumericsLibrary) -> None:
    """All 2^16 patterns widen exactly and come back, NaN becoming quiet."""
    wide = numerics.map("decode_bf16s", ALL_U16, dtype=np.float32)
    np.testing.assert_array_equal(bits(wide), ALL_U16.astype(np.uint32) << 16)
    narrow = numerics.map("encode_bf16s", wide, dtype=np.uint16)
    nan = (ALL_U16 & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal(narrow, np.where(nan, ALL_U16 | 0x40, ALL_U16))


def test_bf16_rounds_to_nearest_even(numerics: NumericsLibrary) -> None:
    """Both sides of the midpoint above every bf16 pattern, subnormals kept; random patterns."""
    base = ALL_U16.astype(np.uint32) << 16
    around = np.concatenate([base | d for d in (0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    x = np.concatenate([around.view(np.float32), random_bit_patterns(10)])
    narrow = numerics.map("encode_bf16s", x, dtype=np.uint16)
    np.testing.assert_array_equal(narrow, tables.f32_to_bf16(x))


def test_f16_widens_and_narrows_every_pattern(numerics: NumericsLibrary) -> None:
    """All 2^16 patterns equal NumPy's IEEE f16; NaN payloads are kept and become quiet."""
    wide = numerics.map("decode_f16s", ALL_U16, dtype=np.float32)
    np.testing.assert_array_equal(bits(wide), bits(tables.f16_to_f32(ALL_U16)))
    nan = np.isnan(wide)
    numpys = ALL_U16[~nan].view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(bits(wide[~nan]), bits(numpys))
    narrow = numerics.map("encode_f16s", wide, dtype=np.uint16)
    np.testing.assert_array_equal(narrow, np.where(nan, ALL_U16 | 0x200, ALL_U16))


def test_f16_rounds_to_nearest_even(numerics: NumericsLibrary) -> None:
    """Midpoints between all neighbouring f16 values +-1 ulp of f32, overflow to Inf, random."""
    finite = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    midpoints = np.append((finite[1:] + finite[:-1]) / 2, np.float32(65520))
    neighbours = [np.nextafter(midpoints, np.float32(end)) for end in (0, np.inf)]
    x = np.concatenate([midpoints, *neighbours, np.array([65536, np.inf], np.float32)])
    x = np.concatenate([x, -x, random_bit_patterns(11)])
    narrow = numerics.map("encode_f16s", x, dtype=np.uint16)
    np.testing.assert_array_equal(narrow, tables.f32_to_f16(x))
    number = ~np.isnan(x)
    with np.errstate(over="ignore"):
        numpys = x[number].astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(narrow[number], numpys)

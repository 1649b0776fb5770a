"""From amax to scales: the NVFP4 chain, four-over-six, MX scales under both rules, FP8."""

import ctypes

import numpy as np
import pytest

from oracles import quantizer, tables
from support.numerics_library import ELEMENTS, FORMATS, RULES, NumericsLibrary

F32 = np.finfo(np.float32)
MX_FORMATS = [name for name in FORMATS if name.startswith("MX")]
FP8_FORMATS = [name for name in FORMATS if name.startswith("FP8")]


def tensor_scales(
    numerics: NumericsLibrary, name: str, amax: np.ndarray, four_over_six: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    encode, global_scale = np.empty_like(amax), np.empty_like(amax)
    arguments = (FORMATS.index(name), int(four_over_six), amax, encode, global_scale)
    numerics.call("tensor_scales", *arguments, np.int64(amax.size))
    return encode, global_scale


def encode_blocks(
    numerics: NumericsLibrary, name: str, amax: np.ndarray, encode: np.ndarray, rule: str = "rceil"
) -> tuple[np.ndarray, np.ndarray]:
    amax, encode = (np.ascontiguousarray(v) for v in np.broadcast_arrays(amax, encode))
    scale, multiplier = np.empty(amax.shape, np.uint8), np.empty_like(amax)
    numbers = (FORMATS.index(name), RULES.index(rule))
    numerics.call("encode_blocks", *numbers, amax, encode, scale, multiplier, np.int64(amax.size))
    return scale, multiplier


def quantize_blocks(
    numerics: NumericsLibrary, name: str, x: np.ndarray, rule: str = "rceil"
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of x [n, block], as one tensor, from the functions of the headers."""
    encode, _ = tensor_scales(numerics, name, np.array([np.abs(x).max()], np.float32))
    scale, multiplier = encode_blocks(numerics, name, np.abs(x).max(axis=1), encode, rule)
    element = ELEMENTS.index(quantizer.FORMATS[name].element)
    with np.errstate(over="ignore"):
        y = x * multiplier[:, None]
    return numerics.map("encode_codes_nearest", element, y, dtype=np.uint8), scale


def adversarial_amax() -> np.ndarray:
    """0, every power of two of f32 +-1 ulp, named troublemakers, and random values of any size."""
    powers = np.ldexp(np.float64(1), np.arange(-149, 128)).astype(np.float32)
    named = np.array(
        # A block of 1e-35, the edge where 2688/amax overflows, and the largest finite value.
        [0, 1e-42, 1e-38, 6e-38, 1e-35, 5e-35, 7e-36, 7.9e-36, 8e-36, 1.3e-36, 448, 2688, 3e38,
         3.4e38, F32.max, F32.tiny, F32.smallest_subnormal],
        np.float32,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    random = np.exp2(rng.uniform(-149, 128, 2000)).astype(np.float32)
    neighbours = [np.nextafter(powers, np.float32(end)) for end in (0, F32.max)]
    return np.concatenate([named, powers, *neighbours, random])


@pytest.mark.parametrize(
    ("name", "four_over_six"), [*((name, False) for name in FORMATS), ("NVFP4", True)]
)
def test_tensor_scales_equal_the_oracle(
    numerics: NumericsLibrary, name: str, four_over_six: bool
) -> None:
    """Encode and global scale for amax from 0 and the smallest subnormal to the largest f32."""
    amax = adversarial_amax()
    encode, global_scale = tensor_scales(numerics, name, amax, four_over_six)
    expected = [quantizer.tensor_scales(quantizer.FORMATS[name], a, four_over_six) for a in amax]
    np.testing.assert_array_equal(encode, np.array([e for e, _ in expected]))
    np.testing.assert_array_equal(global_scale, np.array([g for _, g in expected]))
    assert np.isfinite(encode).all() and (encode > 0).all()


def nvfp4_chain(block_amax: np.ndarray, encode: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The chain of the definition, one rounding a line."""
    one = np.float32(1)
    with np.errstate(over="ignore", divide="ignore", under="ignore"):
        m = encode * (one / np.float32(6))
        t = np.minimum(block_amax * m, F32.max)
        scale = tables.ue4m3_nearest(t)
        decode_scale = one / encode
        stored = tables.VALUES["ue4m3"][scale].astype(np.float32) * decode_scale
        return scale, np.minimum(one / stored, F32.max)


def test_nvfp4_chain_rounds_as_defined(numerics: NumericsLibrary) -> None:
    """Every adversarial tensor amax with 600 block amax values from far below it up to it."""
    amax = adversarial_amax()
    encode, _ = tensor_scales(numerics, "NVFP4", amax)
    rng = np.random.default_rng(1)
    ratio = np.concatenate([[1, 0], np.exp2(-rng.uniform(0, 20, 598))]).astype(np.float32)
    blocks = np.minimum(amax[:, None] * ratio, amax[:, None])
    scale, multiplier = encode_blocks(numerics, "NVFP4", blocks, encode[:, None])
    expected_scale, expected_multiplier = nvfp4_chain(blocks, encode[:, None])
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(multiplier, expected_multiplier)
    assert (scale < 0x7F).all() and np.isfinite(multiplier).all()


def test_nvfp4_scales_on_midpoints(numerics: NumericsLibrary) -> None:
    """Block amax near every midpoint of two UE4M3 values, where an equal chain would differ."""
    encode = np.float32(1)
    midpoints = tables.MIDPOINTS["e4m3"] * np.float32(6)
    amax = [midpoints]
    for _ in range(4):
        amax = [np.nextafter(amax[0], np.float32(0)), *amax, np.nextafter(amax[-1], F32.max)]
    blocks = np.concatenate(amax)
    scale, multiplier = encode_blocks(numerics, "NVFP4", blocks, encode)
    expected_scale, expected_multiplier = nvfp4_chain(blocks, encode)
    np.testing.assert_array_equal(scale, expected_scale)
    # The multiplier belongs to the stored scale, not to the unrounded one.
    np.testing.assert_array_equal(multiplier, expected_multiplier)
    stored = tables.VALUES["ue4m3"][scale]
    normal = stored > 0
    np.testing.assert_allclose(multiplier[normal], 1 / stored[normal], rtol=2**-23)


@pytest.mark.parametrize(
    ("tensor_amax", "scale"),
    [
        (1.0, 0x7E),  # the block that holds the tensor's maximum: 448
        (28_672.0, 0x08),  # the last ratio with a normal scale, 2^-6
        (28_700.0, 0x08),
        (32_768.0, 0x07),
        (458_751.0, 0x01),
        (458_752.0, 0x00),  # t = 448 / 458752 = 2^-10 exactly: a tie between 0 and 2^-9
        (460_000.0, 0x00),
    ],
)
def test_nvfp4_scale_of_a_block_of_ones(
    numerics: NumericsLibrary, tensor_amax: float, scale: int
) -> None:
    """Blocks are normal up to a ratio of 28,672 and flushed to zero from 458,752 on."""
    encode, _ = tensor_scales(numerics, "NVFP4", np.array([tensor_amax], np.float32))
    found, _ = encode_blocks(numerics, "NVFP4", np.array([1], np.float32), encode)
    assert found.tolist() == [scale]


def test_nvfp4_scale_comes_from_the_rounded_sixth(numerics: NumericsLibrary) -> None:
    """Amax 4.5 in a tensor of 6: 336, midway between 320 and 352, goes up as fl(1/6) > 1/6."""
    encode, _ = tensor_scales(numerics, "NVFP4", np.array([6], np.float32))
    scale, _ = encode_blocks(numerics, "NVFP4", np.array([4.5], np.float32), encode)
    assert scale.tolist() == [0x7B]


def test_nvfp4_zero_and_flushed_blocks(numerics: NumericsLibrary) -> None:
    """Scale 0 has the multiplier FLT_MAX: zeros stay zero (with their sign), nothing is NaN."""
    encode, global_scale = tensor_scales(numerics, "NVFP4", np.array([0, 1], np.float32))
    assert encode[0] == 1 and global_scale[0] == 0
    scale, multiplier = encode_blocks(numerics, "NVFP4", np.zeros(2, np.float32), encode)
    assert scale.tolist() == [0, 0] and (multiplier == F32.max).all()
    y = np.array([0.0, -0.0], np.float32) * multiplier
    codes = numerics.map("encode_codes_nearest", ELEMENTS.index("e2m1"), y, dtype=np.uint8)
    assert codes.tolist() == [0, 8]


def test_four_over_six_candidates_equal_the_definition(numerics: NumericsLibrary) -> None:
    """base = fl(fl(b/6) * S), scales e4m3(min(base, 448)) and e4m3(min(fl(1.5 * base), 448))."""
    amax = adversarial_amax()
    encode, _ = tensor_scales(numerics, "NVFP4", amax, four_over_six=True)
    ratio = np.exp2(-np.random.default_rng(2).uniform(0, 20, 300)).astype(np.float32)
    blocks = np.ascontiguousarray(np.append(ratio, np.float32([0, 1])) * amax[:, None])
    encode = np.ascontiguousarray(np.broadcast_to(encode[:, None], blocks.shape))
    out = [np.empty(blocks.shape, dtype) for dtype in (np.uint8, np.float32) * 2]
    numerics.call("four_over_six_blocks", blocks, encode, *out, np.int64(blocks.size))
    with np.errstate(over="ignore", divide="ignore"):
        base = blocks / np.float32(6) * encode
        for scale, multiplier, target in (
            (out[0], out[1], base),
            (out[2], out[3], base * np.float32(1.5)),
        ):
            expected = tables.ue4m3_nearest(np.minimum(target, np.float32(448)))
            np.testing.assert_array_equal(scale, expected)
            stored = tables.VALUES["ue4m3"][scale].astype(np.float32) * (1 / encode)
            np.testing.assert_array_equal(multiplier, np.minimum(1 / stored, F32.max))


def test_four_over_six_error_rounds_as_defined(numerics: NumericsLibrary) -> None:
    """|fl(fl(fl(q * s) * g) / 1536) - x| for random codes, scales and values at three sizes."""
    rng = np.random.default_rng(3)
    n = 100_000
    code, scale = (rng.integers(0, high, n).astype(np.uint8) for high in (16, 0x7F))
    for amax in map(np.float32, (1e-38, 3.7, 3e38)):
        x = (rng.uniform(-1, 1, n) * amax).astype(np.float32)
        error = np.empty_like(x)
        numerics.call("four_over_six_errors", x, code, scale, amax, error, np.int64(n))
        with np.errstate(over="ignore"):
            product = (tables.VALUES["e2m1"][code] * tables.VALUES["ue4m3"][scale]).astype("f4")
            expected = np.abs(product * amax / np.float32(1536) - x)
        np.testing.assert_array_equal(error, expected)


def test_floor_log2_of_every_size(numerics: NumericsLibrary) -> None:
    """All powers of two +-1 ulp and random values, subnormals included."""
    x = adversarial_amax()
    x = x[x > 0]
    exponent = numerics.map("floor_log2s", x, dtype=np.int32)
    np.testing.assert_array_equal(exponent, tables.floor_log2(x))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MX_FORMATS)
def test_mx_scales_equal_exact_arithmetic(numerics: NumericsLibrary, name: str, rule: str) -> None:
    """All exponents of f32 +-1 ulp and the element's maximum times all powers of two +-1 ulp."""
    element = quantizer.FORMATS[name].element
    maximum = tables.MAX[element]
    powers = np.ldexp(maximum, np.arange(-160, 128 - int(np.log2(maximum))))
    powers = powers[(powers >= F32.smallest_subnormal) & (powers <= F32.max)].astype(np.float32)
    amax = np.concatenate(
        [adversarial_amax(), powers, *(np.nextafter(powers, np.float32(e)) for e in (0, F32.max))]
    )
    scale, multiplier = encode_blocks(numerics, name, amax, np.float32(1), rule)
    # Both rules from their definitions, by counting the powers of two below or up to a value.
    powers = np.ldexp(1.0, np.arange(-127, 128))
    if rule == "rceil":
        target = amax * (np.float32(1) / np.float32(maximum))
        expected = np.searchsorted(powers, target.astype(np.float64), side="left")
    else:
        target = amax.astype(np.float64) / 2 ** np.floor(np.log2(maximum))
        expected = np.searchsorted(powers, target, side="right") - 1
    np.testing.assert_array_equal(scale, np.clip(expected, 0, 254))
    np.testing.assert_array_equal(multiplier, np.ldexp(1.0, 127 - scale.astype(int)))
    assert (multiplier > 0).all()
    if rule == "rceil":
        # It never saturates, but for fl(1/max) falling below 1/max by an ulp.
        assert (amax.astype(np.float64) * multiplier <= maximum * (1 + 2**-23)).all()


def test_mx_multiplier_inverts_every_scale(numerics: NumericsLibrary) -> None:
    """amax = 6 * 2^e gives scale 2^e, times the multiplier exactly 1, at both ends of the range."""
    exponents = np.arange(-127, 126)
    amax = np.ldexp(6.0, exponents).astype(np.float32)
    scale, multiplier = encode_blocks(numerics, "MXFP4", amax, np.float32(1))
    np.testing.assert_array_equal(scale, exponents + 127)
    assert (tables.VALUES["ue8m0"][scale] * multiplier == 1).all()


@pytest.mark.parametrize(("rule", "amax", "stored"), [
    ("floor", 957.0, 896.0), ("rceil", 957.0, 960.0),
    ("floor", 960.0, 896.0), ("rceil", 960.0, 960.0),
])  # fmt: skip
def test_mx_rules_differ_where_floor_saturates(
    numerics: NumericsLibrary, rule: str, amax: float, stored: float
) -> None:
    """957 becomes 896 under the OCP floor rule and 960 under round-up."""
    x = np.zeros((1, 32), np.float32)
    x[0, 5] = amax
    codes, scale = quantize_blocks(numerics, "MXFP8_E4M3", x, rule)
    assert tables.VALUES["e4m3"][codes[0, 5]] * tables.VALUES["ue8m0"][scale[0]] == stored


def test_mx_exponent_is_taken_before_any_rounding(numerics: NumericsLibrary) -> None:
    """1.9999 has exponent 0 (through bf16 it would have 1): scale 2^-2 under the floor rule."""
    scale, _ = encode_blocks(numerics, "MXFP4", np.float32([1.9999]), np.float32([1]), "floor")
    assert scale.tolist() == [125]


@pytest.mark.parametrize("name", MX_FORMATS)
@pytest.mark.parametrize("size", [1e-45, 9.2e-41, 1e-40, 1e-38, 5e-35, 1e-30, 1.0, 3.4e38])
def test_mx_blocks_of_any_size_are_finite(
    numerics: NumericsLibrary, name: str, size: float
) -> None:
    """Tiny, subnormal and huge blocks give neither NaN nor an all-zero block."""
    x = (np.random.default_rng(4).uniform(-1, 1, (32, 32)) * size).astype(np.float32)
    x[:, 0] = size
    codes, scale = quantize_blocks(numerics, name, x)
    element = quantizer.FORMATS[name].element
    values = tables.VALUES[element][codes] * tables.VALUES["ue8m0"][scale][:, None]
    assert np.isfinite(values).all()
    # The scale cannot be smaller than 2^-127: what lies far below that is zero.
    if size > 2.0**-127 * tables.MAGNITUDES[element][1]:
        assert (values[:, 0] != 0).all()


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_fp8_blocks_have_unit_scales(numerics: NumericsLibrary, name: str) -> None:
    """Every scale byte is 127 and the multiplier is the per-tensor scale."""
    encode = np.float32([0.5, 3.0, F32.max])
    scale, multiplier = encode_blocks(numerics, name, np.float32([0, 1, 2]), encode)
    assert scale.tolist() == [127] * 3
    np.testing.assert_array_equal(multiplier, encode)


def test_formats_have_their_block_lengths_elements_and_nan_scales(
    numerics: NumericsLibrary,
) -> None:
    """NVFP4: 16 elements, NaN scale 0x7F; all others 32 and 0xFF."""
    for number, name in enumerate(FORMATS):
        f = quantizer.FORMATS[name]
        assert numerics.call("block_of", number, result=ctypes.c_int) == f.block
        assert numerics.call("nan_scale_of", number, result=ctypes.c_int) == f.nan_scale
        assert (
            ELEMENTS[numerics.call("element_number_of", number, result=ctypes.c_int)] == f.element
        )


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_quantize_as_the_oracle_does(numerics: NumericsLibrary, name: str) -> None:
    """50,000 blocks spread over 24 binades, under both scale rules: same scales, same codes."""
    rng = np.random.default_rng(5)
    block = quantizer.FORMATS[name].block
    n = 50_000
    x = rng.standard_normal((n, block)) * np.exp2(rng.integers(-12, 13, (n, 1)))
    x[::7] = np.round(x[::7] * 4) / 4  # ties
    x[::11] = 0
    x = x.astype(np.float32)
    for rule in RULES if name in MX_FORMATS else ("rceil",):
        expected = quantizer.quantize(x, name, scale_rule=rule)
        codes, scale = quantize_blocks(numerics, name, x, rule)
        np.testing.assert_array_equal(scale, expected.scales[:, 0])
        np.testing.assert_array_equal(codes, expected.codes)

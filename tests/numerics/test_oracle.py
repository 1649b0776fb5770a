"""The oracle itself: against the golden vectors, and against tables written by hand.

A test that compares with a wrong oracle proves nothing, so this file comes first.
"""

from pathlib import Path

import numpy as np
import pytest

from oracles import gemm, mma, pack, quantizer, tables, training

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
QUANTIZED = np.load(GOLDEN / "golden.npz")
MMA = np.load(GOLDEN / "mma.npz")
VARIANTS = sorted({k.rsplit("/", 1)[0] for k in QUANTIZED if k.count("/") == 3})
MX_NAMES = {
    "e2m1": "MXFP4",
    "e2m3": "MXFP6_E2M3",
    "e3m2": "MXFP6_E3M2",
    "e4m3": "MXFP8_E4M3",
    "e5m2": "MXFP8_E5M2",
}


def golden_input(distribution: str, dtype: str) -> np.ndarray:
    x = QUANTIZED[f"{distribution}/{dtype}/x"]
    return x if dtype == "f32" else tables.bf16_to_f32(x)


def quantize_as(key: str) -> quantizer.Quantized:
    """The oracle's result for a golden variant."""
    distribution, dtype, variant = key.split("/")
    x = golden_input(distribution, dtype)
    if variant.startswith("mx_"):
        _, element, rule = variant.split("_")
        return quantizer.quantize(x, MX_NAMES[element], scale_rule=rule)
    stochastic = {}
    if variant.endswith("_sr"):
        seed = int(QUANTIZED[f"{key}/seed"])
        stochastic = {
            "rounding": "stochastic",
            "seed": (seed & 0xFFFFFFFF, seed >> 32),
            "stream": int(QUANTIZED[f"{key}/stream"]),
        }
    return quantizer.quantize(
        x,
        "NVFP4",
        axis=0 if "_col" in variant else 1,
        scaling="2d" if variant.endswith("2d") else "1d",
        hadamard=variant.endswith("_rht"),
        **stochastic,
    )


@pytest.mark.parametrize("key", VARIANTS)
def test_quantizer_gives_the_golden_bytes(key: str) -> None:
    """Codes, scales and amax are those of the golden file, byte for byte."""
    q = quantize_as(key)
    codes = pack.pack(q.codes, 4) if q.format.element == "e2m1" else q.codes
    np.testing.assert_array_equal(codes, QUANTIZED[f"{key}/codes"])
    np.testing.assert_array_equal(q.scales, QUANTIZED[f"{key}/scales"])
    if f"{key}/amax" in QUANTIZED:
        assert q.amax == QUANTIZED[f"{key}/amax"]


def test_every_golden_array_is_used() -> None:
    """The tests of this file read every array of both golden files."""
    fields = {"codes", "scales", "amax", "seed", "stream", "rotated"}
    rest = [k for k in QUANTIZED if k.count("/") != 3 or k.rsplit("/", 1)[1] not in fields]
    inputs = {"/".join(v.split("/")[:2]) + "/x" for v in VARIANTS}
    products = {f"gemm/normal_x_lognormal_{t}/y" for t in ("f32", "bf16")}
    assert set(rest) == inputs | products
    assert {k.rsplit("/", 1)[0] for k in MMA} == {*K64_KINDS, *K32_KINDS}


@pytest.mark.parametrize("key", [v for v in VARIANTS if v.endswith("_rht")])
def test_rotation_gives_the_golden_bf16(key: str) -> None:
    """Rotated values equal the golden ones as bf16 bits."""
    distribution, dtype, _ = key.split("/")
    rotated = quantizer.rotate(golden_input(distribution, dtype).T)
    np.testing.assert_array_equal(tables.f32_to_bf16(rotated), QUANTIZED[f"{key}/rotated"])


def test_product_gives_the_golden_result() -> None:
    """The exact sum rounded once, times alpha, equals the golden product in f32 and in bf16."""
    a, b = (quantize_as(f"{name}/f32/nvfp4_row") for name in ("normal", "lognormal"))
    exact = gemm.exact_product(a.values(), b.values())
    y = exact.rounded_to_f32() * (a.global_scale * b.global_scale)
    np.testing.assert_array_equal(y, QUANTIZED["gemm/normal_x_lognormal_f32/y"])
    bf16 = QUANTIZED["gemm/normal_x_lognormal_bf16/y"]
    np.testing.assert_array_equal(tables.f32_to_bf16(y), bf16)


K64_KINDS = {
    "mxf4nvf4_block16_ue4m3": "ue4m3",
    "mxf4nvf4_block16_ue8m0": "ue8m0",
    "mxf4_block32_ue8m0": "ue8m0",
}
K32_KINDS = [f"mxf8f6f4/{a}_{b}" for a in tables.KINDS for b in tables.KINDS]


@pytest.mark.parametrize("kind", K64_KINDS)
def test_tensor_core_model_gives_the_golden_bits_of_k64(kind: str) -> None:
    """Accumulators after one step with 64 E2M1 products are the golden bits."""
    a, b, sa, sb, c, d = (MMA[f"{kind}/{field}"] for field in ("a", "b", "sa", "sb", "c", "d"))
    codes = (pack.unpack(a, 4, 64), pack.unpack(b, 4, 64))
    np.testing.assert_array_equal(mma.mma_k64(*codes, sa, sb, c, K64_KINDS[kind]), d)


@pytest.mark.parametrize("kind", K32_KINDS)
def test_tensor_core_model_gives_the_golden_bits_of_k32(kind: str) -> None:
    """Accumulators after one mxf8f6f4 step with 32 products are the golden bits."""
    a, b, sa, sb, c, d = (MMA[f"{kind}/{field}"] for field in ("a", "b", "sa", "sb", "c", "d"))
    element_a, element_b = kind.removeprefix("mxf8f6f4/").split("_")
    result = mma.mma_k32(a, b, sa[:, 0], sb[:, 0], c, (element_a, element_b))
    np.testing.assert_array_equal(result, d)


# Values by hand, from the formats' published value lists: powers of two and thirds of the range.
BY_HAND = {
    "e2m1": {0: 0, 1: 0.5, 2: 1, 3: 1.5, 4: 2, 5: 3, 6: 4, 7: 6, 9: -0.5, 15: -6},
    "e2m3": {1: 0.125, 7: 0.875, 8: 1, 15: 1.875, 16: 2, 24: 4, 31: 7.5, 63: -7.5},
    "e3m2": {1: 0.0625, 3: 0.1875, 4: 0.25, 12: 1, 16: 2, 31: 28, 32 + 12: -1},
    "e4m3": {1: 2**-9, 7: 7 * 2**-9, 8: 2**-6, 0x38: 1, 0x40: 2, 0x7E: 448, 0xFE: -448},
    "e5m2": {1: 2**-16, 3: 3 * 2**-16, 4: 2**-14, 0x3C: 1, 0x40: 2, 0x7B: 57344, 0xBC: -1},
    "ue4m3": {1: 0.001953125, 2: 0.00390625, 7: 0.013671875, 8: 0.015625, 0x7E: 448, 0x81: 2**-9},
    "ue8m0": {0: 2.0**-127, 1: 2.0**-126, 126: 0.5, 127: 1, 128: 2, 134: 128, 254: 2.0**127},
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_tables_hold_the_published_values(kind: str) -> None:
    """Subnormal scales, scale 128.0 and negative codes: the places where decoders go wrong."""
    for code, value in BY_HAND[kind].items():
        assert tables.VALUES[kind][code] == value, hex(code)


def test_tables_hold_nan_inf_and_signed_zeros() -> None:
    """Exactly the codes that the formats name are NaN or Inf; zero has both signs."""
    for kind, nans in {
        "e2m1": set(),
        "e2m3": set(),
        "e3m2": set(),
        "e4m3": {0x7F, 0xFF},
        "e5m2": {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF},
        "ue4m3": {0x7F, 0xFF},
        "ue8m0": {0xFF},
    }.items():
        assert set(np.flatnonzero(np.isnan(tables.VALUES[kind])).tolist()) == nans
        infinite = np.flatnonzero(np.isinf(tables.VALUES[kind])).tolist()
        assert infinite == ([0x7C, 0xFC] if kind == "e5m2" else [])
        if kind in tables.KINDS:
            sign = tables.KINDS[kind].sign
            assert tables.VALUES[kind][sign] == 0
            assert np.signbit(tables.VALUES[kind][[0, sign]]).tolist() == [False, True]


def test_rounding_takes_midpoints_to_even_codes() -> None:
    """The seven midpoints of E2M1 and their neighbours, both signs; a rule of >= fails here."""
    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    to_even = np.array([0, 2, 2, 4, 4, 6, 6], np.uint8)
    below, above = (np.nextafter(midpoints, np.float32(end)) for end in (0, 9))
    codes = np.arange(7, dtype=np.uint8)
    for sign, bit in ((1, 0), (-1, 8)):
        np.testing.assert_array_equal(tables.round_nearest("e2m1", sign * midpoints), to_even + bit)
        np.testing.assert_array_equal(tables.round_nearest("e2m1", sign * below), codes + bit)
        np.testing.assert_array_equal(tables.round_nearest("e2m1", sign * above), codes + 1 + bit)


def test_stochastic_rounding_rounds_up_as_often_as_the_fraction_says() -> None:
    """Of the 256 random bytes, floor(256 * fraction) round away from zero."""
    random = np.arange(256)
    for x, low, ups in ((0.3, 0, 153), (1.7, 3, 102), (2.25, 4, 64), (5.0, 6, 128), (4.0, 6, 0)):
        for sign, bit in ((1, 0), (-1, 8)):
            codes = tables.round_stochastic("e2m1", np.full(256, sign * x, np.float32), random)
            assert set(codes.tolist()) <= {low + bit, low + bit + 1}
            assert (codes == low + bit + 1).sum() == ups


def test_even_elements_lie_in_the_low_nibble() -> None:
    """0.5, 1, 1.5, 2 with scale 1 give the bytes 0x21 0x43; rows are padded to 16 bytes."""
    codes = tables.round_nearest("e2m1", np.array([[0.5, 1, 1.5, 2]], np.float32))
    packed = pack.pack(codes, 4)
    assert packed.shape == (1, 16)
    assert packed[0, :3].tolist() == [0x21, 0x43, 0]


def test_6_bit_codes_lie_in_three_bytes() -> None:
    """Four codes are a little-endian 24-bit word; rows are padded to 96 bytes."""
    packed = pack.pack(np.array([[0x3F, 0, 0, 0, 0, 0x21, 0, 0x01]], np.uint8), 6)
    assert packed.shape == (1, 96)
    assert packed[0, :7].tolist() == [0x3F, 0, 0, 0x40, 0x08, 0x04, 0]


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_packing_is_invertible(bits: int) -> None:
    """Unpacking gives the codes back for every row length up to 130."""
    rng = np.random.default_rng(bits)
    for k in range(131):
        codes = rng.integers(0, 1 << bits, (2, k)).astype(np.uint8)
        np.testing.assert_array_equal(pack.unpack(pack.pack(codes, bits), bits, k), codes)


def test_scales_come_from_the_rounded_sixth() -> None:
    """Amax 4.5 in a tensor of 6: 4.5 * 448 / 6 = 336 lies midway between scales 320 and 352.

    fl(448 * fl(1/6)) is above 448 / 6, so the defined chain gives 352 (0x7B); (4.5 / 6) * 448 would
    tie to 320. The codes belong to the stored scale: 4.5 / (352 / 448) = 5.73 becomes 6.
    """
    x = np.zeros((1, 32), np.float32)
    x[0, 3], x[0, 20] = 6, 4.5
    q = quantizer.quantize(x, "NVFP4")
    assert q.scales.tolist() == [[0x7E, 0x7B]]
    assert q.codes[0, [3, 20]].tolist() == [7, 7]


def test_exact_sums_round_once_to_f32() -> None:
    """1 + 2^-24 +- 2^-80: the float64 nearest to it is a tie of f32, the exact sum is not."""
    a = np.array([[1, 2.0**-24, 2.0**-80], [1, 2.0**-24, -(2.0**-80)], [1, 2.0**-24, 0]])
    exact = gemm.exact_product(np.vstack([a, -a]), np.ones((1, 3)))
    assert np.unique(np.abs(exact.high)).tolist() == [1 + 2.0**-24]
    expected = [1 + 2.0**-23, 1, 1]
    assert exact.rounded_to_f32()[:, 0].tolist() == [*expected, *(-v for v in expected)]


def test_exact_product_agrees_with_python_fractions() -> None:
    """High plus low is the exact sum for entries 240 binades apart."""
    from fractions import Fraction

    rng = np.random.default_rng(1)
    a, b = (
        rng.integers(-255, 256, (rows, 33)) * np.exp2(rng.integers(-120, 120, (rows, 33)))
        for rows in (5, 4)
    )
    exact = gemm.exact_product(a, b)
    for m, n in np.ndindex(5, 4):
        total = sum(Fraction(x) * Fraction(y) for x, y in zip(a[m], b[n], strict=True))
        error = abs(Fraction(exact.high[m, n]) + Fraction(exact.low[m, n]) - total)
        assert error <= abs(total) / 2**100


def test_output_interval_holds_float32_products_and_detects_a_planted_error() -> None:
    """A float32 product passes; one scaled by 1.0001 (or with a wrong element) does not."""
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((40, 128)).astype(np.float16).astype(np.float32) for _ in "ab")
    exact = gemm.exact_product(a.astype(np.float64), b.astype(np.float64))
    y = a @ b.T
    gemm.output_interval(exact).require(y)
    with pytest.raises(AssertionError, match="elements"):
        gemm.output_interval(exact).require(y * np.float32(1.0001))
    y[3, 4] += np.float32(0.01)
    with pytest.raises(AssertionError, match=r"1 of 1600 elements:\n  \(3, 4\)"):
        gemm.output_interval(exact).require(y)


def test_relative_errors_of_the_recipe() -> None:
    """y, dx and dw have the relative errors known for gaussian data: .146, .175, .175."""
    rng = np.random.default_rng(3)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((1024, 512), (512, 768)))
    rows = np.exp(rng.standard_normal((1024, 1)))
    dy = (rng.standard_normal((1024, 768)) * rows).astype(np.float32)
    p = training.nvfp4_products(x, w, dy, dgrad_seed=(1, 2), wgrad_seed=(3, 4))
    x, w, dy = (v.astype(np.float64) for v in (x, w, dy))
    assert training.relative_error(p.y, x @ w) == pytest.approx(0.146, abs=0.002)
    assert training.relative_error(p.dx, dy @ w.T) == pytest.approx(0.175, abs=0.006)
    assert training.relative_error(p.dw, x.T @ dy) == pytest.approx(0.175, abs=0.006)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.00904),
        ({"scaling": "2d"}, 0.0124),
        ({"rounding": "stochastic"}, 0.0189),
        ({"four_over_six": True}, 0.0078),
    ],
)
def test_relative_square_error_on_gaussian_data(options: dict, expected: float) -> None:
    """Each variant of NVFP4 has its known relative square error, within 1 %."""
    x = np.random.default_rng(4).standard_normal((1024, 1024)).astype(np.float32)
    error = quantizer.quantize(x, "NVFP4", **options).dequantize() - x
    assert (error**2).sum() / (x**2).sum() == pytest.approx(expected, rel=0.01)


def test_a_block_with_nan_or_inf_is_nan_and_changes_nothing_else() -> None:
    """NaN scale and zero codes in that block (2-D: tile) only; amax is over finite values."""
    rng = np.random.default_rng(5)
    for name, options in ((n, {"scaling": s}) for n in quantizer.FORMATS for s in ("1d", "2d")):
        x = rng.standard_normal((70, 100)).astype(np.float32)
        x[5, 40], x[69, 99] = np.nan, -np.inf
        clean = np.where(np.isfinite(x), x, np.float32(0))
        dirty = quantizer.quantize(x, name, **options)
        block = dirty.format.block
        expected = quantizer.quantize(clean, name, **options)
        bad = np.zeros(dirty.scales.shape, bool)
        for r, c in ((5, 40), (69, 99)):
            tile = slice(r // block * block, r // block * block + block)
            bad[tile if options["scaling"] == "2d" else r, c // block] = True
        assert (dirty.scales[bad] == dirty.format.nan_scale).all()
        np.testing.assert_array_equal(dirty.scales[~bad], expected.scales[~bad])
        bad_codes = np.repeat(bad, block, axis=1)[:, :100]
        assert not dirty.codes[bad_codes].any()
        np.testing.assert_array_equal(dirty.codes[~bad_codes], expected.codes[~bad_codes])
        assert dirty.amax == np.abs(clean).max()

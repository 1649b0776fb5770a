"""Every instruction level gives the bytes of the golden vectors and of the independent oracle."""

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from oracles import pack, quantizer, tables
from support import cpu_quantize as cpu
from support.cpu_quantize import Options, Placement

F32, BF16 = np.dtype(np.float32), np.dtype(np.uint16)
SEED = 0x0123_4567_89AB_CDEF
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "golden.npz"


@pytest.fixture(params=cpu.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test at every level that this processor has."""
    with cpu.use_level(request.param):
        yield request.param


@functools.cache
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as archive:
        return dict(archive)


def oracle(x: np.ndarray, o: Options, **more: object) -> quantizer.Quantized:
    """The oracle's copy of a matrix of any input type."""
    signs = [-1 if o.signs >> i & 1 else 1 for i in range(16)]
    return quantizer.quantize(
        cpu.widen(x),
        o.format,
        axis=o.axis,
        scaling="2d" if o.tiles else "1d",
        rounding="stochastic" if o.stochastic else "nearest",
        seed=(o.seed & 0xFFFFFFFF, o.seed >> 32),
        stream=o.stream,
        hadamard=signs if o.hadamard else False,
        scale_rule=o.rule,
        four_over_six=o.four_over_six,
        **more,  # type: ignore[arg-type]
    )


def packed_codes(want: quantizer.Quantized, bits: int) -> np.ndarray:
    """The bytes of rows; where a row has no padding, by a shorter way than the oracle's."""
    codes = want.codes
    if bits == 8 and codes.shape[1] % 16 == 0:
        return codes
    if bits == 4 and codes.shape[1] % 32 == 0:
        return codes[:, ::2] | codes[:, 1::2] << 4
    return pack.pack(codes, bits)


def assert_equals_oracle(x: np.ndarray, o: Options, *, decode: bool = True) -> None:
    """Values, scales, tensor scale and decoded numbers of a matrix, bit for bit, at every level."""
    want = oracle(x, o)
    rows, k = want.codes.shape
    scales = pack.tile_scales(want.scales) if o.tiled_layout else want.scales
    packed = packed_codes(want, o.bits)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = want.dequantize() if decode else None
    for level in cpu.levels():
        with cpu.use_level(level):
            (got,) = cpu.quantize(x[None], o)
            decoded = cpu.dequantize(got, o, rows, k, F32)[0] if decode else None
        assert np.array_equal(got.scales[0], scales.reshape(-1)), (level, o)
        assert np.array_equal(got.values.reshape(packed.shape), packed), (level, o)
        assert got.global_scale.tobytes() == np.float32(want.global_scale).tobytes(), (level, o)
        if decoded is None or expected is None:
            continue
        # The bits of a NaN are ours to choose: the positive quiet one.
        expected = np.where(np.isnan(expected), np.float32(np.nan), expected)
        assert decoded.tobytes() == expected.tobytes(), (level, o)


# ---- Golden vectors -----------------------------------------------------------------------------


def golden_tensors() -> list[str]:
    """The names `distribution/dtype` of the golden inputs."""
    with np.load(GOLDEN) as archive:
        return sorted(name.removesuffix("/x") for name in archive.files if name.endswith("/x"))


GOLDEN_VARIANTS = {
    "nvfp4_row": Options("NVFP4", 1),
    "nvfp4_col": Options("NVFP4", 0),
    "nvfp4_row2d": Options("NVFP4", 1, tiles=True),
    "nvfp4_col2d": Options("NVFP4", 0, tiles=True),
    "nvfp4_row_sr": Options("NVFP4", 1, stochastic=True),
    "nvfp4_col_rht": Options("NVFP4", 0, hadamard=True),
}
GOLDEN_ELEMENTS = {
    "e2m1": "MXFP4",
    "e2m3": "MXFP6_E2M3",
    "e3m2": "MXFP6_E3M2",
    "e4m3": "MXFP8_E4M3",
    "e5m2": "MXFP8_E5M2",
}


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("tensor", golden_tensors())
def test_golden_vectors(tensor: str) -> None:
    """The published bytes: NVFP4 in six forms, five MX element types by two scale rules."""
    x = golden()[f"{tensor}/x"][None]
    seen = 0
    for variant, o in GOLDEN_VARIANTS.items():
        name = f"{tensor}/{variant}"
        if f"{name}/codes" not in golden():
            continue
        if o.stochastic:
            seed, stream = int(golden()[f"{name}/seed"]), int(golden()[f"{name}/stream"])
            o = Options("NVFP4", 1, stochastic=True, seed=seed, stream=stream)
        plain, rotated, _ = cpu.amax(x, rotate_axis=o.axis)
        bits = rotated if o.hadamard else plain
        assert bits.view(np.float32)[0] == golden()[f"{name}/amax"], name
        (got,) = cpu.quantize(x, o)
        assert np.array_equal(got.values[0], golden()[f"{name}/codes"]), name
        assert np.array_equal(got.scales[0], golden()[f"{name}/scales"].reshape(-1)), name
        seen += 1
    for element, fmt in GOLDEN_ELEMENTS.items():
        for rule in ("rceil", "floor"):
            name = f"{tensor}/mx_{element}_{rule}"
            (got,) = cpu.quantize(x, Options(fmt, 1, rule))
            codes = golden()[f"{name}/codes"]
            packed = codes if element == "e2m1" else pack.pack(codes, cpu.FORMATS[fmt][0])
            assert np.array_equal(got.values[0], packed), name
            assert np.array_equal(got.scales[0], golden()[f"{name}/scales"].reshape(-1)), name
            seen += 1
    # Rotating the largest values overflows, and rotated copies were made from bf16 only.
    assert seen == (15 if tensor.endswith("f32") or tensor.startswith("huge") else 16)


# ---- The oracle ---------------------------------------------------------------------------------

FLAVOURS = {
    "plain": {},
    "floor": {"rule": "floor"},
    "stochastic": {"stochastic": True, "seed": SEED, "stream": 3},
    "tiles": {"tiles": True},
    "tiles_stochastic": {"tiles": True, "stochastic": True, "seed": SEED},
    "hadamard": {"hadamard": True, "signs": 0xBEEF},
    "hadamard_stochastic": {"hadamard": True, "stochastic": True, "seed": SEED},
    "tiled_layout": {"tiled_layout": True},
    "four_over_six": {"four_over_six": True},
    "four_over_six_tiles": {"four_over_six": True, "tiles": True},
    "four_over_six_hadamard": {"four_over_six": True, "hadamard": True},
}


def flavours(fmt: str) -> list[str]:
    """The names of FLAVOURS that a format has."""
    return [
        name
        for name in FLAVOURS
        if (fmt == "NVFP4" or not name.startswith("four")) and (fmt[:2] == "MX" or name != "floor")
    ]


@pytest.mark.parametrize("fmt", cpu.FORMATS)
def test_options_equal_oracle(fmt: str) -> None:
    """Every option, both axes, all input types, aligned and ragged, finite and not."""
    rng = np.random.default_rng(1)
    for flavour in flavours(fmt):
        for axis in (1, 0):
            for shape in ((1, 1), (64, 128), (37, 83), (129, 31)):
                for dtype in (F32, BF16, np.dtype(np.float16)):
                    x = cpu.tricky_values(rng, shape, dtype)
                    assert_equals_oracle(x, Options(fmt, axis, **FLAVOURS[flavour]))
                x = cpu.tricky_values(rng, shape, F32)
                x[rng.random(shape) < 0.01] = np.inf
                x[rng.random(shape) < 0.01] = np.nan
                assert_equals_oracle(x, Options(fmt, axis, **FLAVOURS[flavour]))


BLOCKS = 1 << 20


@pytest.mark.parametrize("fmt", cpu.FORMATS)
def test_a_million_blocks_equal_oracle(fmt: str) -> None:
    """2^20 blocks per format, an eighth of them adversarial, the flavours in turn."""
    rng = np.random.default_rng(2)
    block = cpu.FORMATS[fmt][1]
    rows, cols, chunks = 1 << 10, (BLOCKS >> 14) * block, 16
    assert rows * cols * chunks == BLOCKS * block
    names = flavours(fmt)
    for chunk in range(chunks):
        if chunk % 8 == 0:
            x = cpu.tricky_values(rng, (rows, cols), F32)
        else:
            spread = np.exp2(rng.integers(-20, 20, (rows, cols // 16, 1))).astype(np.float32)
            x = rng.standard_normal((rows, cols // 16, 16), np.float32)
            x = (x * spread).reshape(rows, cols)
        if chunk % 2:
            x = cpu.narrow(x, BF16)
        assert_equals_oracle(
            x, Options(fmt, 1, **FLAVOURS[names[chunk % len(names)]]), decode=False
        )


@pytest.mark.parametrize("fmt", cpu.FORMATS)
def test_every_bfloat16_equals_oracle(fmt: str) -> None:
    """All 65,536 bf16 patterns, each in a block with a power of two that leaves it in range."""
    block = cpu.FORMATS[fmt][1]
    x = np.zeros((1 << 16, block), np.uint16)
    x[:, 0] = np.arange(1 << 16)
    exponent = (x[:, 0] >> 7) & 0xFF
    for above, flavour in ((0, "plain"), (1, "stochastic"), (3, "plain"), (9, "stochastic")):
        x[:, 1] = np.minimum(exponent + above, 0xFE) << 7
        assert_equals_oracle(x.reshape(1 << 10, -1), Options(fmt, 1, **FLAVOURS[flavour]))


@pytest.mark.usefixtures("level")
def test_random_bits_follow_the_logical_group_number() -> None:
    """Numbers above 2^32 too: (lead * rows + row) * ceil(K / 16) + k / 16 of the logical copy."""
    x = np.random.default_rng(3).standard_normal((48, 80)).astype(np.float32)
    placement = Placement(lead=3, row=16, col=1600, logical_rows=1 << 20, logical_cols=100_003)
    for axis in (1, 0):
        o = Options("NVFP4", axis, stochastic=True, seed=SEED, stream=0xFFFF_FFFF)
        (got,) = cpu.quantize(x[None], o, placement=placement)
        rows, k = (1 << 20, 100_003) if axis == 1 else (100_003, 1 << 20)
        row0, k0 = (16, 1600) if axis == 1 else (1600, 16)
        want = oracle(
            x,
            o,
            row_offset=3 * rows + row0,
            group_offset=k0 // 16,
            logical_groups=-(-k // 16),
        )
        assert np.array_equal(got.values[0], pack.pack(want.codes, 4))


@pytest.mark.usefixtures("level")
def test_rotated_amax_equals_oracle() -> None:
    """Over finite rotated values only, ragged groups padded with zeros."""
    rng = np.random.default_rng(4)
    for shape in ((48, 64), (19, 70), (1, 1)):
        x = cpu.tricky_values(rng, shape, F32)
        x[rng.random(shape) < 0.003] = np.nan
        for axis in (1, 0):
            rotated = cpu.amax(x[None], rotate_axis=axis)[1].view(np.float32)[0]
            h = quantizer.rotate(np.ascontiguousarray(x if axis == 1 else x.T))
            assert rotated == quantizer.finite_amax(h)


# ---- Single values that others got wrong --------------------------------------------------------


def codes_of(values: list[float], fmt: str, rule: str = "rceil") -> tuple[np.ndarray, np.ndarray]:
    """(codes, scale bytes) of one row."""
    o = Options(fmt, 1, rule)
    (q,) = cpu.quantize(np.array([[values]], np.float32), o)
    return pack.unpack(q.values[0], o.bits, len(values))[0], q.scales[0]


@pytest.mark.usefixtures("level")
def test_e2m1_midpoints_round_to_even_codes() -> None:
    """0.25, 0.75, 1.25, 1.75, 2.5, 3.5 and 5, one f32 below and above, both signs."""
    # MXFP4 with a largest value of 6 has scale 1.
    middle = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(9))
    expected = np.array([0, 2, 2, 4, 4, 6, 6])
    for values, want in ((middle, expected), (below, np.arange(7)), (above, np.arange(1, 8))):
        codes, scales = codes_of([6.0, *values, *-values], "MXFP4")
        assert scales[0] == 127
        assert np.array_equal(codes, [7, *want, *(want | 8)])


@pytest.mark.usefixtures("level")
def test_even_elements_are_low_nibbles() -> None:
    """0.5, 1, 1.5, 2, 3, 4, 6, 0 with scale 1 begin with the bytes 0x21, 0x43."""
    (q,) = cpu.quantize(np.array([[[0.5, 1, 1.5, 2, 3, 4, 6, 0]]], np.float32), Options("MXFP4"))
    assert q.values[0, 0, :4].tolist() == [0x21, 0x43, 0x65, 0x07]


@pytest.mark.usefixtures("level")
def test_negative_zero_keeps_its_sign() -> None:
    """-0 and values that round to zero keep the sign bit of the code."""
    for fmt in cpu.FORMATS:
        codes, _ = codes_of([1.0, -0.0, 0.0, -1e-30, 1e-30], fmt)
        sign = 1 << (cpu.FORMATS[fmt][0] - 1)
        assert codes[1:].tolist() == [sign, 0, sign, 0], fmt


@pytest.mark.usefixtures("level")
def test_mx_scale_rules_differ_where_the_standard_saturates() -> None:
    """A largest value of 957 in MXFP8 gives 896 by `floor` and 960 by `rceil`."""
    for rule, expected in (("floor", 448.0 * 2), ("rceil", 240.0 * 4)):
        codes, scales = codes_of([957.0], "MXFP8_E4M3", rule)
        value = tables.VALUES["e4m3"][codes[0]] * tables.VALUES["ue8m0"][scales[0]]
        assert value == expected


@pytest.mark.usefixtures("level")
def test_zero_and_tiny_tensors_give_no_nan() -> None:
    """All zeros, the smallest subnormals, and bf16 values of magnitude 1e-35 and below."""
    for fmt in cpu.FORMATS:
        for magnitude in (0.0, 1e-45, 9.2e-41, 1e-38, 5e-35):
            x = np.full((1, 32, 64), magnitude, np.float32)
            x[0, ::2] *= -1
            o = Options(fmt)
            (q,) = cpu.quantize(x, o)
            decoded = cpu.dequantize(q, o, 32, 64, F32)
            assert np.isfinite(decoded).all()
            assert magnitude != 0 or not decoded.any()


@pytest.mark.usefixtures("level")
def test_the_largest_values_do_not_vanish() -> None:
    """A block of FLT_MAX decodes near it or to Inf in every format, never to 0."""
    top = np.finfo(np.float32).max
    for fmt in cpu.FORMATS:
        o = Options(fmt)
        (q,) = cpu.quantize(np.full((1, 1, 32), top, np.float32), o)
        decoded = cpu.dequantize(q, o, 1, 32, F32)
        ratio = decoded.astype(np.float64) / np.float64(top)
        assert ((ratio > 0.74) & ((ratio < 1.13) | np.isinf(ratio))).all(), fmt

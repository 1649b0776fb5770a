"""Every instruction level gives the bytes of the portable one, and no byte depends on how x is cut.

That the portable level is right is the business of test_quantize_oracle.py.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from support import cpu_quantize as cpu
from support.cpu_quantize import Options, Placement

F32, BF16, F16 = np.dtype(np.float32), np.dtype(np.uint16), np.dtype(np.float16)
DTYPES = {"f32": F32, "bf16": BF16, "f16": F16}
EDGES = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257)
SEED = 0x0123_4567_89AB_CDEF

VARIANTS = {
    "plain": {},
    "floor": {"rule": "floor"},
    "tiled_layout": {"tiled_layout": True},
    "stochastic": {"stochastic": True, "seed": SEED, "stream": 7},
    "hadamard": {"hadamard": True},
    "hadamard_signs": {"hadamard": True, "signs": 0x1234},
    "hadamard_stochastic": {"hadamard": True, "stochastic": True, "seed": SEED, "stream": 1},
    "tiles": {"tiles": True},
    "tiles_stochastic": {"tiles": True, "stochastic": True, "seed": SEED},
    "tiles_tiled_layout": {"tiles": True, "tiled_layout": True},
    "four_over_six": {"four_over_six": True},
    "four_over_six_hadamard": {"four_over_six": True, "hadamard": True},
    "four_over_six_tiles": {"four_over_six": True, "tiles": True},
}


def is_valid(fmt: str, variant: str) -> bool:
    """Four-over-six is an option of NVFP4, the scale rule one of MX formats."""
    if variant.startswith("four_over_six"):
        return fmt == "NVFP4"
    return variant != "floor" or fmt.startswith("MX")


ALL_OPTIONS = [
    Options(fmt, axis, **VARIANTS[variant])
    for fmt in cpu.FORMATS
    for variant in VARIANTS
    if is_valid(fmt, variant)
    for axis in (1, 0)
]


def poison_nonfinite(rng: np.random.Generator, x: np.ndarray, share: float) -> np.ndarray:
    """Puts NaN of several payloads and both Infs at a share of the places."""
    if x.dtype == F32:
        bad = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32)
        bits = x.view(np.uint32)
    elif x.dtype == F16:
        bad, bits = np.array([0x7C00, 0xFC00, 0x7E00, 0xFFFF], np.uint16), x.view(np.uint16)
    else:
        bad, bits = np.array([0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7FFF], np.uint16), x
    mask = rng.random(x.shape) < share
    return np.where(mask, rng.choice(bad, x.shape), bits).astype(bits.dtype).view(x.dtype)


@pytest.fixture
def level() -> str:
    """The fastest level (on a processor with the portable one only, that: nothing to compare)."""
    return cpu.levels()[-1]


def assert_level_equals_portable(level: str, x: np.ndarray, *options: Options) -> None:
    """Bit equality of all outputs, with two different bytes in the outputs before."""
    with cpu.use_level("portable"):
        expected = cpu.quantize(x, *options)
    for poison in (0x7F, 0xFF):
        with cpu.use_level(level):
            got = cpu.quantize(x, *options, poison=poison)
        for o, want, have in zip(options, expected, got, strict=True):
            assert have.equals(want), (o, x.shape, x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", cpu.FORMATS)
def test_level_gives_portable_bytes_for_every_option(level: str, fmt: str, dtype: str) -> None:
    """Every option, both axes, ragged and aligned shapes, two leads with amax values apart."""
    rng = np.random.default_rng(1)
    for shape in ((2, 128, 256), (2, 131, 67)):
        x = cpu.tricky_values(rng, shape, DTYPES[dtype])
        if x.dtype == F32:
            x[1] *= np.float32(2.0**-90)
        for o in ALL_OPTIONS:
            if o.format == fmt:
                assert_level_equals_portable(level, x, o)


@pytest.mark.parametrize("rows", EDGES)
def test_level_gives_portable_bytes_for_every_shape(level: str, rows: int) -> None:
    """All pairs of sizes around block, strip, band and padding edges; the options take turns."""
    rng = np.random.default_rng(rows)
    dtypes = itertools.cycle(DTYPES.values())
    turns = itertools.cycle(rng.permutation(len(ALL_OPTIONS)))
    for cols in EDGES:
        for _ in range(12):
            x = cpu.tricky_values(rng, (1, rows, cols), next(dtypes))
            assert_level_equals_portable(level, x, ALL_OPTIONS[next(turns)])


def test_level_gives_portable_bytes_for_large_and_narrow_tensors(level: str) -> None:
    """Several pieces in each direction, and single rows and columns longer than a piece."""
    rng = np.random.default_rng(2)
    for shape in ((1, 300, 2100), (1, 1, 140_000), (1, 140_000, 1), (3, 517, 1031)):
        x = cpu.tricky_values(rng, shape, BF16)
        for fmt in ("NVFP4", "MXFP6_E3M2", "MXFP8_E4M3"):
            row = Options(fmt, 1, stochastic=True, seed=SEED, tiled_layout=True)
            col = Options(fmt, 0, stochastic=True, seed=SEED, hadamard=True)
            assert_level_equals_portable(level, x, row, col)


@pytest.mark.parametrize("dtype", DTYPES)
def test_level_gives_portable_bytes_for_nonfinite_values(level: str, dtype: str) -> None:
    """NaN and Inf, rare and frequent, in every kind of block, tile and rotated group."""
    rng = np.random.default_rng(3)
    for share in (0.002, 0.05, 1.0):
        x = cpu.tricky_values(rng, (1, 67, 131), DTYPES[dtype])
        x = poison_nonfinite(rng, x, share)
        for o in ALL_OPTIONS:
            assert_level_equals_portable(level, x, o)


@pytest.mark.parametrize("dtype", DTYPES)
def test_level_gives_portable_bytes_for_long_rows(level: str, dtype: str) -> None:
    """Rows long enough for every fast path and a rest: not finite here and there, amax anything."""
    rng = np.random.default_rng(15)
    for share, amax in itertools.product((0.0, 2e-4, 0.01), (None, 0.0, 1e-42, 0.01, 3e38)):
        x = cpu.tricky_values(rng, (1, 40, 2088), DTYPES[dtype])
        x = poison_nonfinite(rng, x, share)
        for fmt, variant, axis in itertools.product(("NVFP4", "MXFP4"), ("plain", "tiles"), (1, 0)):
            o = Options(fmt, axis, **VARIANTS[variant])
            if amax is not None:
                o = o.with_amax(np.full(1, amax, np.float32).view(np.uint32))
            assert_level_equals_portable(level, x, o)


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-42, 1e-38, 7.9e-36, 1.0, 3e38, 3.4028235e38])
def test_level_gives_portable_bytes_for_any_given_amax(level: str, amax: float) -> None:
    """The tensor scale may be given, and be far from the data: clamps and overflow agree."""
    rng = np.random.default_rng(4)
    bits = np.full(1, amax, np.float32).view(np.uint32)
    for scale in (2.0**-140, 2.0**-60, 1.0, 2.0**60):
        with np.errstate(over="ignore"):
            x = cpu.tricky_values(rng, (1, 33, 97), F32) * np.float32(scale)
        x[~np.isfinite(x)] = 0
        for o in ALL_OPTIONS:
            assert_level_equals_portable(level, x, o.with_amax(bits))


@pytest.mark.parametrize("dtype", DTYPES)
def test_level_accepts_any_alignment_of_the_input(level: str, dtype: str) -> None:
    """Rows may begin at any element."""
    rng = np.random.default_rng(5)
    memory = cpu.tricky_values(rng, (70 * 101 + 64,), DTYPES[dtype])
    for offset in (1, 3, 8, 17, 31):
        x = memory[offset : offset + 70 * 101].reshape(1, 70, 101)
        for o in ALL_OPTIONS[::3]:
            assert_level_equals_portable(level, x, o)


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_and_fingerprint_equal_portable(level: str, dtype: str) -> None:
    """All results of one reading pass, at every size around an edge, with and without NaN."""
    rng = np.random.default_rng(6)
    for rows, cols in itertools.product((0, 1, 16, 17, 130), EDGES):
        for share in (0.0, 0.05):
            x = poison_nonfinite(rng, cpu.tricky_values(rng, (2, rows, cols), DTYPES[dtype]), share)
            for axis in (None, 0, 1):
                with cpu.use_level("portable"):
                    expected = cpu.amax(x, rotate_axis=axis)
                with cpu.use_level(level):
                    got = cpu.amax(x, rotate_axis=axis)
                for have, want in zip(got, expected, strict=True):
                    assert np.array_equal(have, want), (rows, cols, share, axis)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", cpu.FORMATS)
def test_dequantize_equals_portable_for_every_byte(level: str, fmt: str, dtype: str) -> None:
    """Every scale byte against every code, NaN codes and scales included; several tensor scales."""
    rng = np.random.default_rng(7)
    bits, block = cpu.FORMATS[fmt]
    for rows, k, tiled in ((256, 256, False), (130, 33, True), (3, 1, False)):
        blocks = -(-k // block)
        scale_bytes = -(-rows // 128) * -(-blocks // 4) * 512 if tiled else rows * blocks
        values = rng.integers(0, 256, (4, rows, cpu.row_bytes(bits, k)), np.uint8)
        scales = np.resize(np.arange(256, dtype=np.uint8), (4, scale_bytes))
        global_scale = np.array([1.0, 1.2345e-3, 1e-41, 3e38], np.float32)
        q = cpu.Result(values, scales, global_scale)
        o = Options(fmt, tiled_layout=tiled)
        with cpu.use_level("portable"):
            expected = cpu.dequantize(q, o, rows, k, DTYPES[dtype])
        with cpu.use_level(level):
            got = cpu.dequantize(q, o, rows, k, DTYPES[dtype], threads=3)
        assert got.tobytes() == expected.tobytes()


# ---- How x is cut -------------------------------------------------------------------------------


def test_threads_do_not_change_bytes() -> None:
    """One thread or several, in any order of work: the same bytes, amax and fingerprint."""
    rng = np.random.default_rng(8)
    for shape in ((1, 700, 1300), (7, 40, 90)):
        x = cpu.tricky_values(rng, shape, BF16)
        row = Options("NVFP4", 1, stochastic=True, seed=SEED)
        col = Options("NVFP4", 0, stochastic=True, seed=SEED, hadamard=True, tiled_layout=True)
        expected = cpu.quantize(x, row, col)
        amax = cpu.amax(x, rotate_axis=0)
        for threads in (2, 5):
            for have, want in zip(
                cpu.quantize(x, row, col, threads=threads), expected, strict=True
            ):
                assert have.equals(want)
            for a, b in zip(cpu.amax(x, rotate_axis=0, threads=threads), amax, strict=True):
                assert np.array_equal(a, b)


def test_two_copies_in_one_pass_equal_two_passes() -> None:
    """Options of the copies do not mix."""
    rng = np.random.default_rng(9)
    x = cpu.tricky_values(rng, (2, 150, 530), F32)
    pick = rng.permutation(len(ALL_OPTIONS))[:40]
    for i, j in itertools.pairwise(pick):
        row, col = ALL_OPTIONS[i], ALL_OPTIONS[j]
        together = cpu.quantize(x, row, col)
        apart = cpu.quantize(x, row) + cpu.quantize(x, col)
        assert all(a.equals(b) for a, b in zip(together, apart, strict=True)), (row, col)


@pytest.mark.parametrize("variant", VARIANTS)
def test_quantizing_the_transpose_gives_the_other_copy(variant: str) -> None:
    """quantize(x, rows) equals quantize(x transposed, cols), byte for byte."""
    rng = np.random.default_rng(10)
    for fmt in cpu.FORMATS:
        if is_valid(fmt, variant):
            x = cpu.tricky_values(rng, (1, 161, 75), F32)
            o = Options(fmt, 0, **VARIANTS[variant])
            (down,) = cpu.quantize(x, o)
            (across,) = cpu.quantize(np.ascontiguousarray(x.mT), replace(o, axis=1))
            assert down.equals(across), fmt


def test_both_copies_of_a_tile_hold_the_same_codes() -> None:
    """With 2-D scales the transposed copy is the transpose of the other one."""
    x = cpu.tricky_values(np.random.default_rng(11), (1, 96, 64), F32)
    row, col = cpu.quantize(x, Options("NVFP4", 1, tiles=True), Options("NVFP4", 0, tiles=True))
    nibbles = [
        np.stack([q.values[0] & 0xF, q.values[0] >> 4], -1).reshape(len(q.values[0]), -1)
        for q in (row, col)
    ]
    assert np.array_equal(nibbles[0], nibbles[1].T)


def shard(x: np.ndarray, lead: slice, row: slice, col: slice) -> tuple[np.ndarray, Placement]:
    part = np.ascontiguousarray(x[lead, row, col])
    return part, Placement(lead.start, row.start, col.start, x.shape[1], x.shape[2])


@pytest.mark.parametrize("fmt", ["NVFP4", "MXFP4", "MXFP6_E2M3", "FP8_E5M2"])
@pytest.mark.parametrize("axis", [1, 0])
def test_shards_equal_the_whole(fmt: str, axis: int) -> None:
    """Quantizing parts with their placement gives the parts of the whole, random bits included."""
    x = cpu.tricky_values(np.random.default_rng(12), (2, 256, 384), BF16)
    for variant in ("plain", "stochastic", "hadamard_stochastic", "tiles_stochastic"):
        o = Options(fmt, axis, **VARIANTS[variant])
        plain, rotated, _ = cpu.amax(x, rotate_axis=axis)
        bits = rotated if o.hadamard else plain
        (whole,) = cpu.quantize(x, o.with_amax(bits))
        blocks = (384 if axis == 1 else 256) // o.block
        scales = whole.scales.reshape(2, -1, blocks)
        for row, col in itertools.product((slice(0, 128), slice(128, 256)), (slice(128, 384),)):
            part, placement = shard(x, slice(1, 2), row, col)
            (got,) = cpu.quantize(part, o.with_amax(bits[1:]), placement=placement)
            rows, k = (row, col) if axis == 1 else (col, row)
            k_bytes = slice(k.start * o.bits // 8, k.stop * o.bits // 8)
            k_blocks = slice(k.start // o.block, k.stop // o.block)
            assert np.array_equal(got.values[0], whole.values[1, rows, k_bytes]), variant
            assert np.array_equal(got.scales[0], scales[1, rows, k_blocks].reshape(-1)), variant


def test_fingerprints_of_shards_add_up() -> None:
    """The fingerprint is a sum over logical elements mod 2^32."""
    x = cpu.tricky_values(np.random.default_rng(13), (2, 40, 50), BF16)
    bits = x.astype(np.uint64).reshape(-1)
    expected = int((bits * (2 * np.arange(bits.size, dtype=np.uint64) + 1)).sum() % 2**32)
    assert cpu.amax(x)[2] == expected
    total = 0
    for lead, row, col in itertools.product(
        (slice(0, 1), slice(1, 2)), (slice(0, 7), slice(7, 40)), (slice(0, 33), slice(33, 50))
    ):
        part, placement = shard(x, lead, row, col)
        total += cpu.amax(part, placement=placement)[2]
    assert total % 2**32 == expected


@pytest.mark.parametrize("level_name", cpu.levels())
def test_flush_to_zero_of_the_caller_changes_nothing(level_name: str) -> None:
    """XLA calls with FTZ and DAZ set: results are the same, and the caller's state comes back."""
    library = cpu.load_library()
    if not hasattr(library, "c_set_mxcsr"):
        return  # only x86 processors have the register, and XLA sets it only there
    x = cpu.tricky_values(np.random.default_rng(14), (1, 64, 64), F32) * np.float32(2.0**-120)
    saved = library.c_get_mxcsr()
    flushing = saved | 0x8040
    for o in ALL_OPTIONS[::2]:
        with cpu.use_level(level_name):
            bits = cpu.amax(x, rotate_axis=o.axis)[1 if o.hadamard else 0]
            (expected,) = cpu.quantize(x, o.with_amax(bits))
            library.c_set_mxcsr(flushing)
            (got,) = cpu.quantize(x, o.with_amax(bits))
            restored = library.c_get_mxcsr()
            library.c_set_mxcsr(saved)
        assert got.equals(expected)
        assert restored & 0xFFC0 == flushing & 0xFFC0

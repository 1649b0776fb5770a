"""The CPU GEMM: every level, format pair and shape within the bound of exact arithmetic."""

import subprocess
import sys

import numpy as np
import pytest

from oracles import gemm as oracle
from oracles import tables
from support import gemm_native as native
from support.gemm_native import NVFP4, Format, Operand, fp8, gemm, mx, random_operand
from support.repository import ROOT

SIZES = (1, 2, 15, 16, 17, 31, 33, 64, 127, 129, 257)
# Levels held to exact arithmetic (`model` is held to its own oracle in test_mma_model.py). Listed
# by what this machine has, so that nothing is skipped silently on a smaller one.
LEVELS = [level for level in native.levels() if level != "model"]
FASTEST = LEVELS[-1]
PAIRS = [
    (NVFP4, NVFP4),
    *((mx(a), mx(b)) for a in native.ELEMENTS for b in native.ELEMENTS),
    *((fp8(a), fp8(b)) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
]
IDENTITIES = [NVFP4, *(mx(e) for e in native.ELEMENTS), fp8("e4m3")]


def _name(x: object) -> str:
    if isinstance(x, Format):
        return f"{x.element}/{x.scale}"
    return "-".join(_name(y) for y in x) if isinstance(x, tuple) else str(x)


def interval(a: Operand, b: Operand, entry: int = 0, **options: object) -> oracle.Interval:
    """What entry `entry` of the product may be."""
    exact = oracle.exact_product(a.values(entry), b.values(entry))
    alpha = a.global_scale[entry % len(a.codes)] * b.global_scale[entry % len(b.codes)]
    return oracle.output_interval(exact, alpha=alpha, **options)


def check(a: Operand, b: Operand, level: str, **options: object) -> None:
    """The product is within its bound."""
    interval(a, b).require(gemm(a, b, level=level, **options)[0])


@pytest.mark.parametrize("k", SIZES)
def test_every_shape_is_within_its_bound(k: int) -> None:
    """NVFP4 at the fastest level, all m and n of SIZES: panels, edges, few rows on either side."""
    rng = np.random.default_rng(k)
    a, b = (random_operand(rng, NVFP4, max(SIZES), k) for _ in range(2))
    whole = interval(a, b)
    for m in SIZES:
        for n in SIZES:
            out = gemm(
                Operand(NVFP4, a.codes[:, :m], a.scales[:, :m], a.global_scale, tiled=m % 2 == 1),
                Operand(NVFP4, b.codes[:, :n], b.scales[:, :n], b.global_scale, tiled=n % 4 == 1),
                level=FASTEST,
            )
            part = oracle.Interval(
                whole.lower[:m, :n], whole.upper[:m, :n], whole.unbounded[:m, :n]
            )
            part.require(out[0])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (17, 33, 0), (0, 0, 0)])
def test_empty_dimensions(level: str, shape: tuple[int, int, int]) -> None:
    """A sum over nothing is 0; everything else of the epilogue still happens."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    bias = np.arange(n, dtype=np.float32)
    for form in (NVFP4, mx("e4m3")):
        a, b = random_operand(rng, form, m, k), random_operand(rng, form, n, k)
        out = gemm(a, b, level=level, bias=("f32", bias))[0]
        np.testing.assert_array_equal(out, np.broadcast_to(bias, (m, n)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pair", PAIRS, ids=_name)
def test_every_format_pair(level: str, pair: tuple[Format, Format]) -> None:
    """Few rows on either side, whole and partial groups, one and several blocks of k."""
    rng = np.random.default_rng(1)
    for m, n, k in [(1, 40, 77), (33, 3, 129), (8, 17, 640), (16, 16, 32), (33, 47, 545)]:
        tiled = bool(k % 2)
        a = random_operand(rng, pair[0], m, k, tiled=tiled, global_scale=0.37)
        b = random_operand(rng, pair[1], n, k, tiled=not tiled, global_scale=1.91)
        check(a, b, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", IDENTITIES, ids=_name)
@pytest.mark.parametrize("few", ["e2m1", "e5m2"])
def test_few_rows_of_every_length(level: str, form: Format, few: str) -> None:
    """Rows that end anywhere in the chunks and steps of kernels; NaN in what pads tiled scales."""
    rng = np.random.default_rng(19)
    few_form = mx(few) if form.block == 32 else form
    for k in range(3, 300, 5):  # all remainders of a step
        a = random_operand(rng, few_form, 1 + k % 4, k, tiled=bool(k % 3))
        b = random_operand(rng, form, 3 + k % 2, k, tiled=bool(k % 2))
        check(a, b, level, scale_padding=native.NAN_SCALE[form.scale])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", [mx("e2m1"), mx("e2m3"), mx("e4m3")], ids=_name)
@pytest.mark.parametrize("m", [2, 20])
def test_scales_of_zero_blocks_change_nothing(level: str, form: Format, m: int) -> None:
    """However far from the others: finite scales of zero codes are not part of a row's span."""
    rng = np.random.default_rng(20)
    a, b = (random_operand(rng, form, rows, 320, scales=(100, 110)) for rows in (m, 18))
    a.codes[..., 64:96] = b.codes[..., 160:192] = 0
    usual = a.scales % 10, b.scales % 10
    for least in (0, 100, 200):  # of the other blocks
        a.scales[:], b.scales[:] = usual[0] + least, usual[1] + 210 - least
        expected = gemm(a, b, level=level)
        interval(a, b).require(expected[0])
        for zero in (0, 127, 254):
            a.scales[..., 2] = b.scales[..., 5] = zero
            np.testing.assert_array_equal(gemm(a, b, level=level), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(3, 19, 96), (18, 21, 70)])
@pytest.mark.parametrize(
    ("elements", "range_a", "range_b"),
    [
        (("e2m1", "e2m1"), (0, 254), (0, 254)),
        (("e5m2", "e4m3"), (0, 254), (0, 254)),
        (("e2m1", "e3m2"), (0, 254), (120, 130)),
        (("e2m3", "e2m1"), (127, 127), (0, 254)),
        (("e2m1", "e2m1"), (50, 50), (204, 204)),
        (("e5m2", "e5m2"), (0, 71), (183, 254)),
        (("e2m1", "e2m1"), (0, 72), (182, 254)),
        (("e4m3", "e2m1"), (0, 30), (0, 127)),
        (("e5m2", "e5m2"), (0, 0), (0, 0)),
        (("e2m1", "e2m1"), (254, 254), (254, 254)),
        (("e4m3", "e4m3"), (60, 70), (40, 50)),
    ],
)
def test_scales_of_any_range(
    level: str,
    shape: tuple[int, int, int],
    elements: tuple[str, str],
    range_a: tuple[int, int],
    range_b: tuple[int, int],
) -> None:
    """Scale bytes 0 to 254, spans up to and beyond what a panel holds, subnormal and huge sums."""
    m, n, k = shape
    rng = np.random.default_rng(2)
    a = random_operand(rng, mx(elements[0]), m, k, scales=range_a)
    b = random_operand(rng, mx(elements[1]), n, k, scales=range_b)
    check(a, b, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("element", ["e2m1", "e3m2", "e5m2"])
@pytest.mark.parametrize("span", [40, 71, 72, 80, 100, 127])
@pytest.mark.parametrize("m", [2, 18])
def test_small_blocks_beside_large_ones_are_not_lost(
    level: str, element: str, span: int, m: int
) -> None:
    """A row's range of scales is its own affair: products of its smallest block stay exact.

    Block 0 is large in A and zero in B, block 2 the other way round, so that the sums are those of
    block 1, which is smaller by 2^-span in both and holds the smallest codes of the format.
    """
    a, b = (random_operand(np.random.default_rng(18), mx(element), rows, 96) for rows in (m, 17))
    a.scales[:], b.scales[:] = [200, 200 - span, 200], [200, 200 - span, 200]
    a.codes[..., 64:] = b.codes[..., :32] = 0
    a.codes[..., 32:64] = b.codes[..., 32:64] = 1
    expected = np.full((1, m, 17), 32 * (tables.VALUES[element][1] * 2.0 ** (73 - span)) ** 2)
    np.testing.assert_array_equal(gemm(a, b, level=level), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_every_ue4m3_byte(level: str) -> None:
    """Subnormal scales, zero scales, the largest one; bit 7 is ignored."""
    rng = np.random.default_rng(3)
    for m, n, k in [(2, 9, 272), (20, 37, 272)]:
        a, b = (random_operand(rng, NVFP4, rows, k, scales=(0, 126)) for rows in (m, n))
        a.scales[0].reshape(-1)[:127] = np.arange(min(127, a.scales[0].size))[: a.scales[0].size]
        expected = gemm(a, b, level=level)
        interval(a, b).require(expected[0])
        a.scales |= 0x80
        b.scales[:, ::2] |= 0x80
        np.testing.assert_array_equal(gemm(a, b, level=level), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", [NVFP4, mx("e2m1"), mx("e2m3"), fp8("e4m3")], ids=_name)
@pytest.mark.parametrize("shape", [(2, 40, 300), (40, 2, 100), (35, 40, 100)])
def test_nan_scale_makes_its_row_nan_and_no_other(
    level: str, form: Format, shape: tuple[int, int, int]
) -> None:
    """Also where all codes are zero, in the last partial block, and where two NaN rows meet."""
    m, n, k = shape
    rng = np.random.default_rng(4)
    a, b = random_operand(rng, form, m, k), random_operand(rng, form, n, k)
    clean = gemm(a, b, level=level)[0]
    nan = native.NAN_SCALE[form.scale]
    a.scales[0, 1, -1] = nan
    b.scales[0, 0, 0] = b.scales[0, -1, 1] = nan
    a.codes[0, 1] = 0
    b.codes[0, 0] = 0
    out = gemm(a, b, level=level)[0]
    rows, cols = np.arange(m) == 1, np.isin(np.arange(n), [0, n - 1])
    expected_nan = rows[:, None] | cols[None, :]
    np.testing.assert_array_equal(np.isnan(out), expected_nan)
    np.testing.assert_array_equal(out[~expected_nan], clean[~expected_nan])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(3, 20, 64), (20, 20, 64)])
def test_infinite_and_nan_codes_follow_ieee_arithmetic(
    level: str, shape: tuple[int, int, int]
) -> None:
    """E5M2's Inf and NaN and E4M3's NaN reach exactly the outputs they meet."""
    m, n, k = shape
    rng = np.random.default_rng(5)
    a, b = random_operand(rng, mx("e5m2"), m, k), random_operand(rng, mx("e4m3"), n, k)
    a.codes[0, 0, 3], a.codes[0, 1, 40], a.codes[0, 2, 63] = 0x7C, 0xFC, 0x7E
    b.codes[0, 1, 3] = b.codes[0, 2, 40] = 0
    b.codes[0, 5, 9] = 0x7F
    out = gemm(a, b, level=level)[0]
    with np.errstate(invalid="ignore"):
        expected = (a.values() @ b.values().T).astype(np.float32)
    special = ~np.isfinite(expected)
    assert special.sum() > 3 * n - 3
    np.testing.assert_array_equal(out[special], expected[special])
    assert np.isfinite(out[~special]).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", IDENTITIES, ids=_name)
def test_one_hot_rows_pick_their_element(level: str, form: Format) -> None:
    """The order of codes in bytes: an error that both operands share would cancel elsewhere."""
    k = 160
    rng = np.random.default_rng(6)
    x = random_operand(rng, form, 24, k)
    one = int(np.flatnonzero(tables.VALUES[form.element] == 1)[0])
    unit = 0x38 if form.scale == "ue4m3" else 127
    codes = (np.eye(k, dtype=np.uint8) * one)[None]
    blocks = np.full((1, k, -(-k // form.block)), unit, np.uint8)
    hot = Operand(form, codes, blocks, np.ones(1, np.float32))
    expected = x.values().T.astype(np.float32)
    np.testing.assert_array_equal(gemm(hot, x, level=level)[0], expected)
    np.testing.assert_array_equal(gemm(x, hot, level=level)[0], expected.T)
    for row in range(0, k, 7):  # one row on one side: no panels
        single = Operand(form, codes[:, row : row + 1], blocks[:, :1], np.ones(1, np.float32))
        np.testing.assert_array_equal(gemm(single, x, level=level)[0, 0], expected[row])
        np.testing.assert_array_equal(gemm(x, single, level=level)[0, :, 0], expected[row])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", [NVFP4, mx("e2m1"), mx("e3m2"), mx("e4m3")], ids=_name)
@pytest.mark.parametrize("k", [96, 160, 4160, 147_456])
def test_last_elements_of_k_count(level: str, form: Format, k: int) -> None:
    """One element that is not zero, among the last 16 of K."""
    one = int(np.flatnonzero(tables.VALUES[form.element] == 1)[0])
    unit = 0x38 if form.scale == "ue4m3" else 127
    for rows in (1, 17):
        x = Operand(
            form,
            np.zeros((1, rows, k), np.uint8),
            np.full((1, rows, -(-k // form.block)), unit, np.uint8),
            np.ones(1, np.float32),
        )
        for back in (1, 16):
            x.codes[:] = 0
            x.codes[0, :, k - back] = one
            np.testing.assert_array_equal(gemm(x, x, level=level), np.ones((1, rows, rows)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(4, 96, 512), (64, 96, 512)])
def test_sums_of_ordinary_data_are_exact(level: str, shape: tuple[int, int, int]) -> None:
    """Where sum(|terms|) is below 2^24 quanta the sum is the exact one, in any order."""
    m, n, k = shape
    rng = np.random.default_rng(7)
    a, b = (random_operand(rng, NVFP4, rows, k, scales=(0x30, 0x3F)) for rows in (m, n))
    exact = oracle.exact_product(a.values(), b.values())
    assert exact.sums_exactly_in_f32().all()
    np.testing.assert_array_equal(gemm(a, b, level=level)[0], exact.rounded_to_f32())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("m", [3, 20])
@pytest.mark.parametrize("out", native.DTYPES)
@pytest.mark.parametrize("bias", [None, *native.DTYPES])
@pytest.mark.parametrize("accumulate", [None, *native.DTYPES])
def test_bias_accumulate_and_output_types(
    level: str, m: int, out: str, bias: str | None, accumulate: str | None
) -> None:
    """cvt(fl(fl(alpha * sum) + bias) + C), every step rounded once; f16 may overflow to Inf."""
    n, k = 37, 48
    rng = np.random.default_rng(8)
    a = random_operand(rng, NVFP4, m, k, global_scale=0.123)
    b = random_operand(rng, NVFP4, n, k, global_scale=45.6)
    a.scales[0, -1] = 0x7E  # large sums
    extra = {}
    bounds = {}
    for name, dtype, shape in (("bias", bias, (n,)), ("accumulate", accumulate, (1, m, n))):
        if dtype:
            values = oracle.round_to(dtype, rng.normal(size=shape).astype(np.float32) * 100)
            extra[name] = (dtype, values)
            bounds[name] = values[0] if name == "accumulate" else values
    limits = interval(a, b, out=out, **bounds)
    result = gemm(a, b, level=level, out=out, **extra)[0]
    limits.require(result)
    if out == "f16":
        assert np.isinf(result).any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("m", [2, 20])
def test_subnormal_and_overflowing_global_scales(level: str, m: int) -> None:
    """alpha = fl(gA * gB), with subnormals kept: handlers are called with them flushed."""
    n, k = 33, 64
    rng = np.random.default_rng(9)
    for ga, gb in [(1e-20, 1e-22), (1e-38, 1e-3), (2.0**-149, 1.0), (1e30, 1e20), (0.0, 1.0)]:
        a = random_operand(rng, NVFP4, m, k, global_scale=ga)
        b = random_operand(rng, NVFP4, n, k, global_scale=gb)
        with np.errstate(over="ignore", under="ignore"):
            sums = gemm(
                Operand(NVFP4, a.codes, a.scales, np.ones(1, np.float32)),
                Operand(NVFP4, b.codes, b.scales, np.ones(1, np.float32)),
                level=level,
            )
            expected = (a.global_scale * b.global_scale)[0] * sums
        out = gemm(a, b, level=level)
        np.testing.assert_array_equal(out, expected)
        for dtype in ("bf16", "f16"):
            rounded = gemm(a, b, level=level, out=dtype)
            np.testing.assert_array_equal(rounded, oracle.round_to(dtype, expected))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(2, 30, 40), (30, 34, 40), (130, 150, 160)])
@pytest.mark.parametrize("batches", [(3, 3), (1, 3), (7, 1), (1, 1), (0, 1)])
def test_batch_entries_are_separate_products(
    level: str, shape: tuple[int, int, int], batches: tuple[int, int]
) -> None:
    """An operand with batch 1 is shared; alpha and C belong to the entry, bias to all."""
    m, n, k = shape
    rng = np.random.default_rng(10)
    a, b = (
        random_operand(rng, mx("e2m1"), rows, k, batch=batch, tiled=True)
        for rows, batch in zip((m, n), batches, strict=True)
    )
    a.global_scale[:] = np.arange(1, len(a.codes) + 1)
    b.global_scale[:] = np.arange(2, len(b.codes) + 2)
    batch = 0 if 0 in batches else max(batches)
    c = rng.normal(size=(batch, m, n)).astype(np.float32)
    bias = rng.normal(size=n).astype(np.float32)
    options = {"bias": ("f32", bias), "level": level}
    whole = gemm(a, b, accumulate=("f32", c), batch=batch, **options)
    assert whole.shape == (batch, m, n)
    for entry in range(batch):
        one = [
            Operand(x.format, x.codes[i : i + 1], x.scales[i : i + 1], x.global_scale[i : i + 1])
            for x in (a, b)
            for i in [entry % len(x.codes)]
        ]
        single = gemm(*one, accumulate=("f32", c[entry : entry + 1]), **options)
        np.testing.assert_array_equal(whole[entry], single[0])


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize(
    ("shape", "batch"),
    [((1, 700, 256), 1), ((300, 5, 256), 1), ((200, 310, 700), 1), ((20, 30, 300), 40)],
)
def test_threads_change_nothing(level: str, shape: tuple[int, int, int], batch: int) -> None:
    """Not one bit, for 1, 2 and 5 threads."""
    m, n, k = shape if level != "model" else tuple(min(x, 90) for x in shape)
    rng = np.random.default_rng(11)
    for form, scales in ((NVFP4, None), (mx("e4m3"), (20, 200))):
        a = random_operand(rng, form, m, k, batch=batch, scales=scales)
        b = random_operand(rng, form, n, k, scales=scales)
        alone = gemm(a, b, level=level)
        for threads in (2, 5):
            together = gemm(a, b, level=level, threads=threads)
            np.testing.assert_array_equal(together.view(np.uint32), alone.view(np.uint32))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", [NVFP4, mx("e5m2")], ids=_name)
def test_sums_do_not_depend_on_their_place(level: str, form: Format) -> None:
    """Rows moved to other groups and tiles give the same bits, also with sums that round."""
    m, n, k = 290, 275, 1100
    rng = np.random.default_rng(12)
    a, b = random_operand(rng, form, m, k), random_operand(rng, form, n, k)
    out = gemm(a, b, level=level)[0]
    rows, cols = rng.permutation(m), rng.permutation(n)
    moved = gemm(
        Operand(form, a.codes[:, rows], a.scales[:, rows], a.global_scale),
        Operand(form, b.codes[:, cols], b.scales[:, cols], b.global_scale),
        level=level,
    )[0]
    np.testing.assert_array_equal(moved, out[rows][:, cols])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", [NVFP4, mx("e2m1"), mx("e2m3")], ids=_name)
@pytest.mark.parametrize("shape", [(2, 130, 72), (130, 131, 72)])
def test_scale_padding_never_reaches_output(
    level: str, form: Format, shape: tuple[int, int, int]
) -> None:
    """NaN in the tiled layout's bytes of rows and blocks that do not exist changes nothing."""
    m, n, k = shape
    rng = np.random.default_rng(13)
    a, b = (random_operand(rng, form, rows, k, tiled=True) for rows in (m, n))
    clean = gemm(a, b, level=level)
    nan = native.NAN_SCALE[form.scale]
    np.testing.assert_array_equal(gemm(a, b, level=level, scale_padding=nan), clean)


def test_operands_larger_than_a_slab() -> None:
    """Rows whose panels exceed the driver's limit are decoded slab by slab."""
    # 16 rows of f32 panel are 2 MiB at this k, so that 512 rows fill a slab.
    m, n, k, distinct = 523, 530, 1 << 15, 7
    rng = np.random.default_rng(14)
    a, b = (random_operand(rng, NVFP4, distinct, k) for _ in range(2))
    limits = interval(a, b)
    rows, cols = np.arange(m) % distinct, np.arange(n) % distinct
    out = gemm(
        Operand(NVFP4, a.codes[:, rows], a.scales[:, rows], a.global_scale),
        Operand(NVFP4, b.codes[:, cols], b.scales[:, cols], b.global_scale),
        level=LEVELS[min(1, len(LEVELS) - 1)],  # the fastest with f32 panels
    )[0]
    limits.require(out[:distinct, :distinct])
    np.testing.assert_array_equal(out, out[rows][:, cols])


def test_nothing_beyond_the_operands_is_read() -> None:
    """Every array ends before a page without access; all ways of padding, at every level."""
    script = """
import numpy as np
from support.gemm_native import NVFP4, fp8, gemm, levels, mx, random_operand
rng = np.random.default_rng(17)
bias, dtypes = rng.normal(size=64).astype(np.float32), ("f32", "bf16", "f16")
for form in (NVFP4, mx("e2m1"), mx("e2m3"), mx("e4m3"), fp8("e5m2")):
    for m, n, k in ((1, 5, 3), (3, 21, 33), (19, 2, 50), (18, 35, 16), (17, 33, 97), (20, 17, 530),
                    (2, 9, 161), (5, 3, 290)):
        for tiled in (False, True):
            a = random_operand(rng, form, m, k, tiled=tiled)
            b = random_operand(rng, form, n, k, tiled=tiled)
            c = rng.normal(size=(1, m, n)).astype(np.float32)
            for level in levels():
                for dtype in dtypes:
                    gemm(a, b, level=level, bias=(dtype, bias[:n]), accumulate=(dtype, c),
                         out=dtype, fence=True)
"""
    native.load_library()
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT / "tests")


def test_tiles_work_in_a_forked_process() -> None:
    """The permission for AMX is asked once and holds for children and threads."""
    script = """
import os, sys
import numpy as np
from support.gemm_native import NVFP4, gemm, levels, random_operand
rng = np.random.default_rng(15)
a, b = (random_operand(rng, NVFP4, 70, 320) for _ in range(2))
before = gemm(a, b, level=levels()[-1])
child = os.fork()
after = gemm(a, b, level=levels()[-1], threads=2)
same = np.array_equal(before, after)
if child == 0:
    os._exit(0 if same else 1)
sys.exit(0 if same and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 else 1)
"""
    native.load_library()
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT / "tests")


@pytest.mark.parametrize("fault", ["swapped codes", "dropped tail", "wrong scale", "one bit"])
def test_bounds_detect_planted_faults(fault: str) -> None:
    """The comparison the tests above rest on fails for each of these."""
    rng = np.random.default_rng(16)
    a, b = (random_operand(rng, NVFP4, 20, 100) for _ in range(2))
    limits = interval(a, b)
    out = gemm(a, b, level=FASTEST)[0]
    limits.require(out)
    if fault == "swapped codes":
        a.codes = a.codes.reshape(1, 20, 50, 2)[..., ::-1].reshape(1, 20, 100)
    elif fault == "dropped tail":
        a.codes[..., 96:] = 0
    elif fault == "wrong scale":
        b.scales[0, 7, 3] ^= 8
    faulty = gemm(a, b, level=FASTEST)[0]
    if fault == "one bit":
        faulty = np.nextafter(out, np.float32(np.inf))
    with pytest.raises(AssertionError, match="elements"):
        limits.require(faulty)

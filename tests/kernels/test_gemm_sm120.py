"""The GEMM by mma.sync on the machine, all checks on: D equals the tensor-core model bit for bit.

K is walked in steps of 64 (mxf8f6f4: 32) elements in one accumulator, splits at multiples of four
steps, as gemm_sm100.cu does: both kernels give the same bits by the model. Operands, scales and D
lie between poison and canaries (support/gemm_kernels.py). `make test` runs a sample.
"""

import numpy as np
import pytest

from oracles import gemm as exact_gemm
from oracles import tables
from support.gemm_kernels import Problem, Variant, check, expected, random_problem, words

NVFP4 = Variant("nvfp4", 1, 128, "sm120")
NARROW = Variant("nvfp4", 1, 32, "sm120")
MIXED = Variant("mxf8f6f4", 1, 64, "sm120")
EVERY_VARIANT = [
    Variant(kind, 1, tile_n, "sm120")
    for kind in ("nvfp4", "mxfp4", "mxf8f6f4")
    for tile_n in (32, 64, 128)
]
ELEMENTS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")


@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 16), (129, 136, 272), (33, 65, 1040)])
def test_sizes_that_no_tile_divides(m: int, n: int, k: int) -> None:
    """Rows, columns and K past the edge of a tile by one element, block or step."""
    check(random_problem(NVFP4, m, n, k))


@pytest.mark.kernels
@pytest.mark.parametrize("m", [1, 31, 32, 33, 127, 128, 129, 257])
@pytest.mark.parametrize("n", [1, 7, 8, 31, 33, 63, 64, 65, 127, 128, 129, 200])
def test_every_edge_of_rows_and_columns(m: int, n: int) -> None:
    """All pairs of sizes around the edges of products, warps, boxes and tiles."""
    check(random_problem(NVFP4, m, n, 80, out=("f32", "bf16", "f16")[(m + n) % 3]))


@pytest.mark.kernels
@pytest.mark.parametrize("k", [16, 32, 48, 64, 80, 112, 128, 144, 240, 256, 272, 512, 528, 1296])
def test_every_edge_of_k(k: int) -> None:
    """K around blocks, steps, stages and rounds of the pipeline."""
    check(random_problem(NVFP4, 40, 24, k))


@pytest.mark.parametrize("variant", EVERY_VARIANT, ids=lambda v: v.name)
def test_variant_with_ragged_tiles(variant: Variant) -> None:
    """Several ragged tiles for each CTA, K of several stages and no whole one."""
    n = 24 if variant.tile_n == 32 else variant.tile_n + 24
    k = 2 * variant.stage_k + variant.block
    check(random_problem(variant, 136, n, k, out="bf16"))


@pytest.mark.kernels
@pytest.mark.parametrize("variant", EVERY_VARIANT, ids=lambda v: v.name)
@pytest.mark.parametrize("out", ["f32", "bf16", "f16"])
def test_every_variant(variant: Variant, out: str) -> None:
    """Every kernel, every type of D, with bias and C; more tiles than CTAs, stages than slots."""
    n = 24 if variant.tile_n == 32 else 2 * variant.tile_n + 40
    k = 9 * variant.stage_k + variant.block
    check(random_problem(variant, 2 * 128 + 33, n, k, out=out, bias="bf16", c="f32"))


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("variant", EVERY_VARIANT, ids=lambda v: v.name)
def test_every_schedule_gives_the_same_bits(variant: Variant, seed: int) -> None:
    """Warps and copies in other orders: no report, same D."""
    n = 24 if variant.tile_n == 32 else variant.tile_n + 8
    check(random_problem(variant, 136, n, 9 * variant.stage_k, batch=(2, 1), out="bf16"), seed)


@pytest.mark.parametrize("seed", range(2))
def test_schedules(seed: int) -> None:
    """A sample of the test above."""
    check(random_problem(NVFP4, 136, 136, 9 * NVFP4.stage_k, batch=(2, 1), out="bf16"), 100 + seed)


@pytest.mark.kernels
@pytest.mark.parametrize("a", ELEMENTS)
@pytest.mark.parametrize("b", ELEMENTS)
def test_every_pair_of_elements(a: str, b: str) -> None:
    """Kind mxf8f6f4 takes any two element types; rows of 4-bit codes need whole boxes of K."""
    k = 256 if "e2m1" in (a, b) else 288
    check(random_problem(MIXED, 40, 70, k, elements=(a, b)))


@pytest.mark.parametrize("elements", [("e4m3", "e2m1"), ("e3m2", "e5m2"), ("e2m1", "e2m3")])
def test_mixed_elements(elements: tuple[str, str]) -> None:
    """8-bit elements beside padded 4-bit and 6-bit ones."""
    check(random_problem(MIXED, 33, 72, 256, elements=elements))


@pytest.mark.parametrize(
    ("bias", "c", "n"),
    [("f32", None, 48), (None, "f32", 48), ("f16", "bf16", 48), ("bf16", "f16", 35)],
)
def test_bias_and_c(bias: str | None, c: str | None, n: int) -> None:
    """Each operand that is there adds one rounding; rows of C with and without whole vectors."""
    check(random_problem(NVFP4, 70, n, 64, out="bf16", bias=bias, c=c))


@pytest.mark.parametrize("batch", [(3, 3), (1, 3), (3, 1)])
def test_batch(batch: tuple[int, int]) -> None:
    """Each entry has its own rows, scales, bias and C; an operand may be shared by all."""
    problem = random_problem(
        NVFP4, 40, 33, 100, batch=batch, out="bf16", bias="f32", bias_batch=3, c="bf16"
    )
    check(problem)


@pytest.mark.parametrize("out", ["f32", "bf16", "f16"])
def test_d_without_a_tensor_map(out: str) -> None:
    """Warps store D themselves where its rows are no multiple of 16 bytes."""
    check(random_problem(NVFP4, 65, 131, 64, out=out, c=out))


@pytest.mark.parametrize("out", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("n", [1, 17])
def test_transposed_d(out: str, n: int) -> None:
    """A few rows of activations: A and B have changed places; D, C and bias lie the other way."""
    check(random_problem(NARROW, 200, n, 336, out=out, transposed=True, bias="bf16", c="f32"))


@pytest.mark.parametrize("splits", [2, 3])
def test_k_split(splits: int) -> None:
    """Parts of the sum are added in their order, and scaled once."""
    problem = random_problem(
        NVFP4, 70, 40, 1300, splits=splits, batch=(2, 1), out="bf16", bias="f32", c="f16"
    )
    check(problem)


@pytest.mark.parametrize("out", ["f32", "bf16"])
def test_groups_of_rows(out: str) -> None:
    """Each tile of rows has B, bias and scales of its group; rows of no group are left alone."""
    problem = random_problem(
        NVFP4, 5 * 128, 72, 96, batch=(1, 3), out=out, bias="f32", bias_batch=3,
        row_groups=[2, 0, -1, 0, 1],
    )  # fmt: skip
    problem.a.global_scale = np.array([1.5, 0.75, 3], np.float32)
    check(problem)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxf8f6f4"])
def test_groups_of_k(kind: str) -> None:
    """Each group sums over its own K; nothing sums to 0."""
    variant = Variant(kind, 1, 64, "sm120")
    problem = random_problem(
        variant, 140, 72, 896, k_groups=[0, 128, 128, 640, 896], out="bf16", c="f32"
    )
    problem.a.global_scale = np.array([1.5, 0.75, 3, 0.5], np.float32)
    check(problem)


@pytest.mark.parametrize("strip", [1, 8])
def test_every_tile_is_computed_once(strip: int) -> None:
    """18 tiles in strips of any height: some CTAs run, and take over the others' tiles."""
    check(random_problem(NVFP4, 300, 200, 16, batch=(3, 1), strip=strip, out="f16"), seed=strip)


def test_each_step_rounds_once() -> None:
    """alpha * sum + bias + C with values where fusing or reordering two steps changes D."""
    problem = random_problem(NVFP4, 128, 32, 16, out="f32")
    rng = np.random.default_rng(3)
    problem.a.global_scale[:] = np.float32(1 / 3)
    large = (2.0 ** rng.integers(0, 20, (1, 32))).astype(np.float32)
    problem.bias, problem.bias_type = words(large, "f32"), "f32"
    problem.c, problem.c_type = words(np.broadcast_to(-large, (1, 128, 32)), "f32"), "f32"
    check(problem)


def test_nan_scales_stay_in_their_row() -> None:
    """A NaN scale makes its row of D NaN, and no other."""
    problem = random_problem(NVFP4, 40, 40, 80)
    problem.a.scales[0, 7, 3] = 0x7F
    check(problem)
    assert np.isnan(expected(problem)[0, 7].view(np.float32)).all()


def test_model_is_within_the_bound_of_exact_arithmetic() -> None:
    """What the tests demand is exact, up to 2^-22 of the sum of magnitudes for each MMA."""
    problem: Problem = random_problem(NVFP4, 129, 136, 1040)
    a, b = (
        tables.VALUES["e2m1"][o.codes[0]].astype(np.float64)
        * np.repeat(tables.VALUES["e4m3"][o.scales[0]].astype(np.float64), 16, axis=1)
        for o in (problem.a, problem.b)
    )
    problem.a.global_scale[:] = problem.b.global_scale[:] = 1
    exact = exact_gemm.exact_product(a, b)
    got = expected(problem)[0].view(np.float32).astype(np.float64)
    mmas = -(-1040 // 64)
    assert (np.abs(got - exact.high - exact.low) <= mmas * 2.0**-22 * exact.magnitude).all()
    assert len(np.unique(got)) > got.size * 0.9

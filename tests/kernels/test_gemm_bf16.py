"""The GEMM for GPUs without block-scaled MMAs, all checks on: D equals the model bit for bit.

Code times scale rounded once to bf16; K is walked from 0 in one f32 accumulator, in the steps of
the chip's bf16 MMA (docs/numerics.md, M10: 8 elements on 8.x, 16 on 9.x).
"""

import numpy as np
import pytest

from jax_fp4 import sim
from support.device_kernels import compiler, kernel
from support.gemm_bf16 import Run, Variant, check, decoded
from support.gemm_kernels import Problem, expected, random_problem
from support.repository import ROOT

NVFP4 = Variant("nvfp4", 1, 128)
MX8 = Variant("mxf8f6f4", 1, 32)
KINDS = ("nvfp4", "mxfp4", "mxf8f6f4")
EVERY_VARIANT = [
    Variant(kind, 1, n, chip) for kind in KINDS for n in (32, 128) for chip in ("80", "90")
]
ELEMENTS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")


@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 16), (129, 136, 272), (33, 65, 528)])
def test_sizes_that_no_tile_divides(m: int, n: int, k: int) -> None:
    """Rows, columns and K past the edge of a tile by one element, block or step."""
    check(random_problem(NVFP4, m, n, k))


@pytest.mark.kernels
@pytest.mark.parametrize("m", [1, 31, 32, 33, 127, 128, 129, 257])
@pytest.mark.parametrize("n", [1, 7, 8, 31, 33, 64, 65, 127, 128, 129, 200])
def test_every_edge_of_rows_and_columns(m: int, n: int) -> None:
    """All pairs of sizes around the edges of products, warps and tiles."""
    check(random_problem(NVFP4, m, n, 80, out=("f32", "bf16", "f16")[(m + n) % 3]))


@pytest.mark.kernels
@pytest.mark.parametrize("k", [16, 32, 48, 64, 80, 112, 128, 144, 240, 256, 272, 336])
@pytest.mark.parametrize("kind", KINDS)
def test_every_edge_of_k(kind: str, k: int) -> None:
    """K around blocks, steps, stages and rounds of the ring."""
    check(random_problem(Variant(kind, 1, 32), 40, 24, k))


@pytest.mark.parametrize("variant", EVERY_VARIANT[::3], ids=lambda v: f"{v.name}-{v.chip}")
def test_variant_with_ragged_tiles(variant: Variant) -> None:
    """Several ragged tiles, K of several stages and no whole one."""
    check(random_problem(variant, 136, variant.tile_n + 24, 352, out="bf16"))


@pytest.mark.kernels
@pytest.mark.parametrize("variant", EVERY_VARIANT, ids=lambda v: f"{v.name}-{v.chip}")
@pytest.mark.parametrize("out", ["f32", "bf16", "f16"])
def test_every_variant(variant: Variant, out: str) -> None:
    """Every kernel, every type of D, with bias and C."""
    check(random_problem(variant, 136, 2 * variant.tile_n + 40, 352, out=out, bias="bf16", c="f32"))


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("variant", EVERY_VARIANT, ids=lambda v: f"{v.name}-{v.chip}")
def test_every_schedule_gives_the_same_bits(variant: Variant, seed: int) -> None:
    """Warps and copies in other orders: no report, same D."""
    check(random_problem(variant, 136, variant.tile_n + 8, 480, out="bf16"), seed)


@pytest.mark.kernels
@pytest.mark.parametrize("a", ELEMENTS)
@pytest.mark.parametrize("b", ELEMENTS)
def test_every_pair_of_elements(a: str, b: str) -> None:
    """Kind mxf8f6f4 takes any two element types."""
    check(random_problem(MX8, 40, 70, 288, elements=(a, b)))


@pytest.mark.parametrize("elements", [("e4m3", "e2m1"), ("e3m2", "e5m2"), ("e2m1", "e2m3")])
def test_mixed_elements(elements: tuple[str, str]) -> None:
    """Codes of 8, 6 and 4 bits beside each other."""
    check(random_problem(MX8, 33, 40, 224, elements=elements))


def test_every_code_and_scale_is_decoded() -> None:
    """Each code of each element with all scales: subnormals, infinities and NaN among them."""
    for element in ELEMENTS:
        problem = random_problem(MX8, 256, 8, 32, elements=(element, "e4m3"))
        bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(element, 8)
        problem.a.codes[0] = (np.arange(256 * 32) % (1 << bits)).reshape(256, 32)
        problem.a.scales[0, :, 0] = np.arange(256)
        # 1 in a column each, so that a row of D has the values of a row of A.
        problem.b.codes[:] = 0
        problem.b.codes[0, np.arange(8), 4 * np.arange(8)] = 0x38
        problem.b.scales[:] = 127
        problem.b.global_scale[:] = problem.a.global_scale[:] = 1
        check(problem)


def test_nvfp4_decodes_exactly() -> None:
    """E2M1 times UE4M3 is a bf16: nothing rounds before the sum."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (127, 1))
    bits = decoded(codes, np.arange(127, dtype=np.uint8)[:, None], "e2m1", 16)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scale = [
        (s % 8) / 8 * 2.0**-6 if s < 8 else (1 + s % 8 / 8) * 2.0 ** (s // 8 - 7)
        for s in range(127)
    ]
    exact = np.outer(scale, np.concatenate([magnitudes, -magnitudes]))
    got = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    np.testing.assert_array_equal(got, exact)


@pytest.mark.parametrize(("bias", "c"), [("f32", None), (None, "f16"), ("bf16", "f32")])
def test_bias_and_c(bias: str | None, c: str | None) -> None:
    """Each operand that is there adds one rounding."""
    check(random_problem(NVFP4, 70, 48, 64, out="bf16", bias=bias, c=c))


@pytest.mark.parametrize("batch", [(3, 3), (1, 3), (3, 1)])
def test_batch(batch: tuple[int, int]) -> None:
    """Each entry has its own rows, scales, bias and C; an operand may be shared by all."""
    problem = random_problem(
        Variant("nvfp4", 1, 32), 40, 33, 100, batch=batch, out="bf16", bias="f32", bias_batch=3,
        c="bf16",
    )  # fmt: skip
    check(problem)


def test_transposed_d() -> None:
    """A and B have changed places: D, C and bias lie the other way round."""
    variant = Variant("nvfp4", 1, 32)
    check(random_problem(variant, 200, 17, 336, out="f16", transposed=True, bias="bf16", c="f32"))


def test_k_split() -> None:
    """Parts of the sum are added in their order, and scaled once."""
    check(random_problem(MX8, 70, 40, 700, splits=3, batch=(2, 1), out="bf16", bias="f32"))


def test_groups_of_rows() -> None:
    """Each tile of rows has B, bias and scales of its group; rows of no group are left alone."""
    problem = random_problem(
        NVFP4, 3 * 128, 72, 96, batch=(1, 3), bias="f32", bias_batch=3, row_groups=[2, -1, 1]
    )
    problem.a.global_scale = np.array([1.5, 0.75, 3], np.float32)
    check(problem)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_k(kind: str) -> None:
    """Each group sums over its own K; nothing sums to 0."""
    problem = random_problem(
        Variant(kind, 1, 32), 140, 40, 640, k_groups=[0, 128, 128, 512, 640], out="bf16", c="f32"
    )
    problem.a.global_scale = np.array([1.5, 0.75, 3, 0.5], np.float32)
    check(problem)


def test_nan_scales_stay_in_their_row() -> None:
    """A NaN scale makes its row of D NaN, and no other."""
    problem = random_problem(NVFP4, 40, 40, 80)
    problem.a.scales[0, 7, 3] = 0x7F
    check(problem)
    assert np.isnan(expected(problem)[0, 7].view(np.float32)).all()


# old, new, kind of the report ("": D is wrong).
FAULTS = {
    "decoded before it has arrived": (
        "cp_async_wait_group<kStages - 2>();\n    __syncthreads();",
        "cp_async_wait_group<kStages - 1>();\n    __syncthreads();",
        ("uninitialized-memory", "race"),
    ),
    "multiplied before all is decoded": (
        "cp_async_wait_group<kStages - 2>();\n    __syncthreads();",
        "cp_async_wait_group<kStages - 2>();",
        ("uninitialized-memory", "race"),
    ),
    "D's buffers are written while warps multiply": (
        "  __syncthreads();\n  ptx::griddepcontrol_launch",
        "  ptx::griddepcontrol_launch",
        ("race",),
    ),
    "halves of a group are put without the swizzle": ("at ^ 16", "at + 16", ("race",)),
    "scales of the next block": ("kVariant.block() % 4", "kVariant.block() % 4 ^ 1", ()),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_seen(name: str) -> None:
    """Reported by the machine, or D is not what the model says."""
    old, new, kinds = FAULTS[name]
    row = kernel(NVFP4.name)
    source = (ROOT / "csrc" / "kernels" / row.source).read_text()
    assert source.count(old) == 1
    ptx = compiler().compile_ptx(row, "80", source.replace(old, new))
    problem: Problem = random_problem(NVFP4, 129, 40, 400)
    seen = set()
    for seed in range(8):
        machine = sim.Machine("80", seed, sim.Checks(strict=True))
        run = Run(problem, machine, machine.load(ptx))
        try:
            run.launch()
        except sim.SimulationError as error:
            seen.add(error.kind)
            break
        if (run.result() != expected(problem)).any():
            seen.add("")
            break
    assert seen & (set(kinds) or {""}), seen

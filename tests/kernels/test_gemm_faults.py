"""Faults planted in the GEMM kernels are reported, at the right instruction, or seen in D."""

from dataclasses import dataclass

import pytest

from jax_fp4 import sim
from support.gemm_kernels import Problem, Run, Variant, changed_ptx, expected, random_problem

ONE = Variant("nvfp4", 1, 64)
PAIR = Variant("nvfp4", 2, 128)
WIDE = Variant("nvfp4", 2, 256)  # accumulators overlap
WARP = Variant("nvfp4", 1, 64, "sm120")
WARP_MX = Variant("mxf8f6f4", 1, 64, "sm120")


@dataclass(frozen=True)
class Fault:
    """A change of the source, which kinds of report it may lead to, and at which instructions."""

    old: str
    new: str
    kinds: tuple[str, ...]
    instructions: tuple[str, ...]
    variant: Variant = ONE
    file: str = ""  # of parts/


# A deadlock in which lanes also wait for each other has the kind "divergence".
FAULTS = {
    "D leaves before its bytes are visible to the copy": Fault(
        "ptx::fence_proxy_async_shared_cta();", "", ("proxy",), ("cp.async.bulk.tensor.3d.global",)
    ),
    "a buffer of D is written while a copy reads it": Fault(
        "if (lane == 0) ptx::cp_async_bulk_wait_group_read<kBuffers - 1>();",
        "",
        ("race",),
        ("cp.async.bulk.tensor", "st.shared"),
    ),
    "the CTA ends while copies read its memory": Fault(
        "if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<0>();",
        "",
        ("exit",),
        ("cp.async.bulk.tensor.3d.global",),
    ),
    "more bytes are expected than come": Fault(
        "expect_tx(cta.full(place.slot), bytes)",
        "expect_tx(cta.full(place.slot), bytes + 16)",
        ("divergence",),
        ("mbarrier.try_wait",),
    ),
    "fewer bytes are expected than come": Fault(
        "expect_tx(cta.full(place.slot), bytes)",
        "expect_tx(cta.full(place.slot), bytes - 16)",
        ("divergence",),
        ("mbarrier.try_wait",),
    ),
    "MMAs wait for the phase before": Fault(
        "wait<kGroup == 2>(cta.full(place.slot), place.parity);",
        "wait<kGroup == 2>(cta.full(place.slot), place.parity ^ 1);",
        ("uninitialized-memory",),
        ("tcgen05.cp",),
    ),
    "operands are overwritten while MMAs read them": Fault(
        "wait<kGroup == 2>(cta.empty(place.slot), place.parity ^ 1);\n      // Both",
        "// Both",
        ("mbarrier",),
        ("mbarrier.arrive.expect_tx",),
    ),
    "the epilogue does not wait for the MMAs": Fault(
        "wait<kGroup == 2>(cta.done(source.slot), source.parity);",
        "",
        ("uninitialized-memory",),
        ("tcgen05.ld",),
    ),
    "an accumulator is overwritten while it is drained": Fault(
        "    wait_for_accumulator(cta, target);", "", ("race",), ("tcgen05.mma",)
    ),
    "an overlapping accumulator is overwritten while it is drained": Fault(
        "kOverlap != 0 && source == 0", "false", ("race",), ("tcgen05.mma",), WIDE
    ),
    "an accumulator is released before its loads have ended": Fault(
        "ptx::tcgen05_wait_ld(sum[h]);\n      if (i == last_needed) release(cta, source);",
        "if (i == last_needed) release(cta, source);\n      ptx::tcgen05_wait_ld(sum[h]);",
        ("race",),
        ("tcgen05.mma",),
    ),
    "loads follow the MMAs by no fence after the barrier": Fault(
        "whose end was awaited.\n    ptx::tcgen05_fence_after_thread_sync();",
        "",
        ("tensor-memory",),
        ("tcgen05.ld",),
    ),
    "MMAs follow the loads by no fence before the barrier": Fault(
        "  ptx::tcgen05_fence_before_thread_sync();\n  __syncwarp();",
        "  __syncwarp();",
        ("tensor-memory",),
        ("tcgen05.mma",),
    ),
    "nobody hears that an accumulator is done": Fault(
        "    commit(cta.done(target.slot));", "", ("divergence",), ("mbarrier.try_wait",)
    ),
    "tensor memory is not given back": Fault(
        "    ptx::tcgen05_dealloc<kGroup>(cta.tensor, kColumns);",
        "",
        ("tensor-memory",),
        ("tcgen05.alloc",),
    ),
    "half of the epilogue's arrivals release a pair's accumulator": Fault(
        # In one of the schedules two arrivals too many complete a phase that nobody sees.
        "kGroup * kEpilogueWarps",
        "kEpilogueWarps",
        ("race", "divergence"),
        ("tcgen05.mma", "tcgen05.ld", "mbarrier.try_wait"),
        PAIR,
    ),
    "barriers of a pair are not visible to the other CTA": Fault(
        "  ptx::fence_mbarrier_init_release_cluster();",
        "",
        ("race",),
        ("cp.async.bulk.tensor.3d.shared::cluster", "cp.async.bulk.tensor.4d.shared::cluster"),
        PAIR,
    ),
    "nobody waits for the answer about tiles": Fault(
        "    wait<kCtas == 2>(next(), place_.parity);\n",
        "",
        ("uninitialized-memory",),
        ("ld.shared.b128",),
        ONE,
        "tiles.h",
    ),
    "an answer about tiles is asked for while one may be read": Fault(
        "if (rank_ == 0) wait<kCtas == 2>(taken(), place_.parity ^ 1);",
        "",
        ("race",),
        ("clusterlaunchcontrol.try_cancel",),
        ONE,
        "tiles.h",
    ),
    "warps: D leaves before its bytes are visible to the copy": Fault(
        "ptx::fence_proxy_async_shared_cta();",
        "",
        ("proxy",),
        ("cp.async.bulk.tensor.3d.global",),
        WARP,
    ),
    "warps: a buffer of D is written while a copy reads it": Fault(
        "if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<0>();\n    __syncwarp();",
        "",
        ("race",),
        ("cp.async.bulk.tensor", "st.shared"),
        WARP,
    ),
    "warps: the CTA ends while copies read its memory": Fault(
        "that read it.\n  if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<0>();",
        "that read it.",
        ("exit",),
        ("cp.async.bulk.tensor.3d.global",),
        WARP,
    ),
    "warps: more bytes are expected than come": Fault(
        "expect_tx(full, bytes)",
        "expect_tx(full, bytes + 16)",
        ("deadlock",),
        ("mbarrier.try_wait",),
        WARP,
    ),
    "warps: products wait for the phase before": Fault(
        "wait(cta.full(place.slot), place.parity);\n  load(even",
        "wait(cta.full(place.slot), place.parity ^ 1);\n  load(even",
        ("uninitialized-memory",),
        ("ldmatrix",),
        WARP,
    ),
    "warps: operands are overwritten while they are loaded": Fault(
        "wait(cta.empty(place.slot), place.parity ^ 1);",
        "",
        ("mbarrier", "race"),
        ("mbarrier.arrive.expect_tx", "cp.async.bulk.tensor"),
        WARP,
    ),
    "warps: a stage is released by half of the warps": Fault(
        "ptx::mbarrier_init(cta.empty(stage), kWarps);",
        "ptx::mbarrier_init(cta.empty(stage), kWarps / 2);",
        ("mbarrier", "race", "uninitialized-memory"),
        ("mbarrier.arrive", "cp.async.bulk.tensor", "ldmatrix", "ld.shared"),
        WARP,
    ),
    "warps: a stage is released before its last loads": Fault(
        "    load(odd, at, stage, in_stage + 1, p);\n    multiply(sums, even, p);\n    step += 2;",
        "    multiply(sums, even, p);\n    step += 2;\n"
        "    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(cta.empty(place.slot));\n"
        "    load(odd, at, stage, in_stage + 1, p);",
        ("mbarrier", "race", "uninitialized-memory"),
        ("mbarrier.arrive", "cp.async.bulk.tensor", "ldmatrix", "ld.shared"),
        WARP,
    ),
    "warps: padding bits of E2M1 are not zero": Fault(
        "d[i] <<= 2;", "d[i] <<= 1;", ("argument",), ("mma.sync",), WARP_MX
    ),
}

# (old, new, file of parts/): nothing to report, but another D.
WRONG = {
    "rows have the scales of other rows": ("word + 4 * warp_m", "word", ""),
    "columns have the scales of other columns": (
        "static_cast<u16>(j % 4)", "static_cast<u16>(j % 2)", ""
    ),
    "a tile in the middle of 128 columns has the scales of the first": (
        "first_column % static_cast<u32>(kScaleTileRows) +", "0 * first_column +", ""
    ),
    "a step takes the codes of another": ("at.b ^ kStepBytes * step", "at.b", ""),
    "halves of K of B are exchanged": (
        "lane / 8 % 2 * 16", "(1 - lane / 8 % 2) * 16", "warp_tile.h"
    ),
    "columns of D are exchanged": ("first ^ 32 * j", "first ^ 32 * (j ^ 1)", "warp_tile.h"),
}  # fmt: skip


def problem(variant: Variant) -> Problem:
    """Four tiles and more for each of the CTAs (or pairs) that run, several stages each."""
    m, n = variant.tile_m + 8, variant.tile_n + 8
    elements = ("e2m1", "e4m3") if variant.kind == "mxf8f6f4" else None
    k = 640 if elements else 560
    return random_problem(variant, m, n, k, batch=(4, 1), out="bf16", elements=elements)


def report_of(fault: Fault) -> tuple[sim.SimulationError, str]:
    """The first report of 8 schedules, and the PTX line that it names."""
    ptx = changed_ptx(fault.variant, fault.old, fault.new, fault.file)
    for seed in range(8):
        machine = sim.Machine(fault.variant.chip, seed, sim.Checks(strict=True))
        try:
            Run(problem(fault.variant), machine, machine.load(ptx)).launch(max_instructions=1 << 22)
        except sim.SimulationError as error:
            return error, ptx.splitlines()[error.line - 1] if error.line else ""
    raise AssertionError("nothing was reported")


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_reported(name: str) -> None:
    """The report has the right kind, and names an instruction of the fault."""
    fault = FAULTS[name]
    error, line = report_of(fault)
    assert error.kind in fault.kinds, str(error)
    assert any(text in line for text in fault.instructions), str(error)


@pytest.mark.parametrize("name", WRONG)
def test_planted_error_is_seen(name: str) -> None:
    """D is not what the model says."""
    ptx = changed_ptx(WARP, *WRONG[name])
    p = random_problem(WARP, 40, 72, 144)
    machine = sim.Machine(WARP.chip)
    run = Run(p, machine, machine.load(ptx))
    run.launch()
    assert (run.result() != expected(p)).any()

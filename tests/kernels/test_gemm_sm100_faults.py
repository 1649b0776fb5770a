"""Faults planted in the source of the GEMM kernel are reported, at the right instruction."""

from dataclasses import dataclass

import pytest

from jax_fp4 import sim
from support.gemm_kernels import Problem, Run, Variant, changed_ptx, random_problem

ONE = Variant("nvfp4", 1, 64)
PAIR = Variant("nvfp4", 2, 128)
WIDE = Variant("nvfp4", 2, 256)  # accumulators overlap


@dataclass(frozen=True)
class Fault:
    """A change of the source, which kinds of report it may lead to, and at which instructions."""

    old: str
    new: str
    kinds: tuple[str, ...]
    instructions: tuple[str, ...]
    variant: Variant = ONE
    file: str = ""  # of parts/


# A deadlock in which lanes also wait for each other has the kind "divergence", and no line.
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
        ("",),
    ),
    "fewer bytes are expected than come": Fault(
        "expect_tx(cta.full(place.slot), bytes)",
        "expect_tx(cta.full(place.slot), bytes - 16)",
        ("divergence",),
        ("",),
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
        "ptx::tcgen05_wait_ld(sum);\n    if (i + 1 == held) release(cta, source);",
        "if (i + 1 == held) release(cta, source);\n    ptx::tcgen05_wait_ld(sum);",
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
        "    commit(cta.done(target.slot));", "", ("divergence",), ("",)
    ),
    "tensor memory is not given back": Fault(
        "    ptx::tcgen05_dealloc<kGroup>(cta.tensor, kColumns);",
        "",
        ("tensor-memory",),
        ("tcgen05.alloc",),
    ),
    "half of the epilogue's arrivals release a pair's accumulator": Fault(
        "kGroup * kEpilogueWarps", "kEpilogueWarps", ("race",), ("tcgen05.mma",), PAIR
    ),
    "barriers of a pair are not visible to the other CTA": Fault(
        "  ptx::fence_mbarrier_init_release_cluster();",
        "",
        ("race",),
        ("cp.async.bulk.tensor.3d.shared::cluster",),
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
}


def problem(variant: Variant) -> Problem:
    """Four tiles and more for each of the CTAs (or pairs) that run, three stages each."""
    m, n = variant.tile_m + 8, variant.tile_n + 8
    return random_problem(variant, m, n, 560, batch=(4, 1), out="bf16")


def report_of(fault: Fault) -> tuple[sim.SimulationError, str]:
    """The first report of 8 schedules, and the PTX line that it names."""
    ptx = changed_ptx(fault.variant, fault.old, fault.new, fault.file)
    for seed in range(8):
        machine = sim.Machine("100a", seed, sim.Checks(strict=True))
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

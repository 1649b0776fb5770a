"""The cycle model: what follows from its rules by hand, and what must hold in any case."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from jax_fp4 import sim
from support import device_kernels
from support.gemm_kernels import Run, Variant, expected, random_problem
from support.ptx_kernel import run
from support.tensor_memory import with_tensor_memory

# csrc/sim/costs/constants.h
ARITHMETIC_LATENCY = 4
INTEGER_CYCLES = 2
BARRIER_LATENCY = 20
TRY_WAIT_CYCLES = 20
SHARED_LATENCY = 29
SHARED = ".shared .align 1024 .b8 s[16384];"
X = ".param .u64 x"


def timing(body: str, *args: object, seed: int = 0, timeline: bool = False, **options: object):
    model = sim.CostModel(time=True, timeline=timeline)
    machine = sim.Machine("100a", seed, costs=model)
    costs = run(body, *args, machine=machine, **options).costs
    assert costs is not None and costs.timing is not None
    return costs.timing


def cycles(body: str, *args: object, **options: object) -> float:
    return timing(body, *args, **options).cycles


def chain(n: int) -> str:
    return "mov.u32 r0, %tid.x;" + "add.u32 r0, r0, r0;" * n


def independent(n: int) -> str:
    return "mov.u32 r0, %tid.x;" + "".join(f"add.u32 r{1 + i % 8}, r0, r0;" for i in range(n))


def test_a_dependent_chain_takes_its_latency() -> None:
    """n additions more: n latencies more."""
    assert cycles(chain(150)) - cycles(chain(50)) == 100 * ARITHMETIC_LATENCY


def test_independent_instructions_take_their_units_cycles() -> None:
    """An integer addition occupies its unit for two cycles; moves cost nothing."""
    assert cycles(independent(240)) - cycles(independent(80)) == 160 * INTEGER_CYCLES
    moves = independent(80) + "mov.u32 r9, r1;" * 50
    assert cycles(moves) == cycles(independent(80))


def test_warps_overlap() -> None:
    """Four warps have a sub-partition each; eight hide each other's latency until units fill."""
    one = cycles(chain(200))
    assert cycles(chain(200), block=128) == one
    assert cycles(chain(200), block=256) <= one + 2 * INTEGER_CYCLES
    four = cycles(independent(200), block=128)
    assert cycles(independent(200), block=256) - four == pytest.approx(200 * INTEGER_CYCLES, abs=8)


def test_ctas_overlap_until_the_sms_are_full() -> None:
    """A CTA for each of two SMs takes one CTA's time, a third one waits for a place."""
    model = sim.CostModel(time=True, timeline=True, sms=2, ctas_per_sm=1)

    def of(grid: int) -> sim.Timing:
        costs = run(chain(200), grid=grid, machine=sim.Machine("100a", costs=model)).costs
        assert costs is not None and costs.timing is not None
        return costs.timing

    one, two, three = of(1), of(2), of(3)
    assert one.cycles == two.cycles < three.cycles
    assert [cta.sm for cta in three.ctas] == [0, 1, 0]
    assert three.ctas[2].begin > three.ctas[0].end
    assert (one.used_sms, two.used_sms) == (1, 2)


def test_loads_wait_for_their_memory() -> None:
    """Shared memory: its latency for each dependent load; global: more; what is in L2: less."""

    def shared(n: int) -> str:
        return (
            f"{SHARED} mov.u32 r1, s; st.shared.u32 [r1], r1; bar.sync 0;"
            + "ld.shared.u32 r1, [r1];" * n
        )

    step = (cycles(shared(12)) - cycles(shared(2))) / 10
    assert step == SHARED_LATENCY
    x = np.zeros(1024, np.uint32)
    head = "ld.param.u64 a0, [x]; mov.u32 r0, %tid.x; mad.wide.u32 a1, r0, 4, a0;"
    use = "add.u32 r1, r1, r1;"
    none = cycles(f"{head} {use.replace('r1', 'r0')}", x, parameters=X)
    once = cycles(f"{head} ld.global.u32 r1, [a1]; {use}", x, parameters=X)
    again = f"{head} ld.global.u32 r1, [a1]; {use} ld.global.u32 r1, [a1]; {use}"
    twice = timing(again, x, parameters=X)
    assert none + 300 < once < twice.cycles < 2 * once - none
    assert (twice.l2_read, twice.dram_read) == (256, 128)


def test_bank_conflicts_take_a_cycle_each() -> None:
    """Stores of 32 lanes to one bank: 31 cycles more than to 32 banks, each."""

    def stores(stride: int, n: int) -> str:
        return (
            f"{SHARED} mov.u32 r0, %tid.x; mov.u32 r1, s; mad.lo.u32 r1, r0, {stride}, r1;"
            + "st.shared.u32 [r1], r0;" * n
            + "ld.shared.u32 r2, [r1]; add.u32 r2, r2, r2;"
        )

    more = [cycles(stores(stride, 40)) - cycles(stores(stride, 20)) for stride in (4, 128)]
    assert more == [20, 20 * 32]


def test_a_barrier_waits_for_the_last() -> None:
    """Warp 1 is late by 400 additions; warp 0 waits for it, and the timeline says so."""
    late = ".reg .pred w; mov.u32 r0, %tid.x; setp.lt.u32 w, r0, 32; @w bra M;" + (
        "add.u32 r0, r0, r0;" * 400 + "M: bar.sync 0;"
    )
    t = timing(late, block=64, timeline=True)
    waits = {i.warp: i.end - i.begin for i in t.intervals if i.track == "wait"}
    assert list(waits) == [0]
    assert waits[0] == pytest.approx(400 * ARITHMETIC_LATENCY, abs=50)
    assert t.waits == {"a named barrier": waits[0]}


MBARRIER = ".shared .align 8 .b64 b; mov.u32 r1, b; mbarrier.init.shared.b64 [r1], 1;"
TRY = "mbarrier.try_wait.parity.shared.b64 p, [r1], 0"


@pytest.mark.parametrize(
    ("hint", "cycles_waited"),
    [("", TRY_WAIT_CYCLES), (", 1000", 1965)],  # nanoseconds, at 1.965 GHz
)
def test_a_try_wait_gives_up(hint: str, cycles_waited: int) -> None:
    """One that looks ahead says no when its time is up, and the warp goes on."""
    out = np.zeros(4, np.uint64)
    timing(
        f"{MBARRIER} ld.param.u64 a0, [x]; mov.u64 a1, %clock64; {TRY}{hint};"
        "selp.u64 a3, 1, 0, p; mov.u64 a2, %clock64; st.global.u64 [a0], a1;"
        "st.global.u64 [a0+8], a2; st.global.u64 [a0+16], a3;"
        f"mbarrier.arrive.shared.b64 _, [r1]; {TRY}; selp.u64 a3, 1, 0, p;"
        "st.global.u64 [a0+24], a3;",
        out,
        parameters=X,
        block=1,
    )
    assert out[2:].tolist() == [0, 1]
    latency = BARRIER_LATENCY + SHARED_LATENCY
    assert cycles_waited + latency <= int(out[1] - out[0]) <= cycles_waited + latency + 8


@pytest.mark.parametrize(
    "again",
    ["@!p bra L;", "selp.u32 r5, 1, 0, p; setp.eq.u32 p, r5, 0; @p bra L;"],
    ids=["predicate", "register"],
)
def test_a_loop_around_a_try_wait_waits(again: str) -> None:
    """It is tried twice however long it takes, and without an end it is a deadlock."""
    loop = f"L: {TRY}; {again}"
    late = (
        f"mov.u32 r0, %tid.x; setp.eq.u32 q, r0, 0; @!q bra I; {MBARRIER} I: bar.sync 0;"
        "mov.u32 r1, b; setp.ge.u32 q, r0, 32; @!q bra L;"
        + "add.u32 r0, r0, r0;" * 400
        + f"elect.sync _|q, -1; @q mbarrier.arrive.shared.b64 _, [r1]; bra E; {loop} E:"
    )
    machine = sim.Machine("100a", costs=sim.CostModel(time=True))
    costs = run(late, block=64, machine=machine).costs
    assert costs is not None and costs.timing is not None
    # An init, an arrival, a try that gives up and one that waits.
    assert costs.counts["opcodes"]["mbarrier"] == 4
    assert costs.timing.waits["an mbarrier"] == pytest.approx(400 * ARITHMETIC_LATENCY, abs=100)
    with pytest.raises(sim.SimulationError, match="deadlock"):
        run(f"{MBARRIER} {loop}", block=1, machine=machine)


def test_a_multicast_leaves_l2_once() -> None:
    """The same 1 KiB for two CTAs, by a copy of each or by one for both."""
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"

    def l2_read(copies: str) -> int:
        barrier = "barrier.cluster.arrive; barrier.cluster.wait;"
        body = (
            f"{SHARED} {MBARRIER} mov.u32 r2, s; mov.u32 r3, %cluster_ctarank;"
            "mbarrier.arrive.expect_tx.shared.b64 _, [r1], 1024; ld.param.u64 a0, [x];"
            f"fence.mbarrier_init.release.cluster; {barrier} {copies}"
            f"L: {TRY}; @!p bra L; {barrier}"
        )
        return timing(
            body, np.zeros(1024, np.uint8), parameters=X, block=1, grid=2, cluster=2
        ).l2_read

    once = f"setp.eq.u32 q, r3, 0; mov.b16 h0, 3; @q {copy}.multicast::cluster"
    assert l2_read(f"{copy} [r2], [a0], 1024, [r1];") == 2048
    assert l2_read(f"{once} [r2], [a0], 1024, [r1], h0;") == 1024


@pytest.mark.parametrize("warps", [1, 4])
def test_tensor_cores_of_mma_sync(warps: int) -> None:
    """Each warp keeps a quarter of them busy; without data sums stay as they are."""
    step = (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {f0, f1, f2, f3}, {r0, r0, r0, r0},"
        "{r0, r0}, {f0, f0, f0, f0};"
    )
    each = 2 * 16 * 8 * 16 / 512  # cycles: a quarter of 2048 FLOP
    results = []
    for data in (True, False):
        out = np.zeros(1, np.float32)
        machine = sim.Machine("100a", costs=sim.CostModel(time=True, data=data))
        costs = run(
            # Sums of a step are those of the one before: its latency is waited for.
            f"mov.u32 r0, 0x3C003C00; mov.f32 f0, 0f00000000; ld.param.u64 a0, [x]; {step * 50}"
            "st.global.f32 [a0], f0;",
            out, parameters=X, block=32 * warps, machine=machine,
        ).costs  # fmt: skip
        assert costs is not None and costs.timing is not None
        # From the first to the end of the last: 50 latencies of 33 + 8 cycles, but for the last's.
        span = 49 * (33 + each) + each
        assert costs.timing.tensor_busy_steady == pytest.approx(warps / 4 * 50 * each / span)
        results.append((costs.timing.cycles, out[0]))
    assert results[0][0] == results[1][0]
    assert [value for _, value in results] == [50 * 16, 0]


def mmas(m: int, n: int, count: int, group: int = 1) -> tuple[str, dict]:
    """`count` MMAs of kind f16 one after the other, and how to launch them without data."""
    # Matrices of 8 x 16-byte cores, 128 bytes apart along K and 256 along rows (PTX ISA 9.7.16.5).
    matrix = (128 >> 4) << 16 | (256 >> 4) << 32 | 1 << 46
    instruction = 1 << 4 | n // 8 << 17 | m // 16 << 24
    body = (
        "setp.eq.u32 p, r0, 0; @p mbarrier.init.shared.b64 [r4], 1;"
        "fence.mbarrier_init.release.cluster; bar.sync 0;"
        f"shr.u32 r6, r3, 4; cvt.u64.u32 a0, r6; or.b64 a0, a0, {matrix};"
        f"mov.u32 r7, {instruction};"
        f"setp.ne.u32 q, r0, r0; mov.u32 r8, {count}; @!p bra D;\n"
        f"L: tcgen05.mma.cta_group::{group}.kind::f16 [r2], a0, a0, r7, q;"
        "sub.u32 r8, r8, 1; setp.ne.u32 q, r8, 0; @q bra L;"
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [r4];\n"
        "D: mbarrier.try_wait.parity.shared.b64 q, [r4], 0; @!q bra D;"
    )
    machine = sim.Machine("100a", costs=sim.CostModel(time=True, data=False))
    return with_tensor_memory(body, columns=256), {"machine": machine}


@pytest.mark.parametrize(
    ("m", "n", "each"),
    [
        (128, 256, 128),  # 2 * 128 * 256 * 16 FLOP at 8192 a cycle
        (128, 128, 64),  # the same as 8 KiB of operands at 128 bytes a cycle
        (128, 32, 40),  # 5 KiB of operands: shared memory is slower than 16 cycles of products
        (64, 256, 128),  # half of the rows are empty
    ],
)
def test_tensor_pipe(m: int, n: int, each: int) -> None:
    """A stream of MMAs keeps the pipe busy, for as long as products or operands take."""
    times = []
    for count in (100, 300):
        body, options = mmas(m, n, count)
        costs = run(body, **options).costs
        assert costs is not None and costs.timing is not None
        assert costs.timing.tensor_busy_steady > 0.99
        assert costs.counts["mma_flop"] == {"tcgen05.mma f16": 2 * m * n * 16 * count}
        times.append(costs.timing.cycles)
    assert times[1] - times[0] == 200 * each


def test_dram_bounds_a_copy() -> None:
    """16 MiB read and written at 8 TB/s take 4.2 us; twice as much, twice as long."""
    times = []
    for size in (1 << 22, 1 << 23):
        x, y = np.zeros(size, np.uint32), np.zeros(size, np.uint32)
        body = (
            "ld.param.u64 a0, [x]; ld.param.u64 a1, [y]; mov.u32 r0, %tid.x; mov.u32 r1, %ctaid.x;"
            "mad.lo.u32 r0, r1, 256, r0; mul.wide.u32 a2, r0, 16; add.u64 a0, a0, a2;"
            "add.u64 a1, a1, a2; ld.global.v4.u32 {r2, r3, r4, r5}, [a0];"
            "st.global.v4.u32 [a1], {r2, r3, r4, r5};"
        )
        machine = sim.Machine(
            "100a", checks=sim.Checks(False, False), costs=sim.CostModel(time=True)
        )
        parameters = ".param .u64 x, .param .u64 y"
        report = run(
            body, x, y, block=256, grid=size // 1024, parameters=parameters, machine=machine
        )
        assert report.costs is not None and report.costs.timing is not None
        t = report.costs.timing
        assert t.dram_read == t.dram_written == 4 * size
        times.append(t.seconds)
        assert 1.0 < t.seconds / (8 * size / 8e12) < 1.4
    assert 1.8 < times[1] / times[0] < 2.05


def test_clock_is_in_cycles() -> None:
    """%clock64 around a chain of 50 additions, on which the second reading does not depend."""
    out = np.zeros(2, np.uint64)
    cycles(
        "ld.param.u64 a0, [x]; mov.u64 a1, %clock64; mov.u32 r0, %tid.x;"
        + "add.u32 r0, r0, r0;" * 50
        + "mov.u64 a2, %clock64; st.global.u64 [a0], a1; st.global.u64 [a0+8], a2;",
        out,
        parameters=X,
        block=1,
    )
    # The last addition has issued, its result has not arrived.
    assert 49 * ARITHMETIC_LATENCY <= int(out[1] - out[0]) <= 50 * ARITHMETIC_LATENCY + 4


@pytest.mark.parametrize("group", [1, 2])
def test_gemm_is_right_and_takes_the_same_time_whatever_the_seed_and_the_data(group: int) -> None:
    """D under the timed schedule is D; without data, or with another seed, cycles are equal."""
    device_kernels.require_tools()
    problem = random_problem(Variant("nvfp4", group, 128), 200, 300, 600)

    def launch(seed: int, **options: bool) -> tuple[Run, sim.Timing]:
        model = sim.CostModel(time=True, timeline=True, **options)
        gemm = Run(problem, sim.Machine("100a", seed, costs=model))
        costs = gemm.launch().costs
        assert costs is not None and costs.timing is not None
        return gemm, costs.timing

    gemm, first = launch(0)
    np.testing.assert_array_equal(gemm.result(), expected(problem))
    gemm, second = launch(1)
    np.testing.assert_array_equal(gemm.result(), expected(problem))
    _, without = launch(2, data=False)
    assert first == second == without
    assert 0 < first.tensor_busy < first.tensor_busy_steady < 1


def test_trace_file(tmp_path: Path) -> None:
    """Valid JSON; on a track events follow or contain each other; none ends before it begins."""
    device_kernels.require_tools()
    problem = random_problem(Variant("nvfp4", 2, 256), 256, 512, 1024)
    machine = sim.Machine("100a", costs=sim.CostModel(time=True, timeline=True, data=False))
    costs = Run(problem, machine).launch().costs
    assert costs is not None and costs.timing is not None
    costs.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in spans:
        assert e["dur"] >= 0 and 0 <= e["ts"] <= e["ts"] + e["dur"] <= costs.timing.cycles
        tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for intervals in tracks.values():
        open_: list[float] = []
        for begin, end in sorted(intervals, key=lambda i: (i[0], -i[1])):
            while open_ and open_[-1] <= begin:
                open_.pop()
            assert not open_ or end <= open_[-1]
            open_.append(end)
    names = {e["name"] for e in spans}
    assert {"mma", "tcgen05.cp", "copy in", "copy out", "warp", "waits for an mbarrier"} <= names
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(tracks) <= named
    # MMAs of one SM do not overlap.
    mma = sorted(
        (e["ts"], e["ts"] + e["dur"]) for e in spans if e["name"] == "mma" and e["pid"] == 0
    )
    assert all(a[1] <= b[0] for a, b in pairwise(mma))


def test_what_the_model_refuses() -> None:
    """Chips without constants, intervals without times, a trace without a timeline."""
    with pytest.raises(ValueError, match="no constants for sm_90; it knows 100, 103, 120 and 121"):
        sim.Machine("90a", costs=sim.CostModel(time=True)).load(
            ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k() { ret; }"
        ).launch("k", 1, 32)
    with pytest.raises(ValueError, match="timeline: intervals have times; pass time=True"):
        sim.CostModel(timeline=True)
    with pytest.raises(ValueError, match="data: False is for modelled times; pass time=True"):
        sim.CostModel(data=False)
    with pytest.raises(ValueError, match="sms: expected 1 or more, got 0"):
        sim.CostModel(time=True, sms=0)
    costs = run("ret;", machine=sim.Machine("100a", costs=sim.CostModel(time=True))).costs
    assert costs is not None
    with pytest.raises(ValueError, match="kept no timeline"):
        costs.save_trace("never-written.json")


def test_faults_are_those_of_any_schedule() -> None:
    """A deadlock, and a budget that is spent."""
    machine = sim.Machine("100a", costs=sim.CostModel(time=True))
    with pytest.raises(sim.SimulationError, match="deadlock"):
        run("bar.sync 0, 64;", machine=machine)
    with pytest.raises(sim.SimulationError, match="timeout"):
        machine.load(
            ".version 8.8\n.target sm_100a\n.address_size 64\n.visible .entry k() { L: bra L; }"
        ).launch("k", 1, 32, max_instructions=1000)

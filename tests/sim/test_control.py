"""Branches, calls, barriers, special registers, the scheduler."""

import numpy as np
import pytest

from jax_fp4 import sim
from support.ptx_kernel import run


def collect(
    body: str, result: str = "r9", block: int = 32, grid: int = 1, **options: object
) -> np.ndarray:
    """Runs the body and returns `result` of every thread."""
    out = np.zeros(grid * block, np.uint32)
    run(
        f"{body}\nld.param.u64 a7, [y]; mov.u32 r15, %ctaid.x; mov.u32 r14, %ntid.x; "
        "mov.u32 r13, %tid.x;\n"
        "mad.lo.u32 r15, r15, r14, r13; mad.wide.u32 a7, r15, 4, a7; "
        f"st.global.u32 [a7], {result};",
        out,
        parameters=".param .u64 y",
        block=block,
        grid=grid,
        **options,
    )
    return out


def test_divergent_loops_and_nested_scopes() -> None:
    """Collatz lengths: every lane leaves the loop at its own time; scopes hide names."""
    got = collect(
        "mov.u32 r0, %tid.x; add.u32 r0, r0, 1; mov.u32 r9, 0;\n"
        "LOOP: setp.eq.u32 p, r0, 1; @p bra END;\n"
        "{ .reg .pred p; .reg .b32 r9; and.b32 r9, r0, 1; setp.eq.u32 p, r9, 0; @p bra EVEN; "
        "mad.lo.u32 r0, r0, 3, 1; bra.uni DONE;\n"
        "EVEN: shr.u32 r0, r0, 1;\nDONE: }\n"
        "{ add.u32 r9, r9, 1; bra LOOP;\nDONE: }\nEND:"
    )

    def collatz(n: int) -> int:
        return 0 if n == 1 else 1 + collatz(n // 2 if n % 2 == 0 else 3 * n + 1)

    np.testing.assert_array_equal(got, [collatz(n) for n in range(1, 33)])


def test_indexed_branches() -> None:
    """brx.idx goes where the lane's index says."""
    got = collect(
        "mov.u32 r0, %tid.x; rem.u32 r1, r0, 3; TABLE: .branchtargets A, B, C;\n"
        "brx.idx r1, TABLE;\n"
        "A: mov.u32 r9, 10; bra END;\nB: mov.u32 r9, 20; bra END;\nC: mov.u32 r9, 30;\nEND:"
    )
    np.testing.assert_array_equal(got, np.array([10, 20, 30])[np.arange(32) % 3])


FUNCTIONS = """
.func (.param .b32 result) triple(.param .b32 x) {
 .reg .b32 v; .reg .pred p; ld.param.b32 v, [x]; setp.gt.u32 p, v, 20; @p bra BIG;
 mul.lo.u32 v, v, 3; st.param.b32 [result], v; ret;
BIG: { .param .b32 in; .param .b32 out; st.param.b32 [in], v;
 call.uni (out), half, (in); ld.param.b32 v, [out]; }
 st.param.b32 [result], v; ret; }
.func (.param .b32 result) half(.param .b32 x) {
 .reg .b32 v; ld.param.b32 v, [x]; shr.u32 v, v, 1; st.param.b32 [result], v; }
.func (.reg .b32 out) plus(.reg .b32 x, .reg .b64 y) {
 .reg .b32 t; cvt.u32.u64 t, y; add.u32 out, x, t; ret; }
.func nothing() { ret; }
"""


def test_functions_are_called_and_return_where_they_were_called() -> None:
    """Nested calls with .param and .reg parameters, in diverged lanes."""
    module = ".func (.param .b32 result) half(.param .b32 x);\n" + FUNCTIONS
    got = collect(
        "mov.u32 r0, %tid.x; { .param .b32 q0; .param .b32 q1; st.param.b32 [q0], r0; "
        "call (q1), triple, (q0); ld.param.b32 r9, [q1]; }\n"
        "call nothing; setp.gt.u32 p, r0, 5; @p call (r9), plus, (r9, 100);",
        module=module,
    )
    t = np.arange(32)
    value = np.where(t > 20, t // 2, 3 * t)
    np.testing.assert_array_equal(got, np.where(t > 5, value + 100, value))


def test_recursion_is_refused() -> None:
    """Registers are static, so a function that calls itself is an error of the text."""
    with pytest.raises(sim.PtxError, match="'f' calls itself"):
        collect("call f;", module=".func f() { call f; ret; }")


def test_special_registers() -> None:
    """Thread, block, grid and cluster coordinates, lane masks, sizes."""
    names = {
        "tid.x": lambda t: t % 8,
        "tid.y": lambda t: t // 8 % 4,
        "tid.z": lambda t: t // 32,
        "ntid.x": lambda t: 8,
        "ntid.y": lambda t: 4,
        "ntid.z": lambda t: 2,
        "laneid": lambda t: t % 32,
        "warpid": lambda t: t // 32,
        "nctaid.x": lambda t: 1,
        "ctaid.y": lambda t: 0,
        "lanemask_eq": lambda t: 1 << t % 32,
        "lanemask_lt": lambda t: (1 << t % 32) - 1,
        "lanemask_le": lambda t: (2 << t % 32) - 1,
        "lanemask_ge": lambda t: 0xFFFFFFFF & -(1 << t % 32),
        "lanemask_gt": lambda t: 0xFFFFFFFF & -(2 << t % 32),
        "dynamic_smem_size": lambda t: 96,
        "cluster_ctarank": lambda t: 0,
        "cluster_nctarank": lambda t: 1,
        "clusterid.x": lambda t: 0,
        "nclusterid.x": lambda t: 1,
    }
    for name, function in names.items():
        out = np.zeros(64, np.uint32)
        run(
            "mov.u32 r0, %tid.x; mov.u32 r1, %tid.y; mov.u32 r2, %tid.z; "
            f"mad.lo.u32 r0, r1, 8, r0; mad.lo.u32 r0, r2, 32, r0; mov.u32 r9, %{name};"
            "ld.param.u64 a0, [y]; mad.wide.u32 a0, r0, 4, a0; st.global.u32 [a0], r9;",
            out,
            parameters=".param .u64 y",
            block=(8, 4, 2),
            smem=96,
        )
        np.testing.assert_array_equal(out, [function(t) for t in range(64)], err_msg=name)


def test_clocks_advance() -> None:
    """%clock64 and %globaltimer grow while other warps run; nanosleep gives the turn away."""
    got = collect(
        "mov.u64 a0, %clock64; nanosleep.u32 100; mov.u64 a1, %clock64; setp.lt.u64 p, a0, a1; "
        "selp.u32 r9, 1, 0, p; mov.u64 a2, %globaltimer; mov.u32 r1, %clock;",
        block=128,
    )
    assert got.all()


@pytest.mark.parametrize(
    "name", ["bar.sync", "barrier.sync.aligned", "barrier.sync", "bar.cta.sync", "barrier.cta.sync"]
)
def test_barriers_order_shared_memory(name: str) -> None:
    """A value written before a barrier is read after it, for every seed."""
    for seed in range(5):
        got = collect(
            f"{{ .shared .b32 s[128]; mov.u32 r0, %tid.x; shl.b32 r1, r0, 2; mov.u32 r2, s; "
            f"add.u32 r1, r1, r2; st.shared.u32 [r1], r0; {name} 0; "
            "xor.b32 r3, r0, 127; shl.b32 r3, r3, 2; add.u32 r3, r3, r2; ld.shared.u32 r9, [r3]; }",
            block=128,
            seed=seed,
        )
        np.testing.assert_array_equal(got, 127 - np.arange(128))


@pytest.mark.parametrize("prefix", ["bar", "bar.cta", "barrier.cta", "barrier"])
def test_producers_arrive_and_consumers_wait(prefix: str) -> None:
    """bar.arrive does not wait; a barrier counts the threads it is told to."""
    aligned = ".aligned" if prefix.startswith("barrier") else ""
    got = collect(
        "{ .shared .b32 s[32]; mov.u32 r0, %tid.x; and.b32 r1, r0, 31; shl.b32 r1, r1, 2; "
        "mov.u32 r2, s; add.u32 r1, r1, r2; mov.u32 r9, 7; setp.lt.u32 p, r0, 32; @p bra READ;\n"
        f"st.shared.u32 [r1], r0; {prefix}.arrive{aligned} 3, 64; bra END;\n"
        f"READ: {prefix}.sync{aligned} 3, 64; ld.shared.u32 r9, [r1];\nEND: }}",
        block=64,
    )
    np.testing.assert_array_equal(got[:32], np.arange(32, 64))


@pytest.mark.parametrize(
    "prefix", ["bar.red", "bar.cta.red", "barrier.red.aligned", "barrier.cta.red", "barrier.red"]
)
def test_barrier_reductions(prefix: str) -> None:
    """popc, and, or over the predicates of all threads."""
    extra = ", 96" if prefix.startswith("bar.") else ""
    start = "mov.u32 r0, %tid.x; setp.lt.u32 p, r0, 40; "
    assert set(
        collect(f"{start} {prefix}.popc.u32 r9, 0, p; {prefix}.popc.u32 r9, 0{extra}, p;", block=96)
    ) == {40}
    for op, want in (("and", 0), ("or", 1)):
        got = collect(
            f"{start} {prefix}.{op}.pred q, 0, p; {prefix}.{op}.pred q, 1{extra}, p; "
            "selp.u32 r9, 1, 0, q;",
            block=96,
        )
        assert set(got) == {want}


def test_lanes_that_have_exited_do_not_block_a_barrier() -> None:
    """Whole warps and single lanes may exit before the others synchronise."""
    got = collect(
        "mov.u32 r0, %tid.x; mov.u32 r9, 1; setp.ge.u32 p, r0, 70; @p exit; bar.sync 0;", block=128
    )
    np.testing.assert_array_equal(got, np.arange(128) < 70)


def test_lanes_may_wait_for_each_other() -> None:
    """A spin loop on a flag that another lane of the warp sets ends: forward progress."""
    got = collect(
        "{ .shared .b32 flag; mov.u32 r0, %tid.x; mov.u32 r9, 5; setp.eq.u32 p, r0, 0; "
        "@p st.volatile.shared.u32 [flag], 0; bar.warp.sync -1; setp.eq.u32 p, r0, 31; "
        "@p bra SET;\n"
        "SPIN: ld.volatile.shared.u32 r1, [flag]; setp.eq.u32 q, r1, 0; @q bra SPIN;\nbra END;\n"
        "SET: st.volatile.shared.u32 [flag], 1;\nEND: }"
    )
    assert (got == 5).all()


def test_warps_may_wait_for_each_other_through_global_memory() -> None:
    """CTAs run concurrently: a later one may set what an earlier one waits for."""
    flag = np.zeros(1, np.uint32)
    out = np.zeros(4, np.uint32)
    run(
        "ld.param.u64 a0, [f]; ld.param.u64 a1, [y]; mov.u32 r0, %ctaid.x; setp.eq.u32 p, r0, 3; "
        "@p bra SET;\n"
        "SPIN: ld.acquire.gpu.global.u32 r1, [a0]; setp.eq.u32 q, r1, 0; @q bra SPIN; bra END;\n"
        "SET: st.release.gpu.global.u32 [a0], 9;\n"
        "END: ld.relaxed.gpu.global.u32 r2, [a0]; mad.wide.u32 a1, r0, 4, a1; "
        "st.global.u32 [a1], r2;",
        flag,
        out,
        parameters=".param .u64 f, .param .u64 y",
        grid=4,
        block=1,
    )
    assert (out == 9).all()


def test_instructions_that_only_order_or_advise() -> None:
    """Fences and griddepcontrol run and change no value."""
    fences = " ".join(
        f"fence.{o}.{s};"
        for o in ("sc", "acq_rel", "acquire", "release")
        for s in ("cta", "cluster", "gpu", "sys")
    )
    fences += " ".join(f"fence.{s};" for s in ("cta",)) if False else ""
    got = collect(
        f"{fences} membar.cta; membar.gl; membar.sys; griddepcontrol.wait; "
        "griddepcontrol.launch_dependents; mov.u32 r9, 3;"
    )
    assert (got == 3).all()


@pytest.mark.parametrize("suffix", ["", ".aligned"])
@pytest.mark.parametrize("order", [".release", ".relaxed", ""])
def test_cluster_barrier(order: str, suffix: str) -> None:
    """CTAs of a cluster wait for each other; clusters do not."""
    wait = ".acquire" if order else ""
    got = collect(
        f"mov.u32 r9, %cluster_ctarank; barrier.cluster.arrive{order}{suffix}; "
        f"barrier.cluster.wait{wait}{suffix}; barrier.cluster.arrive{order}{suffix}; "
        f"barrier.cluster.wait{wait}{suffix};",
        block=64,
        grid=8,
        cluster=4,
    )
    np.testing.assert_array_equal(got, np.arange(8 * 64) // 64 % 4)


def test_equal_seeds_give_equal_schedules() -> None:
    """The trace depends on the seed and on nothing else."""
    body = (
        "mov.u32 r0, %tid.x;\nL: add.u32 r0, r0, 1; setp.lt.u32 p, r0, 300; @p bra L; bar.sync 0;"
    )
    traces = [run(body, grid=4, block=128, seed=seed).trace for seed in (1, 1, 2)]
    assert traces[0] == traces[1] != traces[2]

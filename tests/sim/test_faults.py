"""One planted bug for each check: it is reported, with its kind, line and place, and the seed."""

import numpy as np
import pytest

from jax_fp4 import sim
from support.ptx_kernel import FIRST_LINE, run


def fault(body: str, *args: object, **options: object) -> sim.SimulationError:
    with pytest.raises(sim.SimulationError) as error:
        run(body, *args, **options)
    return error.value


# (kind, line of the body counted from 0, part of the message, body)
PLANTED = {
    "register": (
        "uninitialized-register",
        1,
        "register r1 is read, and all lanes never wrote it",
        "{ .shared .b32 s;\nst.shared.u32 [s], r1; }",
    ),
    "register computed from another": (
        "uninitialized-register",
        2,
        "register r2 is read, and all lanes computed it from r1, never written",
        "{ .shared .b32 s;\nmov.u32 r0, 1; add.u32 r2, r0, r1; mul.lo.u32 r2, r2, r2;\n"
        "st.shared.u32 [s], r2; }",
    ),
    "register of some lanes": (
        "uninitialized-register",
        2,
        "lanes 8-31 never wrote it",
        "{ .shared .b32 s; mov.u32 r0, %tid.x;\nsetp.lt.u32 p, r0, 8; @p mov.u32 r1, 5;\n"
        "st.shared.u32 [s], r1; }",
    ),
    "predicate": (
        "uninitialized-register",
        1,
        "register q is read, and all lanes never wrote it",
        "mov.u32 r0, 1;\n@q mov.u32 r0, 2;",
    ),
    "predicate computed from a register": (
        "uninitialized-register",
        1,
        "register p is read, and lanes 8-31 computed it from r1, never written",
        "mov.u32 r0, %tid.x; setp.lt.u32 q, r0, 8; @q mov.u32 r1, 5; setp.eq.u32 p, r1, 5;\n"
        "@p mov.u32 r0, 2;",
    ),
    "shared": (
        "uninitialized-memory",
        1,
        "byte 0 of it",
        "{ .shared .b32 s;\nld.shared.u32 r0, [s]; }",
    ),
    "local": (
        "uninitialized-memory",
        2,
        "byte 2 of it",
        "{ .local .align 4 .b8 l[4];\nst.local.u16 [l], 7;\nld.local.u32 r0, [l]; }",
    ),
    "shared bounds": (
        "out-of-bounds",
        1,
        "outside the CTA's 4 bytes",
        "{ .shared .b32 s; st.shared.u32 [s], 1;\nst.shared.u32 [s+4], 1; }",
    ),
    "null": ("out-of-bounds", 0, "outside the CTA's", "ld.shared.u32 r0, [0];"),
    "local bounds": (
        "out-of-bounds",
        1,
        "lane's 16 bytes",
        "{ .local .align 4 .b8 l[16]; st.local.u32 [l], 1;\nst.local.u32 [l+16], 1; }",
    ),
    "peer": (
        "out-of-bounds",
        1,
        "names rank 1 of a cluster of 1",
        "{ .shared .b32 s; mov.u32 r0, s; or.b32 r0, r0, 0x1000000;\n"
        "ld.shared::cluster.u32 r1, [r0]; }",
    ),
    "mapa": (
        "out-of-bounds",
        2,
        "names rank 3 of a cluster of 1",
        "{ .shared .b32 s; mov.u32 r0, s;\nmapa.shared::cluster.u32 r1, r0, 3;\n"
        "ld.shared::cluster.u32 r1, [r1]; }",
    ),
    "misaligned": (
        "misaligned",
        1,
        "not aligned to 8 bytes",
        "{ .shared .align 16 .b8 s[16]; mov.u32 r0, s;\nst.shared.v2.u32 [r0+4], {r0, r0}; }",
    ),
    "parameter": (
        "out-of-bounds",
        1,
        "0 bytes of parameters",
        "mov.u32 r0, 0;\nld.param.u32 r1, [r0];",
    ),
    "prefetch": (
        "out-of-bounds",
        1,
        "outside every global buffer",
        "mov.u64 a0, 4096;\nprefetch.global.L2 [a0];",
    ),
    "trap": (
        "trap",
        1,
        "lane 3 executed 'trap'",
        "mov.u32 r0, %tid.x; setp.eq.u32 p, r0, 3;\n@p trap;",
    ),
    "breakpoint": ("trap", 0, "all lanes executed 'brkpt'", "brkpt;"),
    "branch index": (
        "trap",
        1,
        "index 2 of 2 targets",
        "T: .branchtargets A, A; mov.u32 r0, 2;\nbrx.idx r0, T; A:",
    ),
    "barrier count": ("barrier", 0, "multiple of 32", "bar.sync 1, 48;"),
    "barrier number": ("barrier", 0, "barrier 16 of 0 to 15", "bar.sync 16;"),
    "cluster wait": (
        "barrier",
        0,
        "without barrier.cluster.arrive",
        "barrier.cluster.wait.aligned;",
    ),
    "cluster arrive": (
        "barrier",
        1,
        "twice",
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.arrive.aligned;",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_reported_at_its_line(name: str) -> None:
    """Kind, PTX line with its text, kernel, CTA, warp, lane and seed are in the message."""
    kind, line, message, body = PLANTED[name]
    error = fault(body, seed=77)
    assert (error.kind, error.line) == (kind, FIRST_LINE + line)
    text = str(error)
    assert message in text
    assert f"PTX line {error.line}: {body.splitlines()[line].strip()}" in text
    assert "kernel 'k'" in text and "CTA (0,0,0) warp 0" in text and "seed 77" in text


POINTER = "ld.param.u64 a0, [x]; mov.u32 r0, %tid.x; mad.wide.u32 a0, r0, 4, a0;\n"


def test_computing_with_an_unwritten_register_is_no_fault() -> None:
    """Compilers compute ahead what they then throw away; a write makes the register good again.

    CUTLASS does so with the tile that a cancelled request for work has not returned.
    """
    run(
        "{ .shared .b32 s; add.u32 r2, r1, 5; setp.eq.u32 p, r2, 5; selp.b32 r2, r2, r1, p;\n"
        "mov.u32 r2, 7; st.shared.u32 [s], r2; }"
    )


def test_global_memory_is_bounded() -> None:
    """The message names the buffer that was missed and by how much."""
    error = fault(
        POINTER + "st.global.u32 [a0+4], r0;", np.zeros(32, np.uint32), parameters=".param .u64 x"
    )
    assert error.kind == "out-of-bounds" and "lane 31" in str(error)
    assert "the nearest is 'x' (128 bytes), and this is its byte 128" in str(error)


def test_global_memory_may_be_read_only_or_unwritten() -> None:
    """A read-only array is not written; `Machine.empty` is not read before it is written."""
    data = np.zeros(32, np.uint32)
    data.flags.writeable = False
    error = fault(POINTER + "st.global.u32 [a0], r0;", data, parameters=".param .u64 x")
    assert error.kind == "read-only"
    machine = sim.Machine("100a")
    fresh = machine.empty(32, np.uint32)
    error = fault(
        POINTER + "ld.global.u32 r1, [a0];", fresh, parameters=".param .u64 x", machine=machine
    )
    assert error.kind == "uninitialized-memory"
    run(
        POINTER + "st.global.u32 [a0], r0; ld.global.u32 r1, [a0];",
        fresh,
        parameters=".param .u64 x",
        machine=machine,
    )
    np.testing.assert_array_equal(fresh, np.arange(32))


RACE = (
    "{ .shared .b32 s[64]; mov.u32 r0, %tid.x; mov.u32 r2, s; "
    "shl.b32 r1, r0, 2; add.u32 r1, r1, r2;\n"
)


def test_a_missing_barrier_is_a_race() -> None:
    """Write then read by another warp, in either order; both lines are named."""
    first = RACE + "st.shared.u32 [r1], r0; bar.sync 0; xor.b32 r3, r2, 0;\n"
    body = (
        first + "st.shared.u32 [r1], r0;\nBARRIER\n"
        "sub.u32 r3, r1, r2; xor.b32 r3, r3, 128; add.u32 r3, r3, r2; ld.shared.u32 r4, [r3]; }"
    )
    for seed in range(10):
        run(body.replace("BARRIER", "bar.sync 0;"), block=64, seed=seed)
        error = fault(body.replace("BARRIER", ""), block=64, seed=seed)
        assert error.kind == "race"
        text = str(error)
        assert f"PTX line {FIRST_LINE + 2}:" in text and f"PTX line {FIRST_LINE + 4}:" in text
        assert "no barrier orders the two" in text


def test_bytes_of_one_word_do_not_race() -> None:
    """Warps that write different bytes of a word are no race; the same byte is one."""
    body = RACE + "shr.u32 r3, r0, 5; add.u32 r3, r3, r2; st.shared.u8 [r3], r0; }"
    run(body, block=64)
    assert fault(body.replace("shr.u32 r3, r0, 5;", "mov.u32 r3, 0;"), block=64).kind == "race"


def test_racing_writes_of_one_value_are_a_warning() -> None:
    """Replicated layouts write the same value twice; that is reported once, and harmless."""
    report = run(
        RACE + "mov.u32 r5, 9; and.b32 r3, r0, 31; shl.b32 r3, r3, 2; "
        "add.u32 r3, r3, r2; st.shared.u32 [r3], r5; }",
        block=64,
    )
    assert len(report.warnings) == 1
    assert "both store the same value" in report.warnings[0]


def test_race_check_can_be_switched_off() -> None:
    """Checks(races=False) runs the racing kernel."""
    body = RACE + "st.shared.u32 [r2], r0; }"
    run(body, block=64, machine=sim.Machine("100a", checks=sim.Checks(races=False)))
    assert fault(body, block=64).kind == "race"


def test_divergence_at_an_aligned_barrier() -> None:
    """Two halves of a warp at two barriers never meet."""
    error = fault(
        "mov.u32 r0, %tid.x; setp.lt.u32 p, r0, 16; @p bra A;\nbar.sync 0; bra B;\nA: bar.sync 0;"
        "\nB:"
    )
    assert error.kind == "divergence"
    assert (
        "wait here for lanes" in str(error)
        and "PTX line 8" in str(error)
        and "PTX line 9" in str(error)
    )


def test_guarded_aligned_barrier() -> None:
    """A guard that holds for some lanes only keeps the others from an aligned barrier."""
    error = fault("mov.u32 r0, %tid.x; setp.lt.u32 p, r0, 16;\n@p bar.sync 0;")
    assert (error.kind, error.line) == ("divergence", FIRST_LINE + 1)


def test_deadlock_ends_with_a_report_of_every_warp() -> None:
    """Each warp's lanes, line, and what it waits for, with the barrier's count."""
    error = fault(
        "mov.u32 r0, %tid.x; setp.ge.u32 p, r0, 32; @p bra A;\nbar.sync 1, 96;\nA: bar.sync 2, 96;",
        block=64,
    )
    assert error.kind == "deadlock"
    text = str(error)
    assert (
        "warp 0, all lanes: waits for a named barrier (number 1: 32 threads of 96 have arrived)"
        in text
    )
    assert (
        "warp 1, all lanes: waits for a named barrier (number 2: 32 threads of 96 have arrived)"
        in text
    )
    assert f"PTX line {FIRST_LINE + 1}: bar.sync 1, 96;" in text


def test_endless_loops_end_as_a_timeout() -> None:
    """The budget is a number of warp instructions."""
    error = fault("L: bra L;", max_instructions=10_000)
    assert error.kind == "timeout" and "more than 10000" in str(error) and "L: bra L;" in str(error)


def test_inconsistent_barrier_counts() -> None:
    """Warps that give one barrier different thread counts."""
    error = fault(
        "mov.u32 r0, %tid.x; and.b32 r0, r0, 32; add.u32 r0, r0, 64;\nbar.sync 1, r0;", block=64
    )
    assert (error.kind, error.line) == ("barrier", FIRST_LINE + 1)


def test_a_fault_keeps_the_counts_so_far() -> None:
    """The report of an aborted launch says what ran."""
    error = fault("mov.u32 r0, 1;\nmov.u32 r1, 2;\ntrap;")
    assert error.report.instructions == 3
    assert error.report.by_line == {FIRST_LINE: 1, FIRST_LINE + 1: 1, FIRST_LINE + 2: 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 1025}, "at most 1024"),
        ({"grid": 3, "cluster": 2}, "no multiple of cluster"),
        ({"smem": 300_000}, "needs 300000 bytes of shared memory"),
        ({"grid": 0}, "must not be empty"),
    ],
)
def test_wrong_launches_are_refused(options: dict[str, int], message: str) -> None:
    """What the driver would refuse, with the numbers."""
    with pytest.raises(ValueError, match=message):
        run("", **options)


def test_arguments_are_checked_against_the_parameters() -> None:
    """Number, kind and size."""
    with pytest.raises(ValueError, match="takes 1 parameters \\(x: u64\\), got 0"):
        run("", parameters=".param .u64 x")
    with pytest.raises(ValueError, match="'n' is a u32, got 'five'"):
        run("", "five", parameters=".param .u32 n")
    with pytest.raises(ValueError, match="which is no pointer"):
        run("", np.zeros(3), parameters=".param .u32 n")
    with pytest.raises(ValueError, match="'m' has 128 bytes, got 4"):
        run("", b"1234", parameters=".param .align 64 .b8 m[128]")

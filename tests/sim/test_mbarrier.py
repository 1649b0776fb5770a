"""mbarrier: phases, arrivals, transaction bytes, waits, remote operations, misuse."""

import numpy as np
import pytest

from jax_fp4 import sim
from support.ptx_kernel import FIRST_LINE, run

SETUP = (
    "{ .shared .align 8 .b64 bar; .shared .b32 s[128]; mov.u32 r0, %tid.x; mov.u32 r2, bar; "
    "mov.u32 r3, s; shl.b32 r4, r0, 2; add.u32 r4, r4, r3; setp.eq.u32 p, r0, 0;\n"
)
STORE = "ld.param.u64 a1, [y]; mad.wide.u32 a1, r0, 4, a1; st.global.u32 [a1], r9; }"


def collect(body: str, block: int, **options: object) -> np.ndarray:
    out = np.zeros(block * int(options.get("grid", 1)), np.uint32)
    run(SETUP + body + STORE, out, parameters=".param .u64 y", block=block, **options)
    return out


@pytest.mark.parametrize("wait", ["test_wait", "try_wait"])
@pytest.mark.parametrize("space", ["", ".shared", ".shared::cta"])
def test_all_threads_wait_for_all_arrivals(space: str, wait: str) -> None:
    """What was stored before an arrival is read after the wait; by parity and by state."""
    generic = "cvt.u64.u32 a2, r2; cvta.shared.u64 a2, a2;"
    at = "a2" if not space else "r2"
    for seed in range(6):
        got = collect(
            f"{generic} @p mbarrier.init{space}.b64 [{at}], 96; bar.sync 0; "
            f"st.shared.u32 [r4], r0; mbarrier.arrive{space}.b64 _, [{at}];\n"
            f"W: mbarrier.{wait}.parity{space}.b64 q, [{at}], 0; @!q bra W;\nxor.b32 r5, r0, 31; "
            "shl.b32 r5, r5, 2; add.u32 r5, r5, r3; ld.shared.u32 r9, [r5];"
            f"mbarrier.arrive.release.cta{space}.b64 a3, [{at}], 1; "
            f"V: mbarrier.{wait}.acquire.cta{space}.b64 q, [{at}], a3; @!q bra V;\n"
            "st.shared.u32 [r4], r0;",
            96,
            seed=seed,
        )
        np.testing.assert_array_equal(got, np.arange(96) ^ 31)


@pytest.mark.parametrize("space", ["", ".shared", ".shared::cta", ".shared::cluster"])
@pytest.mark.parametrize("order", ["", ".relaxed.cta"])
def test_a_phase_needs_its_bytes(space: str, order: str) -> None:
    """expect_tx and complete_tx in either order; the phase completes when both counts are zero."""
    for expect in (
        f"mbarrier.expect_tx{order}{space}.b64 [{{at}}], 64; "
        f"mbarrier.arrive{space}.b64 _, [{{at}}];",
        f"mbarrier.arrive.expect_tx{order}{space}.b64 _, [{{at}}], 64;",
        f"mbarrier.arrive.expect_tx.release.cta{space}.b64 _, [{{at}}], 64;",
        f"mbarrier.arrive_drop.expect_tx{order}{space}.b64 _, [{{at}}], 64;",
    ):
        at = "a2" if not space else "r2"
        got = collect(
            "cvt.u64.u32 a2, r2; cvta.shared.u64 a2, a2; @p mbarrier.init.shared.b64 [r2], 2; "
            "@p fence.mbarrier_init.release.cluster; bar.sync 0; @p bra WAIT;\n"
            f"setp.eq.u32 q, r0, 32; @q mbarrier.complete_tx{order}{space}.b64 [{at}], 64; "
            "setp.eq.u32 q, r0, 33; @q mbarrier.arrive.shared.b64 _, [r2]; bra END;\n"
            f"WAIT: {expect.format(at=at)}\n"
            "W: mbarrier.try_wait.parity.relaxed.cta.shared.b64 q, [r2], 0, 1000; @!q bra W;\n"
            "END: mov.u32 r9, 1;",
            64,
        )
        assert got.all()


def test_pending_counts_and_partial_arrivals() -> None:
    """The returned state is that before the arrival; .noComplete, arrive_drop, inval, init."""
    got = collect(
        "mbarrier.init.shared::cta.b64 [r2], 5; "
        "mbarrier.arrive.noComplete.shared.b64 a2, [r2], 2; mbarrier.pending_count.b64 r5, a2; "
        "mbarrier.arrive_drop.shared.b64 a3, [r2];"
        "mbarrier.pending_count.b64 r6, a3; "
        "mbarrier.arrive_drop.noComplete.release.cta.shared.b64 a4, [r2], 1; "
        "mbarrier.arrive_drop.relaxed.cta.shared.b64 a4, [r2]; "
        "mbarrier.arrive.noComplete.shared::cta.b64 a4, [r2], 1;"
        "mbarrier.pending_count.b64 r7, a4; "
        "mbarrier.test_wait.relaxed.cta.shared.b64 q, [r2], a3; selp.u32 r8, 1, 0, q; "
        "mad.lo.u32 r9, r5, 1000, r6; mad.lo.u32 r9, r9, 10, r7; mad.lo.u32 r9, r9, 10, r8;"
        "mbarrier.inval.shared.b64 [r2]; mbarrier.init.shared.b64 [r2], 1; "
        "mbarrier.inval.shared::cta.b64 [r2];".replace(
            "mbarrier.arrive.relaxed.cta.shared.b64 _, [r2];", ""
        ),
        1,
    )
    # 5 before; 3 before the drop; then expected is 5 - 3 = 2 in the new phase, which has completed.
    assert got.tolist() == [((5 * 1000 + 3) * 10 + 2) * 10 + 1]


def test_arrivals_at_another_cta() -> None:
    """CTA 1 arrives at the barrier of CTA 0, which reads what CTA 1 stored in its memory before."""
    for order in ("", ".release.cluster", ".relaxed.cluster"):
        got = collect(
            "mov.u32 r6, %cluster_ctarank; @p mbarrier.init.shared.b64 [r2], 32; "
            "barrier.cluster.arrive; barrier.cluster.wait; setp.eq.u32 q, r6, 0; @q bra W;\n"
            "mapa.shared::cluster.u32 r5, r2, 0; mapa.shared::cluster.u32 r7, r4, 0; "
            "st.shared::cluster.u32 [r7], r0; "
            f"mbarrier.arrive{order}.shared::cluster.b64 _, [r5]; bra END;\n"
            "W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 q, [r2], 0; @!q bra W;\n"
            + ("ld.shared.u32 r9, [r4]; " if "relaxed" not in order else "mov.u32 r9, r0; ")
            + "bra OUT;\nEND: mov.u32 r9, 0;\nOUT: barrier.cluster.arrive; barrier.cluster.wait; "
            "mov.u32 r6, %ctaid.x; mad.lo.u32 r0, r6, 32, r0;",
            32,
            grid=2,
            cluster=2,
        )
        np.testing.assert_array_equal(got[:32], np.arange(32))


# (kind, part of the message, body after SETUP)
PLANTED = {
    "not initialised": (
        "uninitialized-memory",
        "nothing has written",
        "@p mbarrier.arrive.shared.b64 _, [r2];",
    ),
    "overwritten": (
        "mbarrier",
        "was overwritten",
        "mov.u64 a0, 0; @p st.shared.u64 [bar], a0; @p mbarrier.arrive.shared.b64 _, [r2];",
    ),
    "invalidated": (
        "mbarrier",
        "was not initialised",
        "@p mbarrier.init.shared.b64 [r2], 1; @p mbarrier.inval.shared.b64 [r2]; "
        "@p mbarrier.arrive.shared.b64 _, [r2];",
    ),
    "valid": (
        "mbarrier",
        "initialises again an mbarrier that no mbarrier.inval has ended",
        "@p mbarrier.init.shared.b64 [r2], 1; @p mbarrier.init.shared.b64 [r2], 1;",
    ),
    "too many": (
        "mbarrier",
        "3 arrivals, but only 2 of 2 are missing",
        "@p mbarrier.init.shared.b64 [r2], 2; @p mbarrier.arrive.shared.b64 _, [r2], 3;",
    ),
    "count": ("mbarrier", "a count of 0", "@p mbarrier.init.shared.b64 [r2], 0;"),
    "bytes": (
        "mbarrier",
        "leaves its 20 bits",
        "@p mbarrier.init.shared.b64 [r2], 1; @p mbarrier.expect_tx.shared.b64 [r2], 2000000;",
    ),
    "completes": (
        "mbarrier",
        "would complete",
        "@p mbarrier.init.shared.b64 [r2], 1; @p mbarrier.arrive.noComplete.shared.b64 _, [r2], 1;",
    ),
    "misaligned": (
        "misaligned",
        "aligned to 8",
        "add.u32 r5, r2, 4; @p mbarrier.init.shared.b64 [r5], 1;",
    ),
    "place": (
        "mbarrier",
        "lies in shared memory",
        "{ .local .b64 l; mov.u64 a0, l; cvta.local.u64 a0, a0; mbarrier.init.b64 [a0], 1; }",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_misuse_is_reported(name: str) -> None:
    """Each rule of the object, broken once."""
    kind, message, body = PLANTED[name]
    with pytest.raises(sim.SimulationError) as error:
        run(SETUP + body + " }")
    assert (error.value.kind, error.value.line) == (kind, FIRST_LINE + 1)
    assert message in str(error.value)


def test_a_missing_byte_is_a_deadlock_at_the_wait() -> None:
    """A phase that never completes ends with the line that waits for it."""
    with pytest.raises(sim.SimulationError) as error:
        run(
            SETUP + "@p mbarrier.init.shared.b64 [r2], 1; "
            "@p mbarrier.arrive.expect_tx.shared.b64 _, [r2], 16; bar.warp.sync -1;\n"
            "W: mbarrier.try_wait.parity.shared.b64 q, [r2], 0; @!q bra W; }"
        )
    assert (error.value.kind, error.value.line) == ("deadlock", FIRST_LINE + 2)
    assert "waits for an mbarrier" in str(error.value)


def test_a_relaxed_wait_orders_nothing() -> None:
    """Reading after a .relaxed wait what others stored before they arrived is a race."""
    body = (
        "@p mbarrier.init.shared.b64 [r2], 64; bar.sync 0; st.shared.u32 [r4], r0; "
        "mbarrier.arrive.shared.b64 _, [r2];\n"
        "W: mbarrier.try_wait.parity.ORDER.cta.shared.b64 q, [r2], 0; @!q bra W;\n"
        "sub.u32 r5, r4, r3; xor.b32 r5, r5, 128; add.u32 r5, r5, r3; ld.shared.u32 r9, [r5]; }"
    )
    run(SETUP + body.replace("ORDER", "acquire"), block=64)
    with pytest.raises(sim.SimulationError) as error:
        run(SETUP + body.replace("ORDER", "relaxed"), block=64)
    assert error.value.kind == "race"


def test_completing_by_hand_orders_stores_unless_strict() -> None:
    """complete_tx is relaxed; by default it gives what its warp knows (assumption S35)."""
    body = (
        "@p mbarrier.init.shared.b64 [r2], 1; st.shared.u32 [r4], 0; bar.sync 0; "
        "setp.eq.u32 q, r0, 32; "
        "@q mbarrier.arrive.expect_tx.shared.b64 _, [r2], 16;\n"
        "@q st.shared.u32 [r3], 77;\n"
        "@q mbarrier.complete_tx.shared.b64 [r2], 16;\n"
        "W: mbarrier.try_wait.parity.shared.b64 q, [r2], 0; @!q bra W; ld.shared.u32 r9, [r3];"
    )
    for seed in range(6):
        assert (collect(body, 64, seed=seed) == 77).all()
        with pytest.raises(sim.SimulationError) as error:
            collect(
                body, 64, seed=seed, machine=sim.Machine("100a", checks=sim.Checks(strict=True))
            )
        assert error.value.kind == "race"

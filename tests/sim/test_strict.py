"""What Checks(strict=True) asks of a warp's lanes: barriers between uses of each other's memory."""

import numpy as np
import pytest

from jax_fp4 import sim
from support.ptx_kernel import FIRST_LINE, run

MODULE = ".shared .align 8 .b64 bar; .shared .align 16 .b8 words[256];"
SYNC = "bar.warp.sync -1;"
# r1: lane, r2: mbarrier, r3: the lane's word, p: lane 0, q: warp 0.
SETUP = (
    "mov.u32 r1, %laneid; mov.u32 r2, bar; mov.u32 r3, words; mad.lo.u32 r3, r1, 4, r3; "
    "mov.u32 r4, %warpid; setp.eq.u32 q, r4, 0; mov.u32 r6, 0; mov.u32 r7, %tid.x; "
    "setp.eq.u32 p, r7, 0; @p mbarrier.init.shared.b64 [r2], 1; setp.eq.u32 p, r1, 0; bar.sync 0;\n"
)
WAIT = "W: mbarrier.try_wait.parity.shared.b64 {0}, [r2], r6; @!{0} bra W;\n"
KERNELS = {
    "lane 0 arrives for what all lanes have written": (
        "@!q bra READ;\nst.shared.b32 [r3], r1;\n{sync}\n@p mbarrier.arrive.shared.b64 _, [r2];\n"
        "bra END;\nREAD:\n" + WAIT.format("q") + "ld.shared.b32 r5, [r3];\nEND:"
    ),
    "lane 0 waits for a copy of what all lanes overwrite": (
        "@!q bra END; mov.u32 r8, words; ld.param.u64 a0, [y];\n"
        "st.shared.b32 [r3], r1; fence.proxy.async; bar.warp.sync -1;\n"
        "@p cp.async.bulk.global.shared::cta.bulk_group [a0], [r8], 128;\n"
        "@p cp.async.bulk.commit_group; @p cp.async.bulk.wait_group.read 0;\n{sync}\n"
        "st.shared.b32 [r3], r1;\nEND: @p cp.async.bulk.wait_group.read 0;"
    ),
    "lanes read what their neighbours have written": (
        "@!q bra END; mov.u32 r5, words; xor.b32 r6, r1, 1; mad.lo.u32 r5, r6, 4, r5;\n"
        "st.shared.b32 [r3], r1;\n{sync}\nld.shared.b32 r5, [r5];\nEND:"
    ),
    "lanes write what their neighbours have read": (
        "@!q bra END; mov.u32 r5, words; xor.b32 r6, r1, 1; mad.lo.u32 r5, r6, 4, r5;\n"
        "st.shared.b32 [r3], r1; ld.shared.b32 r8, [r3];\n{sync}\nst.shared.b32 [r5], r1;\nEND:"
    ),
    "lanes of one word read halves that others have written": (
        "@!q bra END; mov.u32 r5, words; mad.lo.u32 r5, r1, 2, r5; xor.b32 r6, r1, 1; "
        "mov.u32 r3, words; mad.lo.u32 r3, r6, 2, r3; mov.b16 h0, 1;\n"
        "@p st.shared.b16 [r5], h0;\n{sync}\nsetp.eq.u32 p, r1, 1; @p ld.shared.b16 h1, [r3];\nEND:"
    ),
}


def outcome(body: str, seed: int, *, strict: bool) -> str:
    machine = sim.Machine("100a", seed, sim.Checks(strict=strict))
    try:
        y = np.zeros(32, np.uint32)
        run(SETUP + body, y, block=64, module=MODULE, machine=machine, parameters=".param .u64 y")
    except sim.SimulationError as error:
        assert error.line > FIRST_LINE
        return error.kind
    return ""


@pytest.mark.parametrize("name", KERNELS)
def test_lanes_need_a_barrier_of_the_warp(name: str) -> None:
    """With bar.warp.sync nothing is reported, without it a race at every seed if strict."""
    for seed in range(20):
        assert outcome(KERNELS[name].format(sync=SYNC), seed, strict=True) == ""
        assert outcome(KERNELS[name].format(sync=""), seed, strict=True) == "race"
        assert outcome(KERNELS[name].format(sync=""), seed, strict=False) == ""


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "barrier.cluster.arrive.aligned; "
                                     "barrier.cluster.wait.aligned;"])  # fmt: skip
def test_wider_barriers_let_the_lanes_meet_too(barrier: str) -> None:
    """Of the CTA and of the cluster."""
    body = (
        "mov.u32 r5, words; xor.b32 r6, r1, 1; mad.lo.u32 r5, r6, 4, r5;\n"
        "@q st.shared.b32 [r3], r1;\n" + barrier + "\n@q ld.shared.b32 r5, [r5];"
    )
    for seed in range(5):
        assert outcome(body, seed, strict=True) == ""


@pytest.mark.parametrize("fence", ["fence.proxy.async;", ""])
def test_an_answer_about_clusters_follows_reads_by_a_fence(fence: str) -> None:
    """H8, strictly: who has read an answer fences before the next one is asked for."""
    ask = (
        "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [r2], 16;\n"
        "@p clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 "
        "[r3], [r2];\n"
    )
    # One warp: lane 0 asks twice, all lanes read the first answer.
    body = (
        "@!q bra END; mov.u32 r3, words; mov.u32 r6, 0;\n" + ask + WAIT.format("q")
        + f"ld.shared.b128 big, [r3];\n{fence} bar.warp.sync -1;\n" + ask
        + "mov.u32 r6, 1;\nV: mbarrier.try_wait.parity.shared.b64 q, [r2], r6; @!q bra V;\nEND:"
    )  # fmt: skip
    for seed in range(5):
        for strict in (False, True):
            machine = sim.Machine("100a", seed, sim.Checks(strict=strict), clusters=1)
            try:
                run(SETUP + body, block=64, grid=8, module=MODULE, machine=machine)
                kind = ""
            except sim.SimulationError as error:
                kind = error.kind
            assert kind == ("proxy" if strict and not fence else "")

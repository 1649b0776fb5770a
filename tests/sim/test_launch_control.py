"""Cluster launch control: running clusters take over those that have not been launched."""

from collections import Counter

import numpy as np
import pytest

from jax_fp4 import sim
from support.ptx_kernel import FIRST_LINE, run

TRY = "clusterlaunchcontrol.try_cancel.async{}.mbarrier::complete_tx::bytes{}.b128"
QUERY = "clusterlaunchcontrol.query_cancel"
FIRST = {
    "vector": f"{QUERY}.get_first_ctaid.v4.b32.b128 {{r4, r5, r6, _}}, big;",
    "dimensions": " ".join(
        f"{QUERY}.get_first_ctaid::{d}.b32.b128 r{4 + i}, big;" for i, d in enumerate("xyz")
    ),
}
# r4 to r6: the cluster's first CTA; r3: response, r2: mbarrier; a0: the counters of all CTAs.
SETUP = (
    "{ .shared .align 8 .b64 bar; .shared .align 16 .b8 response[16]; mov.u32 r0, %tid.x; "
    "setp.eq.u32 p, r0, 0; mov.u32 r2, bar; mov.u32 r3, response; ld.param.u64 a0, [y]; "
    "cvt.u64.u32 a2, r2; cvta.shared.u64 a2, a2; cvt.u64.u32 a3, r3; cvta.shared.u64 a3, a3;\n"
    "@p mbarrier.init.shared.b64 [r2], 1; @p fence.mbarrier_init.release.cluster; "
    "mov.u32 r4, %ctaid.x; mov.u32 r5, %ctaid.y; mov.u32 r6, %ctaid.z; mov.u32 r7, 0; "
    "mov.u32 r10, %cluster_ctaid.x; sub.u32 r4, r4, r10; mov.u32 r11, %cluster_ctarank;\n"
    "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
)
# y[z][y][x + rank] += 1
COUNT = (
    "mov.u32 r8, %nctaid.x; mov.u32 r9, %nctaid.y; mad.lo.u32 r9, r6, r9, r5; "
    "add.u32 r12, r4, r10; "
    "mad.lo.u32 r9, r9, r8, r12; mad.wide.u32 a1, r9, 4, a0; @p red.global.add.u32 [a1], 1;\n"
)
LOOP = (
    "PROCESS: @p mbarrier.arrive.expect_tx.relaxed.cluster.shared::cta.b64 _, [r2], 16;\n"
    "setp.eq.and.u32 q, r11, 0, p; @q {request} [{response}], [{barrier}];\n" + COUNT +
    "W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 q, [r2], r7; @!q bra W;\n"
    "xor.b32 r7, r7, 1; ld.shared.b128 big, [r3];\n"
    + QUERY + ".is_canceled.pred.b128 q, big; @!q bra DONE;\n{first}\n"
    "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;\n"
    "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;\n"
    "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;\nbra PROCESS;\n"
    "DONE: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; }}"
)  # fmt: skip
GRID = (6, 3, 2)


def count(body: str, seed: int, cluster: int = 1, grid: tuple[int, int, int] = GRID) -> np.ndarray:
    y = np.zeros(grid[::-1], np.uint32)
    machine = sim.Machine("100a", seed)
    run(SETUP + body, y, parameters=".param .u64 y", grid=grid, cluster=cluster, block=64,
        machine=machine)  # fmt: skip
    return y


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("space", ["", ".shared::cta"])
@pytest.mark.parametrize("cluster", [1, 2])
def test_every_cta_is_processed_once(cluster: int, space: str, first: str) -> None:
    """By a cluster of its own or by one that has taken it over: the manual's loop, 20 schedules."""
    body = LOOP.format(
        request=TRY.format(space, ".multicast::cluster::all" if cluster > 1 else ""),
        response="r3" if space else "a3", barrier="r2" if space else "a2", first=FIRST[first],
    )  # fmt: skip
    for seed in range(20):
        np.testing.assert_array_equal(count(body, seed, cluster), 1)


def test_resident_clusters_take_all_others() -> None:
    """A cluster ends when none is left, so that no more are launched than are resident at first."""
    body = LOOP.format(request=TRY.format(".shared::cta", ""), response="r3", barrier="r2",
                       first=FIRST["vector"])  # fmt: skip
    traces = set()
    for seed in range(10):
        y = np.zeros(36, np.uint32)
        report = run(SETUP + body, y, parameters=".param .u64 y", grid=36,
                     machine=sim.Machine("100a", seed))  # fmt: skip
        assert report.by_line[FIRST_LINE + 2] == 4 * 2  # the cluster barrier of SETUP
        np.testing.assert_array_equal(y, 1)
        traces.add(report.trace)
    assert len(traces) == 10


def faults(body: str, **options: object) -> Counter[tuple[str, int]]:
    """(kind, line of the body) over 20 seeds."""
    found: Counter[tuple[str, int]] = Counter()
    for seed in range(20):
        try:
            count(body, seed, **options)
            found["", 0] += 1
        except sim.SimulationError as error:
            found[error.kind, error.line - FIRST_LINE - 3] += 1
    return found


REQUEST = TRY.format(".shared::cta", "")
GOOD = LOOP.format(request=REQUEST, response="r3", barrier="r2", first=FIRST["vector"])
ASK = (
    "@p mbarrier.arrive.expect_tx.shared.b64 _, [r2], 16; @p " + REQUEST + " [r3], [r2];\n"
    "W: mbarrier.try_wait.parity.shared.b64 q, [r2], r7; @!q bra W; xor.b32 r7, r7, 1;\n"
)


def test_a_request_after_a_refusal() -> None:
    """Whoever has seen that no cluster is left must not ask again."""
    body = (
        ASK + "ld.shared.b128 big, [r3]; " + QUERY + ".is_canceled.pred.b128 q, big; bar.sync 0;\n"
        + ASK.replace("W", "V") + "}"
    )  # fmt: skip
    assert set(faults(body, grid=(1, 1, 1))) == {("argument", 3)}


def test_the_index_of_a_refusal() -> None:
    """A failed response has no first CTA, and other bytes are no response."""
    for first in FIRST.values():
        body = ASK + "ld.shared.b128 big, [r3];\n" + first + "}"
        assert set(faults(body, grid=(1, 1, 1))) == {("argument", 3)}
    for query in (f"{QUERY}.is_canceled.pred.b128 q, big;", *FIRST.values()):
        body = "mov.b64 a4, 77; mov.b128 big, {a4, a4};\n" + query + "}"
        assert set(faults(body, grid=(1, 1, 1))) == {("argument", 1)}


def test_zeros_are_a_response_without_a_cluster() -> None:
    """CUTLASS writes them where there is one tile (assumption S34): no cluster was cancelled."""
    body = "mov.b64 a4, 0; mov.b128 big, {a4, a4};\n" + f"{QUERY}.is_canceled.pred.b128 q, big;\n"
    assert set(faults(body + "@q trap; }", grid=(1, 1, 1))) == {("", 0)}
    for query in FIRST.values():
        assert set(faults(body + query + "}", grid=(1, 1, 1))) == {("argument", 2)}


def test_reading_a_response_too_early() -> None:
    """Without the wait the response counts as unwritten, or the read races with its arrival."""
    wait = "W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 q, [r2], r7; @!q bra W;"
    found = faults(GOOD.replace(wait, ""))
    assert set(found) <= {("uninitialized-memory", 4), ("race", 4), ("race", 1)}, found


def test_reuse_of_a_response_that_others_still_read() -> None:
    """The next request races with reads that no barrier orders before it."""
    barrier = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;"
    found = faults(GOOD.replace(barrier, ""))
    assert ("race", 1) in found, found
    # Without the releasing fence the relaxed barrier orders nothing for them.
    release = "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;"
    found = faults(GOOD.replace(release, ""))
    assert ("race", 1) in found, found


def test_a_wrong_byte_count() -> None:
    """The response has 16 bytes; the wait for others never ends."""
    assert set(faults(GOOD.replace("_, [r2], 16", "_, [r2], 32"), grid=(1, 1, 1))) == {
        ("deadlock", 3)
    }


# name: (kind, operands of the request)
WRONG = {
    "misaligned response": ("misaligned", REQUEST, "[r3+8], [r2]"),
    "misaligned barrier": ("misaligned", REQUEST, "[r3], [r2+4]"),
    "global memory": ("argument", TRY.format("", ""), "[a0], [a2]"),
    "another CTA": ("argument", REQUEST, "[r12], [r2]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_places_are_reported(name: str) -> None:
    """The response and the mbarrier are aligned, and in the CTA's own shared memory."""
    kind, request, operands = WRONG[name]
    body = (
        "mapa.shared::cluster.u32 r12, r3, 1; setp.eq.and.u32 q, r11, 0, p;\n"
        f"@q {request} {operands};\n"
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; }"
    )
    assert set(faults(body, cluster=2)) == {(kind, 1)}

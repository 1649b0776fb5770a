"""tcgen05.commit: where it arrives, and when."""

import numpy as np
import pytest

from jax_fp4 import sim
from support.ptx_kernel import FIRST_LINE, run
from support.tensor_memory import with_tensor_memory

CLUSTER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
INIT = "setp.eq.u32 p, r0, 0; @p mbarrier.init.shared.b64 [r4], {count};"
WAIT = "W: mbarrier.try_wait.parity.shared::cta.b64 q, [r4], 0; @!q bra W;"


def commit(rest: str, group: int = 1) -> str:
    return f"tcgen05.commit.cta_group::{group}.mbarrier::arrive::one{rest}"


def alone(body: str, count: int = 1, **options: object) -> sim.Report:
    """One CTA of one warp; the body starts on the second line after the first."""
    text = f"{INIT.format(count=count)} fence.mbarrier_init.release.cluster; bar.sync 0;\n{body}"
    return run(with_tensor_memory(text), **options)


def cluster(body: str, group: int, ctas: int = 4, count: int = 1, **options: object) -> sim.Report:
    """A cluster whose mbarriers are initialised; r10 is the rank."""
    text = (
        f"{INIT.format(count=count)} @p fence.mbarrier_init.release.cluster; {CLUSTER} "
        f"mov.u32 r10, %cluster_ctarank; or.b32 r11, r10, r0; setp.eq.u32 p, r11, 0;\n{body}"
    )
    return run(with_tensor_memory(text, group=group), grid=ctas, cluster=ctas, **options)


@pytest.mark.parametrize(
    "text",
    [
        commit(".shared::cluster.b64 [r4];"),
        commit(".shared::cluster.b64 [bar];"),
        "cvt.u64.u32 a0, r4; cvta.shared.u64 a0, a0; @p " + commit(".b64 [a0];"),
        "mov.u16 h0, 1; @p " + commit(".shared::cluster.multicast::cluster.b64 [r4], h0;"),
        "cvt.u64.u32 a0, r4; cvta.shared.u64 a0, a0; mov.u16 h0, 1; @p "
        + commit(".multicast::cluster.b64 [a0], h0;"),
    ],
)
def test_addresses_of_the_own_cta(text: str) -> None:
    """Shared and generic addresses; a commit with nothing before it arrives by itself."""
    for seed in range(5):
        report = alone(
            f"@p {text}\n{WAIT}".replace("@p cvt", "cvt").replace("@p mov", "mov"),
            machine=sim.Machine("100a", seed),
        )
        assert report.warnings == []


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("space", [".shared::cluster", ""])
def test_a_mask_names_ctas_of_the_cluster(group: int, space: str) -> None:
    """One arrival in each CTA of the mask, and in no other: rank 3 times its wait out."""
    generic = "cvt.u64.u32 a0, r4; cvta.shared.u64 a0, a0;"
    at = "r4" if space else "a0"
    arrive = commit(f"{space}.multicast::cluster.b64", group)
    body = (
        f"{generic} mov.u16 h0, 7; @p {arrive} [{at}], h0;\n"
        f"setp.eq.u32 p, r10, 3; @p bra N;\n{WAIT}\nN: {CLUSTER} "
        "mbarrier.test_wait.parity.shared::cta.b64 q, [r4], 0; setp.eq.u32 p, r10, 3;\n"
        "@!p bra E; @!q bra E; trap;\nE:"
    )
    for seed in range(5):
        assert cluster(body, group, machine=sim.Machine("100a", seed)).warnings == []


@pytest.mark.parametrize("group", [1, 2])
def test_an_address_of_another_cta(group: int) -> None:
    """Without a mask the address names the CTA."""
    body = (
        "mapa.shared::cluster.u32 r6, r4, 2; setp.ne.u32 q, r10, 2; "
        f"@p {commit('.shared::cluster.b64 [r6];', group)} @q bra N;\n{WAIT}\nN: {CLUSTER}"
    )
    for seed in range(5):
        cluster(body, group, machine=sim.Machine("100a", seed))


def test_lanes_that_issue_together_are_warned_of() -> None:
    """32 lanes arrive 32 times; one thread is to issue."""
    report = alone(f"{commit('.shared::cluster.b64 [r4];')}\n{WAIT}", count=32)
    assert len(report.warnings) == 1 and "issued by 32 lanes" in report.warnings[0]


@pytest.mark.parametrize(
    ("kind", "message", "text"),
    [
        (
            "argument",
            "names no CTA, or one that",
            "mov.u16 h0, 0; " + commit(".shared::cluster.multicast::cluster.b64 [r4], h0;"),
        ),
        (
            "argument",
            "names no CTA, or one that",
            "mov.u16 h0, 4; " + commit(".shared::cluster.multicast::cluster.b64 [r4], h0;"),
        ),
        (
            "out-of-bounds",
            "names rank 1 of a cluster of 1",
            "add.u32 r4, r4, 0x1000000; " + commit(".shared::cluster.b64 [r4];"),
        ),
        ("mbarrier", "lies in shared memory", "mov.u64 a0, 4096; " + commit(".b64 [a0];")),
        (
            "misaligned",
            "aligned to 8",
            "add.u32 r4, r4, 4; " + commit(".shared::cluster.b64 [r4];"),
        ),
        (
            "mbarrier",
            "was not initialised",
            "@p mbarrier.inval.shared.b64 [r4]; bar.warp.sync -1; "
            + commit(".shared::cluster.b64 [r4];"),
        ),
    ],
)
def test_misuse_is_reported(kind: str, message: str, text: str) -> None:
    """A wrong mask, address or count: kind and line."""
    with pytest.raises(sim.SimulationError) as caught:
        alone(f"{text}\nL: bra L;", max_instructions=5000)
    assert (caught.value.kind, caught.value.line) == (kind, FIRST_LINE + 2), caught.value
    assert message in str(caught.value)


def test_the_mbarrier_of_a_cta_that_has_exited() -> None:
    """In the issuing CTA a warning, in another one a fault, unless the commit came first."""
    begin = (
        ".shared .align 8 .b64 bar; mov.u32 r4, bar; mov.u32 r0, %tid.x; "
        f"{INIT.format(count=1)} @p fence.mbarrier_init.release.cluster; {CLUSTER} "
        "mov.u32 r10, %cluster_ctarank; setp.ne.u32 q, r10, 0; @q exit; @!p exit; "
    )
    kinds = set()
    warnings = set()
    for seed in range(20):
        machine = sim.Machine("100a", seed)
        own = f"{begin}\n{commit('.shared::cluster.b64 [r4];')}"
        warnings |= set(run(own, grid=2, cluster=2, machine=machine).warnings)
        other = (
            f"{begin} mapa.shared::cluster.u32 r4, r4, 1;\n{commit('.shared::cluster.b64 [r4];')}"
        )
        try:
            run(other, grid=2, cluster=2, machine=machine)
        except sim.SimulationError as error:
            kinds.add(error.kind)
            assert error.line == FIRST_LINE + 1
    assert kinds == {"exit", "out-of-bounds"}
    assert {text.split("\n")[0] for text in warnings} == {
        "the CTA has exited before this commit arrives at its mbarrier"
    }


def test_strictly_a_cta_waits_for_its_own_commits() -> None:
    """The exit that leaves a commit behind is a fault at some seed; waiting makes it right."""
    begin = (
        ".shared .align 8 .b64 bar; mov.u32 r4, bar; mov.u32 r0, %tid.x; "
        f"{INIT.format(count=1)} bar.sync 0; "
    )
    kinds = set()
    for seed in range(20):
        machine = sim.Machine("100a", seed, sim.Checks(strict=True))
        text = f"{begin}\n@p {commit('.shared::cluster.b64 [r4];')}"
        run(f"{text}\n{WAIT}", machine=machine)
        try:
            run(text, machine=machine)
        except sim.SimulationError as error:
            kinds.add(error.kind)
            assert error.line == FIRST_LINE + 1
    assert kinds == {"exit"}


def test_strictly_commits_arrive_in_any_order() -> None:
    """Both orders are seen: the second of two commits tells nothing about the first."""
    body = (
        ".shared .align 8 .b64 bars[2]; mov.u32 r4, bars; add.u32 r5, r4, 8; mov.u32 r0, %tid.x; "
        "setp.eq.u32 p, r0, 0; @p mbarrier.init.shared.b64 [r4], 1; "
        "@p mbarrier.init.shared.b64 [r5], 1; bar.sync 0; ld.param.u64 a0, [y];\n"
        f"@p {commit('.shared::cluster.b64 [r5];')}\n@p {commit('.shared::cluster.b64 [r4];')}\n"
        f"{WAIT} mbarrier.test_wait.parity.shared::cta.b64 q, [r5], 0; selp.u32 r6, 1, 0, q; "
        "@p st.global.u32 [a0], r6;\n"
        "V: mbarrier.try_wait.parity.shared::cta.b64 q, [r5], 0; @!q bra V;"
    )
    seen: dict[bool, set[int]] = {False: set(), True: set()}
    for strict, orders in seen.items():
        for seed in range(20):
            machine = sim.Machine("100a", seed, sim.Checks(strict=strict))
            y = np.zeros(1, np.uint32)
            run(body, y, parameters=".param .u64 y", machine=machine)
            orders.add(int(y[0]))
    assert seen == {False: {1}, True: {0, 1}}


def test_strictly_a_commit_arrives_in_its_ctas_in_any_order() -> None:
    """That it has arrived in one of them tells the others nothing: each waits for itself."""
    send = "mov.u16 h0, 3; setp.eq.u32 q, r10, 0; and.pred p, p, q;\n@p " + commit(
        ".shared::cluster.multicast::cluster.b64 [r4], h0;"
    )
    rank_1_goes_on = f"setp.eq.u32 p, r10, 1; @p bra ON;\n{WAIT}\nON: {CLUSTER}"
    kinds = set()
    for seed in range(20):
        strict = sim.Machine("100a", seed, sim.Checks(strict=True))
        cluster(f"{send}\n{WAIT} {CLUSTER}", 1, 2, machine=strict)
        cluster(f"{send}\n{rank_1_goes_on}", 1, 2, machine=sim.Machine("100a", seed))
        try:
            cluster(f"{send}\n{rank_1_goes_on}", 1, 2, machine=strict)
        except sim.SimulationError as error:
            kinds.add(error.kind)
    assert kinds == {"exit"}

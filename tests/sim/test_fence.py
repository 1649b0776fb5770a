"""Fences, and the initialisation of mbarriers as other warps and CTAs see it."""

import pytest

from jax_fp4 import sim
from support.ptx_kernel import FIRST_LINE, run

FENCES = [
    "fence.acq_rel.cta;",
    "fence.sc.gpu;",
    "fence.acquire.cluster;",
    "fence.release.sys;",
    "fence.proxy.alias;",
    "fence.proxy.async;",
    "fence.proxy.async.global;",
    "fence.proxy.async.shared::cta;",
    "fence.proxy.async.shared::cluster;",
    "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;",
    "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;",
    "fence.mbarrier_init.release.cluster;",
]


@pytest.mark.parametrize("fence", FENCES)
def test_fences_execute(fence: str) -> None:
    """Every fence is accepted where nothing needs it."""
    assert run(fence).instructions == 2


INIT = (
    "mov.u32 r1, %tid.x; setp.eq.u32 p, r1, 0; mov.u32 r2, bar;\n"
    "@p mbarrier.init.shared.b64 [r2], 64;\n"
)
ARRIVE = "mbarrier.arrive.shared.b64 a0, [r2];"
VARIABLE = ".shared .align 8 .b64 bar;"


def test_mbarrier_init_is_seen_after_a_barrier() -> None:
    """bar.sync makes an initialisation visible to the other warps of the CTA."""
    for seed in range(20):
        run(
            INIT + "bar.sync 0;\n" + ARRIVE,
            block=64,
            module=VARIABLE,
            machine=sim.Machine("100a", seed=seed),
        )


def test_mbarrier_init_without_a_barrier_is_reported() -> None:
    """An arrival that no barrier orders after the initialisation fails at every seed."""
    for seed in range(20):
        with pytest.raises(sim.SimulationError) as caught:
            run(
                INIT + "nanosleep.u32 1;\n" + ARRIVE,
                block=64,
                module=VARIABLE,
                machine=sim.Machine("100a", seed=seed),
            )
        assert caught.value.kind in {"race", "mbarrier", "uninitialized-memory"}
        assert caught.value.line == FIRST_LINE + 3


CLUSTER = (
    "mov.u32 r2, bar; mov.u32 r3, %cluster_ctarank; mov.u32 r1, %tid.x; setp.eq.u32 p, r1, 0;\n"
    "@p mbarrier.init.shared.b64 [r2], 2;\n{fence}\n"
    "barrier.cluster.arrive.{order}.aligned; barrier.cluster.wait.acquire.aligned;\n"
    "mapa.shared::cluster.u32 r4, r2, 0;\n"
    "@p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r4];\n"
    "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
)


@pytest.mark.parametrize(
    ("fence", "order", "fine"),
    [
        ("fence.mbarrier_init.release.cluster;", "relaxed", True),
        ("", "release", True),
        ("", "relaxed", False),
    ],
)
def test_mbarrier_init_across_a_cluster(fence: str, order: str, fine: bool) -> None:
    """A relaxed cluster barrier passes on initialisations only after fence.mbarrier_init."""
    for seed in range(10):
        body = CLUSTER.format(fence=fence, order=order)
        options = {"grid": 2, "cluster": 2, "module": VARIABLE}
        machine = sim.Machine("100a", seed=seed)
        if fine:
            run(body, machine=machine, **options)
            continue
        with pytest.raises(sim.SimulationError) as caught:
            run(body, machine=machine, **options)
        assert caught.value.kind == "race" and "initialisation" in str(caught.value)
        assert caught.value.line == FIRST_LINE + 5

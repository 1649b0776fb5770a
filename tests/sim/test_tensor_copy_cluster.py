"""Tensor copies to other CTAs of a cluster, to several of them, and the signals of CTA pairs."""

import numpy as np
import pytest

from jax_fp4 import sim
from oracles.tensor_box import Tensor, image
from support.tensor_copy import COPY_OUT, FIRST_LINE, START, encoded, launch

CTAS = 4
TILE = Tensor("uint8", (256, 64), (256,), (128, 16), "128b")
MEMORY = np.random.default_rng(5).integers(0, 256, 16384, dtype=np.uint8)
SIZE = TILE.shared_bytes
# r10: the CTA's rank; r12: its mbarrier in the even CTA of its pair; a0: its part of `out`.
SETUP = (
    "mov.u32 r10, %cluster_ctarank; mad.lo.u32 r11, r5, 4, 0; mul.lo.u32 r11, r11, r10; "
    "cvt.u64.u32 a1, r11; add.u64 a0, a0, a1; and.b32 r12, r1, 0xFEFFFFFF; {init}\n"
    "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;\n"
)
INIT = "@p mbarrier.init.shared.b64 [r1], 1; @p fence.mbarrier_init.release.cluster;"
WAIT = "W: mbarrier.try_wait.parity.shared.b64 q, [r1], 0; @!q bra W;\n"
END = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;\n"
LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"


def run(
    body: str, seed: int, init: str = INIT, coordinates: tuple[int, ...] = (128, 40)
) -> np.ndarray:
    machine = sim.Machine("100a", seed, sim.Checks(uninitialized=False))
    out = np.zeros(CTAS * SIZE, np.uint8)
    launch(
        machine, SETUP.format(init=init) + body, encoded(machine, TILE, MEMORY), out, coordinates,
        SIZE, cluster=CTAS,
    )  # fmt: skip
    return out.reshape(CTAS, SIZE)


def tile(coordinates: tuple[int, ...] = (128, 40)) -> np.ndarray:
    return image(TILE, MEMORY, coordinates, START)[0]


UNTOUCHED = np.full(SIZE, 0xCC, np.uint8)


@pytest.mark.parametrize("group", ["", ".cta_group::1"])
@pytest.mark.parametrize("mask", [0b0001, 0b0110, 0b1010, 0b1111])
def test_a_multicast_reaches_the_ctas_of_its_mask(mask: int, group: str) -> None:
    """Each gets the box at the same offset, and the bytes at its own mbarrier; others nothing."""
    for seed in range(5):
        got = run(
            f"mov.u32 r13, {mask}; shr.b32 r13, r13, r10; and.b32 r13, r13, 1; "
            "setp.eq.u32 q, r13, 0; @q bra ISSUE;\n"
            "@p mbarrier.arrive.expect_tx.shared.b64 _, [r1], r4;\nISSUE:\n"
            f"setp.eq.and.u32 q, r10, 2, p; mov.b16 h0, {mask};\n"
            f"@q {LOAD}.multicast::cluster{group} [r3], [map, {{c0, c1}}], [r1], h0;\n"
            "setp.eq.u32 q, r13, 0; @q bra OUT;\n" + WAIT + "OUT:\n" + COPY_OUT + END,
            seed,
        )
        for cta in range(CTAS):
            np.testing.assert_array_equal(got[cta], tile() if mask >> cta & 1 else UNTOUCHED)


@pytest.mark.parametrize("hint", [False, True])
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("parity", [0, 1])
def test_pairs_signal_the_cta_of_the_barriers_parity(parity: int, gather: bool, hint: bool) -> None:
    """A multicast of .cta_group::2 to all: one CTA of each pair receives the bytes of both."""
    if gather:
        tensor = Tensor("uint8", (256, 64), (256,), (128, 1), "128b")
        coordinates, size, mode = (0, 9, -1, 63, 2), 512, ".tile::gather4"
        expected = image(tensor, MEMORY, (0,), START, (9, -1, 63, 2))[0]
        where = "{c0, c1, c2, c3, c4}"
    else:
        tensor, coordinates, size, mode, expected = TILE, (128, 40), SIZE, ".tile", tile()
        where = "{c0, c1}"
    name = LOAD.replace(".tile", mode)
    policy = ("mov.u64 a3, 0x12F0000000000000;", ".L2::cache_hint", ", a3") if hint else ("",) * 3
    for seed in range(5):
        machine = sim.Machine("100a", seed)
        out = np.zeros(CTAS * size, np.uint8)
        body = (
            SETUP.format(init=INIT) + f"and.b32 r13, r10, 1; setp.eq.u32 q, r13, {parity}; "
            "@!q bra ISSUE;\nshl.b32 r14, r4, 1; "
            "@p mbarrier.arrive.expect_tx.shared.b64 _, [r1], r14;\nISSUE:\n"
            f"setp.eq.and.u32 q, r10, {parity + 2}, p; mov.b16 h0, 15; {policy[0]}\n"
            f"@q {name}.multicast::cluster.cta_group::2{policy[1]} "
            f"[r3], [map, {where}], [r1], h0{policy[2]};\n"
            f"setp.ne.u32 q, r13, {parity}; @q bra OUT;\n" + WAIT + "OUT:\n" + END + COPY_OUT
        )  # fmt: skip
        launch(
            machine, body, encoded(machine, tensor, MEMORY), out, coordinates, size, cluster=CTAS
        )
        for cta in range(CTAS):
            np.testing.assert_array_equal(out.reshape(CTAS, size)[cta], expected)


@pytest.mark.parametrize("space", ["shared::cta", "shared::cluster"])
def test_both_ctas_of_a_pair_load_for_the_even_one(space: str) -> None:
    """The mbarrier address with bit 24 cleared is that of the even CTA."""
    name = LOAD.replace("shared::cluster", space)
    for seed in range(10):
        got = run(
            "and.b32 r13, r10, 1; setp.eq.u32 q, r13, 0; @!q bra ISSUE;\nshl.b32 r14, r4, 1; "
            "@p mbarrier.arrive.expect_tx.shared.b64 _, [r1], r14;\nISSUE:\n"
            "mad.lo.s32 c1, r10, 8, c1;\n"
            f"@p {name}.cta_group::2 [r3], [map, {{c0, c1}}], [r12];\n"
            "setp.ne.u32 q, r13, 0; @q bra OUT;\n" + WAIT + "OUT:\n" + END + COPY_OUT,
            seed,
        )
        for cta in range(CTAS):
            np.testing.assert_array_equal(got[cta], tile((128, 40 + 8 * cta)))


def test_a_load_into_another_cta() -> None:
    """A destination and an mbarrier from mapa; the issuing CTA's memory stays as it was."""
    for seed in range(5):
        got = run(
            "setp.eq.and.u32 q, r10, 3, p; "
            "@q mbarrier.arrive.expect_tx.shared.b64 _, [r1], r4; setp.eq.and.u32 q, r10, 0, p; "
            "mapa.shared::cluster.u32 r13, r3, 3; mapa.shared::cluster.u32 r14, r1, 3;\n"
            f"@q {LOAD} [r13], [map, {{c0, c1}}], [r14];\n"
            "setp.ne.u32 q, r10, 3; @q bra OUT;\n" + WAIT + "OUT:\n" + COPY_OUT + END,
            seed,
        )
        np.testing.assert_array_equal(got[3], tile())
        np.testing.assert_array_equal(got[:3], np.broadcast_to(UNTOUCHED, (3, SIZE)))


# name: (kind, part of the message, line after the set-up, the instruction as CTA 1 issues it)
WRONG = {
    "another CTA's barrier": ("argument", "only .cta_group::2 signals another CTA",
                              f"{LOAD} [r3], [map, {{c0, c1}}], [r12];"),
    "another pair's barrier": ("argument", "not of one pair",
                               "mapa.shared::cluster.u32 r13, r1, 2; "
                               f"{LOAD}.cta_group::2 [r3], [map, {{c0, c1}}], [r13];"),
    "not its own memory": ("argument", "a .shared::cta destination is in memory of another CTA",
                           "mapa.shared::cluster.u32 r13, r3, 2; "
                           f"{LOAD.replace('::cluster', '::cta')} [r13], [map, {{c0, c1}}], [r1];"),
    "empty mask": ("argument", "the CTA mask 0", "mov.b16 h0, 0; "
                   f"{LOAD}.multicast::cluster [r3], [map, {{c0, c1}}], [r1], h0;"),
    "mask beyond the cluster": ("argument", "the CTA mask 16", "mov.b16 h0, 16; "
                                f"{LOAD}.multicast::cluster [r3], [map, {{c0, c1}}], [r1], h0;"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ctas_are_reported(name: str) -> None:
    """Destinations and mbarriers that the instruction cannot reach."""
    kind, message, instruction = WRONG[name]
    with pytest.raises(sim.SimulationError) as caught:
        run("setp.eq.and.u32 q, r10, 1, p; @!q bra OUT;\n" + instruction + "\nOUT:\n" + END, 1)
    assert (caught.value.kind, caught.value.line) == (kind, FIRST_LINE + 3)
    assert message in str(caught.value)


def test_a_barrier_whose_initialisation_was_not_fenced() -> None:
    """A remote signal needs fence.mbarrier_init (or a proxy fence) after mbarrier.init."""
    body = (
        "setp.eq.and.u32 q, r10, 3, p; @q mbarrier.arrive.expect_tx.shared.b64 _, [r1], r4;\n"
        "mapa.shared::cluster.u32 r13, r3, 3; mapa.shared::cluster.u32 r14, r1, 3; "
        "setp.eq.and.u32 q, r10, 0, p;\n"
        f"@q {LOAD} [r13], [map, {{c0, c1}}], [r14];\n"
        "setp.ne.u32 q, r10, 3; @q bra OUT;\n" + WAIT + "OUT:\n" + END
    )
    run(body, 0)
    with pytest.raises(sim.SimulationError) as caught:
        launch_relaxed = SETUP.replace("arrive.release", "arrive.relaxed")
        machine = sim.Machine("100a", 0, sim.Checks(uninitialized=False))
        launch(
            machine, launch_relaxed.format(init="@p mbarrier.init.shared.b64 [r1], 1;") + body,
            encoded(machine, TILE, MEMORY), np.zeros(CTAS * SIZE, np.uint8), (0, 0), SIZE,
            cluster=CTAS,
        )  # fmt: skip
    assert caught.value.kind == "race" and "initialis" in str(caught.value)

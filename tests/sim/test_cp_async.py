"""cp.async: the bytes arrive some time before the wait, and not before they may."""

import numpy as np
import pytest

from jax_fp4 import sim
from support.ptx_kernel import FIRST_LINE, run

SETUP = (
    "{ .shared .align 16 .b8 s[2048]; ld.param.u64 a0, [x]; ld.param.u64 a1, [y]; "
    "mov.u32 r0, %tid.x; mad.wide.u32 a0, r0, 16, a0; mad.wide.u32 a1, r0, 16, a1; "
    "shl.b32 r1, r0, 4; mov.u32 r2, s; add.u32 r1, r1, r2;\n"
)
LOAD = "ld.shared.v4.u32 {r4, r5, r6, r7}, [r1]; st.global.v4.u32 [a1], {r4, r5, r6, r7}; }"


def copied(body: str, **options: int) -> tuple[np.ndarray, np.ndarray]:
    """The source and what a body that fills the lane's 16 bytes of shared memory made of it."""
    x = np.arange(128, dtype=np.uint32)
    y = np.zeros(128, np.uint32)
    run(SETUP + body + LOAD, x, y, parameters=".param .u64 x, .param .u64 y", **options)
    return x, y


@pytest.mark.parametrize("space", ["shared", "shared::cta"])
@pytest.mark.parametrize(
    "wait", ["cp.async.wait_all;", "cp.async.commit_group; cp.async.wait_group 0;"]
)
def test_copies_of_every_size(wait: str, space: str) -> None:
    """4, 8 and 16 bytes, .ca and .cg, with cache hints."""
    parts = [
        [f"cp.async.cg.{space}.global.L2::128B [r1], [a0], 16;"],
        [f"cp.async.ca.{space}.global [r1{at}], [a0{at}], 8;" for at in ("", "+8")],
        [f"cp.async.ca.{space}.global [r1{at}], [a0{at}], 4;" for at in ("", "+4", "+8", "+12")],
    ]
    for part in parts:
        x, y = copied("".join(part) + wait)
        np.testing.assert_array_equal(x, y)


def test_missing_source_bytes_become_zero() -> None:
    """The source size may be smaller than the copy, and 0."""
    x, y = copied(
        "and.b32 r3, r0, 3; shl.b32 r3, r3, 2; "
        "cp.async.cg.shared.global [r1], [a0], 16, r3; cp.async.wait_all;"
    )
    words = np.arange(4)[None] < (np.arange(32) % 4)[:, None]
    np.testing.assert_array_equal(y.reshape(32, 4), np.where(words, x.reshape(32, 4), 0))


PIPELINE = (
    "cp.async.ca.shared.global [r1], [a0], 8; cp.async.commit_group;\n"
    "cp.async.ca.shared.global [r1+8], [a0+8], 8; cp.async.commit_group;\n"
    "cp.async.wait_group 1; ld.shared.v2.u32 {r4, r5}, [r1];\n"
)


def test_groups_complete_in_order() -> None:
    """wait_group 1 leaves the latest group pending; its bytes may not be read yet."""
    for seed in range(10):
        x, y = copied(PIPELINE + "cp.async.wait_group 0;", seed=seed)
        np.testing.assert_array_equal(x, y)


def test_a_missing_wait_is_found() -> None:
    """Reading what has not been waited for is reported at the load, whenever it arrives."""
    for seed in range(20):
        with pytest.raises(sim.SimulationError) as caught:
            copied(PIPELINE, seed=seed)
        assert (caught.value.kind, caught.value.line) == ("uninitialized-memory", FIRST_LINE + 4)


@pytest.mark.parametrize("place", ["r1", "r3"])
def test_a_store_over_a_copy_that_nobody_has_waited_for_is_a_race(place: str) -> None:
    """No other cp.async need follow; r1 is the copying lane's own place, r3 one of another warp."""

    def stored(groups: int, seed: int) -> None:
        body = (
            SETUP.replace("align 16", "align 1024") + "xor.b32 r3, r1, 512;\n"
            "cp.async.cg.shared.global [r1], [a0], 16; cp.async.commit_group;\n"
            f"cp.async.wait_group {groups}; bar.sync 0;\n"
            f"st.shared.u32 [{place}], r0; bar.sync 0; "
        )
        x, y = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
        pointers = ".param .u64 x, .param .u64 y"
        run(body + LOAD, x, y, block=64, parameters=pointers, seed=seed)
        first = np.arange(64) if place == "r1" else np.arange(64) ^ 32
        np.testing.assert_array_equal(y[::4], first)
        np.testing.assert_array_equal(y[1::4], x[1::4])

    for seed in range(5):
        stored(0, seed)
        with pytest.raises(sim.SimulationError, match="an asynchronous operation") as caught:
            stored(1, seed)
        assert (caught.value.kind, caught.value.line) == ("race", FIRST_LINE + 4)


def test_two_copies_to_one_place_need_a_wait_between() -> None:
    """Nothing says which of them is done last."""
    copy = "cp.async.cg.shared.global [r1], [a0], 16; cp.async.commit_group;\n"
    copied(f"{copy} cp.async.wait_all; {copy} cp.async.wait_all;")
    with pytest.raises(sim.SimulationError, match="earlier write by an asynchronous"):
        copied(f"{copy} {copy} cp.async.wait_all;")


def test_strict_checks_want_a_wait_before_the_exit() -> None:
    """Also where nobody uses what was copied. With the wait, or not strictly, it is fine."""
    copy = SETUP + "cp.async.cg.shared.global [r1], [a0], 16; cp.async.commit_group;\n"
    x = np.arange(128, dtype=np.uint32)
    for strict, wait in [(False, ""), (True, "cp.async.wait_all;")]:
        machine = sim.Machine("100a", checks=sim.Checks(strict=strict))
        run(copy + wait + "}", x, x, parameters=".param .u64 x, .param .u64 y", machine=machine)
    machine = sim.Machine("100a", checks=sim.Checks(strict=True))
    with pytest.raises(sim.SimulationError, match="without having waited") as caught:
        run(copy + "}", x, x, parameters=".param .u64 x, .param .u64 y", machine=machine)
    assert (caught.value.kind, caught.value.line) == ("exit", FIRST_LINE + 1)


def test_sizes_are_checked() -> None:
    """A size that does not exist does not load; a source larger than the copy is a fault."""
    with pytest.raises(sim.PtxError, match="combination of modifiers"):
        copied("cp.async.ca.shared.global [r1], [a0], 12;")
    with pytest.raises(sim.PtxError, match="combination of modifiers"):
        copied("cp.async.cg.shared.global [r1], [a0], 8;")
    with pytest.raises(sim.SimulationError, match="reads 8 bytes for a copy of 4"):
        copied("cp.async.ca.shared.global [r1], [a0], 4, 8;")

"""Programmatic dependent launch: overlapping grids and what griddepcontrol.wait orders."""

import numpy as np
import pytest

from jax_fp4 import sim
from support.ptx_kernel import FIRST_LINE, text_of

SEEDS = range(20)
PARAMETERS = ".param .u64 x, .param .u64 y"
ADDRESSES = (
    "ld.param.u64 a0, [x]; ld.param.u64 a1, [y]; mov.u32 r0, %tid.x; mov.u32 r1, %ctaid.x;\n"
    "mad.lo.u32 r0, r1, 32, r0; mul.wide.u32 a2, r0, 4; add.u64 a0, a0, a2; add.u64 a1, a1, a2;\n"
)
# y = x + 1, then lets the next grid start; or before that.
FIRST = "ld.global.u32 r2, [a0]; add.u32 r2, r2, 1;\n{0}\nst.global.u32 [a1], r2;\n{1}\n"
TRIGGER = "griddepcontrol.launch_dependents;"
# y = 3 x
SECOND = "{wait}\nld.global.u32 r2, [a0]; mul.lo.u32 r2, r2, 3; {sync}\nst.global.u32 [a1], r2;\n"
WAIT = "griddepcontrol.wait;"


def run(first: str, second: str, seed: int, grid: int = 6) -> np.ndarray:
    machine = sim.Machine("100a", seed=seed)
    x = np.arange(32 * grid, dtype=np.uint32)
    middle, y = np.zeros_like(x), np.zeros_like(x)
    kernels = [machine.load(text_of(ADDRESSES + body, PARAMETERS)) for body in (first, second)]
    machine.run(
        [
            kernels[0].prepare("k", grid, 32, args=[x, middle]),
            kernels[1].prepare("k", grid, 32, args=[middle, y]),
        ]
    )
    return y


@pytest.mark.parametrize("early", [False, True])
def test_wait_orders_grids(early: bool) -> None:
    """With a wait the second grid sees all that the first one wrote, wherever that triggers."""
    first = FIRST.format(TRIGGER, "") if early else FIRST.format("", TRIGGER)
    for seed in SEEDS:
        y = run(first, SECOND.format(wait=WAIT, sync=""), seed)
        np.testing.assert_array_equal(y, 3 * (np.arange(len(y), dtype=np.uint32) + 1))


def test_grids_without_trigger_follow_each_other() -> None:
    """A grid that triggers nothing is done before the next one starts; no wait is needed then."""
    for seed in SEEDS:
        y = run(FIRST.format("", ""), SECOND.format(wait="", sync=""), seed)
        np.testing.assert_array_equal(y, 3 * (np.arange(len(y), dtype=np.uint32) + 1))


@pytest.mark.parametrize("trigger", [(TRIGGER, ""), ("", TRIGGER)])
def test_missing_wait_is_reported(trigger: tuple[str, str]) -> None:
    """Every schedule reports the read, or the write that comes after it, with both places."""
    for seed in SEEDS:
        with pytest.raises(sim.SimulationError) as caught:
            run(FIRST.format(*trigger), SECOND.format(wait="", sync=""), seed)
        assert caught.value.kind == "race" and "griddepcontrol.wait" in str(caught.value)
        assert caught.value.line in {FIRST_LINE + 3, FIRST_LINE + 4}


def test_write_before_the_wait_is_reported() -> None:
    """A later grid must not overwrite what an earlier one may still read."""
    body = "st.global.u32 [a0], r0;\n" + WAIT
    first = "ld.global.u32 r2, [a1];\n" + TRIGGER
    for seed in SEEDS:
        with pytest.raises(sim.SimulationError, match="griddepcontrol"):
            run(first, body, seed)


def test_one_warp_waits_for_its_cta() -> None:
    """What a barrier orders after another warp's wait is ordered after the earlier grids too."""
    second = (
        "mov.u32 r3, %tid.x; setp.lt.u32 p, r3, 32;\n@p griddepcontrol.wait;\nbar.sync 0;\n"
        "ld.global.u32 r2, [a0]; st.global.u32 [a1], r2;"
    )
    for seed in SEEDS:
        machine = sim.Machine("100a", seed=seed)
        x, middle, y = (
            np.arange(64, dtype=np.uint32),
            np.zeros(64, np.uint32),
            np.zeros(64, np.uint32),
        )
        first = machine.load(text_of(ADDRESSES + FIRST.format(TRIGGER, ""), PARAMETERS))
        last = machine.load(text_of(ADDRESSES + second, PARAMETERS))
        machine.run(
            [
                first.prepare("k", 2, 32, args=[x, middle]),
                last.prepare("k", 1, 64, args=[middle, y]),
            ]
        )
        np.testing.assert_array_equal(y, x + 1)


def test_three_grids() -> None:
    """A wait covers all grids before, not only the last one."""
    for seed in SEEDS:
        machine = sim.Machine("100a", seed=seed)
        x = np.arange(64, dtype=np.uint32)
        buffers = [x] + [np.zeros_like(x) for _ in range(3)]
        kernel = machine.load(text_of(ADDRESSES + WAIT + FIRST.format(TRIGGER, ""), PARAMETERS))
        machine.run([kernel.prepare("k", 2, 32, args=buffers[i : i + 2]) for i in range(3)])
        np.testing.assert_array_equal(buffers[3], x + 3)

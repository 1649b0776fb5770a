"""The order of bulk copies against everything else: waits, fences, groups, the end of a CTA."""

from collections import Counter

import numpy as np
import pytest

from jax_fp4 import sim
from oracles.tensor_box import Tensor, image
from support.tensor_copy import COPY_OUT, FIRST_LINE, START, encoded, launch

SEEDS = range(20)
TILE = Tensor("uint8", (128, 64), (128,), (128, 16), "128b")
SIZE = TILE.shared_bytes
LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
# Two mbarriers, at r1 and at r14.
INIT = (
    "@p mbarrier.init.shared.b64 [r1], 1; .shared .align 8 .b64 other; mov.u32 r14, other; "
    "@p mbarrier.init.shared.b64 [r14], 32; bar.sync 0;\n"
)
EXPECT = "@p mbarrier.arrive.expect_tx.shared.b64 _, [r1], {};\n"
WAIT = "{0}: mbarrier.try_wait.parity.shared.b64 q, [{1}], {2}; @!q bra {0};\n"
# 16 bytes of each of 32 lanes, in the first rows of the box.
FILL = "shl.b32 r6, r0, 4; add.u32 r6, r6, r2; st.shared.v4.u32 [r6], {r0, r0, r0, r0};\n"
FENCE = "fence.proxy.async.shared::cta;\n"
# Turns in which the engines may do what is outstanding.
DELAY = (
    "mov.u32 r13, 0; {0}: nanosleep.u32 1; add.u32 r13, r13, 1; setp.lt.u32 q, r13, 40; "
    "@q bra {0};\n"
)
SMALL = Tensor("uint8", (128, 64), (128,), (128, 4))


def memory(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, 128 * 64, dtype=np.uint8)


def run(
    body: str, seed: int, tensor: Tensor = TILE, target: np.ndarray | None = None, block: int = 32,
    strict: bool = False,
) -> np.ndarray:  # fmt: skip
    """The output array after INIT and the body."""
    machine = sim.Machine("100a", seed, checks=sim.Checks(strict=strict))
    out = np.zeros(SIZE, np.uint8)
    data = encoded(machine, tensor, memory() if target is None else target)
    launch(machine, INIT + body, data, out, (0, 0), SIZE, smem=2 * SIZE, block=block)
    return out


def faults(body: str, **options: object) -> Counter[tuple[str, int]]:
    """How often each (kind, line after INIT) came, over the seeds; ("", 0): no fault."""
    found: Counter[tuple[str, int]] = Counter()
    for seed in SEEDS:
        try:
            run(body, seed, **options)
            found["", 0] += 1
        except sim.SimulationError as error:
            found[error.kind, error.line - FIRST_LINE - 1] += 1
    return found


PIPELINE = (
    EXPECT.format(SIZE) + f"@p {LOAD} [r2], [map, {{0, 0}}], [r1];\n" + WAIT.format("A", "r1", 0)
    + "ld.shared.u32 r8, [r2+64]; mbarrier.arrive.shared.b64 _, [r14];\n"
    + WAIT.format("B", "r14", 0) + EXPECT.format(SIZE)
    + f"@p {LOAD} [r2], [map, {{0, 16}}], [r1];\n" + WAIT.format("C", "r1", 1) + COPY_OUT
)  # fmt: skip


def test_a_correct_pipeline() -> None:
    """Full and empty barriers alone order loads and reads of one buffer: no fence is needed."""
    for seed in SEEDS:
        np.testing.assert_array_equal(run(PIPELINE, seed), image(TILE, memory(), (0, 16), START)[0])


def test_reading_before_the_wait() -> None:
    """The bytes count as unwritten, or the read races with the copy: at every seed."""
    found = faults(PIPELINE.replace(WAIT.format("A", "r1", 0), "\n"))
    assert set(found) <= {("uninitialized-memory", 3), ("race", 3), ("race", 1)}, found
    assert found["uninitialized-memory", 3] > 5


def test_overwriting_before_all_have_read() -> None:
    """A load into a buffer that another warp still reads."""
    body = (
        EXPECT.format(SIZE) + f"@p {LOAD} [r2], [map, {{0, 0}}], [r1];\n"
        + WAIT.format("A", "r1", 0) + "ld.shared.u32 r8, [r2+64];\n" + EXPECT.format(SIZE)
        + f"@p {LOAD} [r2], [map, {{0, 16}}], [r1];\n" + WAIT.format("C", "r1", 1)
    )  # fmt: skip
    found = faults(body, block=64)
    # A warp that comes after the second copy waits for a phase that is long over.
    late = {("uninitialized-memory", 3), ("deadlock", 2)}
    assert set(found) <= {("race", 5), ("race", 3), *late}, found


@pytest.mark.parametrize("expected", [SIZE - 16, SIZE + 16, 0])
def test_a_wrong_byte_count(expected: int) -> None:
    """The phase never completes: a deadlock at the wait."""
    body = EXPECT.format(expected) + f"@p {LOAD} [r2], [map, {{0, 0}}], [r1];\n"
    found = faults(body + WAIT.format("A", "r1", 0))
    if expected:
        assert set(found) == {("deadlock", 2)}, found
    else:
        # Without bytes to expect, the phase may end before the copy; then the copy's count stays.
        assert set(found) <= {("deadlock", 2), ("exit", 1)}, found
    no_expect = f"@p {LOAD} [r2], [map, {{0, 0}}], [r1];\n" + WAIT.format("A", "r1", 0)
    assert set(faults(no_expect)) == {("deadlock", 1)}


def test_exit_with_outstanding_loads() -> None:
    """A CTA that ends while a copy may still write its memory; the seed decides who is first."""
    body = EXPECT.format(SIZE) + f"@p {LOAD} [r2], [map, {{0, 0}}], [r1];\n"
    found = faults(body + DELAY.format("D"))
    assert set(found) == {("exit", 1), ("", 0)}, found


def test_a_load_over_generic_writes() -> None:
    """It needs a fence after them; without one the fault names both lines."""
    body = (
        FILL + FENCE + "bar.sync 0;\n" + EXPECT.format(SIZE)
        + f"@p {LOAD} [r2], [map, {{0, 0}}], [r1];\n" + WAIT.format("A", "r1", 0)
    )  # fmt: skip
    assert set(faults(body)) == {("", 0)}
    assert set(faults(body.replace(FENCE, "\n"))) == {("proxy", 4)}
    with pytest.raises(sim.SimulationError) as caught:
        run(body.replace(FENCE, "\n"), 0)
    assert f"PTX line {FIRST_LINE + 1}: shl" in str(caught.value)


# Fill, store, wait for the reads, fill again, wait for all.
WRITER = (
    FILL + FENCE + "bar.sync 0;\n" + f"@p {STORE} [map, {{0, 8}}], [r2];\n"
    "@p cp.async.bulk.commit_group; @p cp.async.bulk.wait_group.read 0;\nbar.sync 0;\n"
    "st.shared.v4.u32 [r6], {r1, r1, r1, r1};\n@p cp.async.bulk.wait_group 0;\n"
)  # fmt: skip


def test_a_correct_store() -> None:
    """The tensor holds what shared memory held when it was read."""
    for seed in SEEDS:
        target = memory()
        run(WRITER, seed, SMALL, target)
        expected = memory()
        expected[8 * 128 : 12 * 128] = np.repeat(np.arange(32), 4).astype(np.uint32).view(np.uint8)
        np.testing.assert_array_equal(target, expected)


def test_a_store_without_the_fence() -> None:
    """Generic writes are not visible to the copy: at every seed, at the copy's line."""
    assert set(faults(WRITER.replace(FENCE, "\n"), tensor=SMALL)) == {("proxy", 3)}


def test_a_store_without_the_barrier() -> None:
    """Other warps' writes are ordered with the copy by a barrier only."""
    body = WRITER.replace("bar.sync 0;\n", "\n", 1)
    wide = body.replace("shl.b32 r6, r0, 4", "shl.b32 r6, r0, 3").replace("v4.u32", "v2.u32")
    wide = wide.replace("{r0, r0, r0, r0}", "{r0, r0}").replace("{r1, r1, r1, r1}", "{r1, r1}")
    found = faults(wide, tensor=SMALL, block=64)
    assert set(found) <= {("uninitialized-memory", 3), ("race", 3), ("race", 0)}, found


@pytest.mark.parametrize("without", ["wait", "commit"])
def test_overwriting_the_source_too_early(without: str) -> None:
    """Without wait_group.read, or where nothing was committed, the overwrite races."""
    wait, commit = "@p cp.async.bulk.wait_group.read 0;", "@p cp.async.bulk.commit_group; "
    body = WRITER.replace(wait if without == "wait" else commit, "") + DELAY.format("D")
    found = faults(body, tensor=SMALL)
    assert set(found) <= {("race", 3), ("race", 6), ("exit", 3)}, found
    assert found["race", 3] + found["race", 6] > 10, found


def test_reads_alone_do_not_write() -> None:
    """After wait_group.read the destination may be unwritten; after wait_group it is not."""
    body = (
        FILL + FENCE + "bar.sync 0;\n" + f"@p {STORE} [map, {{0, 0}}], [r2];\n"
        "@p cp.async.bulk.commit_group; @p cp.async.bulk.wait_group.read 0;\n"
        "ld.param.u64 a2, [out]; @p ld.global.u32 r8, [a2+16]; @p cp.async.bulk.wait_group 0;\n"
    )  # fmt: skip

    def outcome(text: str, seed: int) -> tuple[str, int]:
        machine = sim.Machine("100a", seed)
        target = machine.empty(128 * 64, np.uint8)
        data = encoded(machine, SMALL, target)
        try:
            launch(machine, INIT + text, data, target, (0, 0), smem=SIZE)
        except sim.SimulationError as error:
            return error.kind, error.line - FIRST_LINE - 1
        return "", 0

    waits = body.replace("group.read", "group")
    assert {outcome(waits, seed) for seed in SEEDS} == {("", 0)}
    assert {outcome(body, seed) for seed in SEEDS} == {("", 0), ("uninitialized-memory", 5)}


def test_groups_complete_in_order() -> None:
    """wait_group.read 1 lets the older of two groups' source be overwritten, not the newer's."""
    again = "st.shared.v4.u32 [r6+512], {r0, r0, r0, r0};\n"
    body = (
        FILL + again + FENCE + "bar.sync 0;\n"
        f"@p {STORE} [map, {{0, 0}}], [r2];\n@p cp.async.bulk.commit_group;\n"
        f"@p {STORE} [map, {{0, 4}}], [r2+512];\n@p cp.async.bulk.commit_group;\n"
        "@p cp.async.bulk.wait_group.read 1;\nbar.sync 0;\n"
    )  # fmt: skip
    end = "@p cp.async.bulk.wait_group 0;\n"
    assert set(faults(body + again.replace("+512", "") + end, tensor=SMALL)) == {("", 0)}
    assert set(faults(body + again + end, tensor=SMALL)) <= {("race", 6), ("race", 10)}


def test_exit_with_outstanding_reads() -> None:
    """Memory lasts until a CTA's own stores have read it (assumption S51); strict wants a wait."""
    body = FILL + FENCE + "bar.sync 0;\n" + f"@p {STORE} [map, {{0, 0}}], [r2];\n"
    found = faults(body + DELAY.format("D"), tensor=SMALL, strict=True)
    assert set(found) == {("exit", 3), ("", 0)}, found
    wait = "@p cp.async.bulk.commit_group; @p cp.async.bulk.wait_group.read 0;\n"
    for end, strict in ((wait, True), ("", False)):
        for seed in SEEDS:
            target = memory()
            run(body + end, seed, SMALL, target, strict=strict)
            want = np.repeat(np.arange(32), 4).astype(np.uint32).view(np.uint8)
            np.testing.assert_array_equal(target[:512], want)


def test_seeds_repeat_a_schedule() -> None:
    """One seed, one trace; others differ."""

    def trace(seed: int) -> int:
        machine = sim.Machine("100a", seed)
        data = encoded(machine, TILE, memory())
        return launch(machine, INIT + PIPELINE, data, np.zeros(SIZE, np.uint8), (0, 0), SIZE).trace

    assert trace(3) == trace(3)
    assert len({trace(seed) for seed in range(8)}) > 1

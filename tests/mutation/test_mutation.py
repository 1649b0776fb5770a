"""Mutation: what orders something in a kernel cannot be removed without the machine's objection."""

import pytest

from mutation.cases import SURVIVORS, product, tile, triton_fp4
from mutation.judge import judge
from mutation.mutants import mutants

SEEDS = range(20)

TEXT = """
// fence.proxy.async;
@p fence.proxy.async; bar.sync 0;
L: mbarrier.try_wait.parity.shared.b64 q, [r0], 1;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [r0], 64;
cp.async.bulk.wait_group.read 0;
barrier.cluster.arrive.release.aligned;
"""


def test_mutants_differ_in_one_instruction() -> None:
    """Each mutant removes or weakens one instruction; comments and longer names are left alone."""
    found = {(m.line, m.kind) for m in mutants(TEXT)}
    assert found == {
        (3, "remove fence"),
        (3, "remove barrier"),
        (4, "skip wait"),
        (5, "remove mbarrier.arrive"),
        (5, "drop expect_tx"),
        (6, "remove bulk group"),
        (6, "wait for one group less"),
        (7, "remove barrier.cluster"),
        (7, "relax arrive"),
    }
    for mutant in mutants(TEXT):
        changed = [
            i
            for i, (a, b) in enumerate(
                zip(TEXT.splitlines(), mutant.ptx.splitlines(), strict=True), 1
            )
            if a != b
        ]
        assert changed == [mutant.line]


@pytest.mark.parametrize("group", [1, 2])
def test_every_mutant_of_the_tile_kernel_is_caught(group: int) -> None:
    """At least 95 % are caught, and exactly the derived ones survive 20 schedules."""
    verdicts = judge(tile(group), SEEDS)
    survivors = {v.mutant.key for v in verdicts if v.outcome == "survived"}
    assert survivors == set(SURVIVORS[f"tile of {group}"])
    assert len(verdicts) > 30 and len(survivors) / len(verdicts) < 0.05
    assert all(v.outcome in ("reported", "wrong", "survived") for v in verdicts)


@pytest.mark.mutation
def test_mutants_of_all_kernels() -> None:
    """At least 80 % of the mutants of our kernels and Triton's are caught; prints the others."""
    caught = total = 0
    for case in [tile(1), tile(2)] + [
        triton_fp4(chip, tiled) for chip in ("100a", "120a") for tiled in (False, True)
    ]:
        verdicts = judge(case, SEEDS)
        survivors = [v for v in verdicts if v.outcome == "survived"]
        print(f"{case.name}: {len(verdicts) - len(survivors)} of {len(verdicts)} caught")
        for v in survivors:
            print(f"  line {v.mutant.line}: {v.mutant.key}")
        total += len(verdicts)
        caught += len(verdicts) - len(survivors)
    print(f"{caught} of {total} caught")
    assert caught >= 0.8 * total


@pytest.mark.mutation
def test_mutants_of_a_shipped_product() -> None:
    """At least 60 % are caught (62 % were with fewer tiles); the others are printed."""
    verdicts = judge(product("nvfp4", 1, 64), SEEDS)
    survivors = [v for v in verdicts if v.outcome == "survived"]
    for v in survivors:
        print(f"  line {v.mutant.line}: {v.mutant.key}")
    assert len(survivors) <= 0.4 * len(verdicts)

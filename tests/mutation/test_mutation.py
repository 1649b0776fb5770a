"""Mutation: what orders something in a kernel cannot be removed without the machine's objection."""

from collections import Counter

import pytest

from mutation.cases import SURVIVORS, shipped, tile, triton_fp4
from mutation.judge import Case, Verdict, judge
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


def survivors(case: Case, verdicts: list[Verdict]) -> dict[str, int]:
    """How many mutants of each key have survived; prints them with their lines."""
    left = [v.mutant for v in verdicts if v.outcome == "survived"]
    print(f"{case.name}: {len(verdicts) - len(left)} of {len(verdicts)} caught")
    for mutant in left:
        print(f"  line {mutant.line}: {mutant.key}")
    return dict(Counter(mutant.key for mutant in left))


def derived(case: Case) -> dict[str, int]:
    """The same of those that cases.py derives."""
    return {key: len(reasons) for key, reasons in SURVIVORS.get(case.name, {}).items()}


@pytest.mark.parametrize("group", [1, 2])
def test_every_mutant_of_the_tile_kernel_is_caught(group: int) -> None:
    """At least 95 % are caught, and exactly the derived ones survive 20 schedules."""
    case = tile(group)
    verdicts = judge(case, SEEDS)
    left = survivors(case, verdicts)
    assert left == derived(case)
    assert len(verdicts) > 30 and sum(left.values()) / len(verdicts) < 0.05
    assert all(v.outcome in ("reported", "wrong", "survived") for v in verdicts)


@pytest.mark.mutation
def test_mutants_of_shipped_kernels() -> None:
    """At least 90 % are caught in 20 schedules, and exactly the derived ones survive."""
    caught = total = 0
    for case in shipped():
        verdicts = judge(case, SEEDS)
        left = survivors(case, verdicts)
        assert left == derived(case), case.name
        total += len(verdicts)
        caught += len(verdicts) - sum(left.values())
    print(f"{caught} of {total} caught")
    assert total > 350 and caught >= 0.9 * total


@pytest.mark.mutation
def test_mutants_of_kernels_by_triton() -> None:
    """At least 70 % are caught; prints the others."""
    caught = total = 0
    for chip in ("100a", "120a"):
        for tiled in (False, True):
            case = triton_fp4(chip, tiled)
            verdicts = judge(case, SEEDS)
            caught += len(verdicts) - sum(survivors(case, verdicts).values())
            total += len(verdicts)
    print(f"{caught} of {total} caught")
    assert caught >= 0.7 * total

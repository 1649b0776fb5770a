"""Mutation: what orders something in a kernel cannot be removed without the machine's objection."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

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
    assert [m.number for m in mutants("fence.sc.cta; bar.sync 0; fence.sc.cta;")] == [1, 1, 2]
    for mutant in mutants(TEXT):
        changed = [
            i
            for i, (a, b) in enumerate(
                zip(TEXT.splitlines(), mutant.ptx.splitlines(), strict=True), 1
            )
            if a != b
        ]
        assert changed == [mutant.line]


def survivors(case: Case, verdicts: list[Verdict]) -> dict[str, set[int]]:
    """The numbers of the mutants of each key that have survived; prints them with their lines."""
    left = defaultdict[str, set[int]](set)
    for mutant in (v.mutant for v in verdicts if v.outcome == "survived"):
        left[mutant.key].add(mutant.number)
    print(f"{case.name}: {len(verdicts) - count(left)} of {len(verdicts)} caught")
    for mutant in (v.mutant for v in verdicts if v.outcome == "survived"):
        print(f"  line {mutant.line}: {mutant.key} ({mutant.number})")
    return dict(left)


def derived(case: Case) -> dict[str, set[int]]:
    """The same of those that cases.py derives."""
    return {key: set(reasons) for key, reasons in SURVIVORS.get(case.name, {}).items()}


def count(left: Mapping[str, set[int]]) -> int:
    """How many they are."""
    return sum(map(len, left.values()))


def judged(cases: Iterable[Case]) -> tuple[int, int]:
    """Mutants caught in 20 schedules, and all; exactly the derived ones must survive."""
    caught = total = 0
    for case in cases:
        verdicts = judge(case, SEEDS)
        left = survivors(case, verdicts)
        assert left == derived(case), case.name
        total += len(verdicts)
        caught += len(verdicts) - count(left)
    print(f"{caught} of {total} caught")
    return caught, total


@pytest.mark.parametrize("group", [1, 2])
def test_every_mutant_of_the_tile_kernel_is_caught(group: int) -> None:
    """At least 95 % are caught, and exactly the derived ones survive 20 schedules."""
    case = tile(group)
    verdicts = judge(case, SEEDS)
    left = survivors(case, verdicts)
    assert left == derived(case)
    assert len(verdicts) > 30 and count(left) / len(verdicts) < 0.05
    assert all(v.outcome in ("reported", "wrong", "survived") for v in verdicts)


@pytest.mark.mutation
def test_mutants_of_shipped_kernels() -> None:
    """At least 90 % are caught."""
    caught, total = judged(shipped())
    assert total > 400 and caught >= 0.9 * total


@pytest.mark.mutation
def test_mutants_of_kernels_by_triton() -> None:
    """At least 80 % are caught."""
    caught, total = judged(
        triton_fp4(chip, tiled) for chip in ("100a", "120a") for tiled in (False, True)
    )
    assert total > 140 and 5 * caught >= 4 * total

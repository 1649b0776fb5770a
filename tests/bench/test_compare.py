"""Comparison of two runs: on simulated samples, and (slow) on real ones.

The simulated machine is as bad as a shared one that was measured: its speed wanders by a factor of
three within a run and between runs, single samples are scattered by 20 % in wall time and 8 % in
processor time, some are up to twice as slow, each implementation feels all this in its own measure,
and equal code differs by half a percent from process to process.
"""

import dataclasses
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jax_fp4.cli.bench import compare, records
from jax_fp4.cli.bench.records import Measured
from support.bench_records import measured

RUNS = 40
SHAPES, PEERS, ROUNDS = 4, 6, 60


def simulated(
    seed: int, slowdown: float = 1.0, cpu_slowdown: float | None = None, process: float = 0.005
) -> list[Measured]:
    """A run: rows of ours and peers, ours slower by a factor."""
    random = np.random.default_rng(seed)
    level = random.uniform(0, math.log(3))  # of the whole run
    rows = []
    for shape in range(SHAPES):
        walk = np.clip(level + 0.15 * random.standard_normal(ROUNDS).cumsum(), 0, math.log(3))
        for peer in range(PEERS + 1):
            feels = 1.0 + 0.04 * math.sin(7 * peer + shape)  # a property of the code
            fixed = math.log(0.01 * (1 + peer)) + process * random.standard_normal()
            slow = random.exponential(0.5, ROUNDS) * (random.random(ROUNDS) < 0.1)
            wall = fixed + feels * walk + slow + 0.2 * random.standard_normal(ROUNDS)
            # Other programs take time from the wall; caches and clocks that they share, from both.
            cpu = fixed + 0.3 * feels * walk + 0.08 * random.standard_normal(ROUNDS)
            ours = peer == 0
            factor = slowdown if ours else 1.0
            cpu_factor = factor if cpu_slowdown is None or not ours else cpu_slowdown
            rows.append(
                measured(
                    "jax_fp4" if ours else f"peer {peer}",
                    factor * np.exp(wall),
                    cpu_factor * np.exp(cpu),
                    ours=ours,
                    shape=f"{shape}",
                )
            )
    return rows


def test_equal_code_is_reported_as_no_change() -> None:
    """All rows of a run, in at least 9 of 10 runs: machines three times as slow are no change."""
    clean = 0
    for seed in range(RUNS):
        changes = compare.compare(simulated(2 * seed), simulated(2 * seed + 1))
        assert len(changes) == SHAPES
        clean += all(change.verdict == "no change" for change in changes)
    assert clean >= 0.9 * RUNS


@pytest.mark.parametrize(("factor", "verdict"), [(1.1, "slower"), (1 / 1.1, "faster")])
def test_a_tenth_is_reported(factor: float, verdict: str) -> None:
    """A row that is 10 % slower or faster, in at least 9 of 10."""
    seen = 0
    for seed in range(RUNS):
        changes = compare.compare(simulated(2 * seed), simulated(2 * seed + 1, factor))
        seen += sum(change.verdict == verdict for change in changes)
    assert seen >= 0.9 * RUNS * SHAPES


def test_times_alone_would_not_do() -> None:
    """The twin of both: without peers, the same runs differ by tens of percents."""
    shifts = []
    for seed in range(RUNS):
        runs = [simulated(2 * seed), simulated(2 * seed + 1)]
        medians = [np.median(np.log(run[0].seconds)) for run in runs]
        shifts.append(abs(medians[1] - medians[0]))
    assert np.median(shifts) > 0.2


def test_lost_parallelism_is_seen_by_the_wall_clock() -> None:
    """Twice the wall time at the same processor time is slower."""
    for seed in range(RUNS // 4):
        changes = compare.compare(simulated(2 * seed), simulated(2 * seed + 1, 2.0, 1.0))
        assert {change.verdict for change in changes} == {"slower"}


def test_noise_that_peers_show_is_not_taken_for_a_change() -> None:
    """Where equal code differs by 10 % from process to process, 10 % is none, and it says so."""
    false, blind = 0, 0
    for seed in range(RUNS):
        changes = compare.compare(
            simulated(2 * seed, process=0.1), simulated(2 * seed + 1, process=0.1)
        )
        false += any(change.verdict != "no change" for change in changes)
        blind += all(change.resolution > 0.1 for change in changes)
        assert "too noisy" in compare.text(changes) or not blind
    assert false <= 0.1 * RUNS
    assert blind >= 0.9 * RUNS


def test_what_cannot_be_compared_says_why() -> None:
    """A row without a counterpart, with wrong results, or without peers."""
    run = simulated(0)
    renamed = [dataclasses.replace(row, shape="new") if row.shape == "0" else row for row in run]
    wrong = [dataclasses.replace(row, correct=row.shape != "1") for row in renamed]
    alone = [row for row in wrong if row.ours or row.shape != "2"]
    verdicts = [change.verdict for change in compare.compare(run, alone)]
    assert verdicts[:3] == ["not in the older run", "wrong results", "no peer to compare beside"]
    assert set(verdicts[3:]) == {"no change"}


@pytest.mark.parametrize(
    ("level", "freedom", "expected"),
    [(0.05, 2, 4.303), (0.05, 10, 2.228), (0.01, 5, 4.032), (0.002, 30, 3.385)],
)
def test_quantiles_of_students_t_are_those_of_the_tables(
    level: float, freedom: int, expected: float
) -> None:
    """Three digits, as printed tables have them."""
    assert compare.student_t(level, freedom) == pytest.approx(expected, rel=2e-3)


@pytest.mark.slow
def test_real_runs_of_equal_code_and_of_a_slower_one(tmp_path: Path) -> None:
    """On this machine: no change in 9 of 10 runs, and a tenth more work is seen in 9 of 10."""
    program = Path(__file__).parents[1] / "support" / "bench_pair.py"

    def run(number: int, factor: float) -> list[Measured]:
        path = tmp_path / f"{number}.jsonl"
        command = [sys.executable, str(program), str(factor), "100", str(path)]
        subprocess.run(command, check=True, env=dict(os.environ, OPENBLAS_NUM_THREADS="1"))
        return records.measured(records.read(path))

    equal = [run(number, 1.0) for number in range(11)]
    slower = [run(100 + number, 1.1) for number in range(10)]
    clean = [compare.compare(old, new) for old, new in itertools.pairwise(equal)]
    seen = [compare.compare(old, new) for old, new in zip(equal, slower, strict=False)]
    print("\n" + "\n".join(compare.text(changes) for changes in (*clean, *seen)))
    assert sum({c.verdict for c in changes} == {"no change"} for changes in clean) >= 9
    assert sum(changes[0].verdict == "slower" for changes in seen) >= 9

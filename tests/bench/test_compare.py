"""Comparison of two runs: on simulated samples, and (slow) on real ones.

The simulated machine is as bad as the shared ones that were measured: its speed wanders by a factor
of three within a run and between runs, each implementation feels that in its own measure, single
samples are up to twice as slow, and equal code differs by a percent from process to process.
"""

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jax_fp4.cli.bench import compare, records
from jax_fp4.cli.bench.records import Measured
from support.bench_records import measured

RUNS = 40
SHAPES, PEERS, ROUNDS = 6, 5, 25


def simulated(seed: int, slowdown: float = 1.0, process: float = 0.01) -> list[Measured]:
    """A run: rows of ours and peers, ours slower by a factor."""
    random = np.random.default_rng(seed)
    level = random.uniform(0, math.log(3))  # of the whole run
    rows = []
    for shape in range(SHAPES):
        walk = level + 0.15 * random.standard_normal(ROUNDS).cumsum()
        walk = np.clip(walk, 0, math.log(3))
        for peer in range(PEERS + 1):
            sensitivity = 1.0 + 0.05 * math.sin(7 * peer + shape)  # a property of the code
            noise = 0.05 * random.standard_normal(ROUNDS)
            noise += random.exponential(0.5, ROUNDS) * (random.random(ROUNDS) < 0.1)
            seconds = 0.01 * (1 + peer) * np.exp(sensitivity * walk + noise)
            seconds *= math.exp(process * random.standard_normal())
            ours = peer == 0
            rows.append(
                measured(
                    "jax_fp4" if ours else f"peer {peer}",
                    seconds * (slowdown if ours else 1.0),
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


def test_noise_that_peers_show_is_not_taken_for_a_change() -> None:
    """Where equal code differs by 10 % from process to process, 10 % is no change, and it says so."""
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

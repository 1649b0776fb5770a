"""Two runs: what is faster or slower beyond noise.

A machine that is shared runs everything two or three times as fast in one minute as in the next, so
times of two runs say nothing by themselves. What can be compared is how long ours takes beside the
peers that took turns with it; and since *their* code is the same in both runs, how much they seem
to change beside one another is the noise, measured rather than assumed.

For a peer p of a question with controls C (peers that are not ours, right in both runs), and for
wall time and processor time each:

    r[t]  = log seconds of p in round t, less a weighted sum of those of C without p in that round
    D     = trimmed mean of r in the new run, less that in the old run
    noise = sqrt(own^2 + between^2)
            own      standard error of D, from the scatter of r within the two runs
            between  what the D of all controls of all questions scatter beyond their own errors

The weights sum to one, so that a slower machine is no slower code. Ridge regression moves them from
1 / |C| each to those that follow p best from round to round within the runs: some code suffers from
a neighbour's use of memory and some from that of the multipliers, and p is best compared with what
is like it.

A change is reported where |D| > max(log(1 + `LEAST`), q noise) by either clock, with q from
Student's t for as many degrees of freedom as there are controls, or samples if those are fewer, at
a level of `LEVEL` for all rows and both clocks together: one in twenty reports on equal code has a
false line.

Processor time, of all threads of a call, is the sharper clock where other programs take turns on
the same cores, which stretches wall time by whole time slices. What only wall time shows is work
that no longer runs in parallel. On a GPU there is wall time only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from jax_fp4.cli.bench.records import Measured

LEAST = 0.02  # a smaller change is none, however small the noise
LEVEL = 0.05  # of any false report in a whole run
INTERESTING = 0.10  # a noise that would hide this much is worth a warning
# Of the weights, against squared logs of seconds: five rounds leave them where they were, a hundred
# in the scatter of a shared machine (0.1) move them freely.
_RIDGE = 0.1
_OUTLIER = 0.5  # a sample that is further from the middle counts as this far for the weights
_TRIM = 0.2  # of the samples at either end, which a neighbour may have stretched
_CLOCKS = ("seconds", "cpu_seconds")


_Rows = dict[str, Measured]  # of one question, by peer


@dataclasses.dataclass(frozen=True)
class Change:
    """A row of ours in both runs.

    Attributes:
        op: with the case.
        shape: the label.
        peer: the row of ours.
        speed: new over old, beside the peers.
        resolution: the smallest change that would have been reported, as a part.
        verdict: "faster", "slower", "no change", or why nothing can be said.
    """

    op: str
    shape: str
    peer: str
    speed: float
    resolution: float
    verdict: str


def student_t(level: float, freedom: int) -> float:
    """Two-sided quantile of Student's t: |t| is larger with probability ``level``."""

    def beyond(t: float) -> float:
        # Simpson's rule over the angle u: t = sqrt(f) tan u, density cos(u)^(f - 1) up to a factor.
        u = np.linspace(0.0, math.pi / 2, 4001)
        density = np.cos(u) ** (freedom - 1)
        weights = np.ones_like(u)
        weights[1:-1:2], weights[2:-1:2] = 4, 2
        inside = u <= math.atan(t / math.sqrt(freedom))
        return 1.0 - float(np.sum((weights * density)[inside]) / np.sum(weights * density))

    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle) > level else (low, middle)
    return high


@dataclasses.dataclass(frozen=True)
class _Shift:
    """D of a peer by one clock, and its own standard error."""

    value: float
    error: float
    freedom: int  # of the error


def _middle(x: np.ndarray) -> tuple[float, float]:
    """Trimmed mean of samples and its standard error (from winsorized samples: Tukey, Yuen)."""
    ordered = np.sort(x)
    cut = int(_TRIM * x.size)
    kept = ordered[cut : x.size - cut]
    winsorized = np.clip(ordered, kept[0], kept[-1])
    if x.size < 2:
        return float(kept.mean()), 0.0
    return float(kept.mean()), float(winsorized.std(ddof=1)) / ((1 - 2 * _TRIM) * x.size**0.5)


def _shift(clock: str, peer: str, controls: Sequence[str], runs: Sequence[_Rows]) -> _Shift:
    logs, centered = [], []
    for rows in runs:
        samples = [getattr(rows[name], clock) for name in (peer, *controls)]
        rounds = min(map(len, samples))  # the last one may be incomplete after Ctrl-C
        logs.append(np.log(np.maximum([row[:rounds] for row in samples], 1e-9)))
        away = logs[-1] - np.median(logs[-1], axis=1, keepdims=True)
        centered.append(np.clip(away, -_OUTLIER, _OUTLIER))
    ours, theirs = np.split(np.concatenate(centered, axis=1), [1])
    mean = theirs.mean(axis=0)
    apart = theirs - mean  # so that the weights still sum to one: a slower machine cancels
    gram = apart @ apart.T
    ridge = gram + _RIDGE * np.eye(len(controls))
    moves = np.linalg.solve(ridge, apart @ (ours[0] - mean))
    weights = 1 / len(controls) + moves - moves.mean()
    fitted = float(np.trace(np.linalg.solve(ridge, gram)))  # degrees of freedom that this took
    rounds = ours.size
    (old, old_error), (new, new_error) = (_middle(x[0] - weights @ x[1:]) for x in logs)
    inflation = math.sqrt(rounds / max(rounds - fitted - 1, 1))
    kept = sum(x.shape[1] - 2 * int(_TRIM * x.shape[1]) for x in logs)
    error = inflation * math.hypot(old_error, new_error)
    return _Shift(new - old, error, max(kept - 2, 1))


def compare(old: Sequence[Measured], new: Sequence[Measured]) -> list[Change]:
    """How every row of ours has changed.

    Args:
        old: the older run's rows.
        new: the newer one's.

    Returns:
        A change for each row of ours of the new run, in its order.
    """
    before, after = _by_question(old), _by_question(new)
    shifts: list[tuple[Measured, dict[str, _Shift] | str]] = []
    controls_shifts: dict[str, list[_Shift]] = {clock: [] for clock in _CLOCKS}
    for question, rows in after.items():
        earlier = before.get(question, {})
        runs = (earlier, rows)
        clocks = _CLOCKS if question[-1] else _CLOCKS[:1]
        right = [p for p in rows if p in earlier and rows[p].correct and earlier[p].correct]
        controls = [peer for peer in right if not rows[peer].ours]
        for clock in clocks if len(controls) > 2 else ():
            for peer in controls:
                others = [other for other in controls if other != peer]
                controls_shifts[clock].append(_shift(clock, peer, others, runs))
        for peer, row in rows.items():
            if not row.ours:
                continue
            if peer not in earlier:
                shifts.append((row, "not in the older run"))
            elif peer not in right:
                shifts.append((row, "wrong results"))
            elif not controls:
                shifts.append((row, "no peer to compare beside"))
            else:
                found = {clock: _shift(clock, peer, controls, runs) for clock in clocks}
                shifts.append((row, found))
    between = {clock: _between(found) for clock, found in controls_shifts.items()}
    tests = sum(len(found) for _, found in shifts if isinstance(found, dict))
    level = LEVEL / max(tests, 1)
    controls_found = max(2, *map(len, controls_shifts.values()))
    quantile = functools.cache(lambda freedom: student_t(level, min(freedom, controls_found)))
    return [_change(row, found, between, quantile) for row, found in shifts]


def _by_question(rows: Sequence[Measured]) -> dict[tuple[str, str, str, int], _Rows]:
    found: dict[tuple[str, str, str, int], _Rows] = {}
    for row in rows:
        found.setdefault(row.question, {})[row.peer] = row
    return found


def _between(shifts: Sequence[_Shift]) -> float:
    """Standard deviation of what equal code seems to change by, beyond the errors of each."""
    if not shifts:
        return 0.0
    total = statistics.fmean(shift.value**2 for shift in shifts)
    return math.sqrt(max(0.0, total - statistics.fmean(shift.error**2 for shift in shifts)))


def _change(
    row: Measured,
    found: dict[str, _Shift] | str,
    between: dict[str, float],
    quantile: Callable[[int], float],
) -> Change:
    op = f"{row.op}, {row.case}" if row.case else row.op
    if isinstance(found, str):
        return Change(op, row.shape, row.peer, math.nan, math.nan, found)
    least = {
        clock: max(
            math.log1p(LEAST), quantile(shift.freedom) * math.hypot(shift.error, between[clock])
        )
        for clock, shift in found.items()
    }
    # The clock that shows a change most clearly, or else the sharper one.
    clearest = max(found, key=lambda clock: abs(found[clock].value) / least[clock])
    changed = abs(found[clearest].value) > least[clearest]
    clock = clearest if changed else min(least, key=lambda clock: least[clock])
    verdict = "no change"
    if changed:
        verdict = "slower" if found[clock].value > 0 else "faster"
    speed = math.exp(-found[clock].value)
    return Change(op, row.shape, row.peer, speed, math.expm1(least[clock]), verdict)


def text(changes: Sequence[Change]) -> str:
    """One line for each row."""
    lines = []
    for c in changes:
        name = f"{c.op} {c.shape}: {c.peer}"
        if math.isnan(c.speed):
            lines.append(f"  {name:72} {c.verdict}")
            continue
        blind = c.verdict == "no change" and c.resolution > INTERESTING
        note = "; too noisy to see 10 %: more --rounds" if blind else ""
        lines.append(
            f"  {name:72} {c.verdict:10} {c.speed:6.3f}x, resolution {c.resolution:.1%}{note}"
        )
    changed = sum(c.verdict in ("faster", "slower") for c in changes)
    return "\n".join([*lines, f"  {changed} of {len(changes)} rows changed beyond noise"])

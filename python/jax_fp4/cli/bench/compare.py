"""Two runs: what is faster or slower beyond noise.

A machine that is shared runs everything two or three times as fast in one minute as in the next, so
times of two runs say nothing by themselves. What can be compared is how long ours takes beside the
peers that took turns with it; and since *their* code is the same in both runs, how much they seem
to change beside one another is the noise, measured rather than assumed.

For a peer p of a question with controls C (peers that are not ours, right in both runs):

    r[t]  = log seconds of p in round t, less the mean of those of C without p in that round
    D     = median of r, new run, less the median of r, old run
    noise = sqrt(own^2 + between^2)
            own      standard error of D, from the scatter of r within the two runs
            between  what the D of all controls of all questions scatter beyond their own errors

A change is reported where |D| > max(`LEAST`, q noise), with q from Student's t for as many degrees
of freedom as there are controls, at a level of `LEVEL` for all rows together: one in twenty reports
on equal code has a false line.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np

from jax_fp4.cli.bench.records import Measured

LEAST = 0.02  # a smaller change is none, however small the noise
LEVEL = 0.05  # of any false report in a whole run
INTERESTING = 0.10  # a noise that would hide this much is worth a warning
# Median over mean, as estimators of the middle of normal samples.
_MEDIAN_ERROR = math.sqrt(math.pi / 2)


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
    """D of a peer, and its own standard error."""

    value: float
    error: float


def _logs(rows: dict[str, Measured], peers: Sequence[str]) -> np.ndarray:
    """Log seconds [peers, rounds] of the rounds that all of them have."""
    rounds = min(len(rows[peer].seconds) for peer in peers)
    return np.log(np.array([rows[peer].seconds[:rounds] for peer in peers]))


def _shift(
    peer: str, controls: Sequence[str], old: dict[str, Measured], new: dict[str, Measured]
) -> _Shift:
    medians, errors = [], []
    for rows in (old, new):
        logs = _logs(rows, [peer, *controls])
        relative = logs[0] - logs[1:].mean(axis=0)
        medians.append(float(np.median(relative)))
        spread = float(np.median(np.abs(relative - medians[-1]))) * 1.4826
        errors.append(_MEDIAN_ERROR * spread / math.sqrt(relative.size))
    return _Shift(medians[1] - medians[0], math.hypot(*errors))


def compare(old: Sequence[Measured], new: Sequence[Measured]) -> list[Change]:
    """How every row of ours that is in both runs has changed.

    Args:
        old: the older run's rows.
        new: the newer one's.

    Returns:
        A change for each row of ours of the new run, in its order.
    """
    before: dict[tuple[str, str, str, int], dict[str, Measured]] = {}
    after: dict[tuple[str, str, str, int], dict[str, Measured]] = {}
    for rows, found in ((old, before), (new, after)):
        for row in rows:
            found.setdefault(row.question, {})[row.peer] = row
    shifts: list[tuple[Measured, _Shift | str]] = []
    control_shifts: list[_Shift] = []
    for question, rows in after.items():
        earlier = before.get(question, {})
        common = [p for p, row in rows.items() if p in earlier and row.correct and earlier[p].correct]
        controls = [peer for peer in common if not rows[peer].ours]
        if len(controls) > 2:
            for peer in controls:
                others = [other for other in controls if other != peer]
                control_shifts.append(_shift(peer, others, earlier, rows))
        for peer, row in rows.items():
            if not row.ours:
                continue
            if peer not in earlier:
                shifts.append((row, "not in the older run"))
            elif peer not in common:
                shifts.append((row, "wrong results"))
            elif not controls:
                shifts.append((row, "no peer to compare beside"))
            else:
                shifts.append((row, _shift(peer, controls, earlier, rows)))
    between = _between(control_shifts)
    tests = sum(isinstance(shift, _Shift) for _, shift in shifts)
    quantile = student_t(LEVEL / max(tests, 1), max(len(control_shifts), 2))
    return [_change(row, shift, between, quantile) for row, shift in shifts]


def _between(shifts: Sequence[_Shift]) -> float:
    """Standard deviation of what equal code seems to change by, beyond the errors of each."""
    if not shifts:
        return 0.0
    total = statistics.fmean(shift.value**2 for shift in shifts)
    return math.sqrt(max(0.0, total - statistics.fmean(shift.error**2 for shift in shifts)))


def _change(row: Measured, shift: _Shift | str, between: float, quantile: float) -> Change:
    op = f"{row.op}, {row.case}" if row.case else row.op
    if isinstance(shift, str):
        return Change(op, row.shape, row.peer, math.nan, math.nan, shift)
    least = max(math.log1p(LEAST), quantile * math.hypot(shift.error, between))
    verdict = "no change"
    if abs(shift.value) > least:
        verdict = "slower" if shift.value > 0 else "faster"
    return Change(op, row.shape, row.peer, math.exp(-shift.value), math.expm1(least), verdict)


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

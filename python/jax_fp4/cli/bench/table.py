"""The tables, as text. One has measured figures, the other modelled ones, and they never meet."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import TypeVar

from jax_fp4.cli.bench.records import Measured, Modelled, Skipped

_Row = TypeVar("_Row")


def only(kind: type[_Row], rows: Iterable[_Row]) -> list[_Row]:
    """The rows.

    Raises:
        TypeError: if one of them is of another kind: `Modelled` among `Measured`, or the reverse.
    """
    rows = list(rows)
    for row in rows:
        if not isinstance(row, kind):
            column = kind.__name__.lower()
            raise TypeError(f"a {column} column was given {type(row).__name__}: {row}")
    return rows


def ratio(ours: Measured, peer: Measured) -> float | None:
    """How many times as fast ours is: the median over rounds, in each of which both ran."""
    if peer.key == ours.key or not (ours.correct and peer.correct):
        return None
    pairs = zip(ours.seconds, peer.seconds, strict=False)
    return statistics.median(theirs / mine for mine, theirs in pairs)


def cells(row: Measured, first: Measured) -> list[str]:
    """Median, best, spread, roofline, ratio and verdict; no figure for a wrong result."""
    if not row.correct:
        return ["-", "-", "-", "-", "-", row.verdict]
    times = ratio(first, row)
    return [
        f"{row.rate:.4g}",
        f"{row.best:.4g}",
        f"{row.spread:.0%}",
        f"{row.roofline:.1%}",
        "" if times is None else f"{times:.2f}x",
        row.verdict,
    ]


HEADINGS = ("median", "best", "spread", "roofline", "ours/peer", "results of the timed calls")


def ceilings(rows: Sequence[Measured]) -> str:
    """What the probes found while these rows were measured."""
    matmul = statistics.median(x for row in rows for x in row.matmul_flops)
    copy = statistics.median(x for row in rows for x in row.copy_bytes)
    return f"ceilings: matmul {matmul / 1e9:.3g} GFLOP/s, copy {copy / 1e9:.3g} GB/s"


def questions(rows: Iterable[Measured]) -> list[list[Measured]]:
    """Rows that answer the same question, together, ours first."""
    rows = only(Measured, rows)
    order = {question: i for i, question in enumerate(dict.fromkeys(r.question for r in rows))}
    rows = sorted(rows, key=lambda row: (order[row.question], not row.ours))
    return [list(group) for _, group in itertools.groupby(rows, lambda row: row.question)]


def title(row: Measured) -> str:
    """Of the table with this row."""
    where = f"{row.cores} core{'s' if row.cores > 1 else ''}" if row.cores else "GPU"
    return f"{row.op} {row.shape}{', ' * bool(row.case)}{row.case}, {where}, {row.unit}"


def text(rows: Iterable[Measured]) -> str:
    """A table for each question."""
    lines = []
    for group in questions(rows):
        lines.append(f"\n{title(group[0])}   [{ceilings(group)}]")
        lines.append(f"  {'':28}" + "".join(f"{h:>10}" for h in HEADINGS[:5]) + f"  {HEADINGS[5]}")
        for row in group:
            *figures, verdict = cells(row, group[0])
            lines.append(f"  {row.peer:28}" + "".join(f"{c:>10}" for c in figures) + f"  {verdict}")
    return "\n".join(lines)


def skipped_text(rows: Iterable[Skipped]) -> str:
    """One line for each peer and reason, with how many rows it concerns."""
    counts: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        counts.setdefault((row.peer, row.reason), []).append(f"{row.op} {row.shape}".strip())
    lines = []
    for (peer, reason), where in counts.items():
        place = where[0] if len(where) == 1 else f"{len(where)} rows"
        lines.append(f"  {peer}: {reason} ({place})")
    return "\n".join(lines)


MODELLED_HEADINGS = (
    "modelled us", "modelled TFLOP/s", "modelled tensor busy", "modelled DRAM MB", "instructions",
)  # fmt: skip


def modelled_cells(row: Modelled) -> list[str]:
    """Time, rate, use of the tensor cores, traffic; and the counted warp instructions."""
    rate = row.modelled_flops / row.modelled_seconds / 1e12
    return [
        f"{row.modelled_seconds * 1e6:.1f}",
        f"{rate:.0f}" if row.modelled_flops else "",
        f"{row.tensor_busy:.0%}" if row.modelled_flops else "",
        f"{row.dram_bytes / 1e6:.0f}",
        f"{row.instructions:,}",
    ]


def modelled_text(rows: Sequence[Modelled]) -> str:
    """The table of modelled figures, which says so in every heading."""
    rows = only(Modelled, rows)
    lines = ["\nModelled by the PTX machine, measured by nobody"]
    lines.append(f"  {'':58}" + "".join(f"{h:>22}" for h in MODELLED_HEADINGS))
    for row in rows:
        name = f"{row.op} {row.shape} on {row.chip}: {row.kernel}"
        lines.append(f"  {name:58}" + "".join(f"{cell:>22}" for cell in modelled_cells(row)))
        if row.note:
            lines.append(f"    {row.note}")
    return "\n".join(lines)

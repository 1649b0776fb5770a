"""Plots of measured figures. They take `Measured` records and nothing else."""

from __future__ import annotations

import io
from collections.abc import Sequence

from jax_fp4.cli.bench import table
from jax_fp4.cli.bench.records import Measured

_OURS, _OTHERS, _LINE = "#76b900", "#a9aeb6", "#222222"
_ROW_INCHES, _TITLE_INCHES = 0.26, 0.62


def _panel(axis: object, group: Sequence[Measured]) -> None:
    """Bars of one question: medians, with a line from the slowest to the fastest quarter."""
    import statistics
    from typing import Any

    axes: Any = axis
    right = [row for row in group if row.correct]
    positions = range(len(right))
    rates = [row.rate for row in right]
    axes.barh(positions, rates, color=[_OURS if row.ours else _OTHERS for row in right], height=0.7)
    ends = list(rates)
    for position, row in enumerate(right):
        if len(row.seconds) > 1:
            low, _, high = statistics.quantiles(row.seconds, n=4, method="inclusive")
            ends[position] = row.work / low
            axes.plot([row.work / high, ends[position]], [position] * 2, color=_LINE, linewidth=1.2)
        note = f"  {row.rate:.3g}  ({row.roofline:.0%} of the ceiling)"
        axes.text(ends[position], position, note, va="center", fontsize=7)
    axes.set_yticks(positions, [row.peer for row in right], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(ends, default=1.0))
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title(table.title(group[0]), fontsize=8, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def by_op(rows: Sequence[Measured]) -> dict[str, bytes]:
    """A PNG for each operation: one panel for each question."""
    return {op: _figure(groups, "png") for op, groups in _groups(rows).items()}


def svg_by_op(rows: Sequence[Measured]) -> dict[str, str]:
    """The same as SVG elements, to stand in a page."""
    pictures = {}
    for op, groups in _groups(rows).items():
        text = _figure(groups, "svg").decode()
        pictures[op] = text[text.index("<svg") :]
    return pictures


def _groups(rows: Sequence[Measured]) -> dict[str, list[list[Measured]]]:
    groups: dict[str, list[list[Measured]]] = {}
    for group in table.questions(rows):
        groups.setdefault(group[0].op, []).append(group)
    return groups


def _figure(groups: list[list[Measured]], format: str) -> bytes:
    # Here, so that a run without a report needs no matplotlib.
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    heights = [_TITLE_INCHES + _ROW_INCHES * len(group) for group in groups]
    with matplotlib.rc_context({"svg.hashsalt": "jax_fp4", "svg.fonttype": "none"}):
        figure, axes = pyplot.subplots(
            len(groups), 1, figsize=(9, sum(heights)), squeeze=False, layout="constrained",
            height_ratios=heights,
        )  # fmt: skip
        for axis, group in zip(axes[:, 0], groups, strict=True):
            _panel(axis, group)
        buffer = io.BytesIO()
        metadata = {"Date": None} if format == "svg" else None
        figure.savefig(buffer, format=format, dpi=130, metadata=metadata)
        pyplot.close(figure)
    return buffer.getvalue()

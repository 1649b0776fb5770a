"""The report: one HTML file that needs nothing else, and the plots as PNG beside it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from jax_fp4.cli.bench import plots, table
from jax_fp4.cli.bench.records import Conditions, Measured, Modelled, Record, Skipped

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1d2329; max-width: 92rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: 12px; width: 100%; }
th, td { text-align: left; padding: .28rem .45rem; border-bottom: 1px solid #e3e6ea; }
table.sortable td:not(:last-child) { white-space: nowrap; }
th { background: #f4f6f8; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
table.sortable th { cursor: pointer; position: sticky; top: 0; white-space: nowrap; }
table.sortable th::after { content: " \\2195"; color: #9aa3ad; }
tr.ours td { background: #f1f8e2; } tr.wrong td { background: #fde7e5; color: #a1281b; }
svg { max-width: 100%; height: auto; } .note { color: #5d6770; }
#modelled { background: #fff8e6; padding: .1rem 1rem 1rem; border: 1px solid #ecd9a0; }
"""

# Sorts by the column that is clicked: numbers by value, anything else by text; a second click
# turns it round.
_SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("th").forEach((head, column) => head.addEventListener("click", () => {
    const down = head.dataset.down === "1" ? -1 : 1;
    head.dataset.down = down === 1 ? "1" : "";
    const key = row => {
      const text = row.cells[column].textContent;
      const number = parseFloat(text);
      return Number.isNaN(number) ? text : number;
    };
    const order = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
      return down * (x < y ? -1 : x > y ? 1 : 0);
    };
    const body = table.tBodies[0];
    [...body.rows].sort(order).forEach(row => body.appendChild(row));
  }));
}
"""


def _cells(cells: Sequence[str], numbers: int) -> str:
    """<td>s, the first ``numbers`` of which are numbers."""
    return "".join(
        f'<td class="number">{escape(cell)}</td>' if i < numbers else f"<td>{escape(cell)}</td>"
        for i, cell in enumerate(cells)
    )


def _heads(heads: Sequence[str]) -> str:
    return "<thead><tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr></thead>"


def measured_table(rows: Sequence[Measured]) -> str:
    """All measured rows in one sortable table."""
    heads = ("operation", "shape", "cores", "implementation", "unit", *table.HEADINGS)
    lines = []
    for group in table.questions(rows):
        for row in group:
            kind = "wrong" if not row.correct else "ours" if row.ours else ""
            op = f"{row.op}, {row.case}" if row.case else row.op
            texts = (op, row.shape, str(row.cores or "GPU"), row.peer, row.unit)
            figures = table.cells(row, group[0])
            lines.append(
                f'<tr class="{kind}">{_cells(texts, 0)}{_cells(figures, len(figures) - 1)}</tr>'
            )
    return (
        f'<table class="sortable" id="measured">{_heads(heads)}<tbody>{"".join(lines)}'
        "</tbody></table>"
    )


def modelled_table(rows: Sequence[Modelled]) -> str:
    """The rows that a model computed, in a table of their own."""
    heads = ("operation", "shape", "chip", "kernel", *table.MODELLED_HEADINGS, "note")
    lines = [
        f"<tr>{_cells((row.op, row.shape, row.chip, row.kernel), 0)}"
        f"{_cells(table.modelled_cells(row), 5)}<td>{escape(row.note)}</td></tr>"
        for row in table.only(Modelled, rows)
    ]
    return f"<table>{_heads(heads)}<tbody>{''.join(lines)}</tbody></table>"


def _compared(changes: Sequence[Any]) -> str:
    heads = ("operation", "shape", "implementation", "verdict", "speed, new / old", "resolution")
    lines = []
    for c in changes:
        figures = (f"{c.speed:.3f}", f"{c.resolution:.1%}") if c.speed > 0 else ("", "")  # or NaN
        texts = (c.op, c.shape, c.peer, c.verdict)
        lines.append(f"<tr>{_cells(texts, 0)}{_cells(figures, 2)}</tr>")
    return (
        f'<h2>Against the older run</h2><table class="sortable" id="compared">{_heads(heads)}'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def page(records: Sequence[Record], changes: Sequence[Any] | None = None) -> str:
    """The report as one HTML document without references to anything outside."""
    rows = [record for record in records if isinstance(record, Measured)]
    modelled = [record for record in records if isinstance(record, Modelled)]
    skipped = [record for record in records if isinstance(record, Skipped)]
    parts = [
        "<h1>jax_fp4 bench</h1>",
        '<p class="note">Medians of single calls; peers took turns, every call had new inputs, and '
        "every result was checked. Roofline: the least time that both probes of the same minutes "
        "allow, over the median. A click on a heading sorts.</p>",
    ]
    wrong = [row for row in rows if not row.correct]
    if wrong:
        parts.append(f"<p><strong>{len(wrong)} rows have wrong results and no figure.</strong></p>")
    if rows:
        parts += ["<h2>Measured</h2>", measured_table(rows)]
    if changes is not None:
        parts.append(_compared(changes))
    if rows:
        parts.append("<h2>Plots</h2>")
        parts += [f"<h3>{escape(op)}</h3>{svg}" for op, svg in plots.svg_by_op(rows).items()]
    if modelled:
        parts.append(
            '<section id="modelled"><h2>Modelled, measured by nobody</h2><p>Counts and cycle model '
            f"of the PTX machine (docs/simulator.md).</p>{modelled_table(modelled)}</section>"
        )
    if skipped:
        lines = "".join(
            f"<li>{escape(line.strip())}</li>" for line in table.skipped_text(skipped).splitlines()
        )
        parts.append(f"<h2>Not run</h2><ul>{lines}</ul>")
    facts = "".join(
        f"<tr><th>{escape(topic)}</th><td>{escape(str(value))}</td></tr>"
        for record in records
        if isinstance(record, Conditions)
        for topic, value in record.values.items()
    )
    parts.append(f'<h2>Conditions</h2><table id="conditions"><tbody>{facts}</tbody></table>')
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>jax_fp4 bench</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}<script>{_SCRIPT}</script>"
        "</body></html>\n"
    )


def write(folder: Path, records: Sequence[Record], changes: Sequence[Any] | None = None) -> Path:
    """Writes report.html and a PNG for each operation.

    Returns:
        The page's path.
    """
    rows = [record for record in records if isinstance(record, Measured)]
    for op, picture in plots.by_op(rows).items():
        (folder / f"{op}.png").write_bytes(picture)
    if rows:
        (folder / "table.txt").write_text(table.text(rows).lstrip() + "\n")
    path = folder / "report.html"
    path.write_text(page(records, changes))
    return path

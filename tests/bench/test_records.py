"""What is kept of a run, and that modelled figures never stand among measured ones."""

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import pytest

from jax_fp4.cli.bench import html, plots, records, shapes, table
from jax_fp4.cli.bench.records import Conditions, Measured, Modelled, Record, Skipped
from support.bench_records import measured, modelled

ROWS = [
    measured("jax_fp4 NVFP4", [0.010, 0.012, 0.011], ours=True),
    measured("theirs <b>", [0.020, 0.022, 0.026]),
    measured("cheating", [0.001, 0.001, 0.001], correct=False),
]
OTHERS = [
    Conditions({"processor": "one & only"}),
    Skipped("gemm", "", "64x256x512", "absent", "not installed"),
    modelled(),
]


def test_records_survive_a_file(tmp_path: Path) -> None:
    """Line by line, every field of every kind."""
    path = tmp_path / "results.jsonl"
    every: list[Record] = [*ROWS, *OTHERS]
    path.write_text("".join(records.to_line(record) + "\n" for record in every))
    assert records.read(path) == every
    assert records.measured(records.read(path)) == ROWS


@pytest.mark.parametrize("line", ["", "{}", "[1]", '{"kind": "guessed"}', "not JSON"])
def test_a_line_that_is_no_record_is_named(line: str, tmp_path: Path) -> None:
    """By its number, with what it says."""
    path = tmp_path / "results.jsonl"
    path.write_text(records.to_line(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        records.read(path)


def test_modelled_and_measured_figures_have_no_field_in_common() -> None:
    """Other than what names the row; a record of one kind cannot be read as the other."""
    names = [{field.name for field in dataclasses.fields(cls)} for cls in (Measured, Modelled)]
    assert names[0] & names[1] == {"op", "shape"}
    for record, other in ((ROWS[0], "modelled"), (OTHERS[2], "measured")):
        fields = json.loads(records.to_line(record)) | {"kind": other}
        with pytest.raises(ValueError, match="no record"):
            records.from_line(json.dumps(fields))


def test_no_measured_column_takes_a_modelled_figure() -> None:
    """Text, page and plots refuse it, and so does the other way round."""
    wrong = cast(Any, [ROWS[0], modelled()])
    for show in (table.text, html.measured_table, plots.by_op):
        with pytest.raises(TypeError, match="measured column was given Modelled"):
            show(wrong)
    with pytest.raises(TypeError, match="modelled column was given Measured"):
        table.modelled_text(wrong)


def test_a_wrong_result_has_no_figure() -> None:
    """Neither rate nor ratio, in the table and in the page."""
    lines = [line for line in table.text(ROWS).splitlines() if "cheating" in line]
    assert len(lines) == 1
    assert lines[0].split()[1:6] == ["-"] * 5
    assert "WRONG" in lines[0]


def test_statistics_of_a_row_are_those_of_its_samples() -> None:
    """Medians, and ratios within the rounds: here exactly 2, 22/12 and 26/11."""
    assert ROWS[0].median_seconds == 0.011
    assert ROWS[0].rate == pytest.approx(ROWS[0].work / 0.011)
    assert ROWS[0].best == pytest.approx(ROWS[0].work / 0.010)
    # The matmul probe allows flops / 1e11 s, the copy probe 1e5 / 1e10 s, which is less.
    assert ROWS[0].bound == "matmul"
    assert ROWS[0].roofline == pytest.approx(2 * 64 * 256 * 512 / 1e11 / 0.011)
    assert table.ratio(ROWS[0], ROWS[1]) == pytest.approx(2.0)
    assert table.ratio(ROWS[0], ROWS[2]) is None


class _Page(HTMLParser):
    """Collects what the tests ask for; checks that elements are closed in order."""

    VOID = frozenset({"meta", "br", "path", "use", "img", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.outside: list[str] = []
        self.svgs = 0
        self.scripts = 0
        self._table: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        for name in ("src", "href", "xlink:href"):
            if not (values.get(name) or "#").startswith(("#", "data:")):
                self.outside.append(f"{tag} {name}")
        if tag not in self.VOID:
            self.open.append(tag)
        self.svgs += tag == "svg"
        self.scripts += tag == "script"
        if tag == "table":
            self._table = values.get("id") or "other"
            self.tables[self._table] = []
        if tag == "tr" and self._table:
            self.tables[self._table].append([])

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag
        if tag == "table":
            self._table = None

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        if self._table and self.open[-1] in ("td", "th"):
            self.tables[self._table][-1].append(data)


def test_the_report_is_one_file_with_every_row(tmp_path: Path) -> None:
    """Nothing outside is referred to; what comes in is escaped; modelled rows stand apart."""
    path = html.write(tmp_path, [*ROWS, *OTHERS])
    page = _Page()
    page.feed(path.read_text())
    assert page.open == []
    assert page.outside == []
    assert page.svgs == 1
    assert page.scripts == 1
    head, *rows = page.tables["measured"]
    assert [row[3] for row in rows] == ["jax_fp4 NVFP4", "theirs <b>", "cheating"]
    assert head[:5] == ["operation", "shape", "cores", "implementation", "unit"]
    assert {len(row) for row in rows} <= {len(head), len(head) - 1}  # ours has no ratio
    assert not any("123.0" in cell for row in rows for cell in row)
    assert ["123.0" in row for row in page.tables["other"]] == [False, True]
    assert ["processor", "one & only"] in page.tables["conditions"]
    assert (tmp_path / "gemm.png").read_bytes().startswith(b"\x89PNG")
    assert "jax_fp4 NVFP4" in (tmp_path / "table.txt").read_text()


def test_shapes_are_named_by_set_layer_or_numbers() -> None:
    """M is cut to the tokens asked for, and the label says so."""
    found = shapes.products("llama3-8b/out, 3x5x7,decode/8b_out,llama3-8b/out", tokens=64)
    assert [(p.m, p.n, p.k) for p in found] == [(64, 4096, 4096), (3, 5, 7), (1, 4096, 4096)]
    assert [p.label for p in found] == [
        "llama3-8b/out 64x4096x4096, M of 8192",
        "3x5x7",
        "decode/8b_out 1x4096x4096",
    ]
    assert shapes.products("llama3-70b", 8192)[3].label == "llama3-70b/down 8192x8192x28672"
    assert [b.label for b in shapes.blocks("small,64x128x4", 32)] == [
        "small 1024x4096, 32 tokens of 8192",
        "64x128, 32 tokens of 8192",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llama9", "expected one of llama3-8b"),
        ("llama3-8b/gate", "a layer of llama3-8b: qkv, out, gate_up, down"),
        ("1x0x3", "at least 1"),
    ],
)
def test_a_shape_that_is_none_is_refused(text: str, message: str) -> None:
    """With what there is."""
    with pytest.raises(ValueError, match=message):
        shapes.products(text, 64)


@pytest.mark.parametrize("text", ["decode", "64x128x3", "0x1x1"])
def test_a_block_that_is_none_is_refused(text: str) -> None:
    """A set that is no dense model, or a width that heads do not divide."""
    with pytest.raises(ValueError, match="--shapes: expected"):
        shapes.blocks(text, 64)

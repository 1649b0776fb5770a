"""docs/bugs.md names at least one test for each fault, and only tests that exist."""

import ast
import re
from pathlib import Path

import pytest

from support.repository import ROOT

TABLE = ROOT / "docs" / "bugs.md"
_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
_REPORT = re.compile(r"[\w.-]+/[\w.-]+#\d+")


def rows(text: str) -> list[list[str]]:
    """Cells of every body row of every table."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if not set(row[0]) <= set("-: ") and row[0] != "Public report"]


def problems(text: str, tests: Path) -> list[str]:
    """One line for each row that names no report or no test, or a test that does not exist."""
    found: list[str] = []
    for row in rows(text):
        report, _, answer = row
        if not _REPORT.search(report):
            found.append(f"{report}: no public report")
        named = _TEST.findall(answer)
        if not named:
            found.append(f"{report}: names no test")
        for file, function in named:
            path = tests / file
            tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
            names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            if function not in names:
                found.append(f"{report}: no test {file}::{function}")
    return found


def test_every_named_test_exists() -> None:
    """Renaming or removing a test of the table fails here."""
    assert problems(TABLE.read_text(), ROOT / "tests") == []
    assert len(rows(TABLE.read_text())) == 61


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("| a/b#1 | x | `meta/test_bug_table.py::test_gone` |", "no test"),
        ("| a/b#1 | x | `meta/test_gone.py::test_gone` |", "no test"),
        ("| a/b#1 | x | later |", "names no test"),
        ("| somewhere | x | `meta/test_bug_table.py::problems` |", "no public report"),
    ],
)
def test_table_check_detects_planted_rows(row: str, message: str) -> None:
    """Each kind of hole in the table is reported."""
    text = f"| Public report | Class | Tests |\n|---|---|---|\n{row}\n"
    (problem,) = problems(text, ROOT / "tests")
    assert message in problem

"""The Python snippets of the documentation run, in the order of their page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.repository import ROOT

PAGES = ["dot_family.md", "flax.md", "index.md", "inference.md", "qwix.md", "sharding.md"]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def snippets(text: str) -> list[str]:
    """Every fenced Python block, behind as many empty lines as make its line numbers right."""
    return ["\n" * text[: m.start(1)].count("\n") + m[1] for m in _BLOCK.finditer(text)]


def run(page: Path) -> int:
    """Runs the snippets of a page in one namespace; how many there were."""
    found = snippets(page.read_text())
    namespace: dict[str, object] = {}
    for snippet in found:
        exec(compile(snippet, str(page), "exec"), namespace)
    return len(found)


# Qwix 0.1.8 uses a name that newer releases of Flax have deprecated.
@pytest.mark.filterwarnings("ignore:'VariableState' was removed:DeprecationWarning")
@pytest.mark.parametrize("page", PAGES)
def test_the_snippets_of_a_page_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing fails; a table that a snippet prints is the one that the page shows."""
    path = ROOT / "docs" / page
    assert run(path) > 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    shown = path.read_text().splitlines()
    assert [line for line in printed if line not in shown] == []


def test_a_wrong_snippet_is_noticed(tmp_path: Path) -> None:
    """An assertion that fails in a page fails here, with the page's line."""
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run(page)
    assert caught.traceback[-1].lineno == 9

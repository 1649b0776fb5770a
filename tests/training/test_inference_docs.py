"""docs/inference.md: every command and every program on it runs, in its order."""

import re
from pathlib import Path

import pytest

from jax_fp4.cli import main, transformer
from support.repository import ROOT

PAGE = (ROOT / "docs" / "inference.md").read_text()
SIZE = transformer.Size(32, 1, 64, 2, context=128, batch=2, learning_rate=1e-2)


def test_every_command_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a user types them, with a smaller model in the place of the demo's."""
    monkeypatch.setitem(transformer.SIZES, "tiny", SIZE)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [line.split() for line in lines]
    assert len(commands) == 6
    for words in commands:
        assert words[:4] == ["$", "python", "-m", "jax_fp4"]
        assert main(words[4:]) == 0, words
    printed = capsys.readouterr().out
    assert printed.count("tokens/s, CPU level") == 2 and printed.count("perplexity ") == 2
    assert "activations static" in printed

"""Nothing in the project points at the machine it was written on."""

import re
from pathlib import Path

import pytest

from support.repository import ROOT, source_files

# Absolute paths of some machine, hosts of package registries (clients know them), and settings of
# an index. Written with [x] for x, so that this file does not contain what it looks for.
FOREIGN = re.compile(
    r"(?<![\w.~}])/(?:[h]ome|[r]oot|[w]ork|[t]mp|[U]sers|[m]nt|[v]ar/folders)/\w"
    r"|[i]ndex-url|[I]NDEX_URL|[t]rusted-host"
    r"|https?://(?:[l]ocalhost|127\.|10\.|192\.168\.)"
    r"|[p]ypi\.org|[p]ythonhosted\.org|[n]pmjs\.|[d]ebian\.org"
)


def foreign_lines(root: Path) -> list[str]:
    """One line, with file and line number, for every foreign name."""
    return [
        f"{path.relative_to(root).as_posix()}:{number}: {line.strip()}"
        for path in source_files(root)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if FOREIGN.search(line)
    ]


def test_no_machine_paths_or_package_hosts() -> None:
    """No file names an absolute path of a machine, or a package registry's host or index."""
    assert foreign_lines(ROOT) == []


@pytest.mark.parametrize(
    "line",
    [
        "cd /" + "home/someone/jax-fp4",
        "include('/" + "work/shared/facts.md')",
        'out = "/' + 'tmp/out.json"',
        "pip install --index" + "-url https://pypi.example/simple jax-fp4",
        "see http://" + "localhost:8080/docs",
        "see https://" + "pypi" + ".org/project/jax-fp4",
    ],
)
def test_foreign_name_check_detects_planted_lines(tmp_path: Path, line: str) -> None:
    """Each kind of foreign name is found; relative paths and public addresses are not."""
    readme = tmp_path / "README.md"
    readme.write_text("see docs/home/notes.md, build/tmp/x and https://example.org/paper\n")
    assert foreign_lines(tmp_path) == []
    readme.write_text(f"one\n{line}\n")
    assert len(foreign_lines(tmp_path)) == 1

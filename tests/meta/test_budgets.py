"""Files stay short enough to be read from top to bottom."""

from pathlib import Path

import pytest

from support.repository import ROOT

# Lines a file of the kind may have. A longer one holds two things: split it where they meet.
BUDGETS = {
    "csrc/kernels/**/*.cu": 500,
    "csrc/ptx/**/*.h": 250,
    "python/jax_fp4/**/*.py": 400,
    "tests/**/*.py": 500,
}


def over_budget(root: Path) -> list[str]:
    """One line for every file that is longer than its kind may be."""
    return [
        f"{path.relative_to(root).as_posix()}: {lines} lines, at most {limit}"
        for pattern, limit in BUDGETS.items()
        for path in sorted(root.glob(pattern))
        if (lines := len(path.read_text().splitlines())) > limit
    ]


def test_files_keep_within_their_budget() -> None:
    """No file is longer than its kind may be."""
    assert over_budget(ROOT) == []


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("csrc/kernels/gemm.cu", 500),
        ("csrc/ptx/mma.h", 250),
        ("python/jax_fp4/cli/demo.py", 400),
        ("tests/jax/test_dot.py", 500),
    ],
)
def test_budget_check_detects_a_planted_file(tmp_path: Path, name: str, limit: int) -> None:
    """A file at the limit passes, one line more is reported by name and length."""
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text("\n" * limit)
    assert over_budget(tmp_path) == []
    path.write_text("\n" * (limit + 1))
    assert over_budget(tmp_path) == [f"{name}: {limit + 1} lines, at most {limit}"]

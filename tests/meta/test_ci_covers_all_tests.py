"""Every test file is run by a `make test...` job, and a required run skips nothing."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.repository import ROOT


def defines_tests(path: Path) -> bool:
    """Whether a file has functions or methods named test_*."""
    return any(
        isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        for node in ast.walk(ast.parse(path.read_text()))
    )


def files_with_tests(root: Path) -> set[str]:
    """Names of all such files under root/tests, whatever they are called."""
    return {
        path.relative_to(root).as_posix()
        for path in (root / "tests").rglob("*.py")
        if defines_tests(path)
    }


def collected_files(root: Path, *arguments: str) -> set[str]:
    """Names of the files from which pytest, run in root with these arguments, takes a test."""
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-p",
            "no:cacheprovider",
            *arguments,
        ],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    # 5: nothing collected.
    assert run.returncode in (0, 5), run.stdout + run.stderr
    return set(re.findall(r"^(tests/.*?\.py)::", run.stdout, re.MULTILINE))


def test_every_test_file_is_collected() -> None:
    """The files that define tests are those that the quick and the marked suites collect."""
    collected = collected_files(ROOT) | collected_files(
        ROOT, "-m", "slow or foreign or kernels or device or checkpoints or maxtext"
    )
    assert collected == files_with_tests(ROOT)


def test_the_makefile_narrows_nothing() -> None:
    """The jobs pass pytest no path, no -k, no --ignore of their own."""
    recipes = re.findall(r"-m pytest (.*)", (ROOT / "Makefile").read_text())
    assert recipes == [
        "-n 2 $(ARGS)",
        "-n 2 -m device $(ARGS)",
        "-m slow --timeout 7200 $(ARGS)",
        "-m foreign --timeout 7200 $(ARGS)",
        "-m checkpoints --timeout 7200 $(ARGS)",
        "-m maxtext --timeout 7200 $(ARGS)",
        "-m mutation -s --timeout 7200 $(ARGS)",
        "-n 2 -m kernels --timeout 7200 $(ARGS)",
    ]


def test_continuous_integration_runs_lint_and_test() -> None:
    """.ci/run runs both jobs and requires every test."""
    assert "for job in lint test; do" in (ROOT / ".ci" / "run").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert "JAX_FP4_REQUIRE_ALL=1 $(BIN)/python -m pytest -n 2" in makefile
    assert "$(if $(ARGS),,$(MAKE) test-device)" in makefile


@pytest.mark.parametrize("planted", ["tests/cpu/gemm_test.py", "tests/cpu/check_gemm.py"])
def test_coverage_check_detects_a_planted_file(tmp_path: Path, planted: str) -> None:
    """A file with tests whose name pytest does not look for is found missing."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests" / "cpu").mkdir(parents=True)
    (tmp_path / "tests" / "cpu" / "test_gemm.py").write_text("def test_one():\n    pass\n")
    (tmp_path / "tests" / "cpu" / "helper.py").write_text("def run():\n    pass\n")
    (tmp_path / planted).write_text("def test_two():\n    pass\n")
    found = collected_files(tmp_path, "-o", "python_files=test_*.py")
    assert files_with_tests(tmp_path) - found == {planted}


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("def test_it():\n    pass\n", "1 passed"),
        ("def test_it():\n    pytest.skip('no device')\n", "1 failed"),
        ("@pytest.mark.skip(reason='no device')\ndef test_it():\n    pass\n", "1 error"),
        ("pytest.importorskip('no_such_module_as_this')\n", "1 error"),
        ("@pytest.mark.xfail\ndef test_it():\n    assert False\n", "1 xfailed"),
    ],
)
def test_a_required_run_fails_on_every_kind_of_skip(
    tmp_path: Path, body: str, outcome: str
) -> None:
    """JAX_FP4_REQUIRE_ALL=1 makes a skip fail, with its reason; without it, skips stay skips."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text("import pytest\n\n" + body)

    def summary(require_all: str) -> str:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "."],
            cwd=tmp_path,
            env={**os.environ, "JAX_FP4_REQUIRE_ALL": require_all},
            capture_output=True,
            text=True,
            check=False,
        )
        return run.stdout

    skips = "skip" in body
    required, relaxed = summary("1"), summary("0")
    assert outcome in required
    assert ("JAX_FP4_REQUIRE_ALL=1 asks for every test" in required) == skips
    assert ("1 skipped" in relaxed) == skips

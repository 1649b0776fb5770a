"""`python -m jax_fp4 bench` from the outside: what it writes, refuses and keeps."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jax_fp4.cli import main
from jax_fp4.cli.bench import compare, records
from jax_fp4.cli.bench.records import Conditions, Measured, Modelled

COMMAND = [sys.executable, "-m", "jax_fp4", "bench"]


def test_a_run_leaves_samples_tables_plots_and_a_report(tmp_path: Path) -> None:
    """And compares with another run as the command does."""
    out, folder = tmp_path / "new" / "samples.jsonl", tmp_path / "report"
    words = ["gemm", "--shapes", "32x64x128", "--rounds", "3", "--cores", "1"]
    command = [*COMMAND, *words, "--out", str(out), "--report", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    printed = run.stdout
    found = records.read(out)
    rows = records.measured(found)
    assert {row.op for row in rows} == {"gemm"}
    assert all(row.correct and len(row.seconds) == 3 and row.cores == 1 for row in rows)
    assert {row.peer for row in rows} >= {"jax_fp4 NVFP4 -> f32", "jnp.dot bf16 -> f32"}
    for row in rows:
        assert re.search(rf"^  {re.escape(row.peer)} .* ok ", printed, re.MULTILINE)
    values = {k: v for r in found if isinstance(r, Conditions) for k, v in r.values.items()}
    assert {"processor", "cores", "versions", "date", "matmul ceiling"} <= set(values)
    assert {path.name for path in folder.iterdir()} == {
        "gemm.png", "report.html", "results.jsonl", "table.txt",
    }  # fmt: skip
    assert (folder / "results.jsonl").read_text() == out.read_text()

    # A machine a hundred times as slow is no change; ours being ten times as slow is one.
    for factor, verdict in ((1.0, "no change"), (0.1, "slower")):
        older = []
        for row in found:
            record = json.loads(records.to_line(row))
            if isinstance(row, Measured):
                scale = 0.01 * (factor if row.ours else 1.0)
                record["seconds"] = [s * scale for s in row.seconds]
                record["cpu_seconds"] = [s * scale for s in row.cpu_seconds]
            older.append(json.dumps(record) + "\n")
        old = [records.from_line(line) for line in older]
        changes = compare.compare(records.measured(old), rows)
        assert [change.verdict for change in changes] == [verdict] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["matmul"], "expected operations of gemm, quantize, dot, layer; got 'matmul'"),
        (["gemm", "--shapes", "llama9"], "--shapes: expected one of llama3-8b"),
        (["layer", "--shapes", "decode"], "--shapes: expected one of small"),
        (["--rounds", "0"], "--rounds: expected more than 0, got 0"),
        (["--minutes", "-1"], "--minutes: expected more than 0, got -1.0"),
        (["--cores", "4096"], "--cores: expected 1 to"),
        (["--compare", "/nonexistent/old.jsonl"], "No such file"),
        (["--out", "/proc/nothing/here"], "/proc/nothing"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_measured(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with exit code 2."""
    assert main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("bench: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_comparison_with_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that no run wrote, by the line that is none."""
    path = tmp_path / "old.jsonl"
    path.write_text("{}\n")
    assert main(["bench", "--compare", str(path)]) == 2
    assert "line 1: no record of `bench`" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    """A terminal shows how far it is; after Ctrl-C the rounds so far are shown and written."""
    out = tmp_path / "samples.jsonl"
    words = ["gemm", "--shapes", "16x64x64", "--rounds", "1000000", "--out", str(out)]
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=terminal, text=True, errors="replace"
    )
    os.close(terminal)
    seen = ""
    try:
        while not re.search(r"gemm 16x64x64, round [3-9]", seen):
            seen += os.read(controller, 4096).decode(errors="replace")
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
        os.close(controller)
    assert "]   0%  gemm 16x64x64" in seen
    assert process.returncode == 130
    rows = records.measured(records.read(out))
    assert rows
    assert all(row.correct and 3 <= len(row.seconds) < 1000 for row in rows)
    assert rows[0].peer in printed


def test_modelled_rows_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkout there is one line that says so, and no figure."""
    from jax_fp4.cli.bench import modelled, shapes

    def missing() -> None:
        raise modelled.Unavailable("--modelled needs a checkout of the repository")

    monkeypatch.setattr(modelled, "_tools", missing)
    (row,) = modelled.rows(shapes.products("128x128x256", 64))
    assert isinstance(row, records.Skipped)
    assert "needs a checkout" in row.reason


def test_modelled_rows_are_those_of_the_planned_kernel() -> None:
    """The kernel that a B200 would run, in the PTX machine; nothing of it is a `Measured`."""
    from support import device_kernels

    device_kernels.require_tools()
    from jax_fp4.cli.bench import modelled, shapes

    rows = modelled.rows(shapes.products("1x256x512", 64))
    ran = [row for row in rows if isinstance(row, Modelled)]
    assert [row.kernel.split(",")[0].split("_nvfp4")[0] for row in ran] == ["jax_fp4 gemm_sm100"]
    assert 1e-7 < ran[0].modelled_seconds < 1e-3
    assert ran[0].instructions > 0
    assert not records.measured(rows)

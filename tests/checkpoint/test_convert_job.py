"""A conversion that is stopped loses nothing, leaves no half file, and goes on where it was."""

import builtins
import errno
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jax_fp4 as fp4
from jax_fp4 import checkpoint
from jax_fp4.checkpoint import container
from jax_fp4.cli import main
from jax_fp4.convert import job, journal, quantizing
from support.checkpoints import bf16, write_raw

NAMES = [f"layers.{i}.weight" for i in range(5)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Five matrices of 12 x 64."""
    return write_source(tmp_path)


def write_source(folder: Path) -> Path:
    generator = np.random.default_rng(0)
    tensors = {
        name: ("BF16", (12, 64), bf16(generator.standard_normal((12, 64)).astype(np.float32)))
        for name in NAMES
    }
    return write_raw(folder / "in.safetensors", tensors)


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three slabs for each tensor."""
    monkeypatch.setattr(job, "SLAB_BYTES", 4 * 64 * 2)


def files(out: Path) -> dict[str, bytes]:
    """The result, without the report, which has times."""
    return {
        p.name: p.read_bytes()
        for p in sorted(out.iterdir())
        if p.is_file() and "report" not in p.name
    }


SHARDED = ("--to", "nvfp4", "--max-shard-gb", "1e-6")  # two tensors in a file


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed conversion gives."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(["convert", str(write_source(folder)), str(folder / "out"), *SHARDED]) == 0
    return files(folder / "out")


class Interrupts:
    """Calls a function when the n-th slab is quantized."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, action: Any) -> None:
        original = quantizing.quantize_rows
        self.slabs = 0

        def counted(*arguments: Any) -> Any:
            self.slabs += 1
            if self.slabs == at:
                action()
            return original(*arguments)

        monkeypatch.setattr(quantizing, "quantize_rows", counted)


@pytest.mark.parametrize("at", [1, 3, 5, 8, 14])
def test_ctrl_c_loses_nothing(
    source: Path,
    tmp_path: Path,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    at: int,
) -> None:
    """SIGINT within a tensor: exit code 130, whole files; then the same files, no work twice."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        Interrupts(patch, at, lambda: signal.raise_signal(signal.SIGINT))
        assert main(["convert", str(source), str(out), *SHARDED]) == 130
    assert "the same command goes on" in capsys.readouterr().err
    for name, data in files(out).items():
        assert data == whole[name]
    done = (at - 1) // 3
    counter = Interrupts(monkeypatch, -1, None)
    assert main(["convert", str(source), str(out), *SHARDED]) == 0
    assert counter.slabs == 15 - 3 * done
    assert files(out) == whole
    report = json.loads((out / "convert_report.json").read_text())
    assert report["resumed_tensors"] == done
    assert [t["name"] for t in report["tensors"]] == NAMES
    assert all(t["relative_error"] > 0 for t in report["tensors"])
    assert not (out / ".convert").exists()


class FullDisk:
    """A file that takes so many bytes and then reports a full disk, as the system does."""

    left = 0

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        count = min(len(data), FullDisk.left)
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        FullDisk.left -= count
        return self._file.write(data[:count])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("room", [0, 1, 500, 900, 1500, 2000])
def test_a_full_disk_loses_nothing(
    source: Path,
    tmp_path: Path,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    room: int,
) -> None:
    """Wherever it happens: an error that names file and bytes, whole files only, then the rest."""
    out = tmp_path / "out"

    def opened(path: Any, mode: str, **options: Any) -> Any:
        file = builtins.open(path, mode, **options)
        return FullDisk(file) if "+" in mode else file

    FullDisk.left = room
    with monkeypatch.context() as patch:
        patch.setattr(container, "open", opened, raising=False)
        assert main(["convert", str(source), str(out), *SHARDED]) == 1
    message = capsys.readouterr().err
    assert re.search(r"model-0000\d-of-00003.safetensors. must be on a disk with room", message)
    for name, data in files(out).items():
        assert data == whole[name]
    assert main(["convert", str(source), str(out), *SHARDED]) == 0
    assert files(out) == whole


def test_a_disk_that_is_too_small_is_found_before_the_work(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is quantized when the file cannot fit."""
    counter = Interrupts(monkeypatch, -1, None)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "mxfp4"]) == 1
    assert "100 bytes free" in capsys.readouterr().err
    assert counter.slabs == 0
    assert files(tmp_path / "out") == {}


def test_what_was_damaged_meanwhile_is_done_again(
    source: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal line whose tensor is not in the file any more, and a line that was cut."""
    out = tmp_path / "out"
    arguments = ["convert", str(source), str(out), "--to", "nvfp4"]
    assert main([*arguments[:2], str(tmp_path / "one"), *arguments[3:]]) == 0
    with monkeypatch.context() as patch:
        Interrupts(patch, 11, lambda: signal.raise_signal(signal.SIGINT))
        assert main(arguments) == 130
    partial = out / ".convert" / "model.safetensors"
    with checkpoint.Checkpoint(tmp_path / "one") as finished:
        entry = finished.entries["layers.1.weight_packed"]
        position = finished.reader(entry.name).header.data_start + entry.begin
    data = bytearray(partial.read_bytes())
    data[position] ^= 1
    partial.write_bytes(data)
    lines = out / ".convert" / "journal.jsonl"
    lines.write_bytes(lines.read_bytes() + b'{"tensor": "layers.3.we')
    counter = Interrupts(monkeypatch, -1, None)
    assert main(arguments) == 0
    assert counter.slabs == 9  # one tensor again, and the two that were left
    assert files(out) == files(tmp_path / "one")


def test_another_conversion_does_not_go_on(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Other options or another input: an error; --restart drops the old work."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        Interrupts(patch, 8, lambda: signal.raise_signal(signal.SIGINT))
        assert main(["convert", str(source), str(out), "--to", "nvfp4"]) == 130
    capsys.readouterr()
    assert main(["convert", str(source), str(out), "--to", "mxfp4"]) == 1
    assert "add --restart to drop its work" in capsys.readouterr().err
    os.utime(source, (1, 1))
    assert main(["convert", str(source), str(out), "--to", "nvfp4"]) == 1
    capsys.readouterr()
    assert main(["convert", str(source), str(out), "--to", "mxfp4", "--restart"]) == 0
    assert checkpoint.load(out)[NAMES[0]].format is fp4.MXFP4
    assert main(["convert", str(source), str(out), "--to", "mxfp4"]) == 1
    assert "must be a folder without a checkpoint" in capsys.readouterr().err


def test_a_report_that_could_not_be_written_is_written_by_the_next_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal stays until everything is on disk."""
    from jax_fp4.convert import report

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(report, "_picture", lambda found: signal.raise_signal(signal.SIGINT))
        assert main(["convert", str(source), str(out), "--to", "nvfp4"]) == 130
    assert not (out / "convert_report.json").exists()
    assert main(["convert", str(source), str(out), "--to", "nvfp4"]) == 0
    assert json.loads((out / "convert_report.json").read_text())["resumed_tensors"] == 5


def failing_save(out: Path, tree: dict[str, Any]) -> None:
    with pytest.raises(checkpoint.CheckpointError, match="on a disk with room for its"):
        checkpoint.save(out, tree, convention="modelopt", max_shard_bytes=500)


@pytest.mark.parametrize("room", [0, 300, 700])
def test_save_leaves_the_old_file_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """A disk that fills up while a file is replaced, and while a folder is written."""
    path = tmp_path / "m.safetensors"
    checkpoint.save(path, {"a": np.arange(3)}, convention="modelopt")
    before = path.read_bytes()
    tree = {f"w{i}": np.zeros(100, np.float32) for i in range(3)}

    def opened(path: Any, mode: str, **options: Any) -> Any:
        return FullDisk(builtins.open(path, mode, **options))

    with monkeypatch.context() as patch:
        patch.setattr(container, "open", opened, raising=False)
        FullDisk.left = room
        with pytest.raises(checkpoint.CheckpointError, match="on a disk with room for its"):
            checkpoint.save(path, tree, convention="modelopt")
        FullDisk.left = room
        failing_save(tmp_path / "folder", tree)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["m.safetensors"]
    assert list((tmp_path / "folder").iterdir()) == []


def test_errors_of_the_journal_and_the_plan_name_their_file(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan that is no JSON."""
    (tmp_path / "out" / ".convert").mkdir(parents=True)
    (tmp_path / "out" / ".convert" / "plan.json").write_text("{")
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "nvfp4"]) == 1
    assert "plan.json` must be a plan in JSON" in capsys.readouterr().err
    assert journal.Journal(tmp_path / "out").lines == {}


def run_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["convert", *arguments]) == 1
    return capsys.readouterr().err


RULES = {
    "no TOML": ("[[rule", "a TOML file"),
    "unknown table": ("[rules]\n", r"a file with \[\[rule\]\] and fused, got rules"),
    "no rule": ('fused = [["a"]]\n', r"one \[\[rule\]\] or more"),
    "rule without match": ('[[rule]]\nformat = "nvfp4"\n', "rule 1. must be a table with match"),
    "unknown key": ('[[rule]]\nmatch = "*"\nkind = "nvfp4"\n', "of match, .*got kind"),
    "unknown format": ('[[rule]]\nmatch = "*"\nformat = "int4"\n', "rule 1, format.*'int4'"),
    "unknown method": ('[[rule]]\nmatch = "*"\nmethod = "best"\n', "rule 1, method.*'best'"),
    "method of another format": (
        '[[rule]]\nmatch = "*"\nformat = "mxfp4"\nmethod = "four-over-six"\n', "nearest or mse"),
    "axis": ('[[rule]]\nmatch = "*"\naxis = 0\n', "rule 1, axis. must be -1 or -2"),
    "match no string": ("[[rule]]\nmatch = 3\n", "rule 1, match. must be a pattern"),
    "fused no names": ('fused = ["a"]\n[[rule]]\nmatch = "*"\n', "fused. must be a list of lists"),
    "unused": ('[[rule]]\nmatch = "*"\n[[rule]]\nmatch = "lm_head*"\n', r"rule lm_head\*. must be"),
    "named but unfit": ('[[rule]]\nmatch = ["odd.weight", "*"]\n', "odd.weight. must be fit for"),
}  # fmt: skip


@pytest.mark.parametrize("case", RULES)
def test_a_wrong_rule_is_an_error(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """It names the file and the rule, before anything is written."""
    text, message = RULES[case]
    rules = tmp_path / "rules.toml"
    rules.write_text(text)
    write_raw(
        source,
        {"odd.weight": ("BF16", (2, 17), bytes(68)), "a.weight": ("BF16", (2, 32), bytes(128))},
    )
    found = run_error(
        capsys, str(source), str(tmp_path / "out"), "--to", "nvfp4", "--rules", str(rules)
    )
    assert re.search(message, found), found
    assert str(rules) in found
    assert not (tmp_path / "out").exists()


def test_inputs_that_cannot_be_converted_are_errors(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Quantized already, NaN, no checkpoint, lost dtype, a format that the convention has not."""
    out = str(tmp_path / "out")
    assert main(["convert", str(source), str(tmp_path / "q"), "--to", "nvfp4"]) == 0
    capsys.readouterr()
    found = run_error(capsys, str(tmp_path / "q"), out, "--to", "mxfp4")
    assert "must be a checkpoint that is not quantized, got layers.0.weight" in found
    bad = write_raw(tmp_path / "nan.safetensors", {"w.weight": ("BF16", (1, 32), b"\xc0\x7f" * 32)})
    found = run_error(capsys, str(bad), out, "--to", "nvfp4")
    assert "w.weight` must be finite, got NaN or Inf in 2 blocks" in found
    assert "no such file" in run_error(capsys, str(tmp_path / "none.bin"), out, "--to", "nvfp4")
    (tmp_path / "empty").mkdir()
    assert "got nothing" in run_error(capsys, str(tmp_path / "empty"), out, "--to", "nvfp4")
    np.savez(tmp_path / "lost.npz", w=np.zeros(2, "V2"))
    assert "save float32" in run_error(capsys, str(tmp_path / "lost.npz"), out, "--to", "nvfp4")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "lost.npz").read_bytes()[:60])
    assert "readable as .npz" in run_error(capsys, str(tmp_path / "cut.npz"), out, "--to", "nvfp4")
    found = run_error(capsys, str(source), out, "--to", "nvfp4", "--convention", "gpt-oss")
    assert "must be MXFP4, the only format of gpt-oss" in found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "mixed"), "--to mixed needs --rules FILE"),
        (("--to", "nvfp4", "--max-shard-gb", "0"), "--max-shard-gb: expected a positive number"),
        (("--to", "mxfp4", "--method", "four-over-six"), "four-over-six is for nvfp4"),
    ],
)
def test_arguments_that_clash_have_exit_code_2(
    source: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    """One line that says what to change."""
    assert main(["convert", str(source), "out", *arguments]) == 2
    assert message in capsys.readouterr().err

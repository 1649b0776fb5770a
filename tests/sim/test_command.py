"""`python -m jax_fp4 sim`: a launch from files, its report, its exit codes."""

import json
from pathlib import Path

import numpy as np
import pytest

from jax_fp4.cli import main
from support.ptx_kernel import text_of

BODY = """ld.param.u64 a0, [x]; ld.param.u32 r1, [n];
mov.u32 r0, %tid.x; mad.wide.u32 a0, r0, 4, a0;
ld.global.u32 r2, [a0]; mad.lo.u32 r2, r2, r1, 1; st.global.u32 [a0], r2;"""


def files(folder: Path, body: str = BODY) -> list[str]:
    (folder / "k.ptx").write_text(text_of(body, ".param .u64 x, .param .u32 n"))
    array = {"arange": [32], "dtype": "uint32", "save": "x.npy"}
    spec = {"entry": "k", "grid": 1, "block": [32, 1, 1], "args": [array, 3]}
    (folder / "launch.json").write_text(json.dumps(spec))
    return ["sim", str(folder / "k.ptx"), "--launch", str(folder / "launch.json")]


def test_a_kernel_runs_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts are printed for every seed, lines on request, arrays are saved."""
    assert main([*files(tmp_path), "--seeds", "2", "--lines"]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), np.arange(32) * 3 + 1)
    out = capsys.readouterr().out
    assert "seed 0: " in out and "seed 1: " in out
    assert "bytes read: global 128, param 12" in out
    assert "\n           2      7 ld.param.u64 a0, [x]; ld.param.u32 r1, [n];\n" in out


def test_a_fault_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fault's text goes to stderr."""
    assert main(files(tmp_path, BODY + " trap;")) == 1
    assert "trap: all lanes executed 'trap'" in capsys.readouterr().err


def test_a_wrong_file_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PTX that is not modelled, and an array that is not described."""
    assert main(files(tmp_path, "frobnicate r0;")) == 2
    assert "'frobnicate' is not modelled" in capsys.readouterr().err
    command = files(tmp_path)
    (tmp_path / "launch.json").write_text('{"entry": "k", "grid": 1, "block": 1, "args": [{}, 1]}')
    assert main(command) == 2
    assert "an array is 'zeros'" in capsys.readouterr().err


def test_costs_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts, and with --time what is modelled, called so; both after the report's lines."""
    assert main([*files(tmp_path), "--costs"]) == 0
    out = capsys.readouterr().out
    costs = json.loads(out[out.index("\n{") :])
    assert costs["global"]["load_sectors"] == 4
    assert "modelled" not in costs
    assert main([*files(tmp_path), "--time"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out[out.index("\n{") :])["modelled"]["cycles"] > 0


def test_a_trace_is_written(tmp_path: Path) -> None:
    """In Chrome's format."""
    assert main([*files(tmp_path), "--trace", str(tmp_path / "trace.json")]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["warp"]


def test_no_data_wants_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What moves nothing checks nothing."""
    assert main([*files(tmp_path), "--no-data"]) == 2
    assert "pass time=True as well" in capsys.readouterr().err

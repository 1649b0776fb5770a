"""bench/convergence.py: runs that go on where they stopped, results that are checked, the report.

The model is that of support/tiny_model.py; what the real runs say is in bench/results/convergence.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import image

import jax_fp4
from jax_fp4.cli import demo, transformer
from support import planted_bugs, tiny_model
from support.repository import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import convergence
import convergence_report
import convergence_results

Run = Callable[..., tuple[int, Path]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls `run` with 100 steps of the small model; its exit code and the folder of results."""
    monkeypatch.setitem(transformer.SIZES, "micro", tiny_model.SIZE)
    monkeypatch.setattr(convergence, "VALIDATION_BATCHES", 8)
    text = tiny_model.write_text(tmp_path)

    def call(*words: str, folder: str = "results") -> tuple[int, Path]:
        results = tmp_path / folder
        places = ["--text", str(text), "--out", str(results / "out"), "--results", str(results)]
        return convergence.main(["run", *words, "--steps", "100", *places]), results

    return call


def result(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}-seed0.json").read_text())


def test_interrupted_run_goes_on_and_ends_like_a_whole_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C after step 30 leaves a checkpoint and no result; the same command then finishes."""
    update = demo.Progress.update

    def interrupting(self: Any, state: Any) -> None:
        update(self, state)
        if state.step == 30 and not state.resumed_at:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(demo.Progress, "update", interrupting)
        code, folder = run("--recipe", "NVFP4")
    assert code == 130
    assert "stopped after step 30" in capsys.readouterr().out
    assert not list(folder.glob("*.json"))
    assert run("--recipe", "NVFP4") == (0, folder)
    code, whole_folder = run("--recipe", "NVFP4", folder="whole")
    assert code == 0
    resumed, whole = result(folder, "NVFP4"), result(whole_folder, "NVFP4")
    assert resumed["conditions"].pop("resumed_at") == [30]
    assert whole["conditions"].pop("resumed_at") == []
    for numbers in (resumed, whole):
        conditions = numbers.pop("conditions")
        assert conditions["command"].startswith("python bench/convergence.py run --recipe NVFP4")
    assert resumed == whole
    with np.load(folder / "out" / "NVFP4-seed0" / "checkpoint.npz") as arrays:
        losses = arrays["NVFP4/losses"].astype(np.float64)
    assert whole["losses"] == [round(losses[:50].mean(), 6), round(losses[50:].mean(), 6)]
    # From the first to the second 50 steps a text of 300 lines is learned in part.
    assert np.log(256) > whole["losses"][0] > whole["losses"][1] > whole["validation_loss"] * 0.5


def test_bug_stops_early_under_a_name_of_its_own(run: Run) -> None:
    """--bug with --until: a part of the same schedule, in a file that says so."""
    code, folder = run("--bug", "swap_nibbles", "--until", "50")
    assert code == 0
    faulty = result(folder, "NVFP4-swap_nibbles")
    assert (faulty["bug"], faulty["steps_done"], faulty["steps"]) == ("swap_nibbles", 50, 100)
    assert len(faulty["losses"]) == 1


@pytest.mark.parametrize("name", planted_bugs.BUGS)
def test_every_bug_changes_gradients_and_leaves_nothing_behind(name: str) -> None:
    """The value stays; gradients differ while it is planted, and have the old bits afterwards."""
    x = jax.random.normal(jax.random.key(0), (32, 64)) * 1e-4
    w = jax.random.normal(jax.random.key(1), (64, 64))

    def value_and_gradients() -> Any:
        def loss(x: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(jax_fp4.dot(x, w, recipe=jax_fp4.recipes.NVFP4) * 1e4)) * 1e-6

        return jax.device_get(jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w))

    before = value_and_gradients()
    with planted_bugs.planted(name):
        during = value_and_gradients()
    after = value_and_gradients()
    assert before[0] == during[0] == after[0]
    jax.tree.map(np.testing.assert_array_equal, before, after)
    changed = [not np.array_equal(a, b) for a, b in zip(before[1], during[1], strict=True)]
    # dgrad is where nibbles are swapped, wgrad where a rotation is missing; the rest is in both.
    expected = {"swap_nibbles": [True, False], "rotate_gradient_only": [False, True]}
    assert changed == expected.get(name, [True, True])


def test_a_bug_that_touches_nothing_is_an_error() -> None:
    """A run whose step was compiled before would be sound, under the bug's name."""
    with (
        pytest.raises(AssertionError, match="was not planted"),
        planted_bugs.planted("freeze_seed"),
    ):
        pass


def test_four_over_six_is_where_rounding_is_to_nearest() -> None:
    """It is NVFP4's recipe in everything else; the other recipes are the package's own."""
    ours, published = convergence.RECIPES["NVFP4_4over6"], jax_fp4.recipes.NVFP4
    for operand in ("fprop_x", "fprop_w", "dgrad_w", "wgrad_x"):
        assert getattr(ours, operand).four_over_six
    for operand in ("dgrad_dy", "wgrad_dy"):
        assert getattr(ours, operand) == getattr(published, operand)
    for name in set(convergence.RECIPES) - {"NVFP4_4over6"}:
        assert convergence.RECIPES[name] is jax_fp4.RECIPES[name]
    assert {name for name, _ in convergence.PLAN} == {*convergence.RECIPES, *convergence.BUGGY}


def test_all_runs_what_has_no_result_and_stops_with_the_first_that_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the plan; a result that is there is not made again."""
    started: list[list[str]] = []

    def spawn(words: list[str], check: bool) -> Any:
        started.append(words[3:])
        return subprocess.CompletedProcess(words, 130 if len(started) == 3 else 0)

    monkeypatch.setattr(subprocess, "run", spawn)
    (tmp_path / "NVFP4-seed0.json").touch()
    assert convergence.main(["all", "--results", str(tmp_path)]) == 130
    place = ["--results", str(tmp_path)]
    assert started == [
        ["--recipe", name, "--seed", "0", *place] for name in ("BF16", "FP8", "MXFP8")
    ]


# ---- The report ----------------------------------------------------------------------------------


def made_up(name: str, seed: int, losses: list[float], **changes: Any) -> dict[str, Any]:
    """A result with points of 50 steps."""
    bug = name.partition("-")[2] or None
    return {
        "name": name,
        "bug": bug,
        "seed": seed,
        "steps": 1000,
        "steps_done": 50 * len(losses),
        "averaged_steps": 50,
        "losses": losses,
        "validation_loss": losses[-1] + 0.5,
        "validation_tokens": 1000,
        "model": {"parameters": 1000, "width": 64, "layers": 2, "hidden": 256, "batch": 4,
                  "context": 128, "learning_rate": 1e-3},
        "text": {"source": "a text", "train_bytes": 1000, "sha256": "0"},
        "conditions": {"machine": "a machine", "date": "2026-01-01", "jax": "1", "cpu_level": "x",
                       "python": "3", "training_seconds": 60.0},
        **changes,
    }  # fmt: skip


def write(folder: Path, *results: dict[str, Any]) -> None:
    for one in results:
        (folder / f"{one['name']}-seed{one['seed']}.json").write_text(json.dumps(one))


def test_report_has_gaps_bands_and_what_is_missing(tmp_path: Path) -> None:
    """Gaps are differences at the same steps of the same seed; all figures by hand."""
    write(
        tmp_path,
        made_up("BF16", 0, [4.0] * 10 + [2.0] * 10),
        made_up("BF16", 1, [4.0] * 10 + [2.25] * 10),
        made_up("FP8", 0, [4.0] * 10 + [2.125] * 10),
        made_up("NVFP4", 0, [4.5] * 10 + [2.25] * 10),
        made_up("NVFP4-swap_nibbles", 0, [5.0] * 10),
    )
    convergence_report.write(tmp_path, convergence.PLAN)
    text = (tmp_path / "README.md").read_text()
    # To FP8: (0.5 + 0.125) / 2 and 0.125; to BF16: (0.5 + 0.25) / 2 and 0.25; validation 2.75, 2.5.
    row = "2.2500 | +0.3125 | +0.1250 | +0.3750 | +0.2500 | 2.7500 | +0.2500 | +10.00 %"
    assert f"| NVFP4 | 0 | {row} |" in text.splitlines()
    # No FP8 of seed 1; and BF16 has no gap to itself.
    assert "| BF16 | 1 | 2.2500 |  |  |  |  | 2.7500 |  |  |" in text
    # After 500 steps: 5.0 against 4.5 of NVFP4 and 4.0 of BF16.
    assert "| swap_nibbles | 500 | 5.0000 | +0.5000 | +11.1 % | +1.0000 | +25.0 % |" in text
    # 0.3125 of (4.0 + 2.125) / 2.
    assert "run: +0.3125 nats** a byte, +10.2 % (published: +0.026 a token)" in text
    assert "By quarters of the run: +0.5000, +0.5000, +0.1250, +0.1250; in the last 500" in text
    assert "BF16, seeds 0, 1: final training loss 2.0000 to 2.2500, a band of 0.2500" in text
    missing = text.partition("No result yet: ")[2].partition(". ")[0]
    assert missing.startswith(
        "MXFP8 (seed 0), NVFP4_4over6 (seed 0), MXFP4 (seed 0), NVFP4 (seed 1)"
    )
    assert "NVFP4-freeze_seed (seed 0)" in missing
    picture = image.imread(tmp_path / "convergence.png")
    assert min(picture.shape[:2]) > 500
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 50  # not an empty page


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"losses": [3.0] * 19}, "losses must be 20 means of 50 steps, got 19"),
        ({"losses": [3.0] * 19 + [float("nan")]}, "losses must be positive and finite, got [nan]"),
        ({"validation_loss": -1.0}, "validation_loss must be positive and finite"),
        ({"steps_done": 500, "losses": [3.0] * 10}, "steps_done must be 1000 in a run without"),
        ({"steps_done": 1050}, "steps_done must be from 50 to 1000, got 1050"),
        ({"name": "MXFP8"}, "the file's name must be MXFP8-seed0.json"),
        ({"extra": 1}, "its keys must be averaged_steps, bug, conditions"),
        (
            {"steps": 2000, "steps_done": 2000, "losses": [3.0] * 40},
            "differ in steps (2000 and 1000)",
        ),
        ({"text": {"sha256": "1"}}, "differ in text"),
        ({"model": {"parameters": 2000}}, "differ in model"),
    ],
)
def test_a_wrong_result_is_refused(
    changes: dict[str, Any],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The file, the entry and what is wrong with it, exit code 2; nothing is written."""
    write(tmp_path, made_up("BF16", 0, [3.0] * 20))
    wrong = {**made_up("FP8", 0, [3.0] * 20), **changes}
    (tmp_path / "FP8-seed0.json").write_text(json.dumps(wrong))
    assert convergence.main(["report", "--results", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "FP8-seed0.json" in message
    assert complaint in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["BF16-seed0.json", "FP8-seed0.json"]


def test_no_result_and_no_json_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty folder, and half a file."""
    assert convergence.main(["report", "--results", str(tmp_path)]) == 2
    assert "holds no result; start with `run` or `all`" in capsys.readouterr().err
    (tmp_path / "BF16-seed0.json").write_text('{"name": ')
    assert convergence.main(["report", "--results", str(tmp_path)]) == 2
    assert "BF16-seed0.json is no JSON" in capsys.readouterr().err


def test_committed_report_is_that_of_the_committed_results() -> None:
    """README.md was written by `report` after the last result came, and not edited since."""
    folder = ROOT / "bench" / "results" / "convergence"
    results = convergence_results.read(folder)
    assert (folder / "README.md").read_text() == convergence_report.markdown(
        results, convergence.PLAN
    )
    some = next(iter(results.runs.values()))
    assert (some["steps"], some["model"]["size"]) == (10_000, "micro")

"""`python -m jax_fp4 demo`: what it writes, how it is interrupted and resumed, what it refuses.

Most tests run a much smaller model (support/tiny_model.py); the demo's own numbers are the business
of test_planted_bugs.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from matplotlib import image

import jax_fp4
from jax_fp4.cli import corpus as corpora
from jax_fp4.cli import main, report, training, transformer
from jax_fp4.cli.saved_bytes import saved_bytes
from support import tiny_model


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short text, with the demo's smallest size replaced by the tests' model."""
    monkeypatch.setitem(transformer.SIZES, "tiny", tiny_model.SIZE)
    return tiny_model.write_text(tmp_path)


def arguments(text: Path, out: Path, *more: str) -> list[str]:
    return ["demo", "--text", str(text), "--out", str(out), "--steps", "6", *more]


def config_for(corpus: corpora.Corpus, steps: int = 6) -> training.Config:
    return training.Config("tiny", steps, 0, ("BF16", "NVFP4"), corpus.digest)


def load_corpus(text: Path) -> corpora.Corpus:
    return corpora.load(text, tiny_model.SIZE.context + 1)


# ---- A whole run ---------------------------------------------------------------------------------


def test_default_model_and_text_train(tmp_path: Path) -> None:
    """The command as users call it: the standard library, 0.6 M parameters, both recipes."""
    command = [sys.executable, "-m", "jax_fp4", "demo", "--steps", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads((tmp_path / "results.json").read_text())
    assert 0.6e6 < numbers["model"]["parameters"] < 0.7e6
    assert numbers["text"]["source"] == "the Python standard library"
    assert numbers["conditions"]["command"][2:] == ["jax_fp4", *command[3:]]
    for recipe in numbers["recipes"].values():
        # Untrained, a byte costs about ln 256 nats; three steps lower that, and no loss is NaN.
        assert abs(recipe["losses"][0] - np.log(256)) < 0.3
        assert recipe["losses"][2] < recipe["losses"][0]


def test_run_writes_table_picture_and_numbers(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files are complete, agree with the printed table, and nothing else is left."""
    out = tmp_path / "new" / "out"
    assert main(arguments(text, out, "--recipes", "NVFP4,BF16,MXFP8")) == 0
    printed = capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == [
        "BF16.safetensors",
        "MXFP8.safetensors",
        "NVFP4.safetensors",
        "checkpoint.npz",
        "loss.png",
        "results.json",
    ]
    numbers = json.loads((out / "results.json").read_text())
    assert list(numbers["recipes"]) == ["NVFP4", "BF16", "MXFP8"]
    base = numbers["recipes"]["BF16"]
    for name, recipe in numbers["recipes"].items():
        assert len(recipe["losses"]) == 6
        assert recipe["train_loss"] == np.mean(recipe["losses"][-numbers["averaged_steps"] :])
        for kind in ("train", "validation"):
            gap = 100 * (recipe[f"{kind}_loss"] / base[f"{kind}_loss"] - 1)
            assert recipe[f"{kind}_gap_percent"] == pytest.approx(gap)
        row = next(line for line in printed.splitlines() if re.match(rf"{name} +\d", line))
        assert f"{recipe['train_loss']:.4f}" in row
        assert f"{recipe['validation_loss']:.4f}" in row
        assert f"{recipe['tokens_per_second']:,.0f}" in row
    picture = image.imread(out / "loss.png")
    assert picture.shape[0] > 500
    assert picture.shape[1] > 800
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 50  # not an empty page


def test_recipes_start_alike_and_see_the_same_batches(text: Path) -> None:
    """The first losses differ by rounding only; a run is a function of its arguments."""
    corpus = load_corpus(text)
    runs = []
    for _ in range(2):
        state = training.initial_state(config_for(corpus))
        training.train(
            config_for(corpus), corpus, state, stopped=lambda: False, after_step=lambda _: None
        )
        runs.append({name: run.losses for name, run in state.runs.items()})
    assert abs(runs[0]["BF16"][0] - runs[0]["NVFP4"][0]) < 0.02
    assert not np.array_equal(runs[0]["BF16"], runs[0]["NVFP4"])
    for name, losses in runs[0].items():
        np.testing.assert_array_equal(losses, runs[1][name])


# ---- Interruption --------------------------------------------------------------------------------


def test_resumed_run_equals_an_uninterrupted_one(text: Path, tmp_path: Path) -> None:
    """Losses, weights, moments and validation loss, bit for bit, wherever it was stopped."""
    corpus = load_corpus(text)
    config = config_for(corpus)

    def train(state: training.State, last: int) -> bool:
        return training.train(
            config, corpus, state, stopped=lambda: state.step >= last, after_step=lambda _: None
        )

    whole = training.initial_state(config)
    assert train(whole, 7)
    path = tmp_path / "checkpoint.npz"
    for stop in (0, 1, 4):
        state = training.initial_state(config)
        assert not train(state, stop)
        training.save(path, config, state)
        resumed = training.load(path, config)
        assert resumed is not None
        assert resumed.step == stop
        assert train(resumed, 7)
        for name, run in whole.runs.items():
            other = resumed.runs[name]
            np.testing.assert_array_equal(run.losses, other.losses)
            assert run.validation == other.validation
            jax.tree.map(
                np.testing.assert_array_equal,
                (run.params, run.moments),
                (other.params, other.moments),
            )


def test_interrupt_saves_the_step_and_says_how_to_go_on(tmp_path: Path) -> None:
    """SIGINT: exit code 130, a checkpoint of the step named in the last line, no other files."""
    path, out = tiny_model.write_text(tmp_path), tmp_path / "out"
    words = ["demo", "--text", str(path), "--out", str(out), "--steps", "20000", "--restart"]
    program = (
        "import sys; from jax_fp4.cli import main; from support import tiny_model; "
        "tiny_model.use(); sys.exit(main())"
    )
    search = os.pathsep.join(
        [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": search},
    )
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            if line.startswith("step"):
                process.send_signal(signal.SIGINT)
                break
        rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130, rest + errors
    last = rest.strip().splitlines()[-1]
    found = re.fullmatch(r"stopped after step (\d+) of 20000; to continue: (.*)", last)
    assert found is not None, rest
    assert found[2] == " ".join(["python", "-m", "jax_fp4", *words[:-1]])
    assert "Traceback" not in errors
    assert [file.name for file in out.iterdir()] == ["checkpoint.npz"]
    with np.load(out / "checkpoint.npz") as arrays:
        assert json.loads(str(arrays["config"]))["step"] == int(found[1])
        assert arrays["NVFP4/losses"].shape == (int(found[1]),)


def test_finished_run_is_shown_again_not_repeated(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command prints the same table without a step; --restart trains again."""
    assert main(arguments(text, tmp_path / "out")) == 0
    table = capsys.readouterr().out.partition("\nrecipe")[2]
    assert main(arguments(text, tmp_path / "out")) == 0
    again = capsys.readouterr().out
    assert "all steps are done already" in again
    assert "step 6/6" not in again
    assert again.partition("\nrecipe")[2] == table
    assert main(arguments(text, tmp_path / "out", "--restart")) == 0
    assert "step 6/6" in capsys.readouterr().out


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    """An error in the middle of writing leaves the old content and no temporary file."""
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(file: Any) -> None:
        file.write(b"new, but not all of")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        training.write_atomically(path, write)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# ---- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--recipes", "BF16,FP2"], "'FP2' is no recipe; known are NVFP4, NVFP4_RN, MXFP4"),
        (["--recipes", "BF16,BF16"], "each recipe may come once"),
        (["--steps", "0"], "argument --steps: must be 1 or more, got 0"),
        (["--steps", "many"], "argument --steps: invalid positive integer value: 'many'"),
        (["--seed", "-1"], "argument --seed: must lie in [0, 2**32), got -1"),
        (["--size", "huge"], "argument --size: invalid choice: 'huge'"),
        (["--text", "gone.txt"], "--text gone.txt: no such file or folder"),
        (["--text", "empty"], "holds 0 bytes of text, but at least 330 are needed"),
        (["--text", "short.txt"], "holds 5 bytes of text, but at least 330 are needed"),
        (["--out", "short.txt/out"], "cannot write to --out short.txt/out: Not a directory"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(
    words: list[str],
    complaint: str,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The argument, what is wrong with it; no training, no traceback."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "empty").mkdir()
    try:
        code = main(arguments(text, tmp_path / "out", *words))
    except SystemExit as stop:  # what argparse does
        code = stop.code
    printed = capsys.readouterr()
    assert code == 2
    assert complaint in printed.err
    assert printed.err.startswith("python -m jax_fp4")
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--steps", "7"], "holds a run with steps=6, not steps=7"),
        (["--seed", "1"], "holds a run with seed=0, not seed=1"),
        (["--recipes", "NVFP4"], "holds a run with recipes=BF16,NVFP4, not recipes=NVFP4"),
        (["--text", str(Path(corpora.__file__))], "holds a run on another text"),
    ],
)
def test_another_configuration_in_the_same_folder_is_refused(
    words: list[str],
    complaint: str,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What differs, and two ways out; the checkpoint is not touched."""
    out = tmp_path / "out"
    out.mkdir()
    corpus = load_corpus(text)
    checkpoint = out / "checkpoint.npz"
    training.save(checkpoint, config_for(corpus), training.initial_state(config_for(corpus)))
    before = checkpoint.read_bytes()
    assert main(arguments(text, out, *words)) == 2
    message = capsys.readouterr().err
    assert complaint in message
    assert "--out" in message
    assert "--restart" in message
    assert checkpoint.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"no checkpoint", None])
def test_a_damaged_checkpoint_is_refused(
    content: bytes | None, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty file, another file, and half of a checkpoint (None)."""
    corpus = load_corpus(text)
    path = tmp_path / "checkpoint.npz"
    training.save(path, config_for(corpus), training.initial_state(config_for(corpus)))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content is None else content)
    assert main(arguments(text, tmp_path)) == 2
    assert "checkpoint.npz is no checkpoint of this demo" in capsys.readouterr().err


# ---- Parts ---------------------------------------------------------------------------------------


def test_every_tenth_of_the_text_is_held_out(tmp_path: Path) -> None:
    """Training and validation text are disjoint and together the whole."""
    path = tmp_path / "bytes"
    content = np.arange(2_000_000) // 100_000  # the number of its 100 kB
    path.write_bytes(content.astype(np.uint8).tobytes())
    corpus = corpora.load(path, 129)
    assert corpus.train.size + corpus.validation.size == content.size
    assert corpus.validation.size == pytest.approx(content.size / 10, rel=0.05)
    joined = np.sort(np.concatenate([corpus.train, corpus.validation]))
    np.testing.assert_array_equal(joined, content)
    assert len(np.unique(corpus.validation)) > 3  # from all over the text


def test_folders_are_read_in_order_and_binary_files_left_out(tmp_path: Path) -> None:
    """UTF-8 files in the order of their paths, without hidden ones."""
    files = {
        "b.txt": b"b" * 400,
        "a/c.txt": b"c" * 400,
        ".git/d": b"d",
        "e": b"\xff\xfe",
        "f": b"\0",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    corpus = corpora.load(tmp_path, 33)
    assert corpus.files == 2
    assert bytes(corpus.train) + bytes(corpus.validation) == b"c" * 400 + b"b" * 400


def test_saved_bytes_are_those_of_the_formats() -> None:
    """bfloat16: 2 bytes an element; NVFP4: half a byte, a scale for 16, and 4 bytes a tensor."""
    size = transformer.SIZES["tiny"]
    inputs = [size.width, size.width, size.width, size.hidden]  # of qkv, out, up, down
    outputs = [3 * size.width, size.width, size.hidden, size.width]
    activations = size.layers * sum(inputs) * size.tokens_per_step
    weights = size.layers * sum(k * n for k, n in zip(inputs, outputs, strict=True))
    scales = 4 * len(inputs) * size.layers
    wide, narrow = (saved_bytes(size, jax_fp4.RECIPES[name]) for name in ("BF16", "NVFP4"))
    assert (wide.linear_activations, wide.linear_weights) == (2 * activations, 2 * weights)
    assert narrow.linear_activations == activations * 9 // 16 + scales
    assert narrow.linear_weights == weights * 9 // 16 + scales
    assert narrow.other_activations == wide.other_activations > 0


def test_adamw_follows_its_definition() -> None:
    """Three steps against float64 NumPy: clipping, bias correction, decay of matrices only."""
    random = np.random.default_rng(0)
    params = {"w": random.normal(size=(4, 3)), "norm": random.normal(size=3)}
    m = {name: np.zeros_like(p) for name, p in params.items()}
    v = {name: np.zeros_like(p) for name, p in params.items()}
    rate = 0.1
    ours: Any = jax.tree.map(np.float32, params)
    moments: Any = jax.tree.map(np.float32, (m, v))
    for step in range(3):
        gradients = {name: random.normal(size=p.shape) * 5 for name, p in params.items()}
        ours, moments = training._adamw(
            ours, moments, jax.tree.map(np.float32, gradients), np.float32(step), np.float32(rate)
        )
        norm = np.sqrt(sum(np.sum(g * g) for g in gradients.values()))
        for name, p in params.items():
            g = gradients[name] * min(1, 1 / norm)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g * g
            change = m[name] / (1 - 0.9 ** (step + 1))
            change /= np.sqrt(v[name] / (1 - 0.95 ** (step + 1))) + 1e-8
            params[name] = p - rate * (change + (0.1 * p if name == "w" else 0))
    for name, p in params.items():
        np.testing.assert_allclose(ours[name], p, rtol=1e-5)


def test_learning_rate_rises_then_falls_to_a_tenth() -> None:
    """Linear over the first tenth of the steps, then a cosine."""
    rates = [float(training.learning_rate(np.float32(step), 100, 1.0)) for step in range(101)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_table_shows_no_gap_without_the_baseline(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without BF16 there is nothing to compare with: null in JSON, nothing in the table."""
    assert main(arguments(text, tmp_path / "out", "--recipes", "NVFP4", "--steps", "2")) == 0
    numbers = json.loads((tmp_path / "out" / "results.json").read_text())
    assert numbers["recipes"]["NVFP4"]["train_gap_percent"] is None
    assert "%" not in report.table(numbers).partition("\n\n")[0]
    assert "%" not in capsys.readouterr().out.partition("\nrecipe")[2].partition("\n\n")[0]

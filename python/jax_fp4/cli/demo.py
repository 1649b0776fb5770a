"""`python -m jax_fp4 demo`: a small transformer trained on real text under several recipes.

corpus.py       the text
transformer.py  the model, whose linear layers run through jax_fp4.dot
training.py     optimizer, loop, checkpoints
saved_bytes.py  what the backward pass keeps
report.py       table, picture, JSON
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import jax

import jax_fp4
from jax_fp4.cli import corpus as corpora
from jax_fp4.cli import model_file, report, training, transformer

DESCRIPTION = """\
Trains a byte-level transformer under each recipe, side by side, from the same initial weights and
on the same batches. Writes results.json, loss.png, checkpoint.npz and the models, NAME.safetensors,
to the --out folder. After Ctrl-C the same command continues where it stopped.
"""

_INTERRUPTED = 130  # 128 + SIGINT, what shells expect
_SAVE_SECONDS = 30.0
_LOG_LINES = 20  # of a run whose output is no terminal
_BAR = 24


def positive(text: str) -> int:
    """The type of an argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


def seed(text: str) -> int:
    """The type of an argument that is a seed."""
    value = int(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"must lie in [0, 2**32), got {value}")
    return value


def recipes(text: str) -> tuple[str, ...]:
    """The type of an argument that lists recipes by name."""
    names = tuple(text.split(","))
    for name in names:
        if name not in jax_fp4.RECIPES:
            known = ", ".join(jax_fp4.RECIPES)
            raise argparse.ArgumentTypeError(f"{name!r} is no recipe; known are {known}")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"each recipe may come once, got {text}")
    return names


for _type, _name in ((positive, "positive integer"), (seed, "seed")):
    _type.__name__ = _name  # argparse's message for what int() refuses: "invalid ... value"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "--recipes",
        type=recipes,
        default=("BF16", "NVFP4"),
        metavar="NAME,...",
        help=f"of {', '.join(jax_fp4.RECIPES)} (default: BF16,NVFP4)",
    )
    parser.add_argument(
        "--steps", type=positive, default=500, help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--size",
        choices=transformer.SIZES,
        default="tiny",
        help="of the model (default: %(default)s)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE_OR_DIR",
        help="the text to train on (default: the sources of Python's standard library)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), metavar="DIR", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=seed, default=0, help="of weights and batches (default: %(default)s)"
    )
    parser.add_argument("--restart", action="store_true", help="start anew, whatever --out holds")


class Progress:
    """A line that is rewritten on a terminal; elsewhere a new line every so often."""

    def __init__(self, steps: int, tokens_per_step: int, first_step: int) -> None:
        self._steps = steps
        self._tokens = tokens_per_step
        self._first_step = (
            first_step  # in this session; it comes after compilation, so is not timed
        )
        self._started = 0.0
        self._terminal = sys.stdout.isatty()
        self._interval = max(1, steps // _LOG_LINES)

    def update(self, state: training.State) -> None:
        """Shows the step just done."""
        done = state.step - self._first_step
        if done == 0:
            self._started = time.perf_counter()
        if not self._terminal and state.step % self._interval and state.step != self._steps:
            return
        parts = [f"step {state.step:>{len(str(self._steps))}}/{self._steps}"]
        for name, run in state.runs.items():
            recent = slice(-20, None)
            rate = self._tokens / run.seconds[recent].mean()
            parts.append(f"{name} {run.losses[recent].mean():.3f} ({rate:,.0f} tokens/s)")
        if done:
            left = (time.perf_counter() - self._started) / done * (self._steps - state.step)
            parts.append(f"{int(left) // 60}:{int(left) % 60:02d} left")
        if self._terminal:
            filled = _BAR * state.step // self._steps
            parts.insert(0, "[" + "#" * filled + "." * (_BAR - filled) + "]")
            # Back to the first column, and clear what a longer line has left.
            print("\r" + "  ".join(parts) + "\x1b[K", end="", flush=True)
        else:
            print("  ".join(parts), flush=True)

    def close(self) -> None:
        """Leaves the line."""
        if self._terminal:
            print(flush=True)


@contextmanager
def interrupt_flag() -> Iterator[Callable[[], bool]]:
    """A function that says whether Ctrl-C was pressed; pressed again, it interrupts at once."""
    pressed = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print(
            "\nfinishing this step and saving; Ctrl-C again drops what came after the last save",
            file=sys.stderr,
            flush=True,
        )

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)


def _fail(message: object) -> int:
    print(f"python -m jax_fp4 demo: error: {message}", file=sys.stderr)
    return 2


def _command() -> str:
    arguments = [argument for argument in sys.argv[1:] if argument != "--restart"]
    return shlex.join(["python", "-m", "jax_fp4", *arguments])


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; the exit code is 0, 2 for a wrong argument, or 130 after Ctrl-C."""
    size = transformer.SIZES[arguments.size]
    out: Path = arguments.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        return _fail(f"cannot write to --out {out}: {error.strerror}; name another folder")
    # Kernels exist for the CPU only, whatever other devices this machine has.
    with jax.default_device(jax.devices("cpu")[0]):
        try:
            corpus = corpora.load(arguments.text, size.context + 1)
            config = training.Config(
                size=arguments.size,
                steps=arguments.steps,
                seed=arguments.seed,
                recipes=arguments.recipes,
                text_digest=corpus.digest,
            )
            checkpoint = out / "checkpoint.npz"
            if arguments.restart:
                checkpoint.unlink(missing_ok=True)
            state = training.load(checkpoint, config)
        except (corpora.CorpusError, training.TrainingError) as error:
            return _fail(error)
        return _train_and_report(config, corpus, state, out, checkpoint)


def _train_and_report(
    config: training.Config,
    corpus: corpora.Corpus,
    state: training.State | None,
    out: Path,
    checkpoint: Path,
) -> int:
    size = transformer.SIZES[config.size]
    if state is None:
        state = training.initial_state(config)
    elif 0 < state.step < config.steps:
        state.resumed_at.append(state.step)
    parameters = transformer.parameter_count(state.runs[config.recipes[0]].params)
    print(
        f"{' and '.join(config.recipes)}: {config.steps} steps of {size.tokens_per_step:,} bytes "
        f"each, {parameters / 1e6:.2f} M parameters, CPU level {jax_fp4.cpu_level()}\n"
        f"text: {corpus.source}, {corpus.files} files, {corpus.train.size / 1e6:.1f} MB and "
        f"{corpus.validation.size / 1e6:.1f} MB held out"
    )
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    if not has_matplotlib:
        print("no picture will be drawn: matplotlib is not installed (pip install matplotlib)")
    if state.step == config.steps:
        print(f"all steps are done already, see {checkpoint}; --restart trains anew")
    else:
        if state.step:
            print(f"continuing after step {state.step}")
        print("compiling ...", end="" if sys.stdout.isatty() else "\n", flush=True)

    progress = Progress(config.steps, size.tokens_per_step, state.step + 1)
    saved_at = time.monotonic()

    def after_step(state: training.State) -> None:
        nonlocal saved_at
        progress.update(state)
        if time.monotonic() - saved_at > _SAVE_SECONDS:
            training.save(checkpoint, config, state)
            saved_at = time.monotonic()

    with interrupt_flag() as interrupted:
        finished = training.train(config, corpus, state, stopped=interrupted, after_step=after_step)
        progress.close()  # the line stays
        training.save(checkpoint, config, state)
    if not finished:
        print(f"stopped after step {state.step} of {config.steps}; to continue: {_command()}")
        return _INTERRUPTED
    numbers = report.results(config, corpus, state, parameters)
    report.write_json(out / "results.json", numbers)
    written = [out / "results.json"]
    for name, one in state.runs.items():
        path = out / f"{name}.safetensors"
        model_file.save(path, one.params, size=config.size, recipe=name, text=config.text_digest)
        written.append(path)
    if has_matplotlib:
        report.write_plot(out / "loss.png", numbers)
        written.append(out / "loss.png")
    print(f"\n{report.table(numbers)}\n\nwritten: {', '.join(map(str, written))}")
    return 0

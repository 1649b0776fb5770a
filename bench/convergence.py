"""The published loss comparison in small: 10,000 steps of each recipe from the same seeds.

    python bench/convergence.py run --recipe NVFP4 --seed 0    one run; goes on where it stopped
    python bench/convergence.py run --bug swap_nibbles         NVFP4 with a planted bug, 2,000 steps
    python bench/convergence.py all                            every run that has no result yet
    python bench/convergence.py report                         table and picture of what is there

Model, text, optimizer and checkpoints are those of `python -m jax_fp4 demo`, in its size "micro".
A run keeps its checkpoint below --out and leaves one small file, NAME-seedN.json, in --results;
convergence_results.py reads those, convergence_report.py shows them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

import jax_fp4
from jax_fp4.cli import corpus as corpora
from jax_fp4.cli import demo, report, training, transformer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import convergence_report
import convergence_results

from support import planted_bugs
from support.repository import ROOT

STEPS, BUG_STEPS = 10_000, 2_000
AVERAGED_STEPS = 50  # of one point of a stored curve
# 131 kB of held-out text in the size micro; the demo's 16 batches would be 8 kB.
VALIDATION_BATCHES = 256
_SAVE_SECONDS = 30.0


def _four_over_six() -> jax_fp4.Recipe:
    """The NVFP4 recipe, with four-over-six wherever it rounds to nearest."""
    recipe = jax_fp4.recipes.NVFP4
    chosen = {}
    for field in dataclasses.fields(recipe):
        operand = getattr(recipe, field.name)
        if isinstance(operand, jax_fp4.Operand) and operand.rounding == "nearest":
            chosen[field.name] = dataclasses.replace(operand, four_over_six=True)
    return dataclasses.replace(recipe, name="NVFP4_4over6", **chosen)


RECIPES = {
    **{name: jax_fp4.RECIPES[name] for name in ("BF16", "FP8", "MXFP8", "NVFP4")},
    "NVFP4_4over6": _four_over_six(),
    "MXFP4": jax_fp4.RECIPES["MXFP4"],
}
BUGGY = {f"NVFP4-{bug}": bug for bug in planted_bugs.BUGS}
"""Names of runs with a planted bug."""

# Every run of the experiment: those that say most come first.
PLAN = [
    *(("BF16", 0), ("NVFP4", 0), ("FP8", 0), ("MXFP8", 0), ("NVFP4_4over6", 0), ("MXFP4", 0)),
    *(("NVFP4", 1), ("BF16", 1), ("BF16", 2), ("NVFP4", 2)),
    *((name, 0) for name in BUGGY),
]


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="one run, or the rest of it")
    what = run.add_mutually_exclusive_group(required=True)
    what.add_argument("--recipe", choices=RECIPES)
    what.add_argument("--bug", choices=planted_bugs.BUGS, help="planted in the NVFP4 recipe")
    run.add_argument("--seed", type=demo.seed, default=0, help="of weights and batches")
    everything = commands.add_parser("all", help="every run of the experiment without a result")
    show = commands.add_parser("report", help="README.md and convergence.png, of what is there")
    for command in (run, everything):
        command.add_argument("--steps", type=demo.positive, default=STEPS, help="of the schedule")
        command.add_argument(
            "--until", type=demo.positive, help=f"stop there (bugs: {BUG_STEPS}; others: --steps)"
        )
        command.add_argument("--size", choices=transformer.SIZES, default="micro")
        command.add_argument("--text", type=Path, help="default: Python's standard library")
        command.add_argument("--out", type=Path, default=ROOT / "out" / "convergence")
    for command in (run, everything, show):
        command.add_argument(
            "--results", type=Path, default=ROOT / "bench" / "results" / "convergence"
        )
    return parser


def _machine() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _conditions(command: Sequence[str], run: training.Run, resumed_at: list[int]) -> dict[str, Any]:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    return {
        "command": shlex.join(command),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": _machine(),
        "cores": len(cores),
        "cpu_level": jax_fp4.cpu_level(),
        "median_step_seconds": round(float(np.median(run.seconds)), 5),
        "training_seconds": round(float(np.sum(run.seconds)), 1),
        "resumed_at": resumed_at,
        "jax_fp4": jax_fp4.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def result_of(
    config: training.Config,
    corpus: corpora.Corpus,
    state: training.State,
    validation_loss: float,
    command: Sequence[str],
) -> dict[str, Any]:
    """What is kept of a finished run: a few kB."""
    (name,) = config.recipes
    size = transformer.SIZES[config.size]
    run = state.runs[name]
    losses = run.losses.astype(np.float64)
    points = losses[: len(losses) // AVERAGED_STEPS * AVERAGED_STEPS].reshape(-1, AVERAGED_STEPS)
    return {
        "name": name,
        "bug": BUGGY.get(name),
        "seed": config.seed,
        "steps": config.steps,
        "steps_done": state.step,
        "averaged_steps": AVERAGED_STEPS,
        "losses": [round(float(loss), 6) for loss in points.mean(axis=1)],
        "validation_loss": round(validation_loss, 6),
        "validation_tokens": VALIDATION_BATCHES * size.tokens_per_step,
        "model": {
            "size": config.size,
            **dataclasses.asdict(size),
            "parameters": transformer.parameter_count(run.params),
        },
        "text": {
            "source": corpus.source,
            "train_bytes": int(corpus.train.size),
            "sha256": corpus.digest,
        },
        "conditions": _conditions(command, run, state.resumed_at),
    }


def _train(arguments: argparse.Namespace, name: str, command: Sequence[str]) -> int:
    until = min(arguments.until or (BUG_STEPS if name in BUGGY else STEPS), arguments.steps)
    if until < AVERAGED_STEPS:
        raise training.TrainingError(
            f"a run must have {AVERAGED_STEPS} steps at least, which is one point of its curve, "
            f"got {until}"
        )
    size = transformer.SIZES[arguments.size]
    corpus = corpora.load(arguments.text, size.context + 1)
    config = training.Config(
        arguments.size, arguments.steps, arguments.seed, (name,), corpus.digest
    )
    recipes = {**RECIPES, **dict.fromkeys(BUGGY, jax_fp4.recipes.NVFP4)}
    folder: Path = arguments.out / f"{name}-seed{arguments.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.npz"
    state = training.load(checkpoint, config)
    if state is None:
        state = training.initial_state(config)
    elif 0 < state.step < until:
        state.resumed_at.append(state.step)
    progress = demo.Progress(until, size.tokens_per_step, state.step + 1)
    saved_at = time.monotonic()

    def after_step(state: training.State) -> None:
        nonlocal saved_at
        progress.update(state)
        if time.monotonic() - saved_at > _SAVE_SECONDS:
            training.save(checkpoint, config, state)
            saved_at = time.monotonic()

    print(f"{name}, seed {arguments.seed}: from step {state.step} to {until}", flush=True)
    with demo.interrupt_flag() as interrupted:
        training.train(
            config,
            corpus,
            state,
            stopped=lambda: interrupted() or state.step >= until,
            after_step=after_step,
            recipes=recipes,
        )
        progress.close()
        training.save(checkpoint, config, state)
        if state.step < until:
            print(f"stopped after step {state.step}; the same command goes on")
            return 130
    loss = training.validation_loss(
        state.runs[name].params, corpus, size, recipes[name], VALIDATION_BATCHES
    )
    result = result_of(config, corpus, state, loss, command)
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / convergence_results.file_name(name, arguments.seed)
    convergence_results.check(path, result)
    report.write_json(path, result)
    print(f"written: {path}")
    return 0


def _run(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    name = arguments.recipe or f"NVFP4-{arguments.bug}"
    planted = planted_bugs.planted(arguments.bug) if arguments.bug else contextlib.nullcontext()
    with jax.default_device(jax.devices("cpu")[0]), planted:
        return _train(arguments, name, command)


def _all(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    """Each run in a process of its own; stops at the first that does."""
    for name, seed in PLAN:
        if (arguments.results / convergence_results.file_name(name, seed)).exists():
            continue
        what = ["--bug", BUGGY[name]] if name in BUGGY else ["--recipe", name]
        words = [sys.executable, __file__, "run", *what, "--seed", str(seed), *rest]
        code = subprocess.run(words, check=False).returncode
        if code:
            return code
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command; the exit code is 0, 2 for a wrong argument or file, or 130 after Ctrl-C."""
    words = list(sys.argv[1:] if words is None else words)
    arguments = _arguments().parse_args(words)
    try:
        if arguments.command == "run":
            return _run(arguments, ["python", "bench/convergence.py", *words])
        if arguments.command == "all":
            return _all(arguments, words[1:])
        convergence_report.write(arguments.results, PLAN)
        return 0
    except (corpora.CorpusError, training.TrainingError, convergence_results.ResultError) as error:
        print(f"bench/convergence.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

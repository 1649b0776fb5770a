"""Training runs for the demo: AdamW, the step, and checkpoints that lose nothing.

Several recipes are trained side by side: at every step each of them takes the same batch, so that
their losses and their speeds come from the same text and the same minutes.

A checkpoint is one .npz file with everything that the next step depends on: parameters and moments
of every recipe, and the losses so far. Batches and learning rates are functions of the step number,
and the seeds of stochastic rounding come from the gradients themselves: a run that was interrupted
continues bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp4
from jax_fp4.cli import transformer
from jax_fp4.cli.corpus import Corpus
from jax_fp4.cli.transformer import Params, Size

# AdamW as language models are commonly trained with it.
_BETA1, _BETA2, _EPSILON = 0.9, 0.95, 1e-8
_WEIGHT_DECAY = 0.1  # of matrices; gains of norms have none
_GRADIENT_NORM = 1.0  # gradients are scaled down to this norm
_WARM_UP = 0.1  # of all steps
_FINAL_LEARNING_RATE = 0.1  # of the peak
_VALIDATION_BATCHES = 16


class TrainingError(ValueError):
    """A run cannot go on as asked; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What determines a run's numbers, together with the text.

    Attributes:
        size: a name in `transformer.SIZES`.
        steps: of every recipe.
        seed: of initial weights and batches.
        recipes: names in `jax_fp4.RECIPES`, or what `train` is given, in the order of the tables.
        text_digest: of the corpus.
    """

    size: str
    steps: int
    seed: int
    recipes: tuple[str, ...]
    text_digest: str


@dataclasses.dataclass
class Run:
    """One recipe's training so far.

    Attributes:
        params: float32.
        moments: first and second moment of every parameter.
        losses: float32 [steps], of the steps done.
        seconds: float64 [steps], wall time of each step.
        compile_seconds: of the sessions so far.
        validation: the loss on the held-out text, once the run is done.
    """

    params: Params
    moments: tuple[Params, Params]
    losses: np.ndarray
    seconds: np.ndarray
    compile_seconds: float = 0.0
    validation: float | None = None


@dataclasses.dataclass
class State:
    """All recipes' runs, which are always at the same step."""

    step: int
    runs: dict[str, Run]
    resumed_at: list[int] = dataclasses.field(default_factory=list)


def learning_rate(step: jax.Array, steps: int, peak: float) -> jax.Array:
    """Linear warm-up to ``peak``, then a cosine down to a tenth of it."""
    warm_up = max(1.0, _WARM_UP * steps)
    progress = jnp.clip((step - warm_up) / max(1.0, steps - warm_up), 0.0, 1.0)
    cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
    scale = _FINAL_LEARNING_RATE + (1.0 - _FINAL_LEARNING_RATE) * cosine
    return peak * jnp.where(step < warm_up, (step + 1.0) / warm_up, scale)


def _adamw(
    params: Params,
    moments: tuple[Params, Params],
    gradients: Params,
    step: jax.Array,
    rate: jax.Array,
) -> tuple[Params, tuple[Params, Params]]:
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    scale = jnp.minimum(1.0, _GRADIENT_NORM / jnp.maximum(norm, 1e-30))
    count = step + 1.0

    def update(path: Any, p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> Any:
        g = g * scale
        m = _BETA1 * m + (1.0 - _BETA1) * g
        v = _BETA2 * v + (1.0 - _BETA2) * g * g
        change = (m / (1.0 - _BETA1**count)) / (jnp.sqrt(v / (1.0 - _BETA2**count)) + _EPSILON)
        decay = 0.0 if "norm" in jax.tree_util.keystr(path) else _WEIGHT_DECAY
        return p - rate * (change + decay * p), m, v

    updated = jax.tree_util.tree_map_with_path(update, params, *moments, gradients)
    structure = jax.tree.structure(params)
    params, first, second = jax.tree.transpose(structure, jax.tree.structure((0, 0, 0)), updated)
    return params, (first, second)


def train_step(
    params: Params,
    moments: tuple[Params, Params],
    tokens: jax.Array,
    step: jax.Array,
    *,
    size: Size,
    steps: int,
    recipe: jax_fp4.Recipe,
) -> tuple[Params, tuple[Params, Params], jax.Array]:
    """New params and moments, and the loss before the step: tokens uint8 [B, T + 1]."""
    loss, gradients = jax.value_and_grad(transformer.loss)(params, tokens, size, recipe)
    rate = learning_rate(step, steps, size.learning_rate)
    return *_adamw(params, moments, gradients, step, rate), loss


@functools.cache
def _compiled_step(size: Size, steps: int, recipe: jax_fp4.Recipe) -> Any:
    """`train_step`, compiled; it reuses the memory of params and moments."""
    params = jax.eval_shape(functools.partial(transformer.initial_params, size, 0))
    step = functools.partial(train_step, size=size, steps=steps, recipe=recipe)
    tokens = jax.ShapeDtypeStruct((size.batch, size.context + 1), jnp.uint8)
    number = jax.ShapeDtypeStruct((), jnp.float32)
    traced = jax.jit(step, donate_argnums=(0, 1)).lower(params, (params, params), tokens, number)
    return traced.compile()


def initial_state(config: Config) -> State:
    """Every recipe with the same weights."""
    runs = {}
    for name in config.recipes:
        params = transformer.initial_params(transformer.SIZES[config.size], config.seed)
        zeros = (jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))
        runs[name] = Run(params, zeros, np.zeros(0, np.float32), np.zeros(0))
    return State(0, runs)


def train(
    config: Config,
    corpus: Corpus,
    state: State,
    *,
    stopped: Callable[[], bool],
    after_step: Callable[[State], None],
    recipes: Mapping[str, jax_fp4.Recipe] = jax_fp4.RECIPES,
) -> bool:
    """Trains every recipe in ``state`` to the end, in place.

    Args:
        config: of the run.
        corpus: the text.
        state: where to start.
        stopped: asked before each step; True ends the training there.
        after_step: called after each step, for progress and checkpoints.
        recipes: what the names in ``config.recipes`` mean.

    Returns:
        Whether the end was reached.
    """
    size = transformer.SIZES[config.size]
    step_functions = {}
    for name, run in state.runs.items():
        if state.step == config.steps or stopped():
            break
        started = time.perf_counter()
        step_functions[name] = _compiled_step(size, config.steps, recipes[name])
        run.compile_seconds += time.perf_counter() - started

    while state.step < config.steps:
        if stopped():
            return False
        tokens = corpus.batch(config.seed, state.step, size.batch, size.context + 1)
        for name, run in state.runs.items():
            started = time.perf_counter()
            run.params, run.moments, loss = step_functions[name](
                run.params, run.moments, tokens, np.float32(state.step)
            )
            run.losses = np.append(run.losses, np.float32(loss))  # waits for the step
            run.seconds = np.append(run.seconds, time.perf_counter() - started)
        state.step += 1
        after_step(state)

    for name, run in state.runs.items():
        if run.validation is None:
            run.validation = validation_loss(run.params, corpus, size, recipes[name])
    return True


_validation_step = jax.jit(transformer.loss, static_argnames=("size", "recipe"))


def validation_loss(
    params: Params,
    corpus: Corpus,
    size: Size,
    recipe: jax_fp4.Recipe | Callable[[Any], jax_fp4.Recipe],
    batches: int = _VALIDATION_BATCHES,
) -> float:
    """The loss on held-out text, in nats a byte, under a recipe or one for each weight."""
    tokens_of = corpus.validation_batches(batches, size.batch, size.context + 1)
    losses = [float(_validation_step(params, tokens, size, recipe)) for tokens in tokens_of]
    return float(np.mean(losses))


# ---- Checkpoints ---------------------------------------------------------------------------------

_CONFIG_ENTRY = "config"


def write_atomically(path: Path, write: Callable[[Any], None]) -> None:
    """Writes under a temporary name first: ``path`` holds the old content or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _run_arrays(run: Run) -> dict[str, Any]:
    leaves = jax.tree.leaves((run.params, run.moments))
    return {
        "losses": run.losses,
        "seconds": run.seconds,
        "compile_seconds": np.float64(run.compile_seconds),
        "validation": np.float64(np.nan if run.validation is None else run.validation),
        **{f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)},
    }


def save(path: Path, config: Config, state: State) -> None:
    """Writes a checkpoint."""
    header = {**dataclasses.asdict(config), "step": state.step, "resumed_at": state.resumed_at}
    arrays = {
        f"{name}/{entry}": value
        for name, run in state.runs.items()
        for entry, value in _run_arrays(run).items()
    }
    arrays[_CONFIG_ENTRY] = np.array(json.dumps(header))
    write_atomically(path, lambda file: np.savez(file, **arrays))


def load(path: Path, config: Config) -> State | None:
    """The state in a checkpoint, or None if there is no file.

    Raises:
        TrainingError: the file is of another configuration, or cannot be read.
    """
    if not path.exists():
        return None
    way_out = "name another folder with --out, or start anew with --restart"
    state = initial_state(config)
    try:
        with open(path, "rb") as file, np.load(file) as arrays:
            header = json.loads(str(arrays[_CONFIG_ENTRY]))
            _check_same(path, header, config, way_out)
            for name, run in state.runs.items():
                leaves, structure = jax.tree.flatten((run.params, run.moments))
                stored = [jnp.asarray(arrays[f"{name}/leaf{i}"]) for i in range(len(leaves))]
                run.params, run.moments = jax.tree.unflatten(structure, stored)
                run.losses, run.seconds = arrays[f"{name}/losses"], arrays[f"{name}/seconds"]
                run.compile_seconds = float(arrays[f"{name}/compile_seconds"])
                validation = float(arrays[f"{name}/validation"])
                run.validation = None if np.isnan(validation) else validation
            state.step, state.resumed_at = header["step"], header["resumed_at"]
    except TrainingError:
        raise
    except (OSError, KeyError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise TrainingError(f"{path} is no checkpoint of this demo ({error}); {way_out}") from None
    return state


def _check_same(path: Path, header: dict[str, Any], config: Config, way_out: str) -> None:
    for field in dataclasses.fields(config):
        stored, wanted = header[field.name], getattr(config, field.name)
        if isinstance(wanted, Sequence) and not isinstance(wanted, str):
            stored, wanted = ",".join(stored), ",".join(wanted)
        if stored == wanted:
            continue
        if field.name == "text_digest":
            raise TrainingError(f"{path.parent} holds a run on another text; {way_out}")
        raise TrainingError(
            f"{path.parent} holds a run with {field.name}={stored}, not {field.name}={wanted}; "
            f"{way_out}"
        )

"""`python -m jax_fp4 calibrate`: what each layer loses in each format, and the best mixture.

The demo's model runs over some of its training text, once as it is and once for each linear layer
and format with that layer alone quantized. What is measured is the divergence of its predictions,

    mean over tokens of sum_i p_i log(p_i / q_i)    p: as it is, q: with the layer quantized

which is 0 for the same predictions and never below, whereas differences of the loss may be. On the
same text the largest input of each layer is taken, for static scales of activations.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp4
from jax_fp4.checkpoint import Checkpoint, CheckpointError
from jax_fp4.cli import corpus as corpora
from jax_fp4.cli import model_file, transformer
from jax_fp4.cli.generate import corpus_of
from jax_fp4.cli.model_file import Model, ModelError, linear_names
from jax_fp4.cli.training import write_atomically
from jax_fp4.cli.transformer import Params, Size
from jax_fp4.convert.mixed import (
    CANDIDATES,
    BudgetError,
    Choice,
    assign,
    fitting,
    format_bits,
    rules_text,
)
from jax_fp4.convert.rules import FORMATS, KEEP

DESCRIPTION = """\
Measures on text what each linear layer of a model of `demo` loses in each format, and writes to the
folder OUT: rules.toml, the best mixture within --bits for `convert --to mixed --rules`;
model.safetensors, the model with static scales of its activations (input_global_scale), for
`convert`; calibration.json, everything that was measured.
"""

_SEED = 2**32 - 1  # of the batches; other ones than a training with a usual seed has seen first
_FULL_SCALE = np.float32(2688)  # 6 * 448: input_global_scale is 2688 / amax (docs/checkpoints.md)


def _bits(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {value}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


for _type, _name in ((_count, "positive integer"), (_bits, "number")):
    _type.__name__ = _name  # argparse's message for what int() refuses: "invalid ... value"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("model", type=Path, metavar="MODEL", help=".safetensors file of `demo`")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the result")
    parser.add_argument(
        "--bits",
        type=_bits,
        default=4.75,
        help="of a linear weight on average, scales included (default: %(default)s)",
    )
    parser.add_argument(
        "--batches", type=_count, default=4, help="of text to measure on (default: %(default)s)"
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE_OR_DIR",
        help="what the model was trained on (default: the sources of Python's standard library)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; the exit code is 0, or 2 for a wrong argument."""
    # Kernels exist for the CPU only, whatever other devices this machine has.
    with jax.default_device(jax.devices("cpu")[0]):
        try:
            _run(arguments)
        except (
            corpora.CorpusError,
            CheckpointError,
            ModelError,
            BudgetError,
            OSError,
        ) as error:
            print(f"python -m jax_fp4 calibrate: error: {error}", file=sys.stderr)
            return 2
    return 0


def _run(arguments: argparse.Namespace) -> None:
    model = model_file.load(arguments.model)
    for name, w in model.linear.items():
        if isinstance(w, jax_fp4.BlockScaledArray):
            raise ModelError(f"{name} is {w.format} already; take the model that `demo` wrote")
    corpus = corpus_of(model, arguments.text)
    batches = [
        corpus.batch(_SEED, i, model.size.batch, model.size.context)
        for i in range(arguments.batches)
    ]
    weights = sum(w.size for w in model.linear.values())
    smallest = sum(
        min(format_bits(name, *w.shape) for name in fitting(w.shape[1]))
        for w in model.linear.values()
    )
    if smallest > arguments.bits * weights:  # before anything is measured
        raise BudgetError(
            f"--bits {arguments.bits}: the smallest formats need {smallest / weights:.4f} bits a "
            "weight; allow that much"
        )
    choices = sensitivities(model, batches)
    chosen = assign(choices, int(arguments.bits * weights))
    used = sum(choices[name][format].bits for name, format in chosen.items())
    text = (
        f"Made by `python -m jax_fp4 calibrate`: {used / weights:.4f} bits a weight of at most "
        f"{arguments.bits}."
    )
    amax = input_amax(model.params, batches, model.size)
    _write(arguments, model, choices, chosen, rules_text(_tensors(chosen), text), amax)
    print(_table(choices, chosen, amax))
    print(f"{used / weights:.4f} bits a weight of at most {arguments.bits}")


def _tensors(chosen: dict[str, str]) -> dict[str, str]:
    return {f"{name}.weight": format for name, format in chosen.items()}


def _write(
    arguments: argparse.Namespace,
    model: Model,
    choices: dict[str, dict[str, Choice]],
    chosen: dict[str, str],
    rules: str,
    amax: dict[str, np.float32],
) -> None:
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    with Checkpoint(arguments.model) as file:
        tensors: dict[str, Any] = {n: t for n, t in file.items() if "input_global_scale" not in n}
    for name, value in amax.items():
        tensors[f"{name}.input_global_scale"] = np.array([_FULL_SCALE / value], np.float32)
    model_file.save_tensors(out / "model.safetensors", tensors, model.metadata)
    write_atomically(out / "rules.toml", lambda file: file.write(rules.encode()))
    numbers = {
        "bits": arguments.bits,
        "batches": arguments.batches,
        "layers": {
            name: {
                "chosen": chosen[name],
                "input_amax": float(amax[name]),
                "divergence": {format: choice.cost for format, choice in own.items()},
                "bits": {format: choice.bits for format, choice in own.items()},
            }
            for name, own in choices.items()
        },
    }
    content = (json.dumps(numbers, indent=2) + "\n").encode()
    write_atomically(out / "calibration.json", lambda file: file.write(content))


def _table(
    choices: dict[str, dict[str, Choice]], chosen: dict[str, str], amax: dict[str, np.float32]
) -> str:
    formats = [name for name in CANDIDATES if name != KEEP]
    head = ["layer", "input amax", *(f"{name}, 1e-6" for name in formats), "chosen"]
    rows = [head]
    for layer, own in choices.items():
        costs = [f"{1e6 * own[name].cost:.1f}" if name in own else "-" for name in formats]
        rows.append([layer, f"{amax[layer]:.3g}", *costs, chosen[layer]])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


# ---- What is measured ----------------------------------------------------------------------------


def _wide_linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """The linear layer with a weight in float32, so that a decoded one is not rounded again."""
    return (x.astype(jnp.bfloat16).astype(jnp.float32) @ w).astype(jnp.bfloat16)


def _log_predictions(params: Params, tokens: jax.Array, size: Size) -> jax.Array:
    logits, _ = transformer.forward(params, tokens, size, _wide_linear)
    return jax.nn.log_softmax(logits, axis=-1)


@jax.jit
def _divergence(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    return jnp.mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))


_log_predictions_jit = jax.jit(_log_predictions, static_argnames=("size",))


def sensitivities(model: Model, batches: list[np.ndarray]) -> dict[str, dict[str, Choice]]:
    """Bits and divergence of every linear layer in every format that fits it.

    Args:
        model: with linear weights in bfloat16.
        batches: of tokens uint8 [B, T].

    Returns:
        {layer: {format: choice}}; formats as in rules.
    """
    params: Params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model.params)
    reference = [_log_predictions_jit(params, tokens, model.size) for tokens in batches]
    found: dict[str, dict[str, Choice]] = {}
    for name, i, layer in linear_names(model.size):
        w = model.linear[name]  # [N, K]
        own: dict[str, Choice] = {}
        for format in fitting(w.shape[1]):
            cost = 0.0
            if format != KEEP:
                q = jax_fp4.quantize(jnp.asarray(w), FORMATS[format])
                blocks = list(params["blocks"])
                blocks[i] = {**blocks[i], layer: jax_fp4.dequantize(q, jnp.float32).T}
                changed = {**params, "blocks": blocks}
                cost = float(
                    np.mean(
                        [
                            _divergence(log_p, _log_predictions_jit(changed, tokens, model.size))
                            for log_p, tokens in zip(reference, batches, strict=True)
                        ]
                    )
                )
            own[format] = Choice(format_bits(format, *w.shape), max(cost, 0.0))
        found[name] = own
    return found


def input_amax(params: Params, batches: list[np.ndarray], size: Size) -> dict[str, np.float32]:
    """The largest magnitude of what goes into each linear layer."""

    @jax.jit
    def largest(params: Params, tokens: jax.Array) -> jax.Array:
        seen = []

        def linear(x: jax.Array, w: jax.Array) -> jax.Array:
            seen.append(jnp.max(jnp.abs(x.astype(jnp.bfloat16))).astype(jnp.float32))
            return transformer.Linear(jax_fp4.recipes.BF16)(x, w)

        transformer.forward(params, tokens, size, linear)
        return jnp.stack(seen)

    found = np.max([np.asarray(largest(params, tokens)) for tokens in batches], axis=0)
    return {name: found[n] for n, (name, _, _) in enumerate(linear_names(size))}

"""`python -m jax_fp4 generate`: continues a text with the demo's model, from any of the formats."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import jax

import jax_fp4
from jax_fp4.checkpoint import CheckpointError
from jax_fp4.cli import corpus as corpora
from jax_fp4.cli import decoding, model_file
from jax_fp4.cli.model_file import Model, ModelError

DESCRIPTION = """\
Continues a text with a model that `demo` has trained: MODEL is one of the .safetensors files of its
--out folder, or what `convert` made of one, in any format. Prints the speed, the bytes of the
weights, and the perplexity on held-out text, with --against beside that of the model in bfloat16.
"""

# The first forward pass is the prompt's and the second the first of one token: both are compiled.
_UNTIMED = 2


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"must lie in [0, 2**32), got {value}")
    return value


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {value}")
    return value


for _type, _name in ((_count, "positive integer"), (_seed, "seed"), (_temperature, "number")):
    _type.__name__ = _name  # argparse's message for what int() refuses: "invalid ... value"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("model", type=Path, metavar="MODEL", help=".safetensors file or folder")
    parser.add_argument(
        "--against", type=Path, metavar="MODEL", help="the model in bfloat16, for its perplexity"
    )
    parser.add_argument(
        "--activations",
        choices=decoding.ACTIVATIONS,
        default="bf16",
        help="; ".join(f"{name}: {what}" for name, what in decoding.ACTIVATIONS.items()),
    )
    parser.add_argument("--prompt", default="def ", metavar="TEXT", help="(default: %(default)r)")
    parser.add_argument(
        "--tokens", type=_count, default=100, help="bytes to make (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=_temperature,
        default=0.0,
        help="0, the default: the most likely byte; otherwise sampled",
    )
    parser.add_argument("--top-k", type=_count, metavar="K", help="sample among the K most likely")
    parser.add_argument("--seed", type=_seed, default=0, help="of sampling (default: %(default)s)")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE_OR_DIR",
        help="what the model was trained on (default: the sources of Python's standard library)",
    )


def _fail(message: object) -> int:
    print(f"python -m jax_fp4 generate: error: {message}", file=sys.stderr)
    return 2


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; the exit code is 0, or 2 for a wrong argument."""
    # Kernels exist for the CPU only, whatever other devices this machine has.
    with jax.default_device(jax.devices("cpu")[0]):
        try:
            _run(arguments)
        except (corpora.CorpusError, CheckpointError, ModelError) as error:
            return _fail(error)
    return 0


def corpus_of(model: Model, text: Path | None) -> corpora.Corpus:
    """The text that a model was trained on, so that held-out text was held out.

    Raises:
        ModelError: it was trained on another one.
    """
    corpus = corpora.load(text, model.size.context + 1)
    if corpus.digest != model.metadata.get("text"):
        raise ModelError(
            f"the model was trained on another text than {corpus.source}; name it with --text"
        )
    return corpus


def _run(arguments: argparse.Namespace) -> None:
    model = model_file.load(arguments.model)
    runnable = decoding.runnable(model, arguments.activations)
    prompt = arguments.prompt.encode()
    context = model.size.context
    if not prompt or len(prompt) + arguments.tokens > context:
        raise ModelError(
            f"--prompt of {len(prompt)} bytes and {arguments.tokens} --tokens: expected one byte "
            f"or more of prompt and at most {context} in all, which the model was trained for"
        )
    if arguments.top_k is not None and arguments.top_k > 256:
        raise ModelError(f"--top-k {arguments.top_k}: there are 256 bytes")
    corpus = corpus_of(model, arguments.text)
    against = None if arguments.against is None else model_file.load(arguments.against)
    if against is not None and against.size != model.size:
        raise ModelError(f"--against {arguments.against} is a model of another size")

    print(f"{summary(model)}; activations {arguments.activations}")
    print(f"---\n{arguments.prompt}", end="", flush=True)
    seconds = _print_continuation(runnable, prompt, arguments)
    print("\n---")
    speed = "too few tokens for a speed"
    if arguments.tokens > _UNTIMED:
        speed = f"{(arguments.tokens - _UNTIMED) / seconds:,.0f} tokens/s"
    print(f"{arguments.tokens} tokens, {speed}, CPU level {jax_fp4.cpu_level()}")
    found = decoding.perplexity(runnable, corpus)
    line = f"perplexity {found:.4f} a byte of held-out text"
    if against is not None:
        base = decoding.perplexity(decoding.runnable(against, "bf16"), corpus)
        line += f", {arguments.against} {base:.4f}: {100 * (found / base - 1):+.2f} %"
    print(line)


def summary(model: Model) -> str:
    """Formats and bytes of a model's weights."""
    kinds = Counter(
        str(w.format) if isinstance(w, jax_fp4.BlockScaledArray) else w.dtype.name
        for w in model.linear.values()
    )
    formats = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    return (
        f"linear weights: {formats}, {model.linear_bytes:,} bytes "
        f"({model.bits_per_weight:.2f} bits a weight); others {model.other_bytes:,} bytes"
    )


def _print_continuation(
    model: decoding.Runnable, prompt: bytes, arguments: argparse.Namespace
) -> float:
    """Prints the bytes as they come; the seconds of those that are timed."""
    started = time.perf_counter()
    text = decoding.generate(
        model,
        prompt,
        arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    for number, byte in enumerate(text, start=1):
        character = chr(byte)
        print(character if character.isprintable() or byte == 10 else "?", end="", flush=True)
        if number == _UNTIMED:
            started = time.perf_counter()
    return time.perf_counter() - started

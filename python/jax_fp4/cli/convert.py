"""``python -m jax_fp4 convert``: quantizes a checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_fp4.convert.job import Job

DESCRIPTION = """Quantizes the weights of a checkpoint.

IN is a .safetensors file, a folder of them with an index, an .npz file or an orbax checkpoint, in
bfloat16, float16 or float32. OUT is a folder that gets safetensors files, their configuration, and
a report (table, JSON, picture). A conversion that was interrupted goes on when the same command is
given again. docs/checkpoints.md has the rules file and the conventions.
"""

_GIGABYTE = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    from jax_fp4.checkpoint import CONVENTIONS
    from jax_fp4.convert.rules import FORMATS, METHODS

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("source", metavar="IN", type=Path, help="what is converted")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for the result")
    parser.add_argument(
        "--to",
        required=True,
        choices=(*FORMATS, "mixed"),
        help="format of what is quantized; mixed: as the rules say for each tensor",
    )
    parser.add_argument("--rules", type=Path, help="TOML file: which tensors, how (see the docs)")
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="nearest",
        help="block scales from the block's maximum, the better of two, or the best of a search",
    )
    parser.add_argument(
        "--convention",
        choices=CONVENTIONS,
        default="compressed-tensors",
        help="names and layout of what is stored (default: compressed-tensors)",
    )
    parser.add_argument(
        "--max-shard-gb", type=float, default=5.0, help="begin another file after so many GB"
    )
    parser.add_argument("--restart", action="store_true", help="drop an interrupted conversion")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 1 if the checkpoint cannot be converted, 2 for arguments that clash."""
    from jax_fp4.checkpoint import CheckpointError

    problem = _clash(arguments)
    if problem:
        print(f"jax_fp4 convert: {problem}", file=sys.stderr)
        return 2
    try:
        _convert(arguments)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on where this one stopped", file=sys.stderr)
        return 130
    return 0


def _clash(arguments: argparse.Namespace) -> str:
    if arguments.to == "mixed" and arguments.rules is None:
        return "--to mixed needs --rules FILE, which says the format of each tensor"
    if not arguments.max_shard_gb > 0:
        return f"--max-shard-gb: expected a positive number, got {arguments.max_shard_gb}"
    if arguments.method == "four-over-six" and arguments.to not in ("nvfp4", "mixed"):
        return f"--method four-over-six is for nvfp4, got --to {arguments.to}"
    return ""


def _convert(arguments: argparse.Namespace) -> None:
    from jax_fp4.convert import report
    from jax_fp4.convert.job import Job
    from jax_fp4.convert.rules import FORMATS, default_rules, read_rules
    from jax_fp4.convert.sources import open_source

    format = FORMATS.get(arguments.to)
    if arguments.rules is not None:
        rules = read_rules(arguments.rules, format, arguments.method)
    else:
        assert format is not None
        rules = default_rules(format, arguments.method)
    with open_source(arguments.source) as source:
        limit = int(arguments.max_shard_gb * _GIGABYTE)
        job = Job(source, arguments.out, rules, arguments.convention, limit)
        started = time.perf_counter()
        bar = _Bar(job)
        job.run(bar, restart=arguments.restart)
        bar.close()
        numbers = report.numbers(job, time.perf_counter() - started)
    print(report.table(numbers))
    for path in report.write(arguments.out, numbers):
        print(f"wrote {path}")
    job.close()


class _Bar:
    """A line of progress on stderr: a bar on a terminal, else a line for each tenth."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._total = max(1, job.total_bytes)
        self._terminal = sys.stderr.isatty()
        self._started = self._shown = time.perf_counter()
        self._tenth = 0

    def __call__(self, done: int, name: str) -> None:
        now = time.perf_counter()
        part = done / self._total
        rate = (done - self._job.resumed_bytes) / max(1e-9, now - self._started)
        left = (self._total - done) / max(1.0, rate)
        text = f"{100 * part:5.1f} %  {done / 1e9:.2f} GB  {rate / 1e9:.2f} GB/s  {left:.0f} s left"
        if self._terminal and (now - self._shown > 0.1 or done == self._total):
            bar = ("#" * int(24 * part)).ljust(24, ".")
            print(f"\r[{bar}] {text}  {name[-40:]:40}", end="", file=sys.stderr, flush=True)
            self._shown = now
        elif not self._terminal and int(10 * part) > self._tenth:
            self._tenth = int(10 * part)
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the line."""
        if self._terminal:
            print(file=sys.stderr)

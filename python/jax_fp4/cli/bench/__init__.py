"""``python -m jax_fp4 bench``: this package beside its peers, in one run.

    shapes.py      what is measured, by name        gemm.py        products of quantized operands
    measure.py     the protocol                     dots.py        quantization and product
    check.py       were the results right?          quantizers.py  quantization alone
    inputs.py      operands                         layers.py      a transformer block
    worker.py      the measuring process            runner.py      starts it
    records.py     what is kept                     compare.py     two runs
    table.py, plots.py, html.py                     modelled.py    the PTX machine's cycle model

docs/bench.md says how a figure protects itself, and how to read the report.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from jax_fp4.cli.bench import records, table
from jax_fp4.cli.bench.worker import DEFAULT_SHAPES

DESCRIPTION = """\
Measures products, quantizers and a transformer block beside the implementations of others, in the
same minutes: peers take turns, inputs are new for every sample, and what the timed calls returned
is checked. Prints medians, their spread, the part of this machine's ceilings that was reached, and
how ours compare. The exit code is 1 if any result was wrong. See docs/bench.md.
"""
_MINUTES = 7.0  # with what a last row takes longer, `make bench` ends within ten


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("ops", nargs="*", default=[], metavar="OP", help=", ".join(DEFAULT_SHAPES))
    parser.add_argument(
        "--shapes", help="sets (llama3-8b, decode, ...), layers of them (llama3-8b/out), or MxNxK"
    )
    parser.add_argument("--tokens", type=int, help="M at most, for shapes of a set")
    parser.add_argument("--cores", type=int, nargs="*", help="numbers of cores (default: all)")
    parser.add_argument("--minutes", type=float, default=_MINUTES, help="for everything")
    parser.add_argument("--rounds", type=int, help="samples of each peer, whatever they take")
    parser.add_argument("--out", type=Path, help="write every sample as JSON lines to this file")
    parser.add_argument("--report", type=Path, help="write table, plots and report to this folder")
    parser.add_argument("--compare", type=Path, help="say what changed since that --out file")
    parser.add_argument(
        "--modelled", action="store_true", help="add the PTX machine's figures for GPU kernels"
    )
    parser.add_argument("--platform", choices=("cpu", "gpu"), help="(default: gpu if JAX has one)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)


def _problem(args: argparse.Namespace, cores: list[int], available: int) -> str | None:
    """What is wrong with the arguments."""
    from jax_fp4.cli.bench import worker

    for op in args.ops:
        if op not in DEFAULT_SHAPES:
            return f"expected operations of {', '.join(DEFAULT_SHAPES)}; got {op!r}"
    for name in ("tokens", "rounds", "minutes"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            return f"--{name}: expected more than 0, got {value}"
    for count in cores:
        if not 1 <= count <= available:
            return f"--cores: expected 1 to {available}, as this machine has; got {count}"
    if args.report is not None and importlib.util.find_spec("matplotlib") is None:
        return "--report needs matplotlib for its plots: pip install 'jax-fp4[bench]'"
    try:
        for op in args.ops or DEFAULT_SHAPES:
            worker.cases(op, args.shapes, args.tokens, gpu=False)
    except ValueError as error:
        return str(error)
    return None


def _gpu_wanted(platform: str | None) -> bool:
    from jax_fp4.cli.doctor import gpu_names

    if platform is not None:
        return platform == "gpu"
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return any(importlib.util.find_spec(name) for name in plugins) and bool(gpu_names())


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the exit code."""
    if args.worker is not None:
        from jax_fp4.cli.bench import worker

        return worker.run(**json.loads(args.worker))
    has_affinity = hasattr(os, "sched_getaffinity")
    available = (
        sorted(os.sched_getaffinity(0)) if has_affinity else list(range(os.cpu_count() or 1))
    )
    cores = args.cores or [len(available)]
    problem = _problem(args, cores, len(available))
    old: list[records.Measured] = []
    try:
        if problem is None and args.compare is not None:
            old = records.measured(records.read(args.compare))
        for path in (args.out, args.report / "results.jsonl" if args.report else None):
            if problem is None and path is not None:  # before what could not be kept is measured
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("")
    except (OSError, ValueError) as error:
        problem = str(error)
    if problem is not None:
        print(f"bench: {problem}", file=sys.stderr)
        return 2
    runs = [[]] if _gpu_wanted(args.platform) else [available[:count] for count in cores]
    return _run(args, runs, old)


def _run(args: argparse.Namespace, runs: list[list[int]], old: list[records.Measured]) -> int:
    from jax_fp4.cli.bench import conditions

    facts = conditions.gather()
    print("\n".join(f"{topic}: {value}" for topic, value in facts.items()))
    found: list[records.Record] = [records.Conditions(facts)]
    status = 0
    try:
        for cpus in runs:
            _measure(args, cpus, 60 * args.minutes / len(runs), found)
        if args.modelled:
            _model(args, not runs[0], found)
    except KeyboardInterrupt:
        print("\ninterrupted; what was measured is kept", file=sys.stderr)
        status = 130
    except RuntimeError as error:
        print(f"bench: {error}", file=sys.stderr)
        status = 1
    _finish(args, found, old)
    wrong = [r for r in found if isinstance(r, records.Measured) and not r.correct]
    for row in wrong:
        print(f"bench: {table.title(row)}: {row.peer}: {row.verdict}", file=sys.stderr)
    # A peer may be missing. Ours may not, unless there was no time for it.
    skipped = [record for record in found if isinstance(record, records.Skipped)]
    failed = [s for s in skipped if s.peer.startswith("jax_fp4") and "--minutes" not in s.reason]
    for skip in failed:
        print(f"bench: {skip.op} {skip.shape}: {skip.peer}: {skip.reason}", file=sys.stderr)
    return status or int(bool(wrong or failed))


def _model(args: argparse.Namespace, gpu: bool, found: list[records.Record]) -> None:
    """Adds the PTX machine's rows for the shapes of `gemm`."""
    from jax_fp4.cli.bench import modelled, shapes, worker

    text = args.shapes or DEFAULT_SHAPES["gemm"]
    tokens = args.tokens or (shapes.TOKENS if gpu else worker.TOKENS["gemm"])
    rows = modelled.rows(shapes.products(text, tokens))
    found += rows
    print(table.modelled_text([row for row in rows if isinstance(row, records.Modelled)]))


def _measure(
    args: argparse.Namespace, cpus: list[int], seconds: float, found: list[records.Record]
) -> None:
    """One process: prints a table for each question when it is answered."""
    from jax_fp4.cli.bench import runner

    spec: dict[str, Any] = {
        "ops": args.ops or list(DEFAULT_SHAPES),
        "shape_list": args.shapes,
        "tokens": args.tokens,
        "cores": len(cpus),
        "seconds": seconds,
        "rounds": args.rounds,
    }
    progress = runner.Progress(sys.stderr)
    pending: list[records.Measured] = []

    def show() -> None:
        progress.clear()
        if pending:
            print(table.text(pending), flush=True)
            pending.clear()

    try:
        for record in runner.run(spec, cpus, progress):
            found.append(record)
            if isinstance(record, records.Conditions):
                print("\n".join(f"{topic}: {value}" for topic, value in record.values.items()))
            if not isinstance(record, records.Measured):
                continue
            if pending and pending[0].question != record.question:
                show()
            pending.append(record)
    finally:
        show()


def _finish(
    args: argparse.Namespace, found: list[records.Record], old: list[records.Measured]
) -> None:
    """Writes and prints everything else."""
    skipped = [record for record in found if isinstance(record, records.Skipped)]
    if skipped:
        print("\nnot run:\n" + table.skipped_text(skipped))
    changes = None
    if args.compare is not None:
        from jax_fp4.cli.bench import compare

        changes = compare.compare(old, records.measured(found))
        print(f"\ncompared with {args.compare}:\n{compare.text(changes)}")
    lines = "".join(records.to_line(record) + "\n" for record in found)
    if args.out is not None:
        args.out.write_text(lines)
        print(f"\nsamples: {args.out}")
    if args.report is not None:
        from jax_fp4.cli.bench import html

        (args.report / "results.jsonl").write_text(lines)
        print(f"\nreport: {html.write(args.report, found, changes)}")

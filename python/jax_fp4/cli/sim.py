"""``python -m jax_fp4 sim``: runs one kernel of a PTX file on the PTX machine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

DESCRIPTION = """Runs a kernel of a PTX file on the CPU and reports what it did.

The launch file is JSON: {"entry": name, "grid": [x, y, z], "block": ..., "cluster": ...,
"smem": bytes, "args": [...]}. An argument is a number, {"hex": "..."} for the bytes of a
structure, or an array:
{"zeros": [shape], "dtype": "float32"}, {"empty": ...} (not written yet), {"random": ...} (standard
normal), {"arange": ...}, or {"load": "file.npy"}; with "save": "file.npy" it is
written back after the run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("ptx", type=Path, help="PTX file")
    parser.add_argument("--launch", type=Path, required=True, help="JSON file with the launch")
    parser.add_argument("--sm", default="100a", help="chip to run on (default: 100a)")
    parser.add_argument("--seed", type=int, default=0, help="first seed of the schedule")
    parser.add_argument("--seeds", type=int, default=1, help="number of schedules to run")
    parser.add_argument("--costs", action="store_true", help="print counts as JSON")
    parser.add_argument("--time", action="store_true", help="print counts and modelled times")
    parser.add_argument("--trace", type=Path, help="write the modelled timeline (Chrome's format)")
    parser.add_argument("--no-data", action="store_true", help="with --time: move no bulk data")
    parser.add_argument("--lines", action="store_true", help="print how often each line ran")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 1 if the kernel did what it must not do, 2 for a wrong file."""
    from jax_fp4 import sim

    if arguments.seeds < 1:
        print(f"jax_fp4 sim: --seeds: expected 1 or more, got {arguments.seeds}", file=sys.stderr)
        return 2
    counts: dict[int, int] = {}
    saved: list[tuple[Path, np.ndarray]] = []
    try:
        text = arguments.ptx.read_text()
        spec = json.loads(arguments.launch.read_text())
        timed = arguments.time or arguments.trace is not None
        model = sim.CostModel(
            time=timed, timeline=arguments.trace is not None, data=not arguments.no_data
        )
        machine = sim.Machine(arguments.sm, costs=model if arguments.costs or timed else False)
        module = machine.load(text)
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            values, saved = _arguments(machine, spec.get("args", []), arguments.launch.parent)
            report = module.launch(
                spec["entry"],
                spec["grid"],
                spec["block"],
                spec.get("cluster", 1),
                spec.get("smem", 0),
                values,
                seed=seed,
            )
            _print(report)
            counts = report.by_line
            if report.costs is not None and (arguments.costs or arguments.time):
                print(json.dumps(report.costs.as_dict(), indent=1))
            if report.costs is not None and arguments.trace is not None:
                report.costs.save_trace(arguments.trace)
        for path, array in saved:
            np.save(path, array)
    except sim.SimulationError as error:
        print(error, file=sys.stderr)
        return 1
    except (OSError, ValueError, KeyError) as error:
        print(f"jax_fp4 sim: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if arguments.lines:
        lines = text.splitlines()
        for number, count in sorted(counts.items()):
            print(f"{count:>12} {number:>6} {lines[number - 1].strip()}")
    return 0


def _arguments(
    machine: Any, described: list[Any], folder: Path
) -> tuple[list[Any], list[tuple[Path, np.ndarray]]]:
    values: list[Any] = []
    saved: list[tuple[Path, np.ndarray]] = []
    for item in described:
        if not isinstance(item, dict):
            values.append(item)
            continue
        if "hex" in item:
            values.append(bytes.fromhex(item["hex"]))
            continue
        array = _array(machine, item, folder)
        values.append(array)
        if "save" in item:
            saved.append((folder / item["save"], array))
    return values, saved


def _array(machine: Any, item: dict[str, Any], folder: Path) -> np.ndarray:
    dtype = np.dtype(item.get("dtype", "float32"))
    if "load" in item:
        return np.ascontiguousarray(np.load(folder / item["load"]))
    if "empty" in item:
        return machine.empty(item["empty"], dtype)
    if "zeros" in item:
        return np.zeros(item["zeros"], dtype)
    if "arange" in item:
        return np.arange(int(np.prod(item["arange"]))).reshape(item["arange"]).astype(dtype)
    if "random" in item:
        return np.random.default_rng(0).standard_normal(item["random"]).astype(dtype)
    raise ValueError(
        f"an array is 'zeros', 'empty', 'arange', 'random' or 'load', got {sorted(item)}"
    )


def _print(report: Any) -> None:
    print(f"seed {report.seed}: {report.instructions} warp instructions, trace {report.trace:016x}")
    for title, counts in (
        ("instructions", report.by_class),
        ("bytes read", report.bytes_read),
        ("bytes written", report.bytes_written),
    ):
        print(f"  {title}: " + ", ".join(f"{name} {n}" for name, n in sorted(counts.items())))
    for warning in report.warnings:
        print(f"  warning: {warning}")

"""``python -m jax_fp4 verify``: the conformance suite on whatever this machine has.

Every case runs in a process of its backend's own, which writes its arrays to a file; this process
compares them. The reference is the CPU backend at level `model`, whose own bytes `doctor` compares
with the specification's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_fp4.cli.verify_cases import Arrays, Case, cases

DESCRIPTION = """\
Runs every kernel family on every backend that is here and compares the results with the
reference, the CPU level `model`: quantized and decoded bytes have to be equal; products have to be
equal on the PTX machine, and within the bound of docs/numerics.md elsewhere. Prints a line for each
case. The exit code is 1 if anything failed, did not run, or did not launch its kernel.
"""


@dataclasses.dataclass(frozen=True)
class Backend:
    """Where cases run.

    Attributes:
        name: of the report's lines.
        environment: that a process needs for it.
        level: CPU level to force, "" for the best one.
        launches: whether kernels are launched.
        same_sums: whether products have the reference's very bits.
    """

    name: str
    environment: dict[str, str]
    level: str = ""
    launches: bool = False
    same_sums: bool = False


_CPU = {"JAX_PLATFORMS": "cpu", "JAX_FP4_DRIVER": ""}
_REFERENCE = Backend("reference", _CPU, level="model")


# ---- Processes -----------------------------------------------------------------------------------


def _child(level: str, path: Path) -> int:
    """Runs all cases in this process; arrays, launches and errors go to the file."""
    from jax_fp4 import _native

    if level:
        _native.force_cpu_level(level)
    arrays: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for case in cases():
        before = _native.launch_counts()
        try:
            made = case.compute()
        except Exception as error:  # is that case's result
            made = {}
            facts[case.name] = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        else:
            counts = _native.launch_counts()
            launched = [k for k, count in counts.items() if count > before.get(k, 0)]
            facts[case.name] = {"launched": launched}
        arrays |= {f"{case.name}|{name}": array for name, array in made.items()}
    reports = _native.sim_driver_reports() if _native.SIMULATED else []
    arrays["facts"] = np.array(json.dumps({"cases": facts, "reports": reports}))
    with path.open("wb") as file:
        np.savez(file, **arrays)
    return 0


@dataclasses.dataclass
class _Result:
    arrays: dict[str, Arrays]
    facts: dict[str, Any]
    reports: list[str]


def _run(backend: Backend, folder: Path) -> _Result | str:
    """A backend's results, or why there are none."""
    path = folder / f"{backend.name.replace(' ', '_')}.npz"
    command = [sys.executable, "-m", "jax_fp4", "verify", "--child", backend.level or "best"]
    done = subprocess.run(
        [*command, str(path)],
        env=os.environ | backend.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    by_case: dict[str, Arrays] = {}
    with np.load(path) as file:
        facts = json.loads(str(file["facts"]))
        for key in file.files:
            case, _, name = key.rpartition("|")
            if case:
                by_case.setdefault(case, {})[name] = file[key]
    return _Result(by_case, facts["cases"], facts["reports"])


# ---- Judgement -----------------------------------------------------------------------------------


def _differences(got: Arrays, expected: Arrays, same_sums: bool) -> str:
    """What is wrong with a case's arrays; empty: nothing."""
    if got.keys() != expected.keys():
        return f"expected arrays {sorted(expected)}, got {sorted(got)}"
    for name, value in expected.items():
        if name in ("exact", "bound"):
            continue
        mine = got[name]
        if mine.shape != value.shape or mine.dtype != value.dtype:
            return f"{name}: expected {value.dtype}{value.shape}, got {mine.dtype}{mine.shape}"
        if name == "D" and not same_sums:
            bad = ~(np.abs(mine.astype(np.float64) - expected["exact"]) <= expected["bound"])
        else:
            bad = np.array(
                np.ascontiguousarray(mine).view(np.uint8)
                != np.ascontiguousarray(value).view(np.uint8)
            )
        if bad.any():
            return f"{name}: {int(bad.sum())} of {bad.size} wrong, first at {int(bad.argmax())}"
    return ""


def judge(case: Case, backend: Backend, result: _Result, reference: _Result) -> str:
    """Why a case failed on a backend; empty: it passed."""
    facts = result.facts.get(case.name)
    if facts is None:
        return "did not run"
    if "error" in facts:
        return facts["error"]
    expected = reference.arrays.get(case.name)
    if expected is None:
        return f"the reference failed: {reference.facts.get(case.name)}"
    wrong = _differences(result.arrays.get(case.name, {}), expected, backend.same_sums)
    if wrong or not backend.launches:
        return wrong
    for prefix in case.kernels:
        if not any(kernel.startswith(prefix) for kernel in facts["launched"]):
            return f"no kernel {prefix}* was launched, only {facts['launched']}"
    return ""


def backends(found_gpus: Sequence[str]) -> list[Backend]:
    """Those of this machine."""
    from jax_fp4 import _native

    levels = ["portable", "avx2", "avx512", "avx512_bf16", "amx"]
    levels = levels[: levels.index(_native.best_cpu_level()) + 1]
    result = [Backend(f"cpu {level}", _CPU, level=level) for level in levels]
    images = {image for _, image in _native.kernel_images()}
    # Chips without block-scaled MMAs decode to bf16: other sums.
    for chip, image, same_sums in (
        ("100a", "PTX sm_100f", True),
        ("120a", "PTX sm_120f", True),
        ("90", "PTX sm_90", False),
        ("80", "PTX sm_80", False),
    ):
        if image in images:
            environment = {"JAX_PLATFORMS": "cpu", "JAX_FP4_DRIVER": "sim"}
            environment["JAX_FP4_SIM_DEVICES"] = chip
            name = f"ptx machine {chip}"
            result.append(Backend(name, environment, launches=True, same_sums=same_sums))
    if found_gpus:
        gpu = {"JAX_PLATFORMS": "cuda,cpu", "JAX_FP4_DRIVER": ""}
        result.append(Backend("gpu", gpu, launches=True))
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="backends whose names begin so: cpu, ptx, gpu (default: all that are here)",
    )
    parser.add_argument("--quiet", action="store_true", help="print failures and sums only")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 1 for a failure, 2 for a backend that is not here."""
    if arguments.child:
        level, path = arguments.child
        return _child("" if level == "best" else level, Path(path))
    from jax_fp4.cli import doctor

    chosen = backends(doctor.gpu_names())
    if arguments.only:
        wanted = tuple(arguments.only)
        missing = [w for w in wanted if not any(b.name.startswith(w) for b in chosen)]
        if missing:
            here = ", ".join(b.name for b in chosen)
            print(
                f"jax_fp4 verify: --only {missing[0]}: not here; there are {here}", file=sys.stderr
            )
            return 2
        chosen = [b for b in chosen if b.name.startswith(wanted)]
    failed = passed = 0
    with tempfile.TemporaryDirectory() as folder:
        reference = _run(_REFERENCE, Path(folder))
        if isinstance(reference, str):
            print(f"FAILED reference: {reference}")
            return 1
        for backend in chosen:
            result = _run(backend, Path(folder))
            if isinstance(result, str):
                print(f"FAILED {backend.name}: {result}")
                failed += 1
                continue
            for case in cases():
                wrong = judge(case, backend, result, reference)
                failed, passed = failed + bool(wrong), passed + (not wrong)
                if wrong:
                    print(f"FAILED {backend.name}: {case.name}: {wrong}")
                elif not arguments.quiet:
                    kernels = ", ".join(result.facts[case.name]["launched"])
                    print(f"ok     {backend.name}: {case.name}{kernels and ' by ' + kernels}")
            for report in result.reports:
                print(f"FAILED {backend.name}: {report}")
                failed += 1
    if not any(b.name == "gpu" for b in chosen):
        print("no GPU was used: nothing here says what hardware does")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0

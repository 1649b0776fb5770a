"""The stand-in CUDA runtime: a program as nvcc leaves it runs on the machine."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from support import stand_in
from support.native import compiler
from support.repository import ROOT


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("cudart") / "program"
    library = stand_in.path("libcudart.so")
    subprocess.run(
        [*compiler(), "-std=c++20", "-Wall", "-Wextra", "-Werror",
         str(ROOT / "tests" / "sim" / "cudart_c.cc"), str(library), f"-Wl,-rpath,{library.parent}",
         "-o", str(target)],
        check=True,
    )  # fmt: skip
    return target


def run(program: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program)], capture_output=True, text=True, check=False, env=os.environ | variables
    )


def test_a_program_of_nvcc_runs(program: Path) -> None:
    """Registration, launches, copies, events and errors give what the program expects of them."""
    done = run(program, JAX_FP4_SIM_DEVICES="100a,103a", JAX_FP4_SIM_SEED="5")
    assert done.stdout == "passed\n", done.stdout + done.stderr
    assert done.returncode == 0
    # Nothing that went wrong was silent: the machine's report is on stderr, with its seed.
    assert "PTX line 20: .visible .entry fail() { trap; }" in done.stderr
    assert "seed 5" in done.stderr
    assert "is for sm_100a; the device is sm_103a" in done.stderr
    assert "symbol: the address is of no registered variable" in done.stderr


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"JAX_FP4_SIM_SEED": "five"}, "JAX_FP4_SIM_SEED: expected a number, got 'five'"),
        ({"JAX_FP4_SIM_DEVICES": "gpu"}, "sm 'gpu' is no chip that is modelled"),
        (
            {"JAX_FP4_SIM_DEVICES": "90a", "JAX_FP4_SIM_COSTS": "costs"},
            "JAX_FP4_SIM_COSTS: the cycle model has no constants for sm_90a",
        ),
    ],
)
def test_wrong_settings_end_the_program(
    program: Path, variables: dict[str, str], complaint: str
) -> None:
    """A program that would run on something else than was asked for does not run."""
    done = run(program, **variables)
    assert done.returncode != 0
    assert complaint in done.stderr


def test_the_program_notices_what_is_wrong(program: Path) -> None:
    """On another device its expectations fail, so they do look at results."""
    done = run(program, JAX_FP4_SIM_DEVICES="100a,100a")
    assert done.returncode == 1
    assert done.stdout.endswith("failed\n")


def test_costs_of_launches(program: Path, tmp_path: Path) -> None:
    """A line for each launch that ended, with counts that follow from the kernels."""
    file = tmp_path / "costs"
    devices = {"JAX_FP4_SIM_DEVICES": "100a,103a"}
    run(program, **devices, JAX_FP4_SIM_COSTS=str(file))
    launches = [json.loads(line) for line in file.read_text().splitlines()]
    assert [x["entry"] for x in launches] == ["add", "add", "add", "count", "add"]
    add, count = launches[0], launches[3]
    assert add["counts"]["global"] == {
        "load_instructions": 4, "load_bytes": 512, "load_sectors": 16,
        "store_instructions": 2, "store_bytes": 256, "store_sectors": 8,
    }  # fmt: skip
    assert count["counts"]["global"]["atomic_bytes"] == 4 * 4
    # The device is a whole B200, and each pair of CTAs has SMs of its own.
    assert [(x["timing"]["sms"], x["timing"]["used_sms"]) for x in (add, count)] == [
        (148, 1), (148, 4),
    ]  # fmt: skip
    assert 0 < add["timing"]["cycles"] == pytest.approx(1.965e9 * add["timing"]["seconds"])
    # Where they cannot be written, who waits for the launch gets an error.
    done = run(program, **devices, JAX_FP4_SIM_COSTS=str(tmp_path / "none" / "costs"))
    assert "JAX_FP4_SIM_COSTS: " in done.stderr and "cannot be written" in done.stderr
    assert done.stdout.endswith("failed\n")

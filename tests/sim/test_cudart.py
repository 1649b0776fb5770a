"""The stand-in CUDA runtime: a program as nvcc leaves it runs on the machine."""

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

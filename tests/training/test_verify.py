"""`python -m jax_fp4 verify` passes here, and notices what it is there to notice."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from jax_fp4.cli import main, verify

CASE = verify.Case("a case", ("gemm_",), dict)
GPU = verify.Backend("gpu", {}, launches=True)


def result(
    launched: tuple[str, ...] = ("gemm_sm100_nvfp4_128x64",), **arrays: np.ndarray
) -> verify._Result:
    made = {"a case": {"values": np.arange(4, dtype=np.uint8)} | arrays}
    return verify._Result(made, {"a case": {"launched": list(launched)}}, [])


def test_everything_here_passes() -> None:
    """CPU levels and the PTX machine, a line for each case; the kernels are named.

    In a process of its own: where another test has loaded the stand-in libcuda, this one has a GPU.
    """
    done = subprocess.run(
        [sys.executable, "-m", "jax_fp4", "verify"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].endswith(" passed, 0 failed") and int(lines[-1].split()[0]) > 150
    for chip, family in (("100a", "sm100"), ("120a", "sm120"), ("90", "bf16"), ("80", "bf16")):
        machine = [line for line in lines if line.startswith(f"ok     ptx machine {chip}: ")]
        assert len(machine) == len(list(verify.cases()))
        assert any("quantize_nvfp4_four_over_six_16" in line for line in machine)
        assert any(f"gemm_{family}_mxf8f6f4_" in line for line in machine)


def test_a_case_that_is_right_passes() -> None:
    assert verify.judge(CASE, GPU, result(), result()) == ""


@pytest.mark.parametrize(
    ("got", "said"),
    [
        (result(values=np.array([0, 1, 2, 4], np.uint8)), "values: 1 of 4 wrong, first at 3"),
        (result(values=np.arange(4, dtype=np.int8)), "expected uint8"),
        (result(values=np.arange(3, dtype=np.uint8)), "got uint8(3,)"),
        (result(more=np.zeros(1)), "expected arrays"),
        (result(launched=("amax_16",)), "no kernel gemm_* was launched"),
        (verify._Result({}, {}, []), "did not run"),
        (verify._Result({}, {"a case": {"error": "ValueError: no"}}, []), "ValueError: no"),
    ],
)
def test_a_planted_failure_is_reported(got: verify._Result, said: str) -> None:
    """Bytes, types, shapes, missing launches, missing cases and errors."""
    assert said in verify.judge(CASE, GPU, got, result())


def test_products_are_held_to_the_bound_or_to_the_bits() -> None:
    """Elsewhere a product may differ within its bound, on the PTX machine it may not; NaN never."""
    exact, bound = np.array([1.0, 2.0]), np.array([0.1, 0.1])

    def product(*d: float) -> verify._Result:
        return result(D=np.array(d, np.float32), exact=exact, bound=bound)

    same = dataclasses.replace(GPU, same_sums=True)
    assert verify.judge(CASE, GPU, product(1.05, 2), product(1, 2)) == ""
    assert "D: 1 of 2 wrong" in verify.judge(CASE, GPU, product(1.15, 2), product(1, 2))
    assert "D: 1 of 2 wrong" in verify.judge(CASE, GPU, product(np.nan, 2), product(1, 2))
    assert "D:" in verify.judge(CASE, same, product(1.05, 2), product(1, 2))
    assert verify.judge(CASE, same, product(1, 2), product(1, 2)) == ""


def test_a_backend_that_is_not_here_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """--only names what must be there: its absence is no success."""
    assert main(["verify", "--only", "gpu9"]) == 2
    assert "not here" in capsys.readouterr().err

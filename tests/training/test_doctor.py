"""`python -m jax_fp4 doctor` tells the truth; exit code 0 means that the CPU backend works."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import jax_fp4
from jax_fp4 import _compat, _core
from jax_fp4.cli import doctor, main
from oracles import pack, quantizer, training


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON report of a run in this process."""
    code = main(["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_a_working_installation_has_exit_code_0() -> None:
    """As a user calls it: one line for each topic, no problem marked."""
    done = subprocess.run(
        [sys.executable, "-m", "jax_fp4", "doctor"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for topic in ("python", "jaxlib", "extension", "cpu", "gpu driver", "device images"):
        assert f"\n  {topic} " in f"\n{done.stdout}"
    assert "self-check     passed" in done.stdout
    assert "!" not in done.stdout


def test_the_report_says_what_this_process_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Versions, FFI versions and CPU levels are those of the running packages."""
    code, numbers = report(capsys)
    assert (code, numbers["ok"], numbers["problems"]) == (0, True, [])
    found = {topic: finding["data"] for topic, finding in numbers["findings"].items()}
    assert found["jax_fp4"]["version"] == jax_fp4.__version__
    assert found["numpy"]["version"] == np.__version__
    assert found["extension"]["built"] == list(_core.FFI_API_VERSION)
    assert found["extension"]["running"] == list(_compat.runtime_ffi_api_version() or ())
    assert found["cpu"]["level"] == jax_fp4.cpu_level()
    assert found["cpu"]["best_level"] == jax_fp4.best_cpu_level()
    assert found["self-check"] == {"ok": True}


def test_expected_bytes_are_the_oracles() -> None:
    """The self-check compares with bytes that an independent implementation computes."""
    i, j = np.indices((2, 32))
    x = ((7 * i + 13 * j) % 31 - 15).astype(np.float32) * np.float32(0.375)
    ways = {
        "rounded to nearest": quantizer.quantize(x, "NVFP4"),
        "stochastic, rotated": quantizer.quantize(
            x, "NVFP4", rounding="stochastic", seed=(1, 2), hadamard=True
        ),
    }
    for how, q in ways.items():
        assert doctor._EXPECTED[how] == {
            "values": pack.pack(q.codes, 4).tobytes().hex(),
            "scales": q.scales.tobytes().hex(),
            "global_scale": q.global_scale.tobytes().hex(),
            "product": training.product(q, q).astype(np.float32).tobytes().hex(),
        }


def test_a_wrong_byte_fails_the_self_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quantizer that sets one scale wrongly is named, and the exit code is 1."""
    quantize = jax_fp4.quantize

    def planted(*args: Any, **kwargs: Any) -> Any:
        q = quantize(*args, **kwargs)
        object.__setattr__(q, "scales", q.scales.at[0, 1].add(1))
        return q

    monkeypatch.setattr(jax_fp4, "quantize", planted)
    code, numbers = report(capsys)
    assert code == 1
    (problem,) = numbers["problems"]
    assert problem.startswith("self-check: failed: wrong bytes in scales (rounded to nearest)")


def test_a_call_that_raises_fails_the_self_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason stands in the report, in one line."""

    def planted(*_: Any, **__: Any) -> Any:
        raise RuntimeError("planted\nfault")

    monkeypatch.setattr(jax_fp4, "scaled_matmul", planted)
    code, numbers = report(capsys)
    assert code == 1
    assert numbers["problems"] == ["self-check: failed: RuntimeError: planted fault"]


def test_an_older_jaxlib_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An extension built for a newer FFI than jaxlib offers, with the way out."""
    monkeypatch.setattr(_compat, "runtime_ffi_api_version", lambda: (0, 0))
    code, numbers = report(capsys)
    assert code == 1
    (problem,) = numbers["problems"]
    assert "jaxlib offers 0.0" in problem
    assert "pip install ." in problem
    assert numbers["findings"]["self-check"]["data"] == {"ok": False}


@pytest.mark.parametrize("package", ["numpy", "matplotlib"])
def test_a_missing_package_is_a_problem_unless_optional(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that cannot be imported is reported; matplotlib serves pictures only."""
    monkeypatch.setitem(sys.modules, package, None)
    (finding,) = [f for f in doctor._versions() if f.topic == package]
    assert finding.problem == (package == "numpy")
    assert "not there (ModuleNotFoundError" in finding.text


@pytest.mark.parametrize(
    ("level", "lacking", "text"),
    [
        ("avx2", {"f16c"}, "the processor lacks f16c"),
        ("avx512", {"avx512vbmi", "fma"}, "the processor lacks avx512vbmi, fma"),
        ("avx512_bf16", {"avx512_bf16"}, "the processor lacks avx512_bf16"),
        ("amx", {"amx_bf16"}, "the processor lacks amx_bf16"),
        ("amx", set(), "the operating system does not grant them"),
    ],
)
def test_the_next_level_says_what_it_lacks(
    level: str, lacking: set[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing instructions by name; if none is missing, the operating system withholds them."""
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    everything = {flag for flags in doctor._LEVEL_FLAGS.values() for flag in flags}
    assert text in doctor.missing_for(level, everything - lacking)


def test_a_missing_driver_is_no_problem() -> None:
    """A library that cannot be loaded is said to be absent."""
    driver, images = doctor._gpu("libcuda-absent.so.1")
    assert not driver.problem
    assert driver.data == {"found": False, "devices": []}
    assert images.data["cubin sm_100a"] == images.data["PTX sm_100f"] > 30


def test_every_gpu_is_told_what_it_runs() -> None:
    """Quantizers on everything from 8.0 on, block-scaled products where there are kernels."""
    images = doctor._images()[1]
    assert "8.0" in doctor._gpu_use(75, images)
    assert "cubin sm_80, products by gemm_bf16" in doctor._gpu_use(89, images)
    assert "cubin sm_103a, products by gemm_sm100" in doctor._gpu_use(103, images)
    assert "PTX sm_90, products by gemm_bf16" in doctor._gpu_use(110, images)
    assert "no image" in doctor._gpu_use(100, [])


def test_a_library_that_is_no_driver_does_not_crash() -> None:
    """Some other library under the driver's name: reported as of no use."""
    driver, _ = doctor._gpu("libm.so.6")
    assert driver.data == {"found": True, "devices": []}
    assert "of no use" in driver.text

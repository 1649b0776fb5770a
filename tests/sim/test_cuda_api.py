"""The driver's table: its declarations are NVIDIA's, and loading it says what is missing."""

import ctypes
import functools
import importlib.util
import subprocess
import threading
from pathlib import Path

import pytest

from support import stand_in
from support.native import compiler, shared_library
from support.repository import ROOT

HERE = ROOT / "tests" / "sim"


def cuda_include() -> Path:
    """The folder of cuda.h in the wheel nvidia-cuda-runtime-cu12."""
    spec = importlib.util.find_spec("nvidia.cuda_runtime")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "include"


@functools.cache
def loader() -> ctypes.CDLL:
    library = shared_library(
        "driver_load",
        [HERE / "driver_load_c.cc", ROOT / "csrc" / "driver" / "load.cc"],
        "-Wall", "-Wextra", "-Werror", "-ldl",
    )  # fmt: skip
    library.load_problem.restype = ctypes.c_char_p
    library.the_driver.restype = ctypes.c_void_p
    return library


def problem(library: str) -> str:
    return loader().load_problem(library.encode()).decode()


def fake_library(folder: Path, functions: str) -> str:
    """A shared library of C functions, by its path."""
    source, target = folder / "fake.cc", folder / "fake.so"
    source.write_text(f'extern "C" {{ {functions} }}\n')
    subprocess.run([*compiler(), "-shared", "-fPIC", str(source), "-o", str(target)], check=True)
    return str(target)


def test_declarations_are_those_of_cuda_h() -> None:
    """Values, layouts, signatures (compiled as assertions) and symbols agree with CUDA 12.9."""
    library = shared_library("cuda_api_abi", [HERE / "cuda_api_abi.cc"], f"-I{cuda_include()}")
    library.first_wrong_symbol.restype = ctypes.c_char_p
    assert library.first_wrong_symbol() is None


# Changes of the header, and the line of the comparison that must object.
FAULTS = [
    ("CUDA_ERROR_NOT_FOUND = 500", "CUDA_ERROR_NOT_FOUND = 501", "SAME(CUDA_ERROR_NOT_FOUND)"),
    ("_NUM_REGS = 4", "_NUM_REGS = 3", "SAME(CU_FUNC_ATTRIBUTE_NUM_REGS)"),
    ("unsigned int sharedMemBytes;", "unsigned long sharedMemBytes;", "CUlaunchConfig, sharedMem"),
    ("char pad[64];", "char pad[56];", "same_object<ours::CUlaunchAttributeValue"),
    ("struct alignas(64) CUtensorMap", "struct CUtensorMap", "same_object<ours::CUtensorMap"),
    ("cuModuleUnload)(CUmodule", "cuModuleUnload)(int", "SYMBOL(cuModuleUnload)"),
    ("cuInit)(unsigned int flags)", "cuInit)(unsigned int flags, int more)", "SYMBOL(cuInit)"),
    ("(CUresult error, const char** name", "(CUresult error, int* name", "SYMBOL(cuGetErrorName)"),
]  # fmt: skip


def test_comparison_with_cuda_h_detects_planted_faults(tmp_path: Path) -> None:
    """A changed value, layout or signature fails an assertion that names it; others hold."""
    text = (ROOT / "csrc/driver/cuda_api.h").read_text()
    for old, new, _ in FAULTS:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "cuda_api.h").write_text(text)
    run = subprocess.run(
        [*compiler(), "-std=c++20", "-fsyntax-only", f"-I{tmp_path}", f"-I{ROOT / 'csrc'}",
         f"-I{cuda_include()}", str(HERE / "cuda_api_abi.cc")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode != 0
    for _, _, line in FAULTS:
        assert line in run.stderr, line
    assert "SYMBOL(cuMemAlloc)" not in run.stderr
    assert "SAME(CUDA_ERROR_UNKNOWN)" not in run.stderr


def test_the_stand_in_loads_as_a_driver() -> None:
    """Every symbol is found, the version is read, the device is counted."""
    stand_in.Driver("100a,120a", driver_version=12090)
    library = str(stand_in.path("libcuda.so.1"))
    assert problem(library) == ""
    version = ctypes.c_int()
    assert loader().load_and_count(library.encode(), ctypes.byref(version)) == 2
    assert version.value == 12090


def test_a_missing_driver_is_named() -> None:
    """No library: the text says what it belongs to."""
    text = problem("libcuda_that_is_not_there.so.1")
    assert text.startswith("libcuda_that_is_not_there.so.1 was not found (")
    assert "comes with the NVIDIA driver" in text


@pytest.mark.parametrize(
    "function", ["", "int cuDriverGetVersion(int* v) { *v = 12090; return 0; }"]
)
def test_missing_functions_are_named(function: str, tmp_path: Path) -> None:
    """A library that is no complete driver: the text lists the symbols."""
    text = problem(fake_library(tmp_path, "int cuInit(unsigned) { return 0; }" + function))
    assert "has no " in text and "cuMemAlloc_v2" in text and "cuTensorMapEncodeTiled" in text
    assert "cuInit" not in text
    assert ("cuDriverGetVersion" in text) == (function == "")


def test_an_old_driver_is_named_with_its_version(tmp_path: Path) -> None:
    """A driver before CUDA 12.0 is refused for that, not for what it lacks."""
    stand_in.Driver(driver_version=11080)
    wanted = "supports CUDA 11.8, and CUDA 12.0 or newer is needed"
    assert wanted in problem(str(stand_in.path("libcuda.so.1")))
    old = fake_library(tmp_path, "int cuDriverGetVersion(int* v) { *v = 11080; return 0; }")
    assert wanted in problem(old)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (100, "CUDA_ERROR_NO_DEVICE (100): there is no device"),
        (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"),
        (999, "CUDA_ERROR_UNKNOWN (999)"),
        (46, "unknown error (46): no description"),
    ],
)
def test_a_failing_cuinit_is_named_with_its_code(code: int, name: str) -> None:
    """A driver that cannot start says why, in its own words where it has some."""
    driver = stand_in.Driver()
    driver.inject("cuInit", 1, code)
    assert f"cuInit failed with {name}" in problem(str(stand_in.path("libcuda.so.1")))


def test_the_driver_is_loaded_once() -> None:
    """All threads get the same table, whether this machine has a driver or not."""
    seen: list[int] = []
    threads = [
        threading.Thread(target=lambda: seen.append(loader().the_driver())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8 and len(set(seen)) == 1

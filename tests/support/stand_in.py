"""The stand-in libcuda through ctypes: a driver whose devices are PTX machines.

The package's build makes it (CMakeLists.txt) beside the extensions and does not install it. The
variable JAX_FP4_STAND_INS names the folder where it cannot be found below the project's own build/.
"""

import ctypes
import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from support.repository import ROOT

# Values of cuda.h.
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 0, 1, 2, 3
NO_DEVICE, INVALID_DEVICE, INVALID_IMAGE, INVALID_CONTEXT = 100, 101, 200, 201
NO_BINARY_FOR_GPU, INVALID_PTX, UNSUPPORTED_PTX_VERSION = 209, 218, 222
INVALID_HANDLE, NOT_FOUND = 400, 500
ILLEGAL_ADDRESS, LAUNCH_OUT_OF_RESOURCES, LAUNCH_TIMEOUT = 700, 701, 702
MISALIGNED_ADDRESS, LAUNCH_FAILED, NOT_SUPPORTED, INVALID_CLUSTER_SIZE = 716, 719, 801, 912
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_UNMATCHED = 900, 901, 903
CAPTURE_IMPLICIT, CAPTURE_WRONG_THREAD = 906, 908

# Functions whose symbol has a version.
_VERSIONED = {
    "cuDevicePrimaryCtxRelease", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuStreamDestroy",
    "cuMemAlloc", "cuMemFree", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuDeviceTotalMem",
    "cuModuleGetGlobal",
    "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoDAsync", "cuStreamBeginCapture", "cuGetProcAddress",
}  # fmt: skip


# Stands for the argument that points to the result.
RESULT = object()


def symbol(function: str) -> str:
    """What libcuda exports a function as."""
    return function + "_v2" if function in _VERSIONED else function


def path(name: str) -> Path:
    """A stand-in library of the newest build."""
    given = os.environ.get("JAX_FP4_STAND_INS")
    folders: Iterable[Path] = [Path(given)] if given else ROOT.glob("build/*/stand_ins")
    found = [folder / name for folder in folders if (folder / name).is_file()]
    if not found:
        raise FileNotFoundError(
            f"{name}: the package's build makes it below build/; run `pip install -e .`, or name "
            "its folder with JAX_FP4_STAND_INS"
        )
    return max(found, key=lambda file: file.stat().st_mtime)


class DriverError(RuntimeError):
    """A driver function failed; the text is the machine's report."""

    def __init__(self, function: str, code: int, report: str) -> None:
        super().__init__(report)
        self.function = function
        self.code = code


class LaunchAttribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_uint32 * 16),
    )


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


CLUSTER_DIMENSION, PROGRAMMATIC, PRIORITY = 4, 6, 8


def config(
    grid: Any = (1, 1, 1),
    block: Any = (32, 1, 1),
    shared_bytes: int = 0,
    stream: int | None = None,
    **attributes: Any,
) -> LaunchConfig:
    """A CUlaunchConfig; attributes are cluster=(x, y, z), programmatic=1, or number_<id>=value."""
    entries = []
    for name, value in attributes.items():
        number = {"cluster": CLUSTER_DIMENSION, "programmatic": PROGRAMMATIC}.get(name)
        number = int(name.removeprefix("number_")) if number is None else number
        words = list(value) if isinstance(value, tuple) else [value]
        words += [0] * (16 - len(words))
        entries.append(LaunchAttribute(number, b"", (ctypes.c_uint32 * 16)(*words)))
    array = (LaunchAttribute * len(entries))(*entries)
    return LaunchConfig(
        (ctypes.c_uint * 3)(*grid),
        (ctypes.c_uint * 3)(*block),
        shared_bytes,
        stream,
        ctypes.cast(array, ctypes.POINTER(LaunchAttribute)),
        len(entries),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(path("libcuda.so.1")))
    for name in ("reset", "inject", "last_report", "fault_reports", "warnings"):
        getattr(library, f"jax_fp4_sim_{name}").restype = ctypes.c_char_p
    library.jax_fp4_sim_map.restype = ctypes.c_uint64
    library.jax_fp4_sim_report_to_stderr(0)
    return library


class Driver:
    """The functions of the driver; a failing one raises DriverError.

    Integers that are no ctypes objects are passed as 64 bits, which every integer argument of the
    driver takes; handles and addresses are plain integers.
    """

    def __init__(self, devices: str = "100a", **options: int) -> None:
        self.functions = _library()
        self.reset(devices, **options)

    def reset(
        self,
        devices: str = "100a",
        driver_version: int = 13050,
        memory_bytes: int = 1 << 30,
        seed: int = 0,
        max_instructions: int = 1 << 24,
    ) -> None:
        """A new driver, without handles, memory or reports of the old one."""
        wrong = self.functions.jax_fp4_sim_reset(
            devices.encode(), driver_version, *map(ctypes.c_uint64, (memory_bytes, seed)),
            ctypes.c_uint64(max_instructions),
        )  # fmt: skip
        if wrong is not None:
            raise ValueError(wrong.decode())

    def call(self, function: str, *arguments: Any) -> None:
        code = getattr(self.functions, symbol(function))(
            *[ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        )
        if code != SUCCESS:
            raise DriverError(function, code, self.report())

    def get(self, ctype: Any, function: str, *arguments: Any) -> Any:
        """Calls a function that writes its result where RESULT stands, else the first argument."""
        result = ctype()
        if RESULT not in arguments:
            arguments = (RESULT, *arguments)
        self.call(function, *[ctypes.byref(result) if a is RESULT else a for a in arguments])
        return result.value

    def handle(self, function: str, *arguments: Any) -> int:
        return self.get(ctypes.c_uint64, function, *arguments)

    def integer(self, function: str, *arguments: Any) -> int:
        return self.get(ctypes.c_int, function, *arguments)

    def inject(self, function: str, nth: int, code: int) -> None:
        wrong = self.functions.jax_fp4_sim_inject(function.encode(), nth, code)
        if wrong is not None:
            raise ValueError(wrong.decode())

    def report(self) -> str:
        return self.functions.jax_fp4_sim_last_report().decode()

    def warnings(self) -> list[str]:
        return self.functions.jax_fp4_sim_warnings().decode().split("\f")[:-1]

    def fault_reports(self) -> list[str]:
        return self.functions.jax_fp4_sim_fault_reports().decode().split("\f")[:-1]

    def start(self, device: int = 0) -> int:
        """cuInit, and the device's primary context made current."""
        self.call("cuInit", 0)
        context = self.handle("cuDevicePrimaryCtxRetain", device)
        self.call("cuCtxSetCurrent", context)
        return context

    def load(self, image: bytes) -> int:
        return self.handle("cuModuleLoadDataEx", image + b"\0", 0, None, None)

    def function(self, ptx: str, name: str = "k") -> int:
        return self.handle("cuModuleGetFunction", self.load(ptx.encode()), name.encode())

    def launch(self, function: int, *arguments: Any, **options: Any) -> None:
        """Launches with parameters that are ctypes objects, or integers for 64-bit ones."""
        values = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        self.call("cuLaunchKernelEx", ctypes.byref(config(**options)), function, pointers, None)

    def synchronize(self, stream: int = 0) -> None:
        self.call("cuStreamSynchronize", stream)

    def upload(self, array: np.ndarray, stream: int = 0) -> int:
        address = self.handle("cuMemAlloc", array.nbytes)
        self.call("cuMemcpyHtoDAsync", address, pointer(array), array.nbytes, stream)
        return address

    def download(self, address: int, like: np.ndarray, stream: int = 0) -> np.ndarray:
        result = np.empty_like(like)
        self.call("cuMemcpyDtoHAsync", pointer(result), address, result.nbytes, stream)
        return result


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)

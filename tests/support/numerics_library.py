"""csrc/numerics compiled by the system's C++ compiler, callable on NumPy arrays.

The headers have no object code of their own; `tests/numerics/numerics_c.cc` wraps each of their
functions in a loop over arrays. The flags that matter to numbers are those of the package build.
"""

import ctypes
import functools
from typing import Any

import numpy as np

from support.native import shared_library
from support.repository import ROOT

SOURCE = ROOT / "tests" / "numerics" / "numerics_c.cc"
# Numbers of the C++ enumerations, and of kFormats in numerics_c.cc.
ELEMENTS = ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2")
SCALES = ("ue4m3", "ue8m0")
RULES = ("rceil", "floor")
LAYOUTS = ("linear", "tiled")
FORMATS = (
    "NVFP4", "MXFP4", "MXFP6_E2M3", "MXFP6_E3M2",
    "MXFP8_E4M3", "MXFP8_E5M2", "FP8_E4M3", "FP8_E5M2",
)  # fmt: skip


class NumericsLibrary:
    """The functions of numerics_c.cc.

    `call(name, *arguments)` passes arrays as pointers, int as C int, and np.uint32, np.uint64,
    np.int64 and np.float32 scalars as they are. Arrays must have the C function's types.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any, result: Any = None) -> Any:
        """Calls a function; `result` is its ctypes type, None for void."""
        function = getattr(self._library, name)
        function.restype = result
        return function(*map(_as_c, arguments))

    def map(self, name: str, *arguments: Any, dtype: Any) -> np.ndarray:
        """Calls name(*arguments, out, n) and returns out, shaped like the last array argument."""
        like = next(a for a in reversed(arguments) if isinstance(a, np.ndarray))
        out = np.empty(like.shape, dtype)
        self.call(name, *arguments, out, np.int64(like.size))
        return out


_C_SCALARS = {
    np.uint32: ctypes.c_uint32,
    np.uint64: ctypes.c_uint64,
    np.int64: ctypes.c_int64,
    np.float32: ctypes.c_float,
}


def _as_c(argument: Any) -> Any:
    if isinstance(argument, np.ndarray):
        assert argument.flags.c_contiguous
        return ctypes.c_void_p(argument.ctypes.data)
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return _C_SCALARS[type(argument)](argument.item())


@functools.cache
def library() -> NumericsLibrary:
    """csrc/numerics with warnings as errors: headers must compile clean in any program."""
    return NumericsLibrary(
        shared_library("numerics", [SOURCE], "-O2", "-Wall", "-Wextra", "-Werror")
    )

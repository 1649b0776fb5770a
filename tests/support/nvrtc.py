"""CUDA C++ to PTX by NVRTC, which needs no GPU and no driver (PyPI: nvidia-cuda-nvrtc-cu12)."""

import ctypes
import functools
import importlib.util
from pathlib import Path

import pytest

from support.repository import ROOT


@functools.cache
def library() -> ctypes.CDLL:
    """libnvrtc of the environment; the calling test is skipped where there is none."""
    namespace = importlib.util.find_spec("nvidia")
    folders = list(namespace.submodule_search_locations or []) if namespace else []
    for folder in folders:
        for path in sorted(Path(folder).glob("cuda_nvrtc/lib/libnvrtc.so.12")):
            # NVRTC opens its built-ins by name, from its own folder; under AddressSanitizer that
            # search fails, so they are loaded before.
            for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
            return ctypes.CDLL(str(path))
    pytest.skip("no libnvrtc.so.12: pip install nvidia-cuda-nvrtc-cu12==12.9.86")


def _compile(text: str, architecture: str) -> tuple[bytes, bytes, str]:
    """(PTX, cubin, compiler's log) of a translation unit; the first two empty where it failed.

    csrc/ is on the include path, and products are not fused, as in the package's own build.
    """
    nvrtc = library()
    program = ctypes.c_void_p()
    assert not nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"test.cu", 0, None, None
    )
    options = [
        b"--std=c++20",
        b"--fmad=false",
        f"--gpu-architecture={architecture}".encode(),
        f"--include-path={ROOT / 'csrc'}".encode(),
    ]
    status = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )

    def fetch(size_function: str, function: str) -> bytes:
        size = ctypes.c_size_t()
        assert not getattr(nvrtc, size_function)(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        assert not getattr(nvrtc, function)(program, buffer)
        return buffer.raw

    log = fetch("nvrtcGetProgramLogSize", "nvrtcGetProgramLog").rstrip(b"\0").decode()
    ptx = b"" if status else fetch("nvrtcGetPTXSize", "nvrtcGetPTX").rstrip(b"\0")
    image = b"" if status else fetch("nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    assert not nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx, image, log


def compile_with_log(text: str, architecture: str) -> tuple[str, str]:
    """(PTX, compiler's log) of a translation unit; the PTX is empty where compilation failed."""
    ptx, _, log = _compile(text, architecture)
    return ptx.decode(), log


def cubin(text: str, architecture: str) -> bytes:
    """The machine code of a translation unit that must compile."""
    _, image, log = _compile(text, architecture)
    assert image, log
    return image


@functools.cache
def compile_to_ptx(text: str, architecture: str = "sm_100a") -> str:
    """The PTX of a translation unit that must compile."""
    ptx, log = compile_with_log(text, architecture)
    assert ptx, log
    return ptx

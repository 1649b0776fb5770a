"""The C++ GEMM without Python bindings: built from csrc/ with the compiler alone, called by ctypes.

Every buffer handed out is surrounded by canaries or by pages that must not be touched; outputs
start as NaN.
"""

import ctypes
import mmap
from dataclasses import dataclass
from functools import cache

import numpy as np

from oracles import pack, tables
from support.native import shared_library
from support.repository import ROOT

ELEMENTS = ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2")
SCALES = ("ue4m3", "ue8m0", "unit")
DTYPES = ("f32", "bf16", "f16")
LEVELS = ("model", "portable", "avx2", "avx512", "avx512_bf16", "amx")
NAN_SCALE = {"ue4m3": 0x7F, "ue8m0": 0xFF, "unit": 0xFF}

_CANARY = 0xA5
_MARGIN = 64


@dataclass(frozen=True)
class Format:
    """Element and scale type, elements per scale."""

    element: str
    scale: str
    block: int


NVFP4 = Format("e2m1", "ue4m3", 16)


def mx(element: str) -> Format:
    """The MX format of an element type."""
    return Format(element, "ue8m0", 32)


def fp8(element: str) -> Format:
    """An FP8 format with a tensor scale only."""
    return Format(element, "unit", 32)


class _Operand(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("element", "scale", "block", "layout")),
        ("batch", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("values", "scales", "global_scale")),
    )


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "m", "n", "k")),
        ("a", _Operand),
        ("b", _Operand),
        *((name, ctypes.c_void_p) for name in ("bias", "accumulate", "out")),
        *((name, ctypes.c_int) for name in ("bias_dtype", "accumulate_dtype", "out_dtype")),
    )


@cache
def load_library() -> ctypes.CDLL:
    """Compiles csrc/cpu's GEMM once per state of the sources and loads it."""
    sources = [
        *sorted((ROOT / "csrc/cpu").glob("gemm*.cc")),
        ROOT / "csrc/cpu/cpu.cc",
        ROOT / "tests/cpu/gemm_c.cc",
    ]
    return shared_library("gemm", sources, "-O3")


def levels() -> tuple[str, ...]:
    """The levels this machine has, slowest first."""
    return LEVELS[: load_library().best_level() + 1]


class Guarded:
    """A copy of an array between canaries.

    With `fence`, the array ends where a page ends that nobody may touch: reading beyond it, which
    no canary shows, kills the process.
    """

    def __init__(self, array: np.ndarray, *, fence: bool = False) -> None:
        self._array = array
        self._after = 0 if fence else _MARGIN
        size = _MARGIN + array.nbytes + self._after
        if fence:
            page = mmap.PAGESIZE
            pages = -(-size // page)
            memory = mmap.mmap(-1, (pages + 1) * page)
            everything = np.frombuffer(memory, np.uint8)
            protect = ctypes.CDLL(None).mprotect
            last = ctypes.c_void_p(everything.ctypes.data + pages * page)
            assert protect(last, ctypes.c_size_t(page), 0) == 0
            self._bytes = everything[pages * page - size : pages * page]
        else:
            self._bytes = np.empty(size, np.uint8)
        self._bytes[:] = _CANARY
        self._inside()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def _inside(self) -> np.ndarray:
        return self._bytes[_MARGIN : _MARGIN + self._array.nbytes]

    @property
    def address(self) -> int:
        """Where the array starts."""
        return self._bytes.ctypes.data + _MARGIN

    def read(self) -> np.ndarray:
        """The contents; raises if anything was written outside."""
        assert (self._bytes[:_MARGIN] == _CANARY).all(), "written before the array"
        assert (self._bytes[_MARGIN + self._array.nbytes :] == _CANARY).all(), "written beyond"
        return self._inside().view(self._array.dtype).reshape(self._array.shape).copy()


@dataclass
class Operand:
    """Codes and scale bytes, not packed.

    codes: uint8 [batch, rows, k]; scales: uint8 [batch, rows, blocks]; global_scale: f32 [batch].
    """

    format: Format
    codes: np.ndarray
    scales: np.ndarray
    global_scale: np.ndarray
    tiled: bool = False

    def values(self, entry: int = 0) -> np.ndarray:
        """float64 [rows, k]: code times block scale, exact."""
        entry = entry % len(self.codes)
        scale = "ue4m3" if self.format.scale == "ue4m3" else "ue8m0"
        # A scale of NaN counts for zero codes as well: NaN * 0 is NaN.
        scales = np.repeat(tables.VALUES[scale][self.scales[entry]], self.format.block, axis=-1)
        return (
            tables.VALUES[self.format.element][self.codes[entry]]
            * scales[:, : self.codes.shape[-1]]
        )

    def pack(self, scale_padding: int, fence: bool) -> tuple[Guarded, Guarded, Guarded]:
        """Values, scales and global scale as the library takes them.

        `scale_padding` is written to the bytes of a tiled layout that belong to no block.
        """
        bits = tables.KINDS[self.format.element].bits
        batch, rows, k = self.codes.shape
        values = pack.pack(self.codes.reshape(batch * rows, k), bits)
        scales = self.scales
        if self.tiled and scales.size:
            exists = pack.tile_scales(np.ones(scales.shape[1:], np.uint8)) != 0
            scales = np.stack(
                [np.where(exists, pack.tile_scales(s), scale_padding) for s in scales]
            )
            scales = scales.astype(np.uint8)
        first, second, third = (
            Guarded(x, fence=fence) for x in (values, scales, self.global_scale)
        )
        return first, second, third


def random_operand(
    rng: np.random.Generator,
    form: Format,
    rows: int,
    k: int,
    *,
    batch: int = 1,
    scales: tuple[int, int] | None = None,
    tiled: bool = False,
    global_scale: float = 1.0,
) -> Operand:
    """All finite codes alike likely; scale bytes uniform in a range.

    Args:
        rng: the source.
        form: the format.
        rows: number of rows.
        k: length of a row.
        batch: number of matrices.
        scales: smallest and largest scale byte; None: the usual range of the format.
        tiled: whether `pack` gives the tiled scale layout.
        global_scale: of every matrix.
    """
    usual = {"ue4m3": (0x20, 0x50), "ue8m0": (120, 134), "unit": (127, 127)}[form.scale]
    low, high = scales or usual
    finite = np.flatnonzero(np.isfinite(tables.VALUES[form.element])).astype(np.uint8)
    blocks = -(-k // form.block)
    return Operand(
        form,
        finite[rng.integers(len(finite), size=(batch, rows, k))],
        rng.integers(low, high + 1, size=(batch, rows, blocks)).astype(np.uint8),
        np.full(batch, global_scale, np.float32),
        tiled,
    )


def encode(dtype: str, x: np.ndarray) -> np.ndarray:
    """f32 values as the library's arrays of a dtype."""
    x = np.ascontiguousarray(x, np.float32)
    return {"f32": lambda: x, "bf16": lambda: tables.f32_to_bf16(x),
            "f16": lambda: tables.f32_to_f16(x)}[dtype]()  # fmt: skip


def widen(dtype: str, x: np.ndarray) -> np.ndarray:
    """The inverse of `encode`."""
    return {"f32": lambda: x, "bf16": lambda: tables.bf16_to_f32(x),
            "f16": lambda: tables.f16_to_f32(x)}[dtype]()  # fmt: skip


def gemm(
    a: Operand,
    b: Operand,
    *,
    level: str,
    threads: int = 1,
    bias: tuple[str, np.ndarray] | None = None,
    accumulate: tuple[str, np.ndarray] | None = None,
    out: str = "f32",
    batch: int | None = None,
    scale_padding: int = 0,
    fence: bool = False,
) -> np.ndarray:
    """D as float32 [batch, m, n]. `bias` and `accumulate` are (dtype, float32 values)."""
    batch = max(len(a.codes), len(b.codes)) if batch is None else batch
    (m, k), n = a.codes.shape[1:], b.codes.shape[1]
    packed = [a.pack(scale_padding, fence), b.pack(scale_padding, fence)]
    result = Guarded(encode(out, np.full((batch, m, n), np.nan)), fence=fence)
    extra = [None if x is None else Guarded(encode(*x), fence=fence) for x in (bias, accumulate)]

    def c_operand(x: Operand, arrays: tuple[Guarded, Guarded, Guarded]) -> _Operand:
        f = x.format
        kinds = ELEMENTS.index(f.element), SCALES.index(f.scale), f.block, int(x.tiled)
        return _Operand(*kinds, len(x.codes), *(array.address for array in arrays))

    problem = _Problem(
        batch, m, n, k, c_operand(a, packed[0]), c_operand(b, packed[1]),
        *(None if x is None else x.address for x in extra), result.address,
        *(DTYPES.index(x[0]) if x else 0 for x in (bias, accumulate)), DTYPES.index(out),
    )  # fmt: skip
    found = load_library().gemm(ctypes.byref(problem), LEVELS.index(level), threads)
    assert found, f"level {level} is not available"
    for arrays in packed:
        for array in arrays:
            array.read()
    return widen(out, result.read())

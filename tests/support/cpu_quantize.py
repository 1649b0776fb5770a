"""csrc/cpu/quantize.h through ctypes: builds tests/cpu/cpu_c.cc and wraps it for arrays.

Arrays are float32, float16 or uint16 (the bits of bfloat16) of shape [leads, rows, cols].

Outputs lie between canaries and are filled with a poison byte first, so that every call also shows
that all of its output was written and nothing else.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from support.native import shared_library
from support.repository import ROOT

LEVELS = {"model": 0, "portable": 1, "avx2": 2, "avx512": 3, "avx512_bf16": 4, "amx": 5}
FORMATS = {
    "NVFP4": (4, 16),
    "MXFP4": (4, 32),
    "MXFP6_E2M3": (6, 32),
    "MXFP6_E3M2": (6, 32),
    "MXFP8_E4M3": (8, 32),
    "MXFP8_E5M2": (8, 32),
    "FP8_E4M3": (8, 32),
    "FP8_E5M2": (8, 32),
}  # name -> (bits of a code, elements of a block), in the order of cpu_c.cc
DEFAULT_SIGNS = 0b1101_0111_1110_1000
CANARY = 64


class _Input(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        *[(name, ctypes.c_int64) for name in ("leads", "rows", "cols")],
        *[(name, ctypes.c_int64) for name in ("lead0", "row0", "col0")],
        *[(name, ctypes.c_int64) for name in ("logical_rows", "logical_cols")],
    ]


class _Copy(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int) for name in ("axis", "format", "rule", "tiles", "stochastic")],
        *[(name, ctypes.c_int) for name in ("four_over_six", "hadamard", "layout")],
        ("signs", ctypes.c_uint32),
        ("stream", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        *[(name, ctypes.c_void_p) for name in ("amax", "values", "scales", "global_scale")],
    ]


@functools.cache
def load_library() -> ctypes.CDLL:
    """The compiled library; built once per state of its sources."""
    folder = ROOT / "csrc" / "cpu"
    sources = [*sorted(folder.glob("quantize*.cc")), folder / "cpu.cc"]
    return shared_library("quantize", [*sources, ROOT / "tests" / "cpu" / "cpu_c.cc"], "-O3")


def levels() -> list[str]:
    """The levels with kernels of their own that this processor runs, slowest first."""
    best = load_library().c_best_level()
    return [level for level in ("portable", "avx2", "avx512") if LEVELS[level] <= best]


@contextlib.contextmanager
def use_level(name: str) -> Iterator[None]:
    """Forces an instruction level, a key of LEVELS."""
    assert load_library().c_force_level(LEVELS[name]), f"level {name} is not available"
    try:
        yield
    finally:
        load_library().c_unforce_level()


@dataclass(frozen=True)
class Placement:
    """Where x lies in a logical tensor."""

    lead: int = 0
    row: int = 0
    col: int = 0
    logical_rows: int = 0
    logical_cols: int = 0


@dataclass(frozen=True)
class Options:
    """How one copy is made; `amax` None takes that of the tensor (rotated, if hadamard)."""

    format: str = "NVFP4"
    axis: int = 1
    rule: str = "rceil"
    tiles: bool = False
    stochastic: bool = False
    four_over_six: bool = False
    hadamard: bool = False
    signs: int = DEFAULT_SIGNS
    stream: int = 0
    seed: int = 0
    tiled_layout: bool = False
    amax: np.ndarray | None = field(default=None, compare=False)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return FORMATS[self.format][0]

    @property
    def block(self) -> int:
        """Elements of a block."""
        return FORMATS[self.format][1]

    def with_amax(self, amax: np.ndarray) -> "Options":
        """The same with uint32 amax bits [leads]."""
        return replace(self, amax=amax)


class Guarded:
    """An output array between canaries, full of a poison byte."""

    def __init__(self, count: int, poison: int) -> None:
        """Args: count: bytes; poison: what they hold before."""
        self.memory = np.full(count + 2 * CANARY, 0xA5, np.uint8)
        self.bytes = self.memory[CANARY : CANARY + count]
        self.bytes[:] = poison
        self.address = self.memory.ctypes.data + CANARY

    def check(self) -> np.ndarray:
        """The bytes, after the canaries were seen to be intact."""
        assert (self.memory[:CANARY] == 0xA5).all(), "written before the output"
        assert (self.memory[CANARY + len(self.bytes) :] == 0xA5).all(), "written past the output"
        return self.bytes


@dataclass(frozen=True)
class Result:
    """Bytes of a copy: values [leads, R, row_bytes], scales flat per lead, global_scale [leads]."""

    values: np.ndarray
    scales: np.ndarray
    global_scale: np.ndarray

    def equals(self, other: "Result") -> bool:
        """Bit equality of everything."""
        return all(
            a.shape == b.shape and a.tobytes() == b.tobytes()
            for a, b in (
                (self.values, other.values),
                (self.scales, other.scales),
                (self.global_scale, other.global_scale),
            )
        )


_DTYPES = {np.dtype(np.float32): 0, np.dtype(np.uint16): 1, np.dtype(np.float16): 2}


def widen(x: np.ndarray) -> np.ndarray:
    """Float32 of float32, float16 or (uint16) bfloat16 bits."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def _input(x: np.ndarray, placement: Placement) -> _Input:
    assert x.ndim == 3 and x.flags.c_contiguous
    p = placement
    return _Input(
        x.ctypes.data, _DTYPES[x.dtype], *x.shape,
        p.lead, p.row, p.col, p.logical_rows, p.logical_cols,
    )  # fmt: skip


def amax(
    x: np.ndarray,
    *,
    rotate_axis: int | None = None,
    signs: int = DEFAULT_SIGNS,
    placement: Placement = Placement(),
    threads: int = 1,
) -> tuple[np.ndarray, np.ndarray, int]:
    """(amax bits, rotated amax bits, fingerprint) of x [leads, rows, cols]."""
    plain, rotated = (np.full(x.shape[0], 0xDEADBEEF, np.uint32) for _ in range(2))
    fingerprint = np.full(1, 0xDEADBEEF, np.uint32)
    load_library().c_amax(
        ctypes.byref(_input(x, placement)), int(rotate_axis is not None),
        1 if rotate_axis == 0 else 0, signs, ctypes.c_void_p(plain.ctypes.data),
        ctypes.c_void_p(rotated.ctypes.data), ctypes.c_void_p(fingerprint.ctypes.data), threads,
    )  # fmt: skip
    return plain, rotated, int(fingerprint[0])


def row_bytes(bits: int, k: int) -> int:
    """Bytes of a packed row."""
    pitch = 96 if bits == 6 else 16
    return -(-(k * bits) // (8 * pitch)) * pitch


def quantize(
    x: np.ndarray,
    *copies: Options,
    placement: Placement = Placement(),
    threads: int = 1,
    poison: int = 0x7F,
) -> list[Result]:
    """The copies of x [leads, rows, cols], made in one call (one or two of them)."""
    leads = x.shape[0]
    structures: list[Any] = []
    outputs: list[tuple[Guarded, Guarded, Guarded, int]] = []
    keep: list[np.ndarray] = []
    for o in copies:
        rows, k = x.shape[1:] if o.axis == 1 else x.shape[:0:-1]
        blocks = -(-k // o.block)
        scale_bytes = -(-rows // 128) * -(-blocks // 4) * 512 if o.tiled_layout else rows * blocks
        bits = o.amax
        if bits is None:
            plain, rotated, _ = amax(x, rotate_axis=o.axis if o.hadamard else None, signs=o.signs)
            bits = rotated if o.hadamard else plain
        keep.append(np.ascontiguousarray(bits, np.uint32))
        values = Guarded(leads * rows * row_bytes(o.bits, k), poison)
        scales = Guarded(leads * scale_bytes, poison)
        global_scale = Guarded(4 * leads, poison)
        outputs.append((values, scales, global_scale, rows))
        structures.append(
            _Copy(
                1 if o.axis == 0 else 0,
                list(FORMATS).index(o.format),
                ["rceil", "floor"].index(o.rule),
                o.tiles,
                o.stochastic,
                o.four_over_six,
                o.hadamard,
                o.tiled_layout,
                o.signs,
                o.stream,
                o.seed,
                keep[-1].ctypes.data,
                values.address,
                scales.address,
                global_scale.address,
            )
        )
    pointers = [ctypes.byref(s) for s in structures] + [None]
    load_library().c_quantize(ctypes.byref(_input(x, placement)), pointers[0], pointers[1], threads)
    return [
        Result(
            values.check().reshape(leads, rows, -1) if rows and leads else values.check(),
            scales.check().reshape(leads, -1) if leads else scales.check(),
            global_scale.check().view(np.float32),
        )
        for values, scales, global_scale, rows in outputs
    ]


def dequantize(
    result: Result,
    o: Options,
    rows: int,
    k: int,
    dtype: np.dtype,
    *,
    threads: int = 1,
) -> np.ndarray:
    """out [leads, rows, k] of a copy with these options; dtype as for inputs."""
    leads = len(result.global_scale)
    out = Guarded(leads * rows * k * dtype.itemsize, 0x7F)
    values, scales, global_scale = (
        np.ascontiguousarray(a) for a in (result.values, result.scales, result.global_scale)
    )
    load_library().c_dequantize(
        list(FORMATS).index(o.format), int(o.tiled_layout), ctypes.c_int64(leads),
        ctypes.c_int64(rows), ctypes.c_int64(k), ctypes.c_void_p(values.ctypes.data),
        ctypes.c_void_p(scales.ctypes.data), ctypes.c_void_p(global_scale.ctypes.data),
        _DTYPES[dtype], ctypes.c_void_p(out.address), threads,
    )  # fmt: skip
    return out.check().view(dtype).reshape(leads, rows, k)


def tricky_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Finite values that probe every branch: each run of 16 draws one of eight kinds.

    Normal and wide log-normal values; ties and their neighbours; zeros of both signs with one
    non-zero; subnormals; the largest values; few significant bits; equal magnitudes.
    """
    n = int(np.prod(shape))
    runs = -(-n // 16)
    size = (runs, 16)
    sign = np.where(rng.random(size) < 0.5, -1.0, 1.0)
    exponent = rng.integers(-12, 12, (runs, 1))
    grid = rng.integers(0, 97, size) * 0.0625
    nudge = 1 + rng.integers(-1, 2, size) * 2.0**-23
    ties = np.ldexp(
        np.concatenate([np.full((runs, 1), 6.0), grid[:, 1:] * nudge[:, 1:]], 1), exponent
    )
    lone = np.where(rng.random(size) < 0.08, rng.standard_normal(size), 0.0)
    kinds = [
        rng.standard_normal(size),
        np.exp(rng.standard_normal(size) * 4),
        sign * ties,
        sign * lone,
        sign * np.ldexp(1.0 + rng.random(size), rng.integers(-149, -120, size)),
        sign * np.ldexp(2.0 - 2.0**-23, rng.integers(120, 128, size)),
        sign * np.ldexp(rng.integers(1, 16, size).astype(float), exponent),
        sign * np.ldexp(np.broadcast_to(1 + rng.random((runs, 1)), size), exponent),
    ]
    values = np.choose(rng.integers(0, len(kinds), (runs, 1)), kinds)
    x = values.astype(np.float32).reshape(-1)[:n].reshape(shape)
    return narrow(x, dtype)


def narrow(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Float32 to an input type: bfloat16 by truncation, float16 at most 60000."""
    if dtype == np.uint16:
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return np.clip(x, -60000, 60000).astype(dtype) if dtype == np.float16 else x.astype(dtype)

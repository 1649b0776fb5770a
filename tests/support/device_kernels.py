"""csrc/kernels on the PTX machine, with the interface of support/cpu_quantize.py.

Kernels are compiled as the package's build compiles them (csrc/compile/compile_kernels.py); their
PTX is kept between runs by content. Outputs lie between canaries and count as not written before.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from jax_fp4 import sim
from support import cpu_quantize as cpu
from support.cpu_quantize import Options, Placement, Result
from support.repository import ROOT

CHIPS = {"100a": "100f", "103a": "100f", "120a": "120f", "90": "90", "80": "80"}  # -> PTX target
_FORMATS = {  # name -> (Element, BlockScale, block) of numerics/formats.h
    "NVFP4": (0, 0, 16),
    "MXFP4": (0, 1, 32),
    "MXFP6_E2M3": (1, 1, 32),
    "MXFP6_E3M2": (2, 1, 32),
    "MXFP8_E4M3": (3, 1, 32),
    "MXFP8_E5M2": (4, 1, 32),
    "FP8_E4M3": (3, 2, 32),
    "FP8_E5M2": (4, 2, 32),
}
_INPUTS = {np.dtype(np.float32): 0, np.dtype(np.uint16): 1, np.dtype(np.float16): 2}
_CANARY = 64  # bytes on both sides of an output
_MAX_GRID_YZ = 65535
_WHOLE = Placement()  # x is the logical tensor


class _Format(ctypes.Structure):
    _fields_ = [("element", ctypes.c_uint8), ("scale", ctypes.c_uint8), ("block", ctypes.c_int)]


class CopyParams(ctypes.Structure):
    """params.h: CopyParams."""

    _fields_ = [
        *[(n, ctypes.c_uint64) for n in ("values", "scales", "global_scale", "amax", "seed")],
        ("stream", ctypes.c_uint32),
        ("signs", ctypes.c_uint16),
        *[(n, ctypes.c_uint8) for n in ("stochastic", "hadamard", "tiles", "four_over_six")],
        *[(n, ctypes.c_uint8) for n in ("rule", "layout")],
    ]


class QuantizeParams(ctypes.Structure):
    """params.h: QuantizeParams."""

    _fields_ = [
        *[(n, ctypes.c_uint64) for n in ("x", "origin")],
        *[(n, ctypes.c_int64) for n in ("logical_rows", "logical_cols")],
        *[(n, ctypes.c_uint32) for n in ("leads", "matrices", "rows", "cols")],
        ("format", _Format),
        ("input", ctypes.c_uint8),
        ("row", CopyParams),
        ("col", CopyParams),
    ]


class AmaxParams(ctypes.Structure):
    """params.h: AmaxParams."""

    _fields_ = [
        *[(n, ctypes.c_uint64) for n in ("x", "origin")],
        *[(n, ctypes.c_int64) for n in ("logical_rows", "logical_cols")],
        *[(n, ctypes.c_uint32) for n in ("leads", "matrices", "rows", "cols")],
        ("input", ctypes.c_uint8),
        ("signs", ctypes.c_uint16),
        *[(n, ctypes.c_uint64) for n in ("amax", "rotated", "fingerprint")],
    ]


class DequantizeParams(ctypes.Structure):
    """params.h: DequantizeParams."""

    _fields_ = [
        *[(n, ctypes.c_uint64) for n in ("values", "scales", "global_scale", "out")],
        *[(n, ctypes.c_uint32) for n in ("matrices", "rows", "k")],
        ("format", _Format),
        *[(n, ctypes.c_uint8) for n in ("layout", "output")],
    ]


@functools.cache
def compiler() -> ModuleType:
    """csrc/compile/compile_kernels.py."""
    path = ROOT / "csrc" / "compile" / "compile_kernels.py"
    spec = importlib.util.spec_from_file_location("compile_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compile_kernels"] = module
    spec.loader.exec_module(module)
    return module


def require_tools() -> None:
    """Skips the calling test where NVRTC or ptxas is not installed."""
    try:
        compiler().check_tools()
    except compiler().ToolsMissing as error:
        pytest.skip(str(error))


@functools.cache
def kernel(name: str) -> Any:
    """A row of variants.def."""
    return next(k for k in compiler().kernels() if k.name == name)


@functools.cache
def ptx(name: str, target: str) -> str:
    """The PTX of a kernel, compiled once for each state of its sources."""
    require_tools()
    row = kernel(name)
    text = compiler().source_text(row) + repr(row) + target + Path(compiler().__file__).read_text()
    folder = Path(tempfile.gettempdir()) / f"jax_fp4_tests_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{name}.{target}.{hashlib.sha256(text.encode()).hexdigest()[:16]}.ptx"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(compiler().compile_ptx(row, target))
        partial.rename(path)
    return path.read_text()


@dataclass
class Device:
    """A chip of the PTX machine with our kernels.

    Attributes:
        chip: "100a", "80", ...
        seed: of the schedule.
        replace: (text of the .cu file, other text), for planted faults.
        mutate: PTX to PTX, for planted faults.
        reports: of the launches so far, with the kernel's name.
    """

    chip: str = "100a"
    seed: int = 0
    replace: tuple[str, str] | None = None
    mutate: Callable[[str], str] = str
    reports: list[tuple[str, sim.Report]] = field(default_factory=list)

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: int,
        params: ctypes.Structure,
        machine: sim.Machine,
    ) -> None:
        """Runs a kernel whose only parameter is a structure."""
        module = machine.load(self.mutate(self._ptx(name)))
        report = module.launch(name, list(grid), block, args=[bytes(params)], seed=self.seed)
        assert not report.warnings, report.warnings
        self.reports.append((name, report))

    def _ptx(self, name: str) -> str:
        target = CHIPS[self.chip]
        if self.replace is None:
            return ptx(name, target)
        source = (ROOT / "csrc" / "kernels" / kernel(name).source).read_text()
        old, new = self.replace
        assert source.count(old) == 1, old
        return compiler().compile_ptx(kernel(name), target, source.replace(old, new))

    def machine(self) -> sim.Machine:
        """A machine with nothing in its memory."""
        return sim.Machine(self.chip)


class Output:
    """An array that kernels write, between canaries; nothing of it counts as written before."""

    def __init__(self, machine: sim.Machine, count: int, *, zero: bool = False) -> None:
        """Args: count: of bytes; zero: filled with zeros, and so written."""
        total = count + 2 * _CANARY
        self.memory = np.full(total, 0xA5, np.uint8) if zero else machine.empty(total, np.uint8)
        self.guard = int(self.memory[0])
        self.bytes = self.memory[_CANARY : _CANARY + count]
        self.bytes[:] = 0 if zero else 0x7F
        self.address = machine.address(self.memory) + _CANARY

    def check(self) -> np.ndarray:
        """The bytes, after the canaries were seen to be intact."""
        assert (self.memory[:_CANARY] == self.guard).all(), "written before the output"
        assert (self.memory[_CANARY + len(self.bytes) :] == self.guard).all(), "written past it"
        return self.bytes


def _aligned(machine: sim.Machine, array: np.ndarray) -> int:
    return machine.address(np.ascontiguousarray(array)) if array.size else 0


def _origin(placement: Placement, examples: int) -> np.ndarray:
    return np.tile(
        np.array([placement.lead, placement.row, placement.col], np.uint32), (examples, 1)
    )


def quantize_kernel(name: str, input_bits: int, *, four_over_six: bool = False) -> str:
    """The variant that makes copies of a format."""
    if name == "NVFP4":
        family = "nvfp4_four_over_six" if four_over_six else "nvfp4"
    else:
        family = f"mx{cpu.FORMATS[name][0]}"
    return f"quantize_{family}_{input_bits}"


def _grid(x: int, y: int, z: int) -> tuple[int, int, int]:
    return max(x, 1), min(max(y, 1), _MAX_GRID_YZ), min(z, _MAX_GRID_YZ)


def quantize(
    device: Device,
    x: np.ndarray,
    *copies: Options,
    placement: Placement = _WHOLE,
    amax: Sequence[np.ndarray] | None = None,
    seeds: Sequence[np.ndarray] | None = None,
    max_y: int = _MAX_GRID_YZ,
) -> list[Result]:
    """The copies of x [examples, leads, rows, cols] or [leads, rows, cols], made in one launch.

    Args:
        device: where.
        x: float32, float16 or uint16 (bfloat16 bits).
        copies: of one format, along different axes.
        placement: of every example in its logical tensor.
        amax: uint32 [examples, leads] for each copy; by default the options' or the CPU's.
        seeds: uint32 [examples, 2] for each copy; by default that of the options for all.
        max_y: CTAs in y, at most.

    Returns:
        Like support.cpu_quantize.quantize, with all matrices behind each other.
    """
    machine = device.machine()
    x4 = x if x.ndim == 4 else x[None]
    examples, leads, rows, cols = x4.shape
    matrices = examples * leads
    o = copies[0]
    params = QuantizeParams(
        x=_aligned(machine, x4), origin=_aligned(machine, _origin(placement, examples)),
        logical_rows=placement.logical_rows or rows, logical_cols=placement.logical_cols or cols,
        leads=leads, matrices=matrices, rows=rows, cols=cols,
        format=_Format(*_FORMATS[o.format]), input=_INPUTS[x.dtype],
    )  # fmt: skip
    outputs = []
    for i, o in enumerate(copies):
        r, k = (rows, cols) if o.axis == 1 else (cols, rows)
        blocks = -(-k // o.block)
        scale_bytes = -(-r // 128) * -(-blocks // 4) * 512 if o.tiled_layout else r * blocks
        outputs.append(
            [
                Output(machine, matrices * r * cpu.row_bytes(o.bits, k)),
                Output(machine, matrices * scale_bytes),
                Output(machine, 4 * matrices),
            ]
        )
        bits = amax[i] if amax is not None else o.amax
        if bits is None:
            bits = np.concatenate([_cpu_amax(example, o) for example in x4])
        seed = np.tile(np.array([o.seed & 0xFFFF_FFFF, o.seed >> 32], np.uint32), (examples, 1))
        if seeds is not None:
            seed = seeds[i]
        values, scales, global_scale = (output.address for output in outputs[-1])
        setattr(
            params,
            "row" if o.axis == 1 else "col",
            CopyParams(
                values, scales, global_scale, _aligned(machine, np.ravel(bits)),
                _aligned(machine, seed), o.stream, o.signs, o.stochastic, o.hadamard, o.tiles,
                o.four_over_six, ["rceil", "floor"].index(o.rule), o.tiled_layout,
            ),
        )  # fmt: skip
    name = quantize_kernel(
        o.format, 8 * x.dtype.itemsize, four_over_six=any(c.four_over_six for c in copies)
    )
    grid = _grid(2 * -(-cols // 128), min(-(-rows // 128), max_y), matrices)
    device.launch(name, grid, 128, params, machine)
    results = []
    for o, (values, scales, global_scale) in zip(copies, outputs, strict=True):
        r = rows if o.axis == 1 else cols
        results.append(
            Result(
                values.check().reshape(matrices, r, -1) if r else values.check(),
                scales.check().reshape(matrices, -1),
                global_scale.check().view(np.float32),
            )
        )
    return results


def _cpu_amax(x: np.ndarray, o: Options) -> np.ndarray:
    plain, rotated, _ = cpu.amax(x, rotate_axis=o.axis if o.hadamard else None, signs=o.signs)
    return rotated if o.hadamard else plain


def amax(
    device: Device,
    x: np.ndarray,
    *,
    rotate_axis: int | None = None,
    signs: int = cpu.DEFAULT_SIGNS,
    placement: Placement = _WHOLE,
    fingerprint: bool = True,
    resident: int = 4,
    max_z: int = _MAX_GRID_YZ,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Amax and rotated amax [examples * leads], fingerprint [examples] of an x as for `quantize`.

    Args:
        device: where.
        x: as for `quantize`.
        rotate_axis: None, 1 or 0: along which axis groups are rotated.
        signs: of the rotation.
        placement: of every example.
        fingerprint: whether it is wanted; otherwise it comes back as zeros.
        resident: about how many CTAs to launch.
        max_z: CTAs in z, at most.
    """
    machine = device.machine()
    x4 = x if x.ndim == 4 else x[None]
    examples, leads, rows, cols = x4.shape
    matrices = examples * leads
    plain, rotated = (Output(machine, 4 * matrices, zero=True) for _ in range(2))
    prints = Output(machine, 4 * examples, zero=True)
    params = AmaxParams(
        _aligned(machine, x4), _aligned(machine, _origin(placement, examples)),
        placement.logical_rows or rows, placement.logical_cols or cols, leads, matrices, rows, cols,
        _INPUTS[x.dtype], signs, plain.address, 0 if rotate_axis is None else rotated.address,
        prints.address if fingerprint else 0,
    )  # fmt: skip
    kind = {None: "", 1: "rotated_cols_", 0: "rotated_rows_"}[rotate_axis]
    across = -(-cols // 64)
    columns = min(-(-resident // max(across * matrices, 1)), -(-rows // 128))
    grid = _grid(across, columns, min(matrices, max_z))
    device.launch(f"amax_{kind}{8 * x.dtype.itemsize}", grid, 256, params, machine)
    return tuple(o.check().view(np.uint32) for o in (plain, rotated, prints))  # type: ignore[return-value]


def dequantize(
    device: Device,
    result: Result,
    o: Options,
    rows: int,
    k: int,
    dtype: np.dtype,
    max_y: int = _MAX_GRID_YZ,
) -> np.ndarray:
    """As support.cpu_quantize.dequantize."""
    machine = device.machine()
    matrices = len(result.global_scale)
    out = Output(machine, matrices * rows * k * dtype.itemsize)
    params = DequantizeParams(
        *(_aligned(machine, a) for a in (result.values, result.scales, result.global_scale)),
        out.address, matrices, rows, k, _Format(*_FORMATS[o.format]), int(o.tiled_layout),
        _INPUTS[dtype],
    )  # fmt: skip
    grid = _grid(-(-k // 256), min(-(-rows // 16), max_y), matrices)
    device.launch(f"dequantize_{o.bits}", grid, 256, params, machine)
    return out.check().view(dtype).reshape(matrices, rows, k)

"""Runs csrc/kernels/gemm_bf16.cu on the machine; problems and results as in gemm_kernels.py."""

import ctypes
from dataclasses import dataclass

import numpy as np

from jax_fp4 import sim
from oracles import mma_plain, pack, tables
from support import gemm_kernels
from support.gemm_kernels import ELEMENT_BITS, Operand, Pair, Problem
from support.gemm_params import Bf16Params


@dataclass(frozen=True)
class Variant(gemm_kernels.Variant):
    """A compiled kernel on a chip; `family` is the chip, 80 or 90."""

    family: str = "80"

    @property
    def name(self) -> str:
        return f"gemm_bf16_{self.kind}_128x{self.tile_n}"

    @property
    def chip(self) -> str:
        return self.family

    @property
    def target(self) -> str:
        return self.family

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Two decoded stages and at most four others in 99 KiB."""
        rows = 128 + self.tile_n
        stage = rows * (64 if self.kind == "mxf8f6f4" else 32) + 1024
        decoded = 2 * rows * 128
        return min(4, (99 * 1024 - decoded) // stage) * stage + decoded

    def product(self, codes: Pair, scales: Pair, elements: tuple[str, str]) -> np.ndarray:
        """bf16 of code times scale; the plain model of the chip, in k order."""
        a, b = (
            decoded(c, s, element, self.block)
            for c, s, element in zip(codes, scales, elements, strict=True)
        )
        zero = np.zeros((len(a), len(b)), np.uint32)
        kinds = ("bf16", "bf16")
        d = mma_plain.model(kinds, a[:, None], b[None], zero, "f32", int(self.chip))
        return d.astype(np.uint32)


def decoded(codes: np.ndarray, scales: np.ndarray, element: str, block: int) -> np.ndarray:
    """Bits of bf16 [rows, K]: the exact product, rounded once to nearest even."""
    if block == 16:
        scale = tables.VALUES["e4m3"][scales & 0x7F].astype(np.float64)
    else:
        scale = np.where(scales == 0xFF, np.nan, np.ldexp(1.0, scales.astype(int) - 127))
    wide = np.repeat(scale, block, axis=1)[:, : codes.shape[1]]
    with np.errstate(over="ignore", invalid="ignore"):
        # f32 holds every product below 2^128, and what is beyond is infinite in both types.
        product = (tables.VALUES[element][codes].astype(np.float64) * wide).astype(np.float32)
        return tables.f32_to_bf16(product).astype(np.uint32)


class Run(gemm_kernels.Run):
    """A launch: operands are given by addresses instead of tensor maps."""

    def __init__(self, problem: Problem, machine: sim.Machine, module: sim.Module | None = None):
        problem.direct = True
        super().__init__(problem, machine, module)

    def _operand(self, o: Operand, box_rows: int, scale_tiles: int) -> tuple[bytes, bytes]:
        packed = np.stack([pack.pack(codes, ELEMENT_BITS[o.element]) for codes in o.codes])
        tiled = np.stack([pack.tile_scales(s) for s in o.scales])
        poison = 0x7F if self.problem.variant.kind == "nvfp4" else 0xFF
        self._places.append((self._place(packed, 0x77), self._place(tiled, poison)))
        self._pitches.append(packed.shape[2])
        self._scale_groups = tiled.shape[2]
        return bytes(128), bytes(128)

    def _params(self, parts: np.ndarray | None) -> ctypes.Structure:
        self._places: list[tuple[int, int]] = []
        self._pitches: list[int] = []
        gemm = super()._params(parts)
        (values_a, scales_a), (values_b, scales_b) = self._places
        return Bf16Params(
            gemm, values_a, values_b, scales_a, scales_b, *self._pitches, self._scale_groups
        )


def check(problem: Problem, seed: int = 0) -> sim.Report:
    """Runs the problem under all checks; D has to be what the model says, and nothing else."""
    return gemm_kernels.check(problem, seed, Run)

"""Kernels in Triton's language, and their PTX: programs whose compiler is not ours.

Triton compiles without a GPU. Every size is a multiple of 16 and every pointer aligned to 16 bytes,
which is told to the compiler, so that it vectorises and pipelines its loads.
"""

import functools
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jax_fp4 import sim


@triton.jit
def quantize_nvfp4(x, codes, scales, k_size, ROWS: tl.constexpr, COLS: tl.constexpr):
    """E2M1 codes, two a byte, and an E4M3 scale, amax / 6, for every 16 columns of f32 x."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    at = rows[:, None] * k_size + block * COLS + tl.arange(0, COLS)[None, :]
    groups = tl.reshape(tl.load(x + at), (ROWS, COLS // 16, 16))
    scale8 = tl.div_rn(tl.max(tl.abs(groups), axis=2), 6.0).to(tl.float8e4nv)
    scale = scale8.to(tl.float32)
    inverse = tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, scale))
    y = groups * inverse[:, :, None]
    size = tl.abs(y)
    # A midpoint goes to the even code.
    code = (size > 0.25).to(tl.uint8) + (size >= 0.75).to(tl.uint8) + (size > 1.25).to(tl.uint8)
    code += (size >= 1.75).to(tl.uint8) + (size > 2.5).to(tl.uint8) + (size >= 3.5).to(tl.uint8)
    code += (size > 5.0).to(tl.uint8)
    code |= (y.to(tl.int32, bitcast=True) >> 28 & 8).to(tl.uint8)
    even, odd = tl.split(tl.reshape(code, (ROWS, COLS // 2, 2)))
    pairs = block * (COLS // 2) + tl.arange(0, COLS // 2)
    tl.store(codes + rows[:, None] * (k_size // 2) + pairs[None, :], even | odd << 4)
    words = block * (COLS // 16) + tl.arange(0, COLS // 16)
    tl.store(
        scales + rows[:, None] * (k_size // 16) + words[None, :], scale8.to(tl.uint8, bitcast=True)
    )


@triton.jit
def dot_bf16(a, b, c, m_size, n_size, k_size, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c [M, N] = a [M, K] b [N, K]^T; tiles that reach beyond M, N or K are masked."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, k_size, BK):
        rk = k + tl.arange(0, BK)
        am = (rm[:, None] < m_size) & (rk[None, :] < k_size)
        bm = (rn[None, :] < n_size) & (rk[:, None] < k_size)
        x = tl.load(a + rm[:, None] * k_size + rk[None, :], mask=am, other=0.0)
        y = tl.load(b + rn[None, :] * k_size + rk[:, None], mask=bm, other=0.0)
        total = tl.dot(x, y, total)
    inside = (rm[:, None] < m_size) & (rn[None, :] < n_size)
    tl.store(c + rm[:, None] * n_size + rn[None, :], total, mask=inside)


@triton.jit
def dot_fp4(
    a, sa, b, sb, c, n_size, k_size,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """c [M, N] = a [M, K] b [N, K]^T of packed E2M1 with linear scales [rows, K / BLOCK]."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    pairs, words = tl.arange(0, BK // 2), tl.arange(0, BK // BLOCK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, k_size, BK):
        x = tl.load(a + rm[:, None] * (k_size // 2) + (k // 2 + pairs)[None, :])
        y = tl.load(b + rn[None, :] * (k_size // 2) + (k // 2 + pairs)[:, None])
        u = tl.load(sa + rm[:, None] * (k_size // BLOCK) + (k // BLOCK + words)[None, :])
        v = tl.load(sb + rn[:, None] * (k_size // BLOCK) + (k // BLOCK + words)[None, :])
        total = tl.dot_scaled(x, u, "e2m1", y, v, "e2m1", total)
    tl.store(c + rm[:, None] * n_size + rn[None, :], total)


@triton.jit
def dot_fp4_tiled(
    a, sa, b, sb, c, n_size, k_size,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With scales in the 128x4 layout: [rows / 128, K / BLOCK / 4, 32, 4, 4]."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    ra = tl.program_id(0) * (BM // 128) + tl.arange(0, BM // 128)
    rb = tl.program_id(1) * (BN // 128) + tl.arange(0, BN // 128)
    pairs = tl.arange(0, BK // 2)
    FOURS: tl.constexpr = BK // BLOCK // 4
    word = tl.arange(0, FOURS * 512)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    fours = k_size // BLOCK // 4
    for k in range(0, k_size, BK):
        x = tl.load(a + rm[:, None] * (k_size // 2) + (k // 2 + pairs)[None, :])
        y = tl.load(b + rn[None, :] * (k_size // 2) + (k // 2 + pairs)[:, None])
        u = tl.load(sa + (ra * fours + k // BLOCK // 4)[:, None] * 512 + word[None, :])
        v = tl.load(sb + (rb * fours + k // BLOCK // 4)[:, None] * 512 + word[None, :])
        u = u.reshape(BM // 128, FOURS, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(BM, BK // BLOCK)
        v = v.reshape(BN // 128, FOURS, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(BN, BK // BLOCK)
        total = tl.dot_scaled(x, u, "e2m1", y, v, "e2m1", total)
    tl.store(c + rm[:, None] * n_size + rn[None, :], total)


@dataclass(frozen=True)
class Compiled:
    """PTX of a kernel, and what a launch of it needs."""

    ptx: str
    entry: str
    block: int
    shared: int

    def launch(
        self, sm: str, grid: tuple[int, ...], args: list[Any], seed: int, **options: Any
    ) -> sim.Report:
        """Runs it on a machine of its own; Triton's two scratch pointers are null."""
        machine = sim.Machine(sm, seed=seed, **options)
        module = machine.load(self.ptx)
        return module.launch(self.entry, grid, self.block, 1, self.shared, [*args, 0, 0])


@functools.cache
def compiled(
    kernel: Any, chip: int, types: tuple[str, ...], constants: tuple[int, ...], warps: int = 4
) -> Compiled:
    """The kernel for a chip.

    Args:
        kernel: a function of this file.
        chip: compute capability times ten.
        types: of its parameters, in Triton's notation.
        constants: values of its constexpr parameters.
        warps: of a CTA.
    """
    names = list(kernel.arg_names)
    signature = dict(zip(names, types, strict=False))
    fixed = dict(zip(names[len(types) :], constants, strict=True))
    signature |= dict.fromkeys(fixed, "constexpr")
    aligned = {(n,): [["tt.divisibility", 16]] for n in range(len(types))}
    built = triton.compile(
        ASTSource(kernel, signature, constexprs=fixed, attrs=aligned),
        target=GPUTarget("cuda", chip, 32),
        options={"num_warps": warps, "enable_fp_fusion": False},
    )
    return Compiled(built.asm["ptx"], built.metadata.name, 32 * warps, built.metadata.shared)

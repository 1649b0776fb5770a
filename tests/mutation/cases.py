"""Kernels to make mutants of, and what is right about those that survive.

A survivor's key (`Mutant.key`) stands here with the rule of docs/simulator.md, "Order", that still
orders what the mutant has left unordered, or with what makes the instruction needless.
"""

from typing import Any

import numpy as np

from jax_fp4 import sim
from mutation.judge import Case
from oracles import mma, pack
from support import gemm_kernels, nvfp4_tile


def tile(group: int) -> Case:
    """Our own NVFP4 product of one tile, by a CTA or a pair; strict, since it has every fence."""
    k = 4 * nvfp4_tile.BLOCK
    rng = np.random.default_rng(group)
    codes = tuple(rng.integers(0, 16, (128 * group, k), dtype=np.uint8) for _ in range(2))
    scales = tuple(rng.integers(0x20, 0x58, (128 * group, k // 16), np.uint8) for _ in range(2))
    want = mma.product_k64(*codes, *scales, "ue4m3")

    def run(machine: sim.Machine, module: sim.Module, budget: int) -> int:
        got = nvfp4_tile.launch(machine, module, codes, scales, max_instructions=budget)
        np.testing.assert_array_equal(got.view(np.uint32), want)
        return nvfp4_tile.THREADS // 32 * len(text.splitlines())

    text = nvfp4_tile.kernel(group, k // nvfp4_tile.BLOCK)
    return Case(f"tile of {group}", "100a", text, run, sim.Checks(strict=True))


def triton_fp4(chip: str, tiled: bool) -> Case:
    """NVFP4 `tl.dot_scaled`: mma.sync on sm_120, tcgen05 on sm_100."""
    from support import triton_kernels

    m, n, k = 128, 128, 256
    rng = np.random.default_rng(1)
    codes = [rng.integers(0, 16, (rows, k)).astype(np.uint8) for rows in (m, n)]
    scales = [rng.integers(0x20, 0x50, (rows, k // 16)).astype(np.uint8) for rows in (m, n)]
    kernel = triton_kernels.compiled(
        triton_kernels.dot_fp4_tiled if tiled else triton_kernels.dot_fp4,
        int(chip.rstrip("a")),
        ("*u8", "*fp8e4nv", "*u8", "*fp8e4nv", "*fp32", "i32", "i32"),
        (m, n, 128, 16),
    )
    want = mma.product_k64(codes[0], codes[1], scales[0], scales[1], "ue4m3")
    packed = [pack.pack(x, 4) for x in codes]
    given = [pack.tile_scales(s) for s in scales] if tiled else scales

    def run(machine: sim.Machine, module: sim.Module, budget: int) -> int:
        c = np.full((m, n), np.nan, np.float32)
        args: list[Any] = [packed[0], given[0], packed[1], given[1], c, n, k, 0, 0]
        report = module.launch(
            kernel.entry, 1, kernel.block, 1, kernel.shared, args, max_instructions=budget
        )
        np.testing.assert_array_equal(c.view(np.uint32), want)
        return report.instructions

    return Case(f"triton NVFP4 sm_{chip} {'tiled' if tiled else 'linear'}", chip, kernel.ptx, run)


def product(kind: str, group: int, tile_n: int, **more: Any) -> Case:
    """A shipped product kernel, twice: the second launch adds to what the first one has written.

    Several tiles for each CTA, so that every buffer is used again, and edges on all sides.
    """
    variant = gemm_kernels.Variant(kind, group, tile_n)
    stages = (variant.shared_bytes - 8 * 4096) // (variant.stage_k * (128 + tile_n // group) // 2)
    m, n, k = 2 * variant.tile_m - 40, 5 * tile_n + 16, (stages + 1) * variant.stage_k + 64
    first = gemm_kernels.random_problem(variant, m, n, k, **more)
    second = gemm_kernels.random_problem(variant, m, n, k, seed=1, c="f32", **more)
    want = gemm_kernels.expected(first)
    second.c = want
    want_sum = gemm_kernels.expected(second)

    def run(machine: sim.Machine, module: sim.Module, budget: int) -> int:
        runs = [gemm_kernels.Run(problem, machine, module) for problem in (first, second)]
        runs[1].reads(runs[0])
        reports = machine.run(runs[0].prepare() + runs[1].prepare(), budget)
        np.testing.assert_array_equal(runs[0].result(), want)
        np.testing.assert_array_equal(runs[1].result(), want_sum)
        return sum(report.instructions for report in reports)

    name = f"{variant.name}{', split' if more.get('splits', 1) > 1 else ''}"
    text = gemm_kernels.ptx(variant)
    return Case(name, "100a", text, run, sim.Checks(strict=True))


SURVIVORS = {
    "tile of 1": {
        "remove fence: fence.mbarrier_init.release.cluster;": "H9: bar.sync orders the "
        "initialisation before every use, and no signal comes from another CTA",
    },
    "tile of 2": {},
}

"""Kernels to make mutants of, and what is right about those that survive.

A survivor's key (`Mutant.key`) stands here with the rule of docs/simulator.md, "Order", that still
orders what the mutant has left unordered, or with what makes the instruction needless.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_fp4 import sim
from mutation.judge import Case
from oracles import mma, pack
from support import cpu_quantize, device_kernels, gemm_kernels, nvfp4_tile
from support.cpu_quantize import Options

STRICT = sim.Checks(strict=True)


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
    return Case(f"tile of {group}", "100a", text, run, STRICT)


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


def _problems(variant: gemm_kernels.Variant) -> list[gemm_kernels.Problem]:
    """Products that reach every way through a kernel.

    The first two have tiles for several rounds of every ring (stages, accumulators, buffers,
    answers about tiles) and edges on all sides; the second adds to what the first has written. The
    next have the remaining ways to D, without a tensor map and transposed, and use every stage in
    their last tile. In the last one are tiles that belong to no group.
    """
    some = gemm_kernels.random_problem
    m, n, k = 2 * variant.tile_m - 40, 3 * variant.tile_n + 16, 2 * variant.stage_k + 64
    long_k = 7 * variant.stage_k + 64  # no variant here has more than 7 stages
    groups = [1, -1, -1, 0, -1, 1]
    problems = [
        some(variant, m, n, k),
        some(variant, m, n, k, seed=1, c="f32"),
        some(variant, 130, variant.tile_n - 8, long_k, out="bf16", bias="f32", direct=True),
        some(variant, 130, 40, 64, direct=True),
        some(variant, 130, 40, long_k, transposed=True, bias="f32"),
        some(variant, 6 * variant.tile_m, 24, 64, batch=(1, 2), row_groups=groups),
    ]
    problems[1].c = gemm_kernels.expected(problems[0])
    return problems


def product(variant: gemm_kernels.Variant) -> Case:
    """A shipped product kernel, in launches that may start before the ones before have ended.

    One CTA or pair runs at a time, and so has all tiles of a launch.
    """
    problems = _problems(variant)
    want = [gemm_kernels.expected(p) for p in problems]

    def run(machine: sim.Machine, module: sim.Module, budget: int) -> int:
        runs = [gemm_kernels.Run(problem, machine, module) for problem in problems]
        runs[1].reads(runs[0])
        reports = machine.run([launch for each in runs for launch in each.prepare()], budget)
        for each, expected in zip(runs, want, strict=True):
            np.testing.assert_array_equal(each.result(), expected)
        return max(report.instructions for report in reports)

    text = gemm_kernels.ptx(variant)
    return Case(variant.name, variant.chip, text, run, STRICT, clusters=1)


def reduction() -> Case:
    """Adds the parts of a product whose K is split; the next product reads what it writes."""
    variant = gemm_kernels.Variant("nvfp4", 1, 64)
    m, n, k = 136, 72, 4 * variant.split_k
    first = gemm_kernels.random_problem(variant, m, n, k, splits=2)
    second = gemm_kernels.random_problem(variant, m, n, k, seed=1, c="f32", splits=2)
    second.c = gemm_kernels.expected(first)
    want = [gemm_kernels.expected(p) for p in (first, second)]
    products = gemm_kernels.ptx(variant)

    def run(machine: sim.Machine, module: sim.Module, budget: int) -> int:
        others = machine.load(products)
        runs = [gemm_kernels.Run(p, machine, others) for p in (first, second)]
        for each in runs:
            each.reduce = module
        runs[1].reads(runs[0])
        reports = machine.run([launch for each in runs for launch in each.prepare()], budget)
        for each, expected in zip(runs, want, strict=True):
            np.testing.assert_array_equal(each.result(), expected)
        return max(report.instructions for report in reports)

    text = device_kernels.ptx("gemm_reduce", variant.target)
    return Case("gemm_reduce", variant.chip, text, run, STRICT)


@dataclass
class _Loaded(device_kernels.Device):
    """A device whose machine has loaded its kernel."""

    loaded: tuple[sim.Machine, sim.Module, int] | None = None

    def machine(self) -> sim.Machine:
        assert self.loaded
        return self.loaded[0]

    def launch(self, name: str, grid: Any, block: int, params: Any, machine: sim.Machine) -> None:
        assert self.loaded
        _, module, budget = self.loaded
        arguments = [bytes(params)]
        report = module.launch(name, list(grid), block, args=arguments, max_instructions=budget)
        self.reports.append((name, report))


def quantizer() -> Case:
    """Copies along rows and columns in one pass, and along rows only; a CTA has several tiles."""
    x = cpu_quantize.tricky_values(np.random.default_rng(9), (1, 300, 48), np.dtype(np.uint16))
    launches = [[Options(), Options(axis=0)], [Options()]]
    want = [cpu_quantize.quantize(x, *copies) for copies in launches]

    def run(machine: sim.Machine, module: sim.Module, budget: int) -> int:
        loaded = _Loaded(loaded=(machine, module, budget))
        for copies, expected in zip(launches, want, strict=True):
            got = device_kernels.quantize(loaded, x, *copies, max_y=1)
            assert all(g.equals(w) for g, w in zip(got, expected, strict=True))
        return max(report.instructions for _, report in loaded.reports)

    name = device_kernels.quantize_kernel("NVFP4", 16)
    text = device_kernels.ptx(name, "100f")
    return Case(name, "100a", text, run, STRICT)


def shipped() -> Iterator[Case]:
    """Kernels as we ship them: the sources with barriers, and variants that order otherwise."""
    for kind, group, tile_n in [
        ("nvfp4", 1, 64),
        ("nvfp4", 2, 128),
        ("nvfp4", 2, 256),  # accumulators overlap, and scales have fewer slots than stages
        ("mxf8f6f4", 1, 128),
    ]:
        yield product(gemm_kernels.Variant(kind, group, tile_n))
    yield product(gemm_kernels.Variant("nvfp4", 1, 64, "sm120"))
    yield reduction()
    yield quantizer()


# Removing the permission to start early lets the next grid start when this one has ended.
_LAUNCH = {
    "remove griddepcontrol: griddepcontrol.launch_dependents;": [
        "H13: it orders nothing. Without it the next grid starts later, and is ordered all the same"
    ]
}
_INIT = {
    "remove fence: fence.mbarrier_init.release.cluster;": [
        "H9: bar.sync orders the initialisation before every use, and no signal comes from another "
        "CTA. Kept for pairs, in which copies of both CTAs signal one barrier"
    ]
}
_ANSWERS = {
    "remove fence: fence.proxy.async.shared::cta;": [
        "H8, after a tile's first stage: the thread that multiplies has read the answer before it "
        "commits to `done` (H6), so epilogue warps that have waited for it (H7) know of the read, "
        "and their own fence lies before the next answer, which is asked for after they have "
        "arrived at `taken` (H4). Kept, since tiles of no group have no `done`: the same code"
    ]
}
_END = {
    "remove warp barrier: bar.warp.sync -1;": [
        "H2, and H3 in a pair: the barrier of all threads that follows orders what the lanes did. "
        "Kept, since aligned instructions follow and the lanes come from different roles"
    ]
}
_LOADS = {
    "remove tcgen05.wait: tcgen05.wait::ld.sync.aligned;": 2
    * [
        "H11: one of three waits that take turns. Loaded registers may be used without, and the "
        "waits of the others cover these loads before the columns are released and at the end"
    ]
}
_LAST_STAGES = {
    "skip wait: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%], %;": 3
    * [
        "H4, H7: the producer's last waits, but for two stages. Where scales have two slots, the "
        "thread that multiplies has waited for the same commits before that to `done`, for which "
        "the epilogue waits before the CTA ends"
    ]
}


def _permit(group: int) -> dict[str, list[str]]:
    text = f"tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;"
    return {
        f"remove tcgen05.alloc: {text}": [
            "S40: the CTA has all 512 columns, so that whoever asks for some waits for the "
            "deallocation anyway. Kept, since every kernel that is known to run gives it back"
        ]
    }


# By case and key, a derivation for each mutant that survives.
SURVIVORS: dict[str, dict[str, list[str]]] = {
    "tile of 1": _INIT,
    "gemm_sm100_nvfp4_128x64": _permit(1) | _INIT | _LAUNCH | _ANSWERS | _END,
    "gemm_sm100_nvfp4_256x128": _permit(2) | _LAUNCH | _ANSWERS | _END,
    "gemm_sm100_nvfp4_256x256": (_permit(2) | _LAUNCH | _ANSWERS | _END | _LOADS | _LAST_STAGES),
    "gemm_sm100_mxf8f6f4_128x128": _permit(1) | _INIT | _LAUNCH | _ANSWERS | _END,
    "gemm_sm120_nvfp4_128x64": _INIT | _LAUNCH,
    "gemm_reduce": _LAUNCH,
}

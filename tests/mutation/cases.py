"""Kernels to make mutants of, and what is right about those that survive.

A survivor's key and number (`Mutant`) stand here with the rule of docs/simulator.md, "Order", that
still orders what the mutant has left unordered, or with what makes the instruction needless.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_fp4 import sim
from mutation.judge import Case
from oracles import mma, pack
from support import cpu_quantize, device_kernels, gemm_bf16, gemm_kernels, nvfp4_tile
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
    """NVFP4 `tl.dot_scaled`: mma.sync on sm_120, tcgen05 on sm_100.

    K has no block, one, and more than fit into the ring of stages.
    """
    from support import triton_kernels

    m, n, block = 128, 128, 128
    kernel = triton_kernels.compiled(
        triton_kernels.dot_fp4_tiled if tiled else triton_kernels.dot_fp4,
        int(chip.rstrip("a")),
        ("*u8", "*fp8e4nv", "*u8", "*fp8e4nv", "*fp32", "i32", "i32"),
        (m, n, block, 16),
    )
    rng = np.random.default_rng(1)
    codes = [rng.integers(0, 16, (rows, 5 * block)).astype(np.uint8) for rows in (m, n)]
    scales = [rng.integers(0x20, 0x50, (rows, 5 * block // 16)).astype(np.uint8) for rows in (m, n)]
    launches = []
    # The tiled one for tcgen05 is wrong without a block: nothing waits for its copies of scales.
    for k in (block, 5 * block) if tiled and chip == "100a" else (0, block, 5 * block):
        c = [np.ascontiguousarray(x[:, :k]) for x in codes]
        s = [np.ascontiguousarray(x[:, : k // 16]) for x in scales]
        want = mma.product_k64(*c, *s, "ue4m3") if k else np.zeros((m, n), np.uint32)
        # A launch cannot take an array without elements.
        given = [pack.tile_scales(x) if tiled else x for x in (s if k else scales)]
        launches.append((k, [pack.pack(x, 4) for x in (c if k else codes)], given, want))

    def run(machine: sim.Machine, module: sim.Module, budget: int) -> int:
        longest = 0
        for k, (a, b), (scale_a, scale_b), want in launches:
            out = np.full((m, n), np.nan, np.float32)
            args: list[Any] = [a, scale_a, b, scale_b, out, n, k, 0, 0]
            report = module.launch(
                kernel.entry, 1, kernel.block, 1, kernel.shared, args, max_instructions=budget
            )
            np.testing.assert_array_equal(out.view(np.uint32), want)
            longest = max(longest, report.instructions)
        return longest

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


def product(variant: gemm_kernels.Variant, kind: type[gemm_kernels.Run] = gemm_kernels.Run) -> Case:
    """A shipped product kernel, in launches that may start before the ones before have ended.

    One CTA or pair runs at a time, and so has all tiles of a launch; those of gemm_bf16 have one.
    """
    problems = _problems(variant)
    want = [gemm_kernels.expected(p) for p in problems]

    def run(machine: sim.Machine, module: sim.Module, budget: int) -> int:
        runs = [kind(problem, machine, module) for problem in problems]
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


def largest() -> Case:
    """Amax, rotated amax and fingerprint; a CTA has several tiles and several matrices."""
    x = cpu_quantize.tricky_values(np.random.default_rng(9), (3, 300, 48), np.dtype(np.uint16))
    want = cpu_quantize.amax(x, rotate_axis=1)

    def run(machine: sim.Machine, module: sim.Module, budget: int) -> int:
        loaded = _Loaded(loaded=(machine, module, budget))
        got = device_kernels.amax(loaded, x, rotate_axis=1, resident=1, max_z=2)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w)
        return loaded.reports[0][1].instructions

    name = "amax_rotated_cols_16"
    return Case(name, "100a", device_kernels.ptx(name, "100f"), run, STRICT)


def shipped() -> Iterator[Case]:
    """Kernels as we ship them: the sources with barriers, and variants that order otherwise.

    dequantize.cu, pad_rows.cu and tile_scales.cu have nothing to remove.
    """
    for kind, group, tile_n in [
        ("nvfp4", 1, 64),
        ("nvfp4", 2, 128),
        ("nvfp4", 2, 256),  # accumulators overlap, and scales have fewer slots than stages
        ("mxf8f6f4", 1, 128),
    ]:
        yield product(gemm_kernels.Variant(kind, group, tile_n))
    yield product(gemm_kernels.Variant("nvfp4", 1, 64, "sm120"))
    yield product(gemm_bf16.Variant("nvfp4", 1, 128, "90"), gemm_bf16.Run)
    yield reduction()
    yield quantizer()
    yield largest()


# A key of Mutant -> the number of the mutant with it -> why it may survive.
Derivations = dict[str, dict[int, str]]

# Removing the permission to start early lets the next grid start when this one has ended.
_LAUNCH: Derivations = {
    "remove griddepcontrol: griddepcontrol.launch_dependents;": {
        1: "H13: it orders nothing. Without it the next grid starts later, and is ordered all the "
        "same"
    }
}
_ANSWERS: Derivations = {
    "remove fence: fence.proxy.async.shared::cta;": {
        3: "H8, after a tile's first stage: the thread that multiplies has read the answer before "
        "it commits to `done` (H6), so epilogue warps that have waited for it (H7) know of the "
        "read, and their own fence lies before the next answer, which is asked for after they have "
        "arrived at `taken` (H4). Kept, since tiles of no group have no `done`: the same code"
    }
}
_LOADS: Derivations = {
    "remove tcgen05.wait: tcgen05.wait::ld.sync.aligned;": dict.fromkeys(
        (2, 3),
        "H11: of three waits that take turns, not the first, which a release follows. Loaded "
        "registers may be used without, and after every load comes another wait of its tile",
    )
}


def _init(kept: str) -> Derivations:
    """For one CTA; `kept`: why the instruction is there all the same."""
    return {
        "remove fence: fence.mbarrier_init.release.cluster;": {
            1: "H9: bar.sync orders the initialisation before every use, and no signal comes from "
            f"another CTA. Kept {kept}"
        }
    }


_PAIRS = _init("for pairs, in which copies of both CTAs signal one barrier")
_CUSTOM = _init("as in every kernel that is known to run")


def _end(number: int) -> Derivations:
    """The last one of a kernel for tcgen05."""
    return {
        "remove warp barrier: bar.warp.sync -1;": {
            number: "H2, and H3 in a pair: the barrier of all threads that follows orders what the "
            "lanes did. Kept, since aligned instructions follow and the lanes come from "
            "different roles"
        }
    }


def _permit(group: int) -> Derivations:
    text = f"tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;"
    return {
        f"remove tcgen05.alloc: {text}": {
            1: "S40: the CTA has all 512 columns, so that whoever asks for some waits for the "
            "deallocation anyway. Kept, since every kernel that is known to run gives it back"
        }
    }


# gemm_bf16: a warp's buffer of D is free before its first piece.
_FIRST_PIECE: Derivations = {
    "remove warp barrier: bar.warp.sync -1;": {
        1: "H2: the barrier of all threads after the last product orders the reads of what was "
        "decoded before the first piece. The same code frees the buffer for the others"
    }
}


def _triton_groups(groups: int) -> Derivations:
    """Copies of one stage are several groups, of which a wait leaves those of whole stages."""
    return {
        "remove cp.async group: cp.async.commit_group;": dict.fromkeys(
            range(1, groups),
            "H14: the first stage's next commit_group takes the copies along, and the wait for the "
            "stage is for all of its groups",
        ),
        "wait for one group less: cp.async.wait_group 0;": {
            1: "H14, S52: left over are the latest copies, zeros for a stage that nobody reads; "
            "D goes through the first 16 KiB of shared memory, and they do not go there"
        },
    }


_TRITON_TCGEN05: Derivations = {
    "remove tcgen05.alloc: @% tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;": {
        1: "S40: a CTA has all columns for itself, so that nobody waits for the permit"
    },
    "remove tcgen05.wait: tcgen05.wait::ld.sync.aligned;": {
        1: "H11: every loaded value is stored, with bar.sync between the rounds, before the "
        "deallocation, and registers may be used without the wait"
    },
    "remove barrier: barrier.sync 0;": {
        1: "H2: bar.sync between the rounds of D follow the wait for the loads and precede the "
        "deallocation"
    },
}
_TRITON_LINEAR: Derivations = {
    "remove barrier: bar.sync 0;": {
        3: "H2, H4: before the wait for a stage's products. The barrier before (10) has ordered "
        "the mbarrier's initialisation, and the wait itself takes what the commit gives",
        5: "H2: after the wait for copies. The barriers around the scales (6 to 10) follow before "
        "the products. Where the mbarrier was, warp 0, which has ended it, stores first (H1)",
        10: "H2, H1: after the mbarrier's initialisation. Barrier 3 follows before others wait at "
        "it, and the commit is of the warp that has initialised it",
        11: "H2: barrier 12 follows, and nothing between the two touches shared or tensor memory",
        12: "H2: barrier 11 has done the same",
    }
}
_TRITON_TILED: Derivations = {
    "remove barrier: bar.sync 0;": {
        4: "H10: between copies of scales and products of the first stage, all by warp 0. What "
        "other warps do up to barrier 5 or 8 is to copy into a stage that nobody has read",
        5: "H4: before the wait for the products of the stage before, which takes what their "
        "commit gives; it is that stage that is copied into next",
        7: "H10: between copies of scales and products of a stage, all by warp 0; other warps come "
        "to barrier 5 or 8 with nothing between",
        8: "H4: as 5, for the last products, after which barrier 9 precedes everything else",
    },
    "remove mbarrier.init: @% mbarrier.inval.shared::cta.b64 [%];": dict.fromkeys(
        (1, 2), "H9: nothing is initialised in its place again, and D does not reach it"
    ),
}

# By case, a derivation for each mutant that survives.
SURVIVORS: dict[str, Derivations] = {
    "tile of 1": _PAIRS,
    "gemm_sm100_nvfp4_128x64": _permit(1) | _PAIRS | _LAUNCH | _ANSWERS | _end(6),
    "gemm_sm100_nvfp4_256x128": _permit(2) | _LAUNCH | _ANSWERS | _end(6),
    "gemm_sm100_nvfp4_256x256": _permit(2) | _LAUNCH | _ANSWERS | _end(12) | _LOADS,
    "gemm_sm100_mxf8f6f4_128x128": _permit(1) | _PAIRS | _LAUNCH | _ANSWERS | _end(6),
    "gemm_sm120_nvfp4_128x64": _CUSTOM | _LAUNCH,
    "gemm_bf16_nvfp4_128x128": _LAUNCH | _FIRST_PIECE,
    "gemm_reduce": _LAUNCH,
    "triton NVFP4 sm_100a linear": _TRITON_TCGEN05 | _triton_groups(2) | _TRITON_LINEAR,
    "triton NVFP4 sm_100a tiled": _TRITON_TCGEN05 | _triton_groups(4) | _TRITON_TILED,
    "triton NVFP4 sm_120a linear": _triton_groups(2),
    "triton NVFP4 sm_120a tiled": _triton_groups(4),
}

"""What launches cost: counters equal hand-computed ones, bank conflicts a NumPy model's."""

import json

import numpy as np
import pytest

from jax_fp4 import sim
from support import device_kernels
from support.gemm_kernels import Run, Variant, expected, random_problem
from support.ptx_kernel import run
from support.tensor_memory import with_tensor_memory

UNCHECKED = sim.Checks(races=False, uninitialized=False)
SHARED = ".shared .align 1024 .b8 s[16384];"
X = ".param .u64 x"
ADDRESS = "ld.param.u64 a0, [x]; mov.u32 r0, %tid.x;"


def counts(body: str, *args: object, checks: sim.Checks = UNCHECKED, **options: object) -> dict:
    machine = sim.Machine("100a", checks=checks, costs=True)
    report = run(body, *args, machine=machine, **options)
    assert report.costs is not None and report.costs.timing is None
    return report.costs.counts


def test_instructions_by_class_and_opcode() -> None:
    """Warps, and lanes whose guard holds; an instruction that no lane executes counts as well."""
    c = counts(
        "mov.u32 r0, %tid.x; and.b32 r1, r0, 1; setp.eq.u32 p, r1, 0; @p add.u32 r2, r0, 1; "
        "setp.gt.u32 q, r0, 100; @q add.u32 r3, r0, 1; cvt.rn.f32.u32 f0, r0; add.f32 f1, f0, f0;",
        block=64,
    )
    integer = {"and": 2, "setp": 4, "add of integers": 4}
    assert c["instructions"]["integer"] == sum(integer.values())
    assert c["lane_instructions"]["integer"] == 64 + 2 * 64 + 32
    assert c["opcodes"]["add"] == 2 * 3
    assert c["instructions"]["convert"] == c["instructions"]["floating"] == 2
    assert c["lane_instructions"]["floating"] == 64


def test_an_instruction_that_waits_counts_once() -> None:
    """However often the machine tries it again."""
    for seed in range(5):
        machine = sim.Machine("100a", seed, costs=True)
        report = run(
            ".shared .align 8 .b64 bar; mov.u32 r0, %tid.x; setp.eq.u32 p, r0, 0; mov.u32 r1, bar;"
            "@p mbarrier.init.shared.b64 [r1], 1; bar.sync 0; setp.eq.u32 p, r0, 32;"
            "@p mbarrier.arrive.shared.b64 _, [r1];"
            "mbarrier.try_wait.parity.shared.b64 q, [r1], 0;",
            block=64,
            machine=machine,
        )
        assert report.costs is not None
        assert report.costs.counts["opcodes"]["mbarrier"] == 2 + 2 + 2


@pytest.mark.parametrize(
    ("stride", "bytes_", "sectors"),
    [
        (4, 4, 4),
        (64, 4, 32),
        (0, 4, 1),
        (16, 16, 16),
        (1, 1, 1),
        (2, 2, 2),
        (40, 8, 40),
        (32, 8, 32),
    ],
)
def test_sectors_of_global_loads(stride: int, bytes_: int, sectors: int) -> None:
    """32-byte sectors that a warp's lanes touch together, by hand, for strides from 0 to 64."""
    load = {1: "u8 r1", 2: "u16 h1", 4: "u32 r1", 8: "u64 a2", 16: "v4.u32 {{r1, r2, r3, r4}}"}
    c = counts(
        f"{ADDRESS} mad.wide.u32 a1, r0, {stride}, a0; "
        f"ld.global.{load[bytes_].replace('{{', '{').replace('}}', '}')}, [a1];",
        np.zeros(4096, np.uint8),
        parameters=X,
    )
    want = len({(stride * lane + b) // 32 for lane in range(32) for b in range(bytes_)})
    assert c["global"]["load_sectors"] == want == min(sectors, want)
    assert c["global"]["load_instructions"] == 1
    assert c["global"]["load_bytes"] == 32 * bytes_


def test_stores_and_atomics_of_half_a_warp() -> None:
    """Lanes that a guard holds back touch nothing; nor does an instruction without lanes."""
    c = counts(
        f"{ADDRESS} mad.wide.u32 a1, r0, 4, a0; setp.lt.u32 p, r0, 16; setp.gt.u32 q, r0, 99;"
        "@p st.global.u32 [a1], r0; @q st.global.u32 [a1], r0; @p red.global.add.u32 [a1], 1;",
        np.zeros(32, np.uint32),
        parameters=X,
    )
    assert c["global"] == {
        "store_instructions": 1, "store_bytes": 64, "store_sectors": 2,
        "atomic_instructions": 1, "atomic_bytes": 64, "atomic_sectors": 2,
    }  # fmt: skip


def wavefronts(addresses: np.ndarray, active: np.ndarray, width: int) -> tuple[int, int]:
    """Of one access, and without conflicts: words of a bank in the lanes served together."""
    lanes = {1: 32, 2: 32, 4: 32, 8: 16, 16: 8}[width]
    total = least = 0
    for first in range(0, 32, lanes):
        group = addresses[first : first + lanes][active[first : first + lanes]]
        if not len(group):
            continue
        words = np.unique(group[:, None] // 4 + np.arange(-(-width // 4)))
        total += np.bincount(words % 32).max()
        least += 1
    return total, least


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("kind", ["ld", "st"])
def test_bank_conflicts(kind: str, width: int) -> None:
    """Random addresses, regular strides and guards, against sets of words and banks."""
    rng = np.random.default_rng(width)
    cases = [np.arange(32) * s for s in (0, 1, 2, 4, 8, 16, 31, 32, 33)]
    cases += [rng.integers(0, 16384 // width, 32) for _ in range(12)]
    registers = {1: "u8 {}r1", 2: "u16 {}h1", 4: "u32 {}r1", 8: "u64 {}a2", 16: "v4.u32 {}"}
    vector = "{r1, r1, r1, r1}" if kind == "st" else "{r1, r2, r3, r4}"
    value = registers[width].format("") + (vector if width == 16 else "")
    type_, register = value.split(" ", 1)
    access = (
        f"@p ld.shared.{type_} {register}, [r6];"
        if kind == "ld"
        else f"mov.u32 r1, 0; mov.u16 h1, 0; mov.u64 a2, 0; @p st.shared.{type_} [r6], {register};"
    )
    name = {"ld": "load", "st": "store"}[kind]
    for number, case in enumerate(cases):
        addresses = (case * width % 16384).astype(np.uint32)
        active = rng.random(32) < (1 if number % 2 else 0.6)
        active[0] = True
        mask = int(np.packbits(active, bitorder="little").view("<u4")[0])
        c = counts(
            f"{SHARED} {ADDRESS} mad.wide.u32 a1, r0, 4, a0; ld.global.u32 r5, [a1]; mov.u32 r6, s;"
            f"add.u32 r6, r6, r5; mov.u32 r7, {mask}; shr.u32 r7, r7, r0; and.b32 r7, r7, 1;"
            f"setp.ne.u32 p, r7, 0; {access}",
            addresses,
            parameters=X,
        )["shared"]
        total, least = wavefronts(addresses, active, width)
        assert c[f"{name}_wavefronts"] == total, (case, active)
        assert c[f"{name}_conflicts"] == total - least
        assert c[f"{name}_bytes"] == width * active.sum()


@pytest.mark.parametrize(("pitch", "wavefronts_"), [(16, 4), (128, 32), (144, 4), (64, 16)])
def test_bank_conflicts_of_ldmatrix(pitch: int, wavefronts_: int) -> None:
    """Eight rows of 16 bytes are one wavefront if they lie in different banks."""
    c = counts(
        f"{SHARED} mov.u32 r0, %tid.x; mov.u32 r6, s; mad.lo.u32 r6, r0, {pitch}, r6;"
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {r1, r2, r3, r4}, [r6];"
    )["shared"]
    assert c["load_wavefronts"] == wavefronts_
    assert c["load_conflicts"] == wavefronts_ - 4


def test_atomics_on_one_word_follow_each_other() -> None:
    """32 lanes, one word: 32 wavefronts; 32 words of 32 banks: one."""
    for stride, want in ((0, 32), (4, 1)):
        c = counts(
            f"{SHARED} mov.u32 r0, %tid.x; mov.u32 r6, s; mad.lo.u32 r6, r0, {stride}, r6;"
            "red.shared.add.u32 [r6], 1;"
        )["shared"]
        assert c["atomic_wavefronts"] == want


def test_bulk_copies() -> None:
    """Bytes and sectors of a load and a store, what they move in shared memory, once each."""
    c = counts(
        f"{SHARED} .shared .align 8 .b64 bar; {ADDRESS} setp.eq.u32 p, r0, 0; mov.u32 r1, bar;"
        "mov.u32 r2, s; add.u64 a1, a0, 4096;"
        "@p mbarrier.init.shared.b64 [r1], 1; bar.sync 0;"
        "@p mbarrier.arrive.expect_tx.shared.b64 _, [r1], 528;"
        "@p cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [r2], [a0], 528, [r1];"
        "W: mbarrier.try_wait.parity.shared.b64 q, [r1], 0; @!q bra W;"
        "@p cp.async.bulk.global.shared::cta.bulk_group [a1], [r2], 256;"
        "@p cp.async.bulk.commit_group; @p cp.async.bulk.wait_group 0;",
        np.zeros(8192, np.uint8),
        parameters=X,
        checks=sim.Checks(),
    )
    assert c["bulk"] == {
        "operations": 2, "read_bytes": 528, "read_sectors": 17,
        "written_bytes": 256, "written_sectors": 8, "shared_bytes": 784,
    }  # fmt: skip


def test_a_copy_that_all_lanes_ask_for_counts_once() -> None:
    """As NVIDIA's own kernels issue their stores: 32 lanes, one copy; different ones are more."""
    for stride, copies in ((0, 1), (64, 32)):
        c = counts(
            f"{SHARED} {ADDRESS} mov.u32 r2, s; mad.wide.u32 a1, r0, {stride}, a0;"
            "cp.async.bulk.global.shared::cta.bulk_group [a1], [r2], 64;"
            "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
            np.zeros(2048, np.uint8),
            parameters=X,
        )
        assert c["bulk"]["operations"] == copies
        assert c["bulk"]["written_bytes"] == 64 * copies


def test_tensor_memory_traffic() -> None:
    """tcgen05.st and ld of 32 lanes x 16 columns of 4 bytes, each by one warp."""
    registers = "{" + ", ".join(["r6"] * 16) + "}"
    targets = (
        ".reg .b32 t<16>;"
        + "tcgen05.ld.sync.aligned.32x32b.x16.b32 {"
        + ", ".join(f"t{i}" for i in range(16))
        + "}, [r2];"
    )
    c = counts(
        with_tensor_memory(
            f"mov.u32 r6, 0; tcgen05.st.sync.aligned.32x32b.x16.b32 [r2], {registers};"
            f"tcgen05.wait::st.sync.aligned; {targets} tcgen05.wait::ld.sync.aligned;"
        )
    )
    assert c["tensor_memory"] == {"load_bytes": 2048, "store_bytes": 2048, "copy_bytes": 0}


def test_warp_level_mma() -> None:
    """m16n8k16: 4096 FLOP."""
    c = counts(
        "mov.u32 r0, 0; mov.f32 f0, 0f00000000; mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{f0, f1, f2, f3}, {r0, r0, r0, r0}, {r0, r0}, {f0, f0, f0, f0};"
    )
    assert c["mma_flop"] == {"mma.sync 16-bit": 2 * 16 * 8 * 16}
    assert c["mma_instructions"] == {"mma.sync 16-bit": 1}


@pytest.mark.parametrize("group", [1, 2])
def test_gemm(group: int) -> None:
    """One tile, K = 512: FLOPs, operand and scale bytes, D; the counts of every schedule agree."""
    device_kernels.require_tools()
    m, n, k = 128 * group, 128, 512
    problem = random_problem(Variant("nvfp4", group, 128), m, n, k)
    for seed in range(2):
        gemm = Run(problem, sim.Machine("100a", seed, costs=True))
        costs = gemm.launch().costs
        np.testing.assert_array_equal(gemm.result(), expected(problem))
        assert costs is not None
        c = costs.counts
        assert c["mma_flop"] == {"tcgen05.mma mxf4nvf4": 2 * m * n * k}
        assert c["mma_instructions"] == {"tcgen05.mma mxf4nvf4": k // 64}
        # B's scales, which both CTAs of a pair need, are read once.
        assert c["bulk"]["read_bytes"] == (m + n) * k // 2 + (m + n) * k // 16
        assert c["bulk"]["written_bytes"] == m * n * 4
        assert c["tensor_memory"]["load_bytes"] == m * n * 4
        # tcgen05.cp writes a scale to all four quarters of the lanes.
        assert c["tensor_memory"]["copy_bytes"] == 4 * (m + n * group) * k // 16


def test_counting_changes_no_schedule() -> None:
    """The trace, the counts and the results of a seed are those without costs."""
    problem = random_problem(Variant("nvfp4", 2, 256), 300, 200, 300)
    device_kernels.require_tools()
    reports = []
    for costs in (False, True):
        gemm = Run(problem, sim.Machine("100a", 3, costs=costs))
        reports.append(gemm.launch())
        np.testing.assert_array_equal(gemm.result(), expected(problem))
    off, on = reports
    assert off.costs is None and on.costs is not None
    assert off.trace == on.trace
    assert off.by_line == on.by_line
    assert off.bytes_read == on.bytes_read


def test_costs_are_plain_numbers() -> None:
    """They can be written as JSON."""
    machine = sim.Machine("100a", checks=UNCHECKED, costs=True)
    costs = run("add.u32 r0, r1, r1;", machine=machine).costs
    assert costs is not None
    assert json.loads(json.dumps(costs.as_dict()))["instructions"]["integer"] == 1

"""Bulk copies of consecutive bytes: all directions, masks, reductions, other CTAs."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_fp4 import sim
from support.ptx_kernel import FIRST_LINE, run

# r1: an mbarrier; r2: 4 KiB of shared memory; a0, a1: x and y; p: thread 0.
PARAMETERS = ".param .u64 x, .param .u64 y"
SETUP = (
    "{ .shared .align 8 .b64 bar; .shared .align 128 .b8 s[4096]; mov.u32 r0, %tid.x; "
    "setp.eq.u32 p, r0, 0; mov.u32 r1, bar; mov.u32 r2, s; "
    "ld.param.u64 a0, [x]; ld.param.u64 a1, [y]; @p mbarrier.init.shared.b64 [r1], 1; "
    "@p fence.mbarrier_init.release.cluster; mov.u32 r10, %cluster_ctarank;\n"
    "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
)
WAIT = "W: mbarrier.try_wait.parity.shared.b64 q, [r1], 0; @!q bra W;\n"
END = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; }"
BODY = FIRST_LINE + 2  # the line after SETUP


def copy_shared(words: str = "1024", offset: str = "r10, 4096") -> str:
    """Shared memory from r2 on to y; CTAs one after the other."""
    return (
        f"mul.lo.u32 r11, {offset}; cvt.u64.u32 a2, r11; add.u64 a2, a1, a2; mov.u32 r6, r0;\n"
        f"L: setp.ge.u32 q, r6, {words}; @q bra E; mad.lo.u32 r7, r6, 4, r2; "
        "ld.shared.u32 r8, [r7]; mad.wide.u32 a3, r6, 4, a2; st.global.u32 [a3], r8; "
        "add.u32 r6, r6, 32; bra L;\nE:\n"
    )


def fill_shared(words: str = "1024") -> str:
    """x to shared memory from r2 on, and the fence that a bulk copy of it needs."""
    return (
        f"mov.u32 r6, r0;\nF: setp.ge.u32 q, r6, {words}; @q bra G; mad.wide.u32 a3, r6, 4, a0; "
        "ld.global.u32 r8, [a3]; mad.lo.u32 r7, r6, 4, r2; st.shared.u32 [r7], r8; "
        "add.u32 r6, r6, 32; bra F;\nG: fence.proxy.async; bar.sync 0;\n"
    )


def source(seed: int, size: int = 4096) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@given(st.integers(1, 256), st.integers(0, 255), st.integers(0, 255), st.integers(0, 99))
@settings(max_examples=40)
def test_loads_of_any_size(chunks: int, to: int, start: int, seed: int) -> None:
    """16-byte chunks from anywhere to anywhere; what is not copied stays unwritten."""
    chunks = min(chunks, 256 - to, 256 - start)
    x, y = source(seed), np.zeros(4096, np.uint8)
    machine = sim.Machine("100a", seed, sim.Checks(uninitialized=False))
    body = (
        f"@p mbarrier.arrive.expect_tx.shared.b64 _, [r1], {16 * chunks};\n"
        f"@p cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes "
        f"[r2+{16 * to}], [a0+{16 * start}], {16 * chunks}, [r1];\n" + WAIT + copy_shared() + END
    )
    run(SETUP + body, x, y, parameters=PARAMETERS, machine=machine)
    expected = np.full(4096, 0xCC, np.uint8)
    expected[16 * to : 16 * (to + chunks)] = x[16 * start : 16 * (start + chunks)]
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
@pytest.mark.parametrize("space", ["shared::cta", "shared::cluster"])
def test_every_spelling_of_a_load(space: str, hint: str) -> None:
    """Spaces, a size in a register, the cache policy, a size of zero."""
    policy = ", a4" if hint else ""
    name = f"cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes{hint}"
    for seed in range(10):
        x, y = source(seed), np.zeros(4096, np.uint8)
        body = (
            "mov.u32 r3, 4096; mov.u32 r4, 0; mov.u64 a4, 0x1000000000000000; "
            "@p mbarrier.arrive.expect_tx.shared.b64 _, [r1], r3;\n"
            f"@p {name} [r2], [a0], r3, [r1]{policy}; @p {name} [r2], [a0], r4, [r1]{policy};\n"
        )
        run(SETUP + body + WAIT + copy_shared() + END, x, y, parameters=PARAMETERS,
            machine=sim.Machine("100a", seed))  # fmt: skip
        np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
@pytest.mark.parametrize("mask", [0b0001, 0b1100, 0b1111])
def test_multicast(mask: int, hint: str) -> None:
    """Each CTA of the mask gets the bytes and the signal."""
    policy = ", a4" if hint else ""
    for seed in range(5):
        x, y = source(seed), np.zeros((4, 4096), np.uint8)
        machine = sim.Machine("100a", seed, sim.Checks(uninitialized=False))
        body = (
            f"mov.u32 r3, {mask}; shr.b32 r3, r3, r10; and.b32 r3, r3, 1; mov.b16 h0, {mask}; "
            "mov.u64 a4, 0x1000000000000000; setp.ne.and.u32 q, r3, 0, p; "
            "@q mbarrier.arrive.expect_tx.shared.b64 _, [r1], 4096;\n"
            "setp.eq.and.u32 q, r10, 1, p; @q cp.async.bulk.shared::cluster.global."
            f"mbarrier::complete_tx::bytes.multicast::cluster{hint} "
            f"[r2], [a0], 4096, [r1], h0{policy};\n"
            "setp.eq.u32 q, r3, 0; @q bra N;\n" + WAIT + "N:\n" + copy_shared() + END
        )
        run(SETUP + body, x, y, parameters=PARAMETERS, machine=machine, grid=4, cluster=4)
        for cta in range(4):
            np.testing.assert_array_equal(y[cta], x if mask >> cta & 1 else 0xCC)


def test_copies_between_ctas() -> None:
    """From the own shared memory to the next CTA's, whose mbarrier gets the bytes."""
    for seed in range(20):
        x, y = source(seed, 2048), np.zeros((4, 4096), np.uint8)
        body = (
            "@p mbarrier.arrive.expect_tx.shared.b64 _, [r1], 2048;\n" + fill_shared("512") +
            "st.shared.u8 [r2], r10; fence.proxy.async; bar.sync 0;\n"
            "add.u32 r3, r10, 1; and.b32 r3, r3, 3; mapa.shared::cluster.u32 r4, r2, r3; "
            "mapa.shared::cluster.u32 r5, r1, r3; "
            "@p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
            "[r4+2048], [r2], 2048, [r5];\n" + WAIT + copy_shared() + END
        )  # fmt: skip
        run(SETUP + body, x, y, parameters=PARAMETERS, grid=4, cluster=4,
            machine=sim.Machine("100a", seed))  # fmt: skip
        for cta in range(4):
            expected = np.concatenate([x, x])
            expected[0], expected[2048] = cta, (cta - 1) % 4
            np.testing.assert_array_equal(y[cta], expected)


STORE = "@p {} [a1{}], [r2], {}{};\n@p cp.async.bulk.commit_group; @p cp.async.bulk.wait_group 0;\n"


@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
@pytest.mark.parametrize("mask", [None, 0xFFFF, 0x8001, 0x0FF0, 0])
def test_stores(mask: int | None, hint: str) -> None:
    """With .cp_mask bit i decides about byte i of every 16."""
    for seed in range(5):
        x, y = source(seed), source(seed + 100)
        name = f"cp.async.bulk.global.shared::cta.bulk_group{hint}"
        tail = ", a4" if hint else ""
        if mask is not None:
            name, tail = name + ".cp_mask", tail + ", h0"
        body = f"mov.b16 h0, {mask or 0}; mov.u64 a4, 0;\n" + fill_shared()
        expected = y.copy()
        written = np.arange(2048) % 16
        written = np.ones(2048, bool) if mask is None else (mask >> written & 1).astype(bool)
        expected[1024:3072][written] = x[:2048][written]
        run(SETUP + body + STORE.format(name, "+1024", 2048, tail) + "}", x, y,
            parameters=PARAMETERS, machine=sim.Machine("100a", seed))  # fmt: skip
        np.testing.assert_array_equal(y, expected)


INTEGERS = {
    "add": lambda a, b: a + b,
    "min": min,
    "max": max,
    "inc": lambda a, b: 0 if a >= b else a + 1,
    "dec": lambda a, b: b if a == 0 or a > b else a - 1,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}
TYPES = {
    "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "u64": np.uint64, "s64": np.int64,
    "b64": np.uint64, "f32": np.float32, "f64": np.float64, "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}  # fmt: skip
# PTX ISA 9.7.9.25.4.2
TO_GLOBAL = [
    *(("add", t) for t in ("u32", "s32", "u64", "f32", "f64")),
    *(("add.noftz", t) for t in ("f16", "bf16")),
    *((op, t) for op in ("min", "max") for t in ("u32", "s32", "u64", "s64", "f16", "bf16")),
    *((op, "u32") for op in ("inc", "dec")),
    *((op, t) for op in ("and", "or", "xor") for t in ("b32", "b64")),
]
TO_SHARED = [
    *(("add", t) for t in ("u32", "s32", "u64")),
    *((op, t) for op in ("min", "max") for t in ("u32", "s32")),
    *((op, "u32") for op in ("inc", "dec")),
    *((op, "b32") for op in ("and", "or", "xor")),
]


def operands(type_: str, count: int, seed: int) -> np.ndarray:
    dtype, rng = TYPES[type_], np.random.default_rng(seed)
    if type_[0] in "fb" and not np.issubdtype(dtype, np.integer):
        return (rng.integers(-127, 128, count) / 8).astype(dtype)
    info = np.iinfo(dtype)
    values = rng.integers(info.min, info.max, count, dtype, endpoint=True)
    return np.where(rng.random(count) < 0.3, values % 4, values).astype(dtype)


def reduced(op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    function = INTEGERS[op.split(".")[0]]
    if np.issubdtype(a.dtype, np.integer):
        bits = 8 * a.itemsize
        wrapped = [function(int(u), int(v)) & ((1 << bits) - 1) for u, v in zip(a, b, strict=True)]
        return np.array(wrapped, f"<u{a.itemsize}").view(a.dtype)
    return np.array([function(float(u), float(v)) for u, v in zip(a, b, strict=True)]).astype(
        a.dtype
    )


@pytest.mark.parametrize(("op", "type_"), TO_GLOBAL)
def test_reductions_into_global_memory(op: str, type_: str) -> None:
    """Element by element, with every type that an operation has."""
    count = 512 // np.dtype(TYPES[type_]).itemsize
    a, b = operands(type_, count, 1), operands(type_, count, 2)
    expected = reduced(op, a, b)
    name = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}.{type_}"
    machine = sim.Machine("100a", 7)
    run(SETUP + fill_shared("128") + STORE.format(name, "", 512, "") + "}", b, a,
        parameters=PARAMETERS, machine=machine)  # fmt: skip
    np.testing.assert_array_equal(a.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize(("op", "type_"), TO_SHARED)
def test_reductions_into_another_cta(op: str, type_: str) -> None:
    """Three CTAs reduce into the memory of the first; the order does not matter."""
    count = 512 // np.dtype(TYPES[type_]).itemsize
    a, b = operands(type_, count, 3), operands(type_, count, 4)
    once = op in ("inc", "dec")
    name = "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    for seed in range(5):
        y = a.copy()
        body = (
            "setp.eq.u32 q, r10, 0; selp.u64 a0, a1, a0, q;\n" + fill_shared("128")
            + "setp.eq.and.u32 q, r10, 0, p; "
            f"@q mbarrier.arrive.expect_tx.shared.b64 _, [r1], {512 if once else 1536};\n"
            "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; "
            "mapa.shared::cluster.u32 r4, r2, 0; mapa.shared::cluster.u32 r5, r1, 0; "
            f"setp.gt.and.u32 q, r10, {2 if once else 0}, p; "
            f"@q {name}.{op}.{type_} [r4], [r2], 512, [r5];\n"
            "setp.ne.u32 q, r10, 0; @q bra N;\n" + WAIT + copy_shared("128") + "N:\n" + END
        )  # fmt: skip
        run(SETUP + body, b, y, parameters=PARAMETERS, grid=4, cluster=4,
            machine=sim.Machine("100a", seed))  # fmt: skip
        expected = a
        for _ in range(1 if once else 3):
            expected = reduced(op, expected, b)
        np.testing.assert_array_equal(y, expected)


def test_prefetches() -> None:
    """A prefetch changes nothing, and must name a range that exists."""
    x = source(0)
    body = "cp.async.bulk.prefetch.L2.global [a0+16], 4080; mov.u64 a4, 0;\n"
    hint = "cp.async.bulk.prefetch.L2.global.L2::cache_hint [a0], 4096, a4; }"
    run(SETUP + body + hint, x, x, parameters=PARAMETERS)
    np.testing.assert_array_equal(x, source(0))
    for wrong in ("[a0+16], 4096", "[a0], 8"):
        with pytest.raises(sim.SimulationError, match="a multiple of 16 inside one") as caught:
            run(SETUP + f"cp.async.bulk.prefetch.L2.global {wrong}; }}", x, x,
                parameters=PARAMETERS)  # fmt: skip
        assert (caught.value.kind, caught.value.line) == ("argument", BODY)


LOAD = "@p cp.async.bulk.shared::{}.global.mbarrier::complete_tx::bytes"
EXCHANGE = "@p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
OTHER = "mapa.shared::cluster.u32 r4, r2, 1; mapa.shared::cluster.u32 r5, r1, 1; "
# name: (kind, part of the message, instruction)
WRONG = {
    "size": ("argument", "the size is 24", LOAD.format("cta") + " [r2], [a0], 24, [r1];"),
    "destination": ("misaligned", "the destination is at", LOAD.format("cta") +
                    " [r2+8], [a0], 16, [r1];"),
    "source": ("misaligned", "the source is at", LOAD.format("cta") + " [r2], [a0+8], 16, [r1];"),
    "barrier": ("misaligned", "the mbarrier is at", LOAD.format("cta") +
                " [r2], [a0], 16, [r1+4];"),
    "not its own": ("argument", "in memory of another CTA", OTHER + LOAD.format("cta") +
                    " [r4], [a0], 16, [r1];"),
    "another barrier": ("argument", "the mbarrier is in CTA 0 and the destination in CTA 1",
                        OTHER + LOAD.format("cluster") + " [r4], [a0], 16, [r1];"),
    "mask": ("argument", "the CTA mask 4", "mov.b16 h0, 4; " + LOAD.format("cluster") +
             ".multicast::cluster [r2], [a0], 16, [r1], h0;"),
    "to itself": ("argument", "it must be in another CTA's", EXCHANGE +
                  " [r2], [r2+64], 16, [r1];"),
    "exchange barrier": ("argument", "not in the CTA of the destination", OTHER + EXCHANGE +
                         " [r4], [r2], 16, [r1];"),
    "beyond the source": ("out-of-bounds", "outside every buffer", LOAD.format("cta") +
                          " [r2], [a0+4080], 32, [r1];"),
    "beyond shared memory": ("out-of-bounds", "outside the CTA's", LOAD.format("cta") +
                             " [r2+4096], [a0], 32, [r1];"),
    "unwritten": ("uninitialized-memory", "which nothing has written",
                  "@p cp.async.bulk.global.shared::cta.bulk_group [a1], [r2], 16;"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_copies_are_reported(name: str) -> None:
    """Each rule of a bulk copy, broken once by CTA 0."""
    kind, message, instruction = WRONG[name]
    done = "\n@p cp.async.bulk.commit_group; @p cp.async.bulk.wait_group 0;\n" + WAIT + "N:\n"
    body = "setp.ne.u32 q, r10, 0; @q bra N;\n" + instruction + done + END
    with pytest.raises(sim.SimulationError) as caught:
        run(SETUP + body, source(0), source(1), parameters=PARAMETERS, grid=2, cluster=2)
    assert (caught.value.kind, caught.value.line) == (kind, BODY + 1)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "instruction",
    [
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [r2], [a0], 16, [r1], a0;",
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [a0], [r2], 16;",
        "cp.async.bulk.wait_group r0;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [a0], [r2], 16;",
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.f32 "
        "[r2], [r2], 16, [r1];",
    ],
)
def test_wrong_forms_do_not_load(instruction: str) -> None:
    """Operands that do not fit the modifiers, and reductions that do not exist."""
    with pytest.raises(sim.PtxError, match=f"line {FIRST_LINE}"):
        run(instruction)

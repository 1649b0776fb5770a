"""256-bit loads and stores, vector atomics, cache policies."""

import numpy as np
import pytest

from jax_fp4 import sim
from oracles import tables
from support.ptx_kernel import run, text_of

BOTH = ".param .u64 x, .param .u64 y"
ADDRESSES = (
    "ld.param.u64 a0, [x]; ld.param.u64 a1, [y]; mov.u32 r0, %tid.x; "
    "mad.wide.u32 a0, r0, 32, a0; mad.wide.u32 a1, r0, 32, a1;"
)
WIDE = [(8, kind) for kind in ("b32", "u32", "s32", "f32")]
WIDE += [(4, kind) for kind in ("b64", "u64", "s64", "f64")]
SEMANTICS = [
    ("", ""),
    (".weak", ".weak"),
    (".relaxed.gpu", ".relaxed.gpu"),
    (".acquire.gpu", ".release.gpu"),
    (".volatile", ".volatile"),
]


@pytest.mark.parametrize(("load", "store"), SEMANTICS)
@pytest.mark.parametrize(("count", "kind"), WIDE)
def test_256_bits_in_one_access(count: int, kind: str, load: str, store: str) -> None:
    """v8 of 32 bits and v4 of 64 bits, with the .global space and through generic addresses."""
    x = np.random.default_rng(1).integers(0, 1 << 32, 32 * 8, np.uint32)
    for space in (".global", ""):
        y = np.zeros_like(x)
        names = ", ".join(f"v{k}" for k in range(count))
        back = ", ".join(f"v{k}" for k in reversed(range(count)))
        run(
            f"{{ .reg .{kind} v<{count}>; {ADDRESSES} "
            f"ld{load}{space}.v{count}.{kind} {{{names}}}, [a0]; "
            f"st{store}{space}.v{count}.{kind} [a1], {{{back}}}; }}",
            x,
            y,
            parameters=BOTH,
        )
        want = x.view(np.uint64 if count == 4 else np.uint32).reshape(32, count)[:, ::-1]
        np.testing.assert_array_equal(y.view(want.dtype).reshape(32, count), want)


def test_mmio_and_eight_halves() -> None:
    """.mmio accesses of 256 bits; eight registers of 16 bits are an access of 128 bits."""
    x = np.arange(32 * 16, dtype=np.uint16)
    y = np.zeros_like(x)
    halves = ", ".join(f"w{k}" for k in range(8))
    run(
        f"{{ .reg .b16 w<8>; {ADDRESSES} ld.global.v8.b16 {{{halves}}}, [a0]; "
        f"st.global.v8.b16 [a1], {{{halves}}}; "
        "ld.mmio.global.v4.b64 {a2, a3, a4, a5}, [a0]; "
        "st.mmio.global.v4.b64 [a1], {a2, a3, a4, a5}; "
        "ld.mmio.global.v8.b32 {r1, r2, r3, r4, r5, r6, r7, r8}, [a0]; "
        "st.mmio.global.v8.b32 [a1], {r1, r2, r3, r4, r5, r6, r7, r8}; }",
        x,
        y,
        parameters=BOTH,
    )
    np.testing.assert_array_equal(y, x)


def test_256_bits_need_global_memory_and_alignment() -> None:
    """Shared memory has no such access; the address is a multiple of 32."""
    text = text_of(
        "{ .shared .align 32 .b8 s[64]; ld.shared.v8.b32 {r1, r2, r3, r4, r5, r6, r7, r8}, [s]; }"
    )
    with pytest.raises(sim.PtxError, match=r"ld\.shared\.v8\.b32"):
        sim.Machine("100a").load(text)
    with pytest.raises(sim.PtxError, match=r"needs \.version 8\.8"):
        sim.Machine("100a").load(
            text.replace(".version 8.8", ".version 8.7").replace("ld.shared", "ld.global")
        )
    x = np.zeros(64, np.uint32)
    with pytest.raises(sim.SimulationError) as error:
        run(
            "ld.param.u64 a0, [x]; ld.global.v4.b64 {a2, a3, a4, a5}, [a0+16];",
            x,
            parameters=".param .u64 x",
        )
    assert error.value.kind == "misaligned"


# A vector's element type, its register type, and elements of an access.
VECTORS = [
    *((kind, "b16", n) for kind in ("f16", "bf16") for n in (2, 4, 8)),
    *((kind, "b32", n) for kind in ("f16x2", "bf16x2") for n in (2, 4)),
]


def half_values(kind: str, bits: np.ndarray) -> np.ndarray:
    return tables.bf16_to_f32(bits) if kind.startswith("bf16") else tables.f16_to_f32(bits)


def half_bits(kind: str, values: np.ndarray) -> np.ndarray:
    x = values.astype(np.float32)
    return tables.f32_to_bf16(x) if kind.startswith("bf16") else tables.f32_to_f16(x)


@pytest.mark.parametrize("op", ["add", "min", "max"])
@pytest.mark.parametrize(("kind", "register", "count"), VECTORS)
def test_vector_atomics_of_halves(kind: str, register: str, count: int, op: str) -> None:
    """Each element is one operation, lane after lane; atom returns the old elements."""
    rng = np.random.default_rng(count)
    lanes, elements = 32, count * (2 if kind.endswith("x2") else 1)
    # Multiples of 1/4 whose sums every step keeps exactly.
    values = rng.integers(-8, 8, (lanes, elements)) / 4
    bits = half_bits(kind, values).astype(np.uint16)
    start = half_bits(kind, rng.integers(-8, 8, elements) / 4).astype(np.uint16)
    apply = {"add": np.add, "min": np.minimum, "max": np.maximum}[op]
    steps = [half_values(kind, start)]
    for lane in range(lanes):
        steps.append(apply(steps[-1], values[lane].astype(np.float32)))
    new, old = (", ".join(f"{n}{k}" for k in range(count)) for n in "vw")
    size = 2 * elements
    for order in ("", ".relaxed.gpu", ".acquire.gpu", ".release.gpu", ".acq_rel.gpu"):
        for space in (".global", ""):
            cell, again = start.copy(), start.copy()
            returned = np.zeros((lanes, elements), np.uint16)
            red = (
                ""
                if "acq" in order
                else f"red{order}{space}.v{count}.{kind}.{op}.noftz [a2], {{{new}}};"
            )
            run(
                f"{{ .reg .{register} v<{count}>, w<{count}>; ld.param.u64 a0, [x]; "
                "ld.param.u64 a1, [y]; ld.param.u64 a2, [z]; ld.param.u64 a3, [t]; "
                f"mov.u32 r0, %tid.x; mad.wide.u32 a0, r0, {size}, a0; "
                f"mad.wide.u32 a3, r0, {size}, a3; "
                f"ld.global.v{count}.{register} {{{new}}}, [a0]; "
                f"atom{order}{space}.{op}.noftz.v{count}.{kind} {{{old}}}, [a1], {{{new}}}; "
                f"st.global.v{count}.{register} [a3], {{{old}}}; {red} }}",
                bits,
                cell,
                again,
                returned,
                parameters=".param .u64 x, .param .u64 y, .param .u64 z, .param .u64 t",
            )
            np.testing.assert_array_equal(half_values(kind, cell), steps[-1])
            np.testing.assert_array_equal(half_values(kind, returned), np.stack(steps[:-1]))
            if red:
                np.testing.assert_array_equal(half_values(kind, again), steps[-1])


@pytest.mark.parametrize("count", [2, 4])
def test_vector_atomics_of_f32(count: int) -> None:
    """Sums of f32 vectors with every ordering."""
    values = np.random.default_rng(1).integers(-50, 50, (32, count)).astype(np.float32)
    names, old = (", ".join(f"{n}{k}" for k in range(count)) for n in "vw")
    for order in ("", ".relaxed.gpu", ".acquire.gpu", ".release.gpu", ".acq_rel.gpu"):
        for space in (".global", ""):
            cell, again = np.zeros(4, np.float32), np.zeros(4, np.float32)
            red = "" if "acq" in order else f"red{order}{space}.add.v{count}.f32 [a2], {{{names}}};"
            run(
                f"{{ .reg .f32 v<{count}>, w<{count}>; ld.param.u64 a0, [x]; ld.param.u64 a1, [y]; "
                f"ld.param.u64 a2, [z]; mov.u32 r0, %tid.x; mad.wide.u32 a0, r0, {4 * count}, a0; "
                f"ld.global.v{count}.f32 {{{names}}}, [a0]; "
                f"atom{order}{space}.add.v{count}.f32 {{{old}}}, [a1], {{{names}}}; {red} }}",
                values,
                cell,
                again,
                parameters=".param .u64 x, .param .u64 y, .param .u64 z",
            )
            np.testing.assert_array_equal(cell[:count], values.sum(0))
            if red:
                np.testing.assert_array_equal(again[:count], values.sum(0))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_extremes_prefer_numbers_and_order_zeros(kind: str) -> None:
    """min and max of a NaN and a number give the number; -0 is below +0; two NaNs give 0x7FFF."""
    nan, one, negative_zero = 0x7FFF, int(half_bits(kind, np.ones(1))[0]), 0x8000
    start = np.array([nan, one, 0, negative_zero, 0xFFFF, nan, negative_zero, 0], np.uint16)
    given = np.array([one, nan, negative_zero, 0, nan, one, 0, negative_zero], np.uint16)
    for op, zero in (("min", negative_zero), ("max", 0)):
        cell = start.copy()
        names = ", ".join(f"v{k}" for k in range(8))
        run(
            "{ .reg .b16 v<8>; ld.param.u64 a0, [x]; ld.param.u64 a1, [y]; "
            f"ld.global.v8.b16 {{{names}}}, [a0]; "
            f"red.global.{op}.noftz.v8.{kind} [a1], {{{names}}}; }}",
            given,
            cell,
            parameters=BOTH,
            block=1,
        )
        want = [one, one, zero, zero, 0x7FFF, one, zero, zero]
        np.testing.assert_array_equal(cell, np.array(want, np.uint16))


PRIORITIES = ("evict_last", "evict_normal", "evict_first", "evict_unchanged")


def test_cache_policies_change_nothing() -> None:
    """createpolicy makes a policy that loads, stores and atomics take."""
    lines = ["createpolicy.cvt.L2.b64 a3, 0x1400000000000000;"]
    for first in PRIORITIES:
        for second in ("", ".L2::evict_first", ".L2::evict_unchanged"):
            lines += [
                f"createpolicy.fractional.L2::{first}{second}.b64 a3, 0.5;",
                f"createpolicy.range.L2::{first}{second}.b64 a3, [a0], 64, 128;",
                f"createpolicy.range.global.L2::{first}{second}.b64 a3, [a0], 64, 128;",
            ]
    x = np.array([5, 7], np.uint32)
    run(
        "ld.param.u64 a0, [x]; "
        + "\n".join(lines)
        + "createpolicy.fractional.L2::evict_last.b64 a3; "
        "ld.global.L2::cache_hint.u32 r1, [a0], a3; add.u32 r1, r1, 1; "
        "st.global.L2::cache_hint.u32 [a0], r1, a3; "
        "atom.global.add.L2::cache_hint.u32 r2, [a0], r1, a3; "
        "atom.global.cas.L2::cache_hint.b32 r2, [a0], 12, 13, a3; "
        "red.global.max.L2::cache_hint.u32 [a0+4], r1, a3;",
        x,
        parameters=".param .u64 x",
        block=1,
    )
    np.testing.assert_array_equal(x, [13, 7])

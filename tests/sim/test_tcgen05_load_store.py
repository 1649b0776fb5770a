"""tcgen05.ld and st: which thread holds which word, and what orders them."""

import numpy as np
import pytest

from jax_fp4 import sim
from support.ptx_kernel import FIRST_LINE, run
from support.tensor_memory import REPETITIONS, SHAPES, holder, with_tensor_memory

LANES, COLUMNS = 128, 512
PARAMETERS = ".param .u64 z, .param .u64 x, .param .u64 y, .param .u64 t"


def probe(shape: str, number: int, start: int, split: int | None, *, pack: bool) -> str:
    """Fills tensor memory with z, loads y from it, stores x into it, and dumps it to t.

    Even warps give their quarter in the address, odd ones leave it 0; of 16 lanes the upper two
    warps take the second half.
    """
    count = SHAPES[shape][0] * number
    registers = ", ".join(f"v{k}" for k in range(count))
    half = "" if split is None else f", {split}"
    packs, unpacks = (".pack::16b", ".unpack::16b") if pack else ("", "")
    all_registers = ", ".join(f"v{k}" for k in range(128))

    def each(operation: str, many: int) -> str:
        return "".join(operation.format(k=k, at=512 * k) + "\n" for k in range(many))

    upper = "shr.u32 r8, r1, 1; shl.b32 r8, r8, 20; add.u32 r6, r6, r8;"
    return with_tensor_memory(
        ".reg .b32 v<128>; shl.b32 r7, r1, 21; add.u32 r7, r7, r2; and.b32 r6, r1, 1; "
        f"setp.eq.u32 p, r6, 0; selp.u32 r6, r7, r2, p; add.u32 r6, r6, {start};"
        f"{upper if SHAPES[shape][1] == 16 else ''}"
        "ld.param.u64 a0, [z]; ld.param.u64 a1, [x]; ld.param.u64 a2, [y]; ld.param.u64 a3, [t]; "
        "mad.wide.u32 a0, r0, 4, a0; mad.wide.u32 a1, r0, 4, a1; mad.wide.u32 a2, r0, 4, a2; "
        "mad.wide.u32 a3, r0, 4, a3; mov.u32 r9, 0; mov.u32 r10, r7;\n"
        f"FILL: {each('ld.global.u32 v{k}, [a0+{at}];', 128)}"
        f"tcgen05.st.sync.aligned.32x32b.x128.b32 [r10], {{{all_registers}}}; "
        "add.u32 r10, r10, 128; add.u64 a0, a0, 65536; add.u32 r9, r9, 1; setp.lt.u32 p, r9, 4; "
        "@p bra FILL;\ntcgen05.wait::st.sync.aligned;\n"
        f"tcgen05.ld.sync.aligned.{shape}.x{number}{packs}.b32 {{{registers}}}, [r6]{half};\n"
        f"tcgen05.wait::ld.sync.aligned;\n{each('st.global.u32 [a2+{at}], v{k};', count)}"
        f"{each('ld.global.u32 v{k}, [a1+{at}];', count)}"
        f"tcgen05.st.sync.aligned.{shape}.x{number}{unpacks}.b32 [r6]{half}, {{{registers}}};\n"
        "tcgen05.wait::st.sync.aligned; mov.u32 r9, 0;\n"
        f"DUMP: tcgen05.ld.sync.aligned.32x32b.x128.b32 {{{all_registers}}}, [r7]; "
        f"tcgen05.wait::ld.sync.aligned;\n{each('st.global.u32 [a3+{at}], v{k};', 128)}"
        "add.u32 r7, r7, 128; add.u64 a3, a3, 65536; add.u32 r9, r9, 1; setp.lt.u32 p, r9, 4; "
        "@p bra DUMP;",
        columns=512,
    )


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(("shape", "number"), REPETITIONS)
def test_registers_and_lanes(shape: str, number: int, pack: bool) -> None:
    """Every shape and repetition moves each word between its lane and column and its register."""
    _, lanes, per_repetition, _ = SHAPES[shape]
    span = number * per_repetition * (2 if pack else 1)
    start = min(3, COLUMNS - span)
    # The two halves of 16x32bx2, the second one above or below the first.
    split = None
    if shape == "16x32bx2":
        split = span if number % 4 else -span
        start = 0 if split > 0 else span
    rng = np.random.default_rng(number)
    z, x = (rng.integers(0, 1 << 32, (n, LANES), dtype=np.uint32) for n in (COLUMNS, 128))
    y, t = np.zeros((128, LANES), np.uint32), np.zeros((COLUMNS, LANES), np.uint32)
    run(probe(shape, number, start, split, pack=pack), z, x, y, t, block=128, parameters=PARAMETERS)

    want_y, want_t = np.zeros_like(y), z.copy()
    for warp in range(4):
        base = 32 * warp + (16 if lanes == 16 and warp >= 2 else 0)
        for half in range(1 if split is None else 2):
            first = start + half * (split or 0)
            for lane in range(lanes):
                for column in range(number * per_repetition):
                    thread, register = holder(shape, lane, column)
                    thread += 32 * warp + 16 * half
                    at = base + lane
                    if pack:
                        low, high = first + 2 * column, first + 2 * column + 1
                        want_y[register, thread] = (z[low, at] & 0xFFFF) | (z[high, at] << 16)
                        want_t[low, at] = x[register, thread] & 0xFFFF
                        want_t[high, at] = x[register, thread] >> 16
                    else:
                        want_y[register, thread] = z[first + column, at]
                        want_t[first + column, at] = x[register, thread]
    np.testing.assert_array_equal(y, want_y)
    np.testing.assert_array_equal(t, want_t)


LD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {r9}, [r2];"
ST = "tcgen05.st.sync.aligned.32x32b.x1.b32 [r2], {r0};"
WAIT_LD, WAIT_ST = (f"tcgen05.wait::{kind}.sync.aligned;" for kind in ("ld", "st"))
FENCES = "tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;"
LATER = "setp.ge.u32 p, r1, 4; "  # warp 4 reaches the same lanes as warp 0


def two_warps(first: str, later: str) -> str:
    """Warp 0 does the one thing, then warp 4 the other, after a barrier."""
    return with_tensor_memory(
        f"setp.eq.u32 p, r1, 0; setp.eq.u32 q, r1, 4;\n@p bra A; bra B;\nA: {first}\nB: {FENCES} "
        f"@q bra C; bra D;\nC: {later}\nD: bar.sync 0;"
    )


# Bodies with `{wait}`, what belongs there, and the line that races without it.
ORDERS = {
    "store, load": (with_tensor_memory(f"{ST} {{wait}}\n{LD} {WAIT_LD}"), WAIT_ST, 2),
    "store, store": (with_tensor_memory(f"{ST} {{wait}}\n{ST} {WAIT_ST}"), WAIT_ST, 2),
    "load, store": (
        with_tensor_memory(f"{ST} {WAIT_ST} {LD} {{wait}}\n{ST} {WAIT_ST}"),
        WAIT_LD,
        2,
    ),
    "load, release": (
        with_tensor_memory(f"{ST} {WAIT_ST} {LD} {{wait}}", release="\nbar.sync 0;"),
        WAIT_LD,
        3,
    ),
    "store, release": (with_tensor_memory(f"{ST} {{wait}}", release="\nbar.sync 0;"), WAIT_ST, 3),
    "load, store of another warp": (
        two_warps(f"{ST} {WAIT_ST} {LD} {{wait}}", f"{ST} {WAIT_ST}"),
        WAIT_LD,
        5,
    ),
    "store, load of another warp": (
        two_warps(f"{ST} {{wait}}", f"{LD} {WAIT_LD}"),
        WAIT_ST,
        5,
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_missing_wait_is_a_race(name: str) -> None:
    """Without tcgen05.wait nothing orders a load or store before what follows, at every seed."""
    body, wait, line = ORDERS[name]
    block = 160 if "another" in name else 32
    for seed in range(20):
        machine = sim.Machine("100a", seed)
        run(body.replace("{wait}", wait), block=block, machine=machine)
        with pytest.raises(sim.SimulationError) as caught:
            run(body.replace("{wait}", ""), block=block, machine=machine)
        assert (caught.value.kind, caught.value.line) == ("race", FIRST_LINE + line), name


LD2 = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {r9, r10}, [r2];"
ST2 = "tcgen05.st.sync.aligned.32x32b.x2.b32 [r2], {r0, r0};"
POINTER = "ld.param.u64 a0, [y]; mad.wide.u32 a0, r0, 4, a0; setp.lt.u32 p, r0, 16;"
BOTH = "st.global.u32 [a0], r9; st.global.u32 [a0+128], r10;"

# Loads whose values are stored, and whether the columns may be released behind a barrier then.
STORED = {
    "all": (f"{LD2} {BOTH}", True),
    "all, computed": (
        f"{LD2} add.u32 r9, r9, r10; shl.b32 r9, r9, 1; st.global.u32 [a0], r9;",
        True,
    ),
    "one of two": (f"{LD2} st.global.u32 [a0], r10;", False),
    "none": (f"{LD2} add.u32 r9, r9, r10;", False),
    "by half of the warp": (
        f"{LD2} @p st.global.u32 [a0], r9; st.global.u32 [a0+128], r10;",
        False,
    ),
    "computed by half of the warp": (
        f"{LD2} mov.u32 r11, 0; @p add.u32 r11, r9, r10; st.global.u32 [a0], r11;",
        False,
    ),
    "to local memory": (
        f".local .b32 w[2]; {LD2} st.local.u32 [w], r9; st.local.u32 [w+4], r10;",
        False,
    ),
    "overwritten before": (f"{LD2} mov.u32 r9, 0; {BOTH}", False),
    "loaded again before": (f"{LD2} {LD} {BOTH}", False),
    "in another block": (f"{LD2} bra N; N: {BOTH}", False),
    "thrown away": (f"{LD2.replace('r10', '_')} st.global.u32 [a0], r9;", False),
    "two loads, in order": (
        f"{LD} {LD.replace('r9', 'r10')} st.global.u32 [a0], r9; st.global.u32 [a0], r10;",
        True,
    ),
    "two loads, the later first": (
        f"{LD} {LD.replace('r9', 'r10')} st.global.u32 [a0], r10; st.global.u32 [a0], r9;",
        True,
    ),
    "the later of two loads": (f"{LD} {LD.replace('r9', 'r10')} st.global.u32 [a0], r10;", False),
    "the later of two loads, the other in another block": (
        f"{LD} bra N; N: {LD.replace('r9', 'r10')} st.global.u32 [a0], r10;",
        False,
    ),
    "perhaps not loaded again": (
        f"{LD} setp.gt.u32 q, r0, 99; mov.u32 r10, 0; @q {LD.replace('r9', 'r10')} "
        "st.global.u32 [a0], r10;",
        False,
    ),
    "after a load that was waited for": (
        f"{LD} {WAIT_LD} {LD.replace('r9', 'r10')} st.global.u32 [a0], r10;",
        True,
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_what_has_been_stored_has_been_loaded(name: str) -> None:
    """H11: stores of all values stand in for tcgen05.wait::ld, except in strict mode."""
    body, ordered = STORED[name]
    text = with_tensor_memory(f"{POINTER} {ST2} {WAIT_ST} {body}", release="bar.sync 0;")
    for seed in range(5):
        for strict in (False, True):
            machine = sim.Machine("100a", seed, sim.Checks(strict=strict))
            out = np.zeros(64, np.uint32)
            arguments = {"parameters": ".param .u64 y", "machine": machine}
            if ordered and not strict:
                run(text, out, **arguments)
                continue
            with pytest.raises(sim.SimulationError) as caught:
                run(text, out, **arguments)
            assert (caught.value.kind, caught.value.line) == ("race", FIRST_LINE + 2), name


def test_loaded_registers_may_be_used_before_the_wait() -> None:
    """A register's own dependence orders its use after the load (PTX ISA 9.7.16.6.4.5)."""
    out = np.zeros(32, np.uint32)
    run(
        with_tensor_memory(
            "ld.param.u64 a0, [y]; mad.wide.u32 a0, r0, 4, a0;"
            f"{ST} {WAIT_ST} {LD} st.global.u32 [a0], r9; {WAIT_LD}"
        ),
        out,
        parameters=".param .u64 y",
    )
    np.testing.assert_array_equal(out, np.arange(32))


# (kind, part of the message, PTX of the line with the fault); warp 0 of a CTA with 32 columns.
PLANTED = {
    "lanes of another warp": (
        "argument",
        "warp 0 reaches lanes 0-31",
        "add.u32 r2, r2, 0x400000;",
        ST,
    ),
    "lane inside the warp's": ("argument", "multiples of 32", "add.u32 r2, r2, 0x100000;", ST),
    "lane inside the half": (
        "argument",
        "multiples of 16",
        "add.u32 r2, r2, 0x80000;",
        "tcgen05.ld.sync.aligned.16x64b.x1.b32 {r9}, [r2];",
    ),
    "lane 128": ("argument", "below 128", "add.u32 r2, r2, 0x800000;", ST),
    "different addresses": ("argument", "the address is the same", "add.u32 r2, r2, r0;", ST),
    "half of the warp": (
        "divergence",
        "would have to take part",
        "setp.lt.u32 p, r0, 16;",
        "@p " + ST,
    ),
    "column not allocated": (
        "out-of-bounds",
        "column 32 is not allocated",
        "add.u32 r2, r2, 31;",
        "tcgen05.st.sync.aligned.32x32b.x2.b32 [r2], {r0, r0};",
    ),
    "column 512": ("out-of-bounds", "outside the 128 lanes", "add.u32 r2, r2, 512;", ST),
    "not written": ("uninitialized-memory", "nothing has written lane 0, column 0", "", LD),
    "written in part": (
        "uninitialized-memory",
        "nothing has written lane 0, column 1",
        ST + WAIT_ST,
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {r9, r10}, [r2];",
    ),
    "halves that meet": (
        "race",
        "races with an earlier write",
        "",
        "tcgen05.st.sync.aligned.16x32bx2.x2.b32 [r2], 1, {r0, r0};",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_misuse_is_reported(name: str) -> None:
    """Each rule of an access, broken once: kind and line."""
    kind, message, before, line = PLANTED[name]
    with pytest.raises(sim.SimulationError) as caught:
        run(with_tensor_memory(f"{before}\n{line}"))
    assert (caught.value.kind, caught.value.line) == (kind, FIRST_LINE + 2)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {r9}, [r2];",
        "tcgen05.ld.sync.aligned.16x256b.x1.b32 {r9, r10}, [r2];",
        "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {r9}, [r2], r3;",
        "tcgen05.st.sync.aligned.16x128b.x128.b32 [r2], {r9};",
        "tcgen05.ld.red.sync.aligned.32x32b.x2.min.u32 {r9, r10}, r11, [r2];",
        "tcgen05.shift.cta_group::1.down [r2];",
    ],
)
def test_forms_that_do_not_exist(text: str) -> None:
    """Wrong register counts, a distance in a register, and what is not modelled do not load."""
    with pytest.raises(sim.PtxError):
        run(with_tensor_memory(text))


def test_a_warp_needs_all_its_lanes() -> None:
    """A warp of 16 threads cannot load or store."""
    with pytest.raises(sim.SimulationError) as caught:
        run(with_tensor_memory(f"\n{ST}"), block=16)
    assert (caught.value.kind, caught.value.line) == ("divergence", FIRST_LINE + 2)
    assert "take all 32 lanes" in str(caught.value)

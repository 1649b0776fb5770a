"""ldmatrix and stmatrix: which lane holds which element of the tiles."""

import numpy as np
import pytest

from jax_fp4 import sim
from support.ptx_kernel import FIRST_LINE, run


@pytest.mark.parametrize("space", ["", ".shared", ".shared::cta"])
@pytest.mark.parametrize("transpose", ["", ".trans"])
@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_tiles_to_lanes_and_back(tiles: int, transpose: str, space: str) -> None:
    """Lane t holds elements 2(t%4), 2(t%4)+1 of row t/4 (column with .trans) of each tile."""
    x = np.random.default_rng(0).integers(0, 1 << 16, (tiles, 8, 8)).astype(np.uint16)
    fragments, back = np.zeros((tiles, 32), np.uint32), np.zeros_like(x)
    registers = ", ".join(f"r{8 + k}" for k in range(tiles))
    stores = "".join(f"st.global.u32 [a1+{128 * k}], r{8 + k};" for k in range(tiles))
    at = "a3" if not space else "r3"
    run(
        "{ .shared .align 16 .b8 s[1024]; ld.param.u64 a0, [x]; ld.param.u64 a1, [y]; "
        "ld.param.u64 a2, [z]; mov.u32 r0, %tid.x; shl.b32 r1, r0, 4; mov.u32 r2, s; "
        "add.u32 r3, r2, r1;"
        "cvt.u64.u32 a3, r3; cvta.shared.u64 a3, a3; cvt.u64.u32 a4, r1; add.u64 a0, a0, a4; "
        f"add.u64 a2, a2, a4; setp.lt.u32 p, r0, {8 * tiles};"
        "@p ld.global.v4.u32 {r4, r5, r6, r7}, [a0]; @p st.shared.v4.u32 [r3], {r4, r5, r6, r7}; "
        "bar.warp.sync -1;"
        f"ldmatrix.sync.aligned.m8n8.x{tiles}{transpose}{space}.b16 {{{registers}}}, [{at}]; "
        f"mad.wide.u32 a1, r0, 4, a1; {stores}"
        "add.u32 r3, r3, 512; add.u64 a3, a3, 512; "
        f"stmatrix.sync.aligned.m8n8.x{tiles}{transpose}{space}.b16 [{at}], {{{registers}}}; "
        "bar.warp.sync -1;"
        "@p ld.shared.v4.u32 {r4, r5, r6, r7}, [r3]; @p st.global.v4.u32 [a2], {r4, r5, r6, r7}; }",
        x,
        fragments,
        back,
        parameters=".param .u64 x, .param .u64 y, .param .u64 z",
    )
    source = x.transpose(0, 2, 1) if transpose else x
    np.testing.assert_array_equal(
        fragments, np.ascontiguousarray(source).view(np.uint32).reshape(tiles, 32)
    )
    np.testing.assert_array_equal(back, x)


def test_movmatrix_transposes_a_tile() -> None:
    """Lane 4g + t gets elements 2t and 2t + 1 of column g."""
    x = np.random.default_rng(3).integers(0, 1 << 16, (8, 8)).astype(np.uint16)
    out = np.zeros((8, 8), np.uint16)
    run(
        "ld.param.u64 a0, [x]; ld.param.u64 a1, [y]; mov.u32 r0, %tid.x; "
        "mad.wide.u32 a0, r0, 4, a0; mad.wide.u32 a1, r0, 4, a1; ld.global.u32 r1, [a0]; "
        "movmatrix.sync.aligned.m8n8.trans.b16 r2, r1; st.global.u32 [a1], r2;",
        x,
        out,
        parameters=".param .u64 x, .param .u64 y",
    )
    np.testing.assert_array_equal(out, x.T)


def load_bytes(form: str, rows: np.ndarray, registers: int, space: str) -> np.ndarray:
    """uint32 [registers, 32] that ldmatrix gives for rows of 16 bytes; lane r names row r."""
    out = np.zeros((registers, 32), np.uint32)
    names = ", ".join(f"r{4 + k}" for k in range(registers))
    stores = "".join(f"st.global.u32 [a1+{128 * k}], r{4 + k};" for k in range(registers))
    run(
        "{ .shared .align 16 .b8 s[512]; ld.param.u64 a0, [x]; ld.param.u64 a1, [y]; "
        "mov.u32 r0, %tid.x; shl.b32 r1, r0, 4; mov.u32 r3, s; add.u32 r3, r3, r1; "
        "cvt.u64.u32 a3, r3; cvta.shared.u64 a3, a3; cvt.u64.u32 a4, r1; add.u64 a0, a0, a4; "
        f"setp.lt.u32 p, r0, {len(rows)}; "
        "@p ld.global.v4.u32 {r4, r5, r6, r7}, [a0]; @p st.shared.v4.u32 [r3], {r4, r5, r6, r7}; "
        f"bar.warp.sync -1; ldmatrix.sync.aligned.{form} {{{names}}}, [{'r3' if space else 'a3'}]; "
        f"mad.wide.u32 a1, r0, 4, a1; {stores} }}",
        rows,
        out,
        parameters=".param .u64 x, .param .u64 y",
    )
    return out


def packed_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows of 16 codes as 16 bytes: little-endian bits from the start, then noise as padding."""
    rows = np.random.default_rng(2).integers(0, 256, (len(codes), 16)).astype(np.uint8)
    stream = (codes[..., None] >> np.arange(bits)) & 1
    packed = np.packbits(stream.reshape(len(codes), -1).astype(np.uint8), 1, bitorder="little")
    rows[:, : packed.shape[1]] = packed
    return rows


SOURCES = [(8, "b8"), (6, "b8x16.b6x16_p32"), (4, "b8x16.b4x16_p64")]


@pytest.mark.parametrize("space", ["", ".shared", ".shared::cta"])
@pytest.mark.parametrize(("bits", "kind"), SOURCES[1:])
@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_m8n16_expands_codes(matrices: int, bits: int, kind: str, space: str) -> None:
    """Lane 4g + t has columns 4t to 4t + 3 of row g, one code a byte, in register m of matrix m."""
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (8 * matrices, 16))
    got = load_bytes(f"m8n16.x{matrices}{space}.{kind}", packed_rows(codes, bits), matrices, space)
    want = codes.astype(np.uint8).view(np.uint32).reshape(matrices, 32)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("space", ["", ".shared", ".shared::cta"])
@pytest.mark.parametrize(("bits", "kind"), SOURCES)
@pytest.mark.parametrize("matrices", [1, 2])
def test_m16n16_transposes(matrices: int, bits: int, kind: str, space: str) -> None:
    """Lane 4g + t has rows 4t to 4t + 3 of column g + 8j, in register 2m + j of matrix m."""
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (matrices, 16, 16))
    rows = packed_rows(codes.reshape(-1, 16), bits)
    got = load_bytes(f"m16n16.x{matrices}.trans{space}.{kind}", rows, 2 * matrices, space)
    transposed = np.ascontiguousarray(codes.transpose(0, 2, 1)).astype(np.uint8)
    np.testing.assert_array_equal(got, transposed.view(np.uint32).reshape(2 * matrices, 32))


@pytest.mark.parametrize("space", ["", ".shared", ".shared::cta"])
@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_stmatrix_m16n8_stores_accumulators(matrices: int, space: str) -> None:
    """Byte i of lane 4g + t goes to row 2t + i % 2, column g + 8 (i // 2): C transposed."""
    x = np.random.default_rng(4).integers(0, 1 << 32, (matrices, 32), np.uint32)
    out = np.zeros((matrices, 8, 16), np.uint8)
    names = ", ".join(f"r{8 + k}" for k in range(matrices))
    loads = "".join(f"ld.global.u32 r{8 + k}, [a0+{128 * k}];" for k in range(matrices))
    run(
        "{ .shared .align 16 .b8 s[512]; ld.param.u64 a0, [x]; ld.param.u64 a1, [y]; "
        "mov.u32 r0, %tid.x; shl.b32 r1, r0, 4; mov.u32 r3, s; add.u32 r3, r3, r1; "
        "cvt.u64.u32 a3, r3; cvta.shared.u64 a3, a3; cvt.u64.u32 a4, r1; add.u64 a1, a1, a4; "
        f"mad.wide.u32 a0, r0, 4, a0; {loads} setp.lt.u32 p, r0, {8 * matrices}; "
        f"stmatrix.sync.aligned.m16n8.x{matrices}.trans{space}.b8 "
        f"[{'r3' if space else 'a3'}], {{{names}}}; bar.warp.sync -1; "
        "@p ld.shared.v4.u32 {r4, r5, r6, r7}, [r3]; @p st.global.v4.u32 [a1], {r4, r5, r6, r7}; }",
        x,
        out,
        parameters=".param .u64 x, .param .u64 y",
    )
    want = np.zeros_like(out)
    for m, lane, i in np.ndindex(matrices, 32, 4):
        g, t = divmod(lane, 4)
        want[m, 2 * t + i % 2, g + 8 * (i // 2)] = x[m, lane] >> np.uint32(8 * i) & np.uint32(0xFF)
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize(("bits", "kind"), SOURCES[1:])
def test_padding_is_not_read(bits: int, kind: str) -> None:
    """Only the bytes that hold codes must have been written; one fewer is reported."""
    for written, clean in ((2 * bits, True), (2 * bits - 4, False)):
        body = (
            "{ .shared .align 16 .b8 s[128]; mov.u32 r0, %tid.x; and.b32 r0, r0, 7; "
            "shl.b32 r1, r0, 4; mov.u32 r3, s; add.u32 r3, r3, r1; mov.u32 r2, 0;"
            + "".join(f"st.shared.u32 [r3+{at}], r2;" for at in range(0, written, 4))
            + f"bar.warp.sync -1;\nldmatrix.sync.aligned.m8n16.x1.shared.{kind} {{r4}}, [r3]; }}"
        )
        if clean:
            run(body)
            continue
        with pytest.raises(sim.SimulationError) as error:
            run(body)
        assert (error.value.kind, error.value.line) == ("uninitialized-memory", FIRST_LINE + 1)


def test_rows_are_aligned_to_16_bytes() -> None:
    """A row of packed codes that starts in the middle of 16 bytes is reported."""
    with pytest.raises(sim.SimulationError, match="aligned to 16 bytes") as error:
        run(
            "{ .shared .align 16 .b8 s[256]; mov.u32 r3, s; add.u32 r3, r3, 8;\n"
            "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {r4}, [r3]; }"
        )
    assert (error.value.kind, error.value.line) == ("misaligned", FIRST_LINE + 1)

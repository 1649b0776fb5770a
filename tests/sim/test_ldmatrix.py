"""ldmatrix and stmatrix: which lane holds which element of the 8x8 tiles."""

import numpy as np
import pytest

from support.ptx_kernel import run


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

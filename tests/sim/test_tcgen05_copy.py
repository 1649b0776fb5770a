"""tcgen05.cp and commit: which byte goes where, and what must wait for them."""

import numpy as np
import pytest

from jax_fp4 import sim
from support.ptx_kernel import FIRST_LINE, run
from support.tensor_memory import with_tensor_memory

BYTES, LANES, COLUMNS = 16384, 128, 16
PARAMETERS = ".param .u64 x, .param .u64 y"
FILL = 0x5A5A_0000  # what tensor memory holds before: this plus the lane
# Shape: rows, bytes of a row.
SHAPES = {
    "128x256b": (128, 32),
    "128x128b": (128, 16),
    "4x256b": (4, 32),
    "64x128b.warpx2::02_13": (64, 16),
    "64x128b.warpx2::01_23": (64, 16),
    "32x128b.warpx4": (32, 16),
}
# Swizzle field: width of a row in bytes, bits of the row that are XORed into the chunk number.
SWIZZLES = {0: (16, 0), 2: (128, 7), 4: (64, 3), 6: (32, 1)}
FENCE = "fence.proxy.async.shared::cta;"


def lanes_of(shape: str, row: int) -> list[int]:
    """Lanes that a row goes to, by the captions of the PTX ISA's figures."""
    if shape == "4x256b":
        return [32 * row]
    if shape == "32x128b.warpx4":
        return [row, 32 + row, 64 + row, 96 + row]
    if shape == "64x128b.warpx2::02_13":
        return [row, 64 + row]
    if shape == "64x128b.warpx2::01_23":
        return [row, 32 + row] if row < 32 else [32 + row, 64 + row]
    return [row]


def descriptor(start: str, swizzle: int, leading: int, stride: int) -> str:
    """PTX that makes a1 a matrix descriptor from a shared address."""
    constant = leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | swizzle << 61
    return f"shr.u32 r6, {start}, 4; cvt.u64.u32 a1, r6; or.b64 a1, a1, {constant:#x};"


def signal(group: int) -> str:
    if group == 1:
        return "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [r4];"
    return (
        "mov.u16 h0, 3; tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
        ".multicast::cluster.b64 [r4], h0;"
    )


WAIT = "W: mbarrier.try_wait.parity.shared::cta.b64 q, [r4], 0; @!q bra W;"


def kernel(
    issue: str,
    group: int = 1,
    *,
    fence: str = FENCE,
    wait: str = WAIT,
    after: str = "",
    load: bool = True,
) -> str:
    """Fills shared memory with x and tensor memory, lets one thread issue, waits, dumps to y.

    Lines after the first one: 1 and 2 set up, 3 issues, 4 waits, 5 comes after that, 6 loads,
    8 releases.
    """
    cluster = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    registers = ", ".join(f"v{k}" for k in range(COLUMNS))
    copies = "".join(
        f"ld.global.v4.u32 {{v0, v1, v2, v3}}, [a0+{2048 * k}]; "
        f"st.shared.v4.u32 [r8+{2048 * k}], {{v0, v1, v2, v3}};"
        for k in range(8)
    )
    fill = f"add.u32 v0, r0, {FILL};" + "".join(f"mov.u32 v{k}, v0;" for k in range(1, COLUMNS))
    dump = (
        f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{registers}}}, [r9]; "
        "tcgen05.wait::ld.sync.aligned;"
    ) + "".join(f"st.global.u32 [a2+{512 * k}], v{k};" for k in range(COLUMNS))
    return with_tensor_memory(
        f".reg .b32 v<{COLUMNS}>; ld.param.u64 a0, [x]; ld.param.u64 a2, [y]; mov.u32 r7, %ctaid.x;"
        f"mad.wide.u32 a0, r7, {BYTES}, a0; mad.wide.u32 a0, r0, 16, a0; mad.lo.u32 r8, r0, 16, r3;"
        f"mad.wide.u32 a2, r7, {4 * LANES * COLUMNS}, a2; mad.wide.u32 a2, r0, 4, a2; {copies} "
        f"shl.b32 r9, r1, 21; add.u32 r9, r9, r2; {fill} setp.eq.u32 p, r0, 0; "
        "@p mbarrier.init.shared.b64 [r4], 1; @p fence.mbarrier_init.release.cluster; "
        f"tcgen05.st.sync.aligned.32x32b.x16.b32 [r9], {{{registers}}};\n"
        f"tcgen05.wait::st.sync.aligned; {fence} {cluster if group == 2 else 'bar.sync 0;'} "
        "mov.u32 r10, %cluster_ctarank; or.b32 r10, r10, r0; setp.ne.u32 p, r10, 0; @p bra R;\n"
        f"{issue}\nR: {wait}\n{after}\n"
        f"{dump if load else ''}",
        group=group,
        release="\nbar.sync 0;",
    )


def launch(body: str, x: np.ndarray, seed: int = 0) -> np.ndarray:
    """Runs on as many CTAs, one cluster, as x has rows; the words by CTA, column, lane."""
    ctas = len(x)
    y = np.zeros((ctas, COLUMNS, LANES), np.uint32)
    machine = sim.Machine("100a", seed)
    run(
        body,
        x,
        y,
        parameters=PARAMETERS,
        block=128,
        grid=ctas,
        cluster=ctas,
        machine=machine,
    )
    return y


def random_bytes(ctas: int) -> np.ndarray:
    return np.random.default_rng(ctas).integers(0, 256, (ctas, BYTES), dtype=np.uint8)


def source_row(
    memory: np.ndarray, swizzle: int, start: int, leading: int, stride: int, row: int, count: int
) -> np.ndarray:
    """Bytes of a row of a K-major matrix, by the canonical layouts (PTX ISA 9.7.16.3)."""
    width, mask = SWIZZLES[swizzle]
    result = []
    for byte in range(count):
        at = start + row // 8 * stride + row % 8 * width + byte % 16
        at += byte // 16 * (16 if swizzle else leading)
        result.append(memory[at ^ ((at >> 7 & mask) << 4)])
    return np.array(result, np.uint8)


def expected(shape: str, memory: np.ndarray, column: int, lane: int, expand: int = 8, **where: int):
    """Tensor memory of a CTA after the copy, by column and lane."""
    rows, count = SHAPES[shape]
    words = np.tile(FILL + np.arange(LANES, dtype=np.uint32), (COLUMNS, 1))
    for row in range(rows):
        data = source_row(memory, row=row, count=count, **where)
        if expand != 8:
            parts = data.reshape(-1, 16)[:, : 2 * expand]
            bits = np.unpackbits(parts, axis=1, bitorder="little").reshape(-1, 16, expand)
            data = np.packbits(bits, axis=2, bitorder="little").reshape(-1)
        for target in lanes_of(shape, row):
            words[column : column + count // 4, lane + target] = data.view(np.uint32)
    return words


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_and_lanes(shape: str, swizzle: int, group: int) -> None:
    """Every shape and swizzle; both CTAs of a pair copy from their own shared memory."""
    x = random_bytes(group)
    width, _ = SWIZZLES[swizzle]
    leading, stride = (2048, 128) if swizzle == 0 else (0, 8 * width)
    # Inside a row of the pattern where there is room for that.
    offset = 48 if swizzle == 0 else width - SHAPES[shape][1]
    column, lane = 5, 31 if shape == "4x256b" else 0
    body = kernel(
        f"add.u32 r6, r3, {offset}; {descriptor('r6', swizzle, leading, stride)} "
        f"add.u32 r6, r2, {lane << 16 | column}; tcgen05.cp.cta_group::{group}.{shape} [r6], a1; "
        + signal(group),
        group,
    )
    for seed in range(2):
        got = launch(body, x, seed)
        for cta in range(group):
            want = expected(
                shape,
                x[cta],
                column,
                lane,
                swizzle=swizzle,
                start=offset,
                leading=leading,
                stride=stride,
            )
            np.testing.assert_array_equal(got[cta], want)


@pytest.mark.parametrize(("source", "bits"), [("b4x16_p64", 4), ("b6x16_p32", 6)])
@pytest.mark.parametrize("shape", SHAPES)
def test_elements_become_bytes(shape: str, source: str, bits: int) -> None:
    """16 elements of 4 or 6 bits with padding become 16 bytes, each in the low bits of its own."""
    x = random_bytes(1)
    body = kernel(
        f"{descriptor('r3', 2, 0, 1024)} tcgen05.cp.cta_group::1.{shape}.b8x16.{source} [r2], a1; "
        + signal(1)
    )
    got = launch(body, x)[0]
    want = expected(shape, x[0], 0, 0, bits, swizzle=2, start=0, leading=0, stride=1024)
    np.testing.assert_array_equal(got, want)


def test_padding_is_not_read() -> None:
    """The last 8 bytes of 16 may be unwritten where only the first 8 hold elements."""
    load = (
        "cvt.u64.u32 a0, r0; shl.b64 a0, a0, 4; st.shared.u64 [r8], a0; mbarrier.init.shared.b64 "
        f"[r4], 1; {FENCE} bar.sync 0; {descriptor('r3', 0, 0, 128)} "
    )
    copy = "tcgen05.cp.cta_group::1.32x128b.warpx4{} [r2], a1;"
    body = with_tensor_memory(
        f"mad.lo.u32 r8, r0, 16, r3; elect.sync _|p, -1; {load}\n@p {copy}\n@p {signal(1)} {WAIT}"
    ).replace("mbarrier.init", "@p mbarrier.init")
    run(body.replace("warpx4{}", "warpx4.b8x16.b4x16_p64"))
    for seed in range(5):
        with pytest.raises(sim.SimulationError) as caught:
            run(body.replace("warpx4{}", "warpx4"), machine=sim.Machine("100a", seed))
        assert (caught.value.kind, caught.value.line) == ("uninitialized-memory", FIRST_LINE + 2)


COPY = "tcgen05.cp.cta_group::1.128x128b [r2], a1;"
ISSUE = f"{descriptor('r3', 0, 0, 128)} {COPY} {signal(1)}"


def test_copies_of_one_warp_keep_their_order() -> None:
    """The later copy to the same place wins, at every seed."""
    second = descriptor("r6", 0, 0, 128).replace("shr", "add.u32 r6, r3, 4096; shr", 1)
    x = random_bytes(1)
    for seed in range(20):
        got = launch(
            kernel(f"{descriptor('r3', 0, 0, 128)} {COPY} {second} {COPY} {signal(1)}"), x, seed
        )
        want = expected("128x128b", x[0], 0, 0, swizzle=0, start=4096, leading=0, stride=128)
        np.testing.assert_array_equal(got[0], want)


# A copy that nobody waits for meets a load, columns that are released, or the end of its CTA.
UNFINISHED = {"race", "out-of-bounds", "exit"}
# Kernel with the fault, its kinds, the lines after the first at which it may show.
PLANTED = {
    "no fence": (kernel(ISSUE, fence=""), {"proxy"}, {3}),
    "no wait": (kernel(ISSUE, wait="mov.u32 r6, 0;"), UNFINISHED, {3, 6}),
    "no commit": (
        kernel(ISSUE.replace(signal(1), ""), wait="mov.u32 r6, 0;"),
        UNFINISHED,
        {3, 6},
    ),
    "commit before the copy": (
        kernel(f"{descriptor('r3', 0, 0, 128)} {signal(1)} {COPY}"),
        UNFINISHED,
        {3, 6},
    ),
    "source overwritten": (
        kernel(ISSUE + "\nst.shared.u32 [r3+64], r0;"),
        {"race"},
        {3, 4},
    ),
    "released too early": (
        kernel(ISSUE, wait="mov.u32 r6, 0;", load=False),
        UNFINISHED,
        {3, 8},
    ),
    "no such descriptor": (
        kernel(ISSUE.replace(COPY, f"mov.u64 a1, 0; {COPY}")),
        {"argument"},
        {3},
    ),
    "misaligned swizzle": (
        kernel(ISSUE.replace(descriptor("r3", 0, 0, 128), descriptor("r3", 2, 0, 512))),
        {"misaligned"},
        {3},
    ),
    "lane": (
        kernel(ISSUE.replace(COPY, f"add.u32 r2, r2, 0x200000; {COPY}")),
        {"argument"},
        {3},
    ),
    "columns": (
        kernel(ISSUE.replace(COPY, f"add.u32 r2, r2, 30; {COPY}")),
        {"out-of-bounds"},
        {3},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_misuse_is_reported(name: str) -> None:
    """Each rule of a copy, broken once: kind and line, at every seed."""
    body, kinds, lines = PLANTED[name]
    x = random_bytes(1)
    for seed in range(20):
        with pytest.raises(sim.SimulationError) as caught:
            launch(body, x, seed)
        assert caught.value.kind in kinds, caught.value
        assert caught.value.line - FIRST_LINE in lines, caught.value

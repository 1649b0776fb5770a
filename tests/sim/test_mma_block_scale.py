"""mma.sync of the block-scaled kinds: fragments, scale selectors, and the sum bit for bit.

The fragments are made here from matrices by the tables of the PTX ISA (9.7.14.5.14), element by
element; the sums come from tests/oracles/mma.py.
"""

import numpy as np
import pytest

from jax_fp4 import sim
from oracles import mma, tables

KINDS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
CONTAINER_SHIFT = {"e2m1": 2}


def fragments(rows: np.ndarray, registers: int, per_register: int, width: int) -> np.ndarray:
    """uint32 [32, registers] of lane and register from codes [rows, K]; 16 rows are A, 8 are B."""
    out = np.zeros((32, registers), np.uint32)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for q in range(registers):
            row = g + 8 * (q & 1) if len(rows) == 16 else g
            block = q >> 1 if len(rows) == 16 else q
            for i in range(per_register):
                k = per_register * t + i + 4 * per_register * block
                out[lane, q] |= np.uint32(int(rows[row, k]) << (width * i))
    return out


def accumulator(matrix: np.ndarray) -> np.ndarray:
    """uint32 [32, 4] of lane and register from [16, 8]."""
    lane, q = np.arange(32)[:, None], np.arange(4)
    return matrix[lane // 4 + 8 * (q >> 1), 2 * (lane % 4) + (q & 1)]


def run(
    instruction: str,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    sa: np.ndarray | None = None,
    sb: np.ndarray | None = None,
    version: str = "8.8",
) -> np.ndarray:
    """D as [16, 8] bits; operands are per lane: a [32, 4], b [32, 2], c [16, 8], sa and sb [32]."""
    out = np.zeros((32, 4), np.uint32)
    scales = [np.zeros(32, np.uint32) if s is None else s for s in (sa, sb)]
    data = np.concatenate([a, b, accumulator(c), *(s[:, None] for s in scales)], axis=1)
    data = np.ascontiguousarray(data, np.uint32)
    text = f""".version {version}
.target sm_120a
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 y) {{
 .reg .b32 t, a<4>, b<2>, s<2>; .reg .f32 c<4>, d<4>; .reg .b64 at;
 ld.param.u64 at, [x]; mov.u32 t, %tid.x; mad.wide.u32 at, t, 48, at;
 ld.global.v4.b32 {{a0, a1, a2, a3}}, [at]; ld.global.v2.b32 {{b0, b1}}, [at+16];
 ld.global.v2.f32 {{c0, c1}}, [at+24]; ld.global.v2.f32 {{c2, c3}}, [at+32];
 ld.global.v2.b32 {{s0, s1}}, [at+40];
 {instruction}
 ld.param.u64 at, [y]; mad.wide.u32 at, t, 16, at; st.global.v4.f32 [at], {{d0, d1, d2, d3}};
 ret; }}"""
    sim.Machine("120a").load(text).launch("k", 1, 32, args=[data, out])
    matrix = np.zeros((16, 8), np.uint32)
    lane, q = np.arange(32)[:, None], np.arange(4)
    matrix[lane // 4 + 8 * (q >> 1), 2 * (lane % 4) + (q & 1)] = out
    return matrix


OPERANDS = "{d0, d1, d2, d3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}"


def place_scales(
    words_a: np.ndarray, words_b: np.ndarray, thread_a: int, thread_b: int, shift: int
) -> tuple[np.ndarray, np.ndarray]:
    """Registers of the lanes that the selectors name; the others hold noise."""
    noise = np.random.default_rng(8).integers(0, 2**32, (2, 32), np.uint32)
    sa, sb = noise
    for g in range(8):
        sa[4 * g + 2 * thread_a] = words_a[g] << shift
        sa[4 * g + 2 * thread_a + 1] = words_a[g + 8] << shift
        sb[4 * g + thread_b] = words_b[g] << shift
    return sa, sb


def random_accumulator(rng: np.random.Generator) -> np.ndarray:
    c = (rng.standard_normal((16, 8)) * np.exp2(rng.integers(-30, 30, (16, 8)))).astype(np.float32)
    c[0, 0], c[1, 1], c[2, 2], c[3, 3] = np.nan, np.inf, -np.inf, 0
    return c.view(np.uint32)


FORMS_K64 = [
    ("kind::mxf4nvf4.block_scale.scale_vec::4X", "ue4m3", 4, "8.8"),
    ("kind::mxf4nvf4.block_scale.scale_vec::4X", "ue8m0", 4, "9.1"),
    ("kind::mxf4nvf4.block_scale.scale_vec::2X", "ue8m0", 2, "8.8"),
    ("kind::mxf4.block_scale.scale_vec::2X", "ue8m0", 2, "8.8"),
    ("kind::mxf4.block_scale", "ue8m0", 2, "8.8"),
]


@pytest.mark.parametrize(("kind", "scale", "count", "version"), FORMS_K64)
@pytest.mark.parametrize("seed", range(4))
def test_four_bit_kinds(kind: str, scale: str, count: int, version: str, seed: int) -> None:
    """16x8x64 with every selector; the shape may stand before or after the kind."""
    rng = np.random.default_rng(seed)
    a = rng.integers(0, 16, (16, 64)).astype(np.uint8)
    b = rng.integers(0, 16, (8, 64)).astype(np.uint8)
    near = rng.integers(100, 150, 2)
    words = [rng.integers(near[n], near[n] + 20, (rows, count)) for n, rows in ((0, 16), (1, 8))]
    if seed == 3:
        words = [rng.integers(0, 256, w.shape) for w in words]
    words = [w.astype(np.uint8) for w in words]
    packed = [
        sum(w[:, s].astype(np.uint32) << np.uint32(8 * s) for s in range(count)) for w in words
    ]
    c = random_accumulator(rng)
    want = mma.mma_k64(a[:, None], b[None], words[0][:, None], words[1][None], c, scale)
    thread_a, thread_b = seed % 2, seed
    byte = 2 * (seed % 2) if count == 2 else 0
    sa, sb = place_scales(packed[0], packed[1], thread_a, thread_b, 8 * byte)
    shape = f"m16n8k64.row.col.{kind}" if seed % 2 else f"{kind}.m16n8k64.row.col"
    got = run(
        f"mma.sync.aligned.{shape}.f32.e2m1.e2m1.f32.{scale} {OPERANDS}, "
        f"s0, {{{byte}, {thread_a}}}, s1, {{{byte}, {thread_b}}};",
        fragments(a, 4, 8, 4),
        fragments(b, 2, 8, 4),
        c,
        sa,
        sb,
        version,
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind_b", KINDS)
@pytest.mark.parametrize("kind_a", KINDS)
def test_eight_bit_containers(kind_a: str, kind_b: str) -> None:
    """16x8x32 of every pair of element kinds, scaled with every byte selector, and unscaled."""
    rng = np.random.default_rng(KINDS.index(kind_a) * 5 + KINDS.index(kind_b))
    bits = [tables.KINDS[k].bits for k in (kind_a, kind_b)]
    a = rng.integers(0, 1 << bits[0], (16, 32)).astype(np.uint8)
    b = rng.integers(0, 1 << bits[1], (8, 32)).astype(np.uint8)
    if "e5m2" in (kind_a, kind_b) or "e4m3" in (kind_a, kind_b):
        # NaN and Inf in one row only, so that the other outputs are numbers.
        a[1:] &= 0xFF ^ (4 if bits[0] == 8 else 0)
        b &= 0xFF ^ (4 if bits[1] == 8 else 0)
    c = random_accumulator(rng)
    scale_a, scale_b = (rng.integers(120, 135, n).astype(np.uint8) for n in (16, 8))
    lanes = [
        fragments(x.astype(np.uint32) << CONTAINER_SHIFT.get(kind, 0), n, 4, 8)
        for x, kind, n in ((a, kind_a, 4), (b, kind_b, 2))
    ]
    for byte in range(4):
        want = mma.mma_k32(
            a[:, None], b[None], scale_a[:, None], scale_b[None], c, (kind_a, kind_b)
        )
        packed = [s.astype(np.uint32) for s in (scale_a, scale_b)]
        sa, sb = place_scales(packed[0], packed[1], byte % 2, byte, 8 * byte)
        name = "scale_vec::1X." if byte % 2 else ""
        got = run(
            f"mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.{name}"
            f"f32.{kind_a}.{kind_b}.f32.ue8m0 {OPERANDS}, "
            f"s0, {{{byte}, {byte % 2}}}, s1, {{{byte}, {byte}}};",
            *lanes,
            c,
            sa,
            sb,
        )
        np.testing.assert_array_equal(got, want)
    one = np.full(1, 127, np.uint8)
    want = mma.mma_k32(a[:, None], b[None], one, one, c, (kind_a, kind_b))
    got = run(
        f"mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.{kind_a}.{kind_b}.f32 {OPERANDS};",
        *lanes,
        c,
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("selectors", "padding", "message"),
    [
        ("{1, 0}, s1, {0, 0}", 0, "selector {1, 0} does not exist for 2 scales"),
        ("{0, 2}, s1, {0, 0}", 0, "selector {0, 2} does not exist"),
        ("{0, 0}, s1, {0, 4}", 0, "selector {0, 4} does not exist"),
        ("{0, 0}, s1, {0, 0}", 1, "padding bits"),
    ],
)
def test_what_does_not_exist_is_reported(selectors: str, padding: int, message: str) -> None:
    """Selectors beyond the word or the lanes, and containers whose padding is not zero."""
    a, b = np.full((32, 4), padding, np.uint32), np.zeros((32, 2), np.uint32)
    c, s = np.zeros((16, 8), np.uint32), np.zeros(32, np.uint32)
    form = (
        "m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e2m1.e2m1.f32.ue8m0"
        if padding
        else "m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0"
    )
    with pytest.raises(sim.SimulationError) as error:
        run(f"mma.sync.aligned.{form} {OPERANDS}, s0, {selectors};", a, b, c, s, s)
    assert error.value.kind == "argument"
    assert message in str(error.value)

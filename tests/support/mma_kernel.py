"""Runs mma.sync on the matrices of many warps in one launch.

Fragments are those of the PTX ISA (9.7.14.5), with lane = 4 g + t and e elements a register:
A row g + 8 (q & 1), k = e t + i + 4 e (q >> 1); B column g, k = e t + i + 4 e q; C and D row
g + 8 (q >> 1), column 2 t + (q & 1), f16 in pairs of columns.
"""

import numpy as np

from jax_fp4 import sim

_LANE = np.arange(32)[:, None, None]


def a_registers(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint32 [W, 32, registers] from codes [W, 16, K]."""
    e = 32 // bits
    q, i = np.arange(codes.shape[2] // (2 * e))[None, :, None], np.arange(e)
    row = _LANE // 4 + 8 * (q & 1)
    k = e * (_LANE % 4) + i + 4 * e * (q >> 1)
    return _pack(codes[:, row + 0 * i, k], bits)


def b_registers(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint32 [W, 32, registers] from codes [W, 8, K]."""
    e = 32 // bits
    q, i = np.arange(codes.shape[2] // (4 * e))[None, :, None], np.arange(e)
    k = e * (_LANE % 4) + i + 4 * e * q
    return _pack(codes[:, _LANE // 4 + 0 * k, k], bits)


def _pack(elements: np.ndarray, bits: int) -> np.ndarray:
    shifts = (np.arange(32 // bits) * bits).astype(np.uint32)
    return np.bitwise_or.reduce(elements.astype(np.uint32) << shifts, axis=-1)


def _accumulator_places(half: bool) -> tuple[np.ndarray, np.ndarray]:
    lane, q = np.arange(32)[:, None], np.arange(4)
    return lane // 4 + 8 * (q >> 1), 2 * (lane % 4) + (q & 1)


def c_registers(bits: np.ndarray, half: bool) -> np.ndarray:
    """uint32 [W, 32, 4 or 2] from [W, 16, 8]."""
    values = bits.astype(np.uint32)[:, *_accumulator_places(half)]
    return values[..., ::2] | values[..., 1::2] << np.uint32(16) if half else values


def d_matrix(registers: np.ndarray, half: bool) -> np.ndarray:
    """uint32 [W, 16, 8] from [W, 32, 4 or 2]."""
    if half:
        pairs = [registers & np.uint32(0xFFFF), registers >> np.uint32(16)]
        registers = np.stack(pairs, axis=-1).reshape(len(registers), 32, 4)
    out = np.zeros((len(registers), 16, 8), np.uint32)
    out[:, *_accumulator_places(half)] = registers
    return out


def multiply(
    form: str,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    *,
    bits: int,
    half: bool = False,
    scales: tuple[np.ndarray, np.ndarray] | None = None,
    sm: str = "120a",
    version: str = "8.8",
    mma: str = "model",
) -> np.ndarray:
    """D as bits [W, 16, 8] of W instructions.

    Args:
        form: of the instruction, after "mma.sync.aligned.".
        a: codes [W, 16, K].
        b: codes [W, 8, K].
        c: bits [W, 16, 8].
        bits: of an element's place in a register.
        half: C and D are f16.
        scales: words [W, 16] and [W, 8], given to the instruction with selectors {0, 0}.
        sm: the chip.
        version: of PTX.
        mma: how the machine adds.
    """
    parts = [a_registers(a, bits), b_registers(b, bits), c_registers(c, half)]
    names = [
        f"{name}{n}" for name, part in zip("abc", parts, strict=True) for n in range(part.shape[2])
    ]
    if scales is not None:
        # thread_id 0: lanes with t = 0 hold the rows g, t = 1 the rows g + 8; t = 0 the columns.
        lane = np.arange(32)
        parts.append(scales[0].astype(np.uint32)[:, lane // 4 + 8 * (lane & 1), None])
        parts.append(scales[1].astype(np.uint32)[:, lane // 4, None])
        names += ["s0", "s1"]
    data = np.ascontiguousarray(np.concatenate(parts, axis=2))
    out = np.zeros((len(a), 32, parts[2].shape[2]), np.uint32)

    def vector(name: str) -> str:
        return "{" + ", ".join(n for n in names if n[0] == name) + "}"

    d = vector("c").replace("c", "d")
    # A word in braces is one too.
    selectors = ", {s0}, {0, 0}, s1, {0, 0}" if scales is not None else ""
    loads = " ".join(f"ld.global.b32 {n}, [at+{4 * k}];" for k, n in enumerate(names))
    stores = " ".join(f"st.global.b32 [at+{4 * k}], d{k};" for k in range(out.shape[2]))
    kind = "b32" if half else "s32" if ".s32" in form else "f32"
    text = f""".version {version}
.target sm_{sm}
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 y) {{
 .reg .b32 t, u, a<4>, b<2>, s<2>; .reg .{kind} c<4>, d<4>; .reg .b64 at;
 mov.u32 t, %tid.x; mov.u32 u, %ctaid.x; mad.lo.u32 t, u, 32, t;
 ld.param.u64 at, [x]; mad.wide.u32 at, t, {4 * data.shape[2]}, at;
 {loads}
 mma.sync.aligned.{form} {d}, {vector("a")}, {vector("b")}, {vector("c")}{selectors};
 ld.param.u64 at, [y]; mad.wide.u32 at, t, {4 * out.shape[2]}, at; {stores}
 ret; }}"""
    sim.Machine(sm, mma=mma).load(text).launch("k", len(a), 32, args=[data, out])
    return d_matrix(out, half)

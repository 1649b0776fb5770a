"""Kernels that run tcgen05.mma: memory from arrays, instructions, tensor memory back to arrays."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jax_fp4 import sim
from oracles.shared_layout import Descriptor, bit_addresses

LANES = 128
# Codes of element types in instruction descriptors of 8-bit kinds (PTX ISA 9.7.16.4.2).
TYPES = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}


@dataclass(frozen=True)
class Packing:
    """How elements fill 16 bytes: bits of one, and of one with its share of the padding."""

    bits: int
    container: int


PACKED4 = Packing(4, 4)


def packing_of(kind: str) -> Packing:
    """Of an element type in a kind that is not mxf4 or mxf4nvf4."""
    if kind in TYPES:
        return Packing({"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(kind, 8), 8)
    return {"f16": Packing(16, 16), "bf16": Packing(16, 16), "tf32": Packing(32, 32)}.get(
        kind, Packing(8, 8)
    )


def place(
    image: np.ndarray, codes: np.ndarray, d: Descriptor, packing: Packing, major: str = "k"
) -> None:
    """Writes codes [rows, K] into bytes of shared memory, as the descriptor says; others stay."""
    at = bit_addresses(d, major, *codes.shape, packing.container)
    # Elements of 16 bytes come without gaps, then their padding.
    at = at // 128 * 128 + at % 128 // packing.container * packing.bits
    bits = np.unpackbits(image, bitorder="little")
    for bit in range(packing.bits):
        bits[at + bit] = codes >> bit & 1
    image[:] = np.packbits(bits, bitorder="little")


def place_scales(tensor: np.ndarray, column: int, scales: np.ndarray, first: int) -> None:
    """Writes scale bytes [rows, n], from byte `first` of the words on, to all four quarters."""
    for row, values in enumerate(scales):
        for quarter in range(4):
            words = tensor[32 * quarter + row % 32, column + row // 32 :]
            for s, value in enumerate(values):
                shift = 8 * (first + s)
                words[0] = int(words[0]) & ~(0xFF << shift) & 0xFFFFFFFF | int(value) << shift


@dataclass
class Mma:
    """One instruction. `a` may be a column of tensor memory; so are `d`, `sfa` and `sfb`."""

    form: str
    idesc: int
    a: Descriptor | int
    b: Descriptor
    d: int = 0
    sfa: int | None = None
    sfb: int | None = None
    accumulate: bool = False
    disabled: tuple[int, ...] = ()
    shrink: int | None = None

    def with_(self, **changes: Any) -> "Mma":
        """The same with some fields changed."""
        return replace(self, **changes)

    def text(self, group: int) -> str:
        """PTX: registers on the first line, the instruction alone on the second."""
        tensor = isinstance(self.a, int)
        setup = f"mov.u32 i, {self.idesc:#x}; add.u32 d, tm, {self.d}; "
        setup += f"setp.ne.u32 acc, {int(self.accumulate)}, 0; "
        if isinstance(self.a, int):
            setup += f"add.u32 ta, tm, {self.a}; "
        else:
            setup += f"add.u64 da, base, {self.a.bits:#x}; "
        setup += f"add.u64 db, base, {self.b.bits:#x}; "
        scales = mask = ""
        if self.sfa is not None:
            setup += f"add.u32 sa, tm, {self.sfa}; add.u32 sb, tm, {self.sfb}; "
            scales = " [sa], [sb],"
        if self.disabled:
            setup += "".join(f"mov.u32 m{k}, {word:#x}; " for k, word in enumerate(self.disabled))
            mask = " {" + ", ".join(f"m{k}" for k in range(len(self.disabled))) + "},"
        shrink = "" if self.shrink is None else f", {self.shrink}"
        return (
            f"{setup}\n@lead tcgen05.mma.cta_group::{group}.{self.form} [d], "
            f"{'[ta]' if tensor else 'da'}, db, i,{scales}{mask} acc{shrink};"
        )


@dataclass
class Run:
    """A kernel around instructions, and what memory holds before.

    shared: uint8 [CTAs, bytes]; bytes a multiple of 2048.
    tensor: uint32 [CTAs, 128, columns]; columns a power of two from 32 on.
    """

    mmas: list[Mma]
    shared: np.ndarray
    tensor: np.ndarray
    target: str = "100a"
    version: str = "8.8"
    fence: str = "fence.proxy.async.shared::cta;"
    written: int | None = None  # bytes of shared memory that are written, if not all
    filled: int | None = None  # columns of tensor memory that are written, if not all
    dumped: tuple[int, int] | None = None  # first column and number of those read back, if not all
    between: str = ""  # between two instructions
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> int:
        """CTAs that work together."""
        return len(self.shared)

    def text(self) -> str:
        """PTX of the kernel `k`."""
        g, size, columns = self.group, self.shared.shape[1], self.tensor.shape[2]
        barrier = "bar.sync 0;"
        if g == 2:
            barrier = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
        pieces = (size if self.written is None else self.written) // 2048
        blocks = (columns if self.filled is None else self.filled) // 32
        first, count = self.dumped or (0, columns)
        v = ", ".join(f"v{k}" for k in range(32))
        loads = " ".join(f"ld.global.u32 v{k}, [at+{512 * k}];" for k in range(32))
        stores = " ".join(f"st.global.u32 [at+{512 * k}], v{k};" for k in range(32))
        commit = f"tcgen05.commit.cta_group::{g}.mbarrier::arrive::one.shared::cluster"
        commit += ".b64 [rb];" if g == 1 else ".multicast::cluster.b64 [rb], both;"
        alloc = "sync.aligned.shared::cta.b32"
        cluster = ".reqnctapercluster 2" if g == 2 else ""
        return f""".version {self.version}
.target sm_{self.target}
.address_size 64
.visible .entry k(.param .u64 shared, .param .u64 tensor, .param .u64 out)
.reqntid 128 {cluster} {{
.shared .align 1024 .b8 smem[{size}]; .shared .align 8 .b64 bar; .shared .b32 slot;
.reg .pred p, acc, lead, first; .reg .b16 both; .reg .b64 at, base, da, db;
.reg .b32 t, w, rank, n, tm, d, ta, sa, sb, i, rs, rb, x, v<32>, m<8>;
mov.u32 t, %tid.x; shr.u32 w, t, 5; mov.u32 rank, %cluster_ctarank; mov.u16 both, 3;
setp.eq.u32 first, w, 0; setp.eq.u32 lead, t, 0; mov.u32 rs, smem; mov.u32 rb, bar;
and.b32 x, rs, 0xFFFFFF; shr.u32 x, x, 4; cvt.u64.u32 base, x;
@lead mbarrier.init.shared::cta.b64 [rb], 1;
fence.mbarrier_init.release.cluster;
setp.eq.and.u32 lead, rank, 0, lead;
ld.param.u64 at, [shared]; mad.wide.u32 at, rank, {size}, at; mad.wide.u32 at, t, 16, at;
shl.b32 x, t, 4; add.u32 rs, rs, x; mov.u32 n, 0;
FILL: setp.ge.u32 p, n, {pieces}; @p bra FILLED;
ld.global.v4.u32 {{v0, v1, v2, v3}}, [at]; st.shared.v4.u32 [rs], {{v0, v1, v2, v3}};
add.u64 at, at, 2048; add.u32 rs, rs, 2048; add.u32 n, n, 1; bra FILL;
FILLED: {self.fence}
mov.u32 x, slot; {barrier}
@first tcgen05.alloc.cta_group::{g}.{alloc} [x], {columns};
@first tcgen05.relinquish_alloc_permit.cta_group::{g}.sync.aligned;
{barrier} ld.shared.u32 tm, [x];
ld.param.u64 at, [tensor]; mad.wide.u32 at, rank, {512 * columns}, at; mad.wide.u32 at, t, 4, at;
mov.u32 n, 0; mov.u32 x, tm;
LOAD: setp.ge.u32 p, n, {blocks}; @p bra LOADED;
{loads}
tcgen05.st.sync.aligned.32x32b.x32.b32 [x], {{{v}}};
add.u32 x, x, 32; add.u64 at, at, {512 * 32}; add.u32 n, n, 1; bra LOAD;
LOADED: tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync;
{barrier} tcgen05.fence::after_thread_sync;
{self.between.join(mma.text(g) for mma in self.mmas)}
@lead {commit}
WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [rb], 0; @!p bra WAIT;
tcgen05.fence::after_thread_sync;
ld.param.u64 at, [out]; mad.wide.u32 at, rank, {512 * count}, at; mad.wide.u32 at, t, 4, at;
mov.u32 n, 0; add.u32 x, tm, {first};
DUMP: setp.ge.u32 p, n, {count // 32}; @p bra DUMPED;
tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{v}}}, [x]; tcgen05.wait::ld.sync.aligned;
{stores}
add.u32 x, x, 32; add.u64 at, at, {512 * 32}; add.u32 n, n, 1; bra DUMP;
DUMPED: tcgen05.fence::before_thread_sync; {barrier}
@first tcgen05.dealloc.cta_group::{g}.sync.aligned.b32 tm, {columns};
ret; }}"""

    def line(self, number: int = 0) -> int:
        """PTX line of an instruction."""
        lines = self.text().split("\n")
        return [n for n, line in enumerate(lines, 1) if " tcgen05.mma" in line][number]

    def __call__(self, seed: int = 0) -> np.ndarray:
        """Tensor memory afterwards, like `tensor`, or the columns of it that are dumped."""
        machine = sim.Machine(self.target, seed=seed, **self.options)
        source = np.ascontiguousarray(self.tensor.transpose(0, 2, 1))
        count = self.dumped[1] if self.dumped else source.shape[1]
        out = np.zeros((self.group, count, LANES), np.uint32)
        self.report = machine.load(self.text()).launch(
            "k", self.group, LANES, self.group, 0, [np.ascontiguousarray(self.shared), source, out]
        )
        return out.transpose(0, 2, 1)

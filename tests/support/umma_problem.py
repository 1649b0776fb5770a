"""One tcgen05.mma as a problem: random operands, where they lie, and D as the oracles have it."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from oracles import mma, mma_plain, tables
from oracles.shared_layout import SWIZZLES, Descriptor
from support.umma import PACKED4, TYPES, Mma, Packing, Run, packing_of, place, place_scales

COLUMNS = 512
SFA, SFB = 256, 264  # columns of the scale factors; D begins at column 0
TENSOR_A = 288
B_START = 32768
SHARED_BYTES = 65536
INTEGERS = ("u8", "s8")


@dataclass(frozen=True)
class Problem:
    """An instruction: its form, formats and shape, and how its operands lie.

    `result` is the type of D; `scale` that of the scale factors, `scales` their number in a row.
    """

    form: str
    a: str
    b: str
    m: int = 128
    n: int = 16
    group: int = 1
    result: str = "f32"
    scale: str = ""
    scales: int = 0
    majors: tuple[str, str] = ("k", "k")
    swizzles: tuple[str, str] = ("128B", "128B")
    step: int = 0  # along K, of 32 bytes
    ids: tuple[int, int] = (0, 0)
    negate: tuple[bool, bool] = (False, False)
    accumulate: bool = True
    saturates: bool = False
    tensor_a: bool = False
    base_lane: int = 0
    disabled: tuple[int, ...] = ()
    shrink: int | None = None

    @property
    def packed(self) -> bool:
        """Whether 4-bit elements come without padding."""
        return "mxf4" in self.form

    @property
    def k(self) -> int:
        """Elements of K."""
        return 256 // (4 if self.packed else packing_of(self.a).container)

    def packing(self, kind: str) -> Packing:
        """Of an operand of this type."""
        return PACKED4 if self.packed else packing_of(kind)

    @property
    def idesc(self) -> int:
        """The instruction descriptor."""
        bits = self.n >> 3 << 17 | self.negate[0] << 13 | self.negate[1] << 14
        bits |= (self.majors[0] == "mn") << 15 | (self.majors[1] == "mn") << 16
        if self.scale:
            bits |= self.ids[1] << 4 | self.ids[0] << 29 | self.m >> 7 << 27
            bits |= (self.scale == "ue8m0") << 23
            kinds = (1, 1) if self.packed else (TYPES[self.a], TYPES[self.b])
        else:
            bits |= self.m >> 4 << 24 | self.saturates << 3
            bits |= {"f16": 0, "f32": 1, "s32": 2}[self.result] << 4
            codes = {"f16": 0, "bf16": 1, "tf32": 2, "u8": 0, "s8": 1} | TYPES
            kinds = (codes[self.a], codes[self.b])
        return bits | kinds[0] << 7 | kinds[1] << 10

    def descriptor(self, operand: int) -> Descriptor:
        """The matrix descriptor of A (0) or B (1)."""
        start = B_START if operand else 0
        swizzle, major = self.swizzles[operand], self.majors[operand]
        width = SWIZZLES[swizzle][1]
        if major == "k":
            if swizzle == "none":
                return Descriptor(start, 128, 384, swizzle)
            return Descriptor(start + 32 * self.step, 16, 8 * width, swizzle)
        if swizzle == "none":
            return Descriptor(start, 128, 128 * max(self.k // 8, 1), swizzle)
        group = width * (4 if swizzle == "128B_atom_32B" else 8)
        groups = self.k * width // group
        return Descriptor(start, group * groups, group, swizzle)

    def place_of(self, row: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(CTA, lane, column) of elements of D (PTX ISA 9.7.16.10.5)."""
        zero = row * 0 + n * 0
        if self.group == 1 and self.m == 128:
            return zero, row + zero, n + zero
        if self.group == 1:
            return zero, row // 16 * 32 + row % 16 + self.base_lane + zero, n + zero
        if self.m == 256:
            return row // 128 + zero, row % 128 + zero, n + zero
        half = self.n // 2
        return row // 64 + zero, row % 64 + 64 * (n >= half) + zero, n % half + zero

    def negated(self, operand: int, codes: np.ndarray) -> np.ndarray:
        """The codes as they count."""
        if not self.negate[operand]:
            return codes
        kind = self.b if operand else self.a
        return codes ^ 1 << sum(mma_plain.FORMATS[kind])

    def product(
        self, a: np.ndarray, b: np.ndarray, sa: np.ndarray, sb: np.ndarray, c: np.ndarray
    ) -> np.ndarray:
        """D [M, N] of one instruction."""
        a, b = self.negated(0, a), self.negated(1, b)
        if self.a in INTEGERS:
            left, right = (
                np.where((kind == "s8") & (x > 127), x - 256, x)
                for kind, x in ((self.a, a), (self.b, b))
            )
            total = left @ right.T + c.view(np.int32)
            if self.saturates:
                total = np.clip(total, -(1 << 31), (1 << 31) - 1)
            return (total & 0xFFFFFFFF).astype(np.uint32)
        if self.packed:
            x = [v.astype(np.uint8) for v in (a[:, None], b[None], sa[:, None], sb[None])]
            return mma.mma_k64(*x, c, self.scale)
        if self.scale:
            x = [v.astype(np.uint8) for v in (a[:, None], b[None], sa, sb)]
            return mma.mma_k32(x[0], x[1], x[2], x[3].T, c, (self.a, self.b))
        chip = 120 if self.k == 32 else 100  # 8-bit elements: one step of 32 products
        return mma_plain.model((self.a, self.b), a[:, None], b[None], c, self.result, chip)


class Instance:
    """A problem with operands drawn from a seed."""

    def __init__(self, problem: Problem, seed: int = 0) -> None:
        """Args: problem: what; seed: of the operands."""
        self.problem = p = problem
        self.rng = np.random.default_rng(seed)
        self.codes = [self._codes(p.a, p.m), self._codes(p.b, p.n)]
        self.scales = [self._scales(p.m), self._scales(p.n)]
        g = p.group
        self.shared = self.rng.integers(0, 256, (g, SHARED_BYTES)).astype(np.uint8)
        self.tensor = self.rng.integers(0, 1 << 32, (g, 128, COLUMNS)).astype(np.uint32)
        self._place_accumulators()
        for cta in range(g):
            self._place(cta)

    def _codes(self, kind: str, rows: int) -> np.ndarray:
        p, rng = self.problem, self.rng
        if kind in INTEGERS:
            return rng.integers(0, 256, (rows, p.k))
        exponent_bits, mantissa_bits = mma_plain.FORMATS[kind]
        codes = rng.integers(0, 1 << (1 + exponent_bits + mantissa_bits), (rows, p.k))
        if exponent_bits > 3:
            # Moderate exponents but in two rows, where infinities and NaN may be.
            bias = (1 << (exponent_bits - 1)) - 1
            field = bias + rng.integers(-5, 6, codes.shape)
            mask = ((1 << exponent_bits) - 1) << mantissa_bits
            moderate = codes & ~mask | field << mantissa_bits
            codes[1:-1] = moderate[1:-1]
        codes[rng.random(codes.shape) < 0.1] = 0
        codes[rows // 2] = 0
        return codes

    def _scales(self, rows: int) -> np.ndarray:
        p, rng = self.problem, self.rng
        if not p.scale:
            return np.zeros((rows, 0), np.int64)
        low, high = (0x20, 0x58) if p.scale == "ue4m3" else (120, 135)
        scales = rng.integers(low, high, (rows, p.scales))
        scales[2] = rng.integers(0, 256, p.scales)
        scales[3, -1] = 0xFF if p.scale == "ue8m0" else 0x7F
        return scales

    def _place_accumulators(self) -> None:
        p, rng = self.problem, self.rng
        shape = (p.m, p.n)
        if p.result == "s32":
            c = rng.integers(0, 1 << 32, shape).astype(np.uint32)
            c[:, 1] = 0x7FFFFFF0
        else:
            c = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 15, shape)
            c = c.astype(np.float32).view(np.uint32)
            if p.result == "f16":
                with np.errstate(over="ignore"):  # to infinity
                    half = c.view(np.float32).astype(np.float16)
                c = half.view(np.uint16).astype(np.uint32)
                c |= rng.integers(0, 1 << 16, shape).astype(np.uint32) << 16  # not a part of it
        c[0, :] = 0
        self.tensor[p.place_of(np.arange(p.m)[:, None], np.arange(p.n))] = c
        self.c = c & 0xFFFF if p.result == "f16" else c

    def _place(self, cta: int) -> None:
        p = self.problem
        rows, columns = p.m // p.group, p.n // p.group
        a = self.codes[0][cta * rows : (cta + 1) * rows]
        b = self.codes[1][cta * columns : (cta + 1) * columns]
        # TF32 operands are the upper bits of words; the others are noise.
        a, b = (
            x << 13 | self.rng.integers(0, 1 << 13, x.shape) if kind == "tf32" else x
            for x, kind in ((a, p.a), (b, p.b))
        )
        place(self.shared[cta], b, p.descriptor(1), p.packing(p.b), p.majors[1])
        if p.tensor_a:
            width = p.packing(p.a).bits
            bits = (a[:, :, None] >> np.arange(width) & 1).astype(np.uint8)
            data = np.packbits(bits.reshape(len(a), -1), axis=1, bitorder="little")
            words = data.view(np.uint32)
            self.tensor[cta, : len(a), TENSOR_A : TENSOR_A + words.shape[1]] = words
        else:
            place(self.shared[cta], a, p.descriptor(0), p.packing(p.a), p.majors[0])
        if p.scale:
            own = self.scales[0][cta * rows : (cta + 1) * rows]
            place_scales(self.tensor[cta], SFA, own, p.ids[0])
            place_scales(self.tensor[cta], SFB, self.scales[1], p.ids[1])

    @cached_property
    def mma(self) -> Mma:
        """The instruction."""
        p = self.problem
        return Mma(
            p.form, p.idesc, TENSOR_A if p.tensor_a else p.descriptor(0), p.descriptor(1),
            p.base_lane << 16, SFA if p.scale else None, SFB if p.scale else None,
            p.accumulate, p.disabled, p.shrink,
        )  # fmt: skip

    @cached_property
    def run(self) -> Run:
        """The kernel, with this instruction alone."""
        return Run([self.mma], self.shared, self.tensor)

    def expected(self) -> np.ndarray:
        """Tensor memory afterwards."""
        p = self.problem
        c = self.c if p.accumulate else np.zeros_like(self.c)
        d = p.product(*self.codes, *self.scales, c)
        out = self.tensor.copy()
        cta, lane, column = p.place_of(np.arange(p.m)[:, None], np.arange(p.n))
        words = np.array(p.disabled or (0,) * (4 * p.group), np.uint32)
        on = (words[cta * 4 + lane // 32] >> (lane % 32).astype(np.uint32) & 1) == 0
        out[cta[on], lane[on], column[on]] = d[on]
        return out

    def check(self, seed: int = 0) -> None:
        """Runs and compares every word of tensor memory."""
        np.testing.assert_array_equal(self.run(seed), self.expected())


def nan_free(codes: np.ndarray, kind: str) -> np.ndarray:
    """The codes with NaN and infinities replaced by one."""
    return np.where(np.isfinite(tables.VALUES[kind][codes]), codes, 1)


def with_(problem: Problem, **changes: object) -> Problem:
    """A problem that differs in some fields."""
    return replace(problem, **changes)  # type: ignore[arg-type]

"""Runs the GEMM kernels of csrc/kernels on the machine, and says what D has to be, bit for bit.

Everything around the operands is poison: codes of the largest magnitude, NaN scales, and in D a
canary pattern. Whatever a kernel reads or writes too much shows up in D or in the canaries.
"""

import re
from dataclasses import dataclass

import numpy as np

from jax_fp4 import sim
from oracles import mma, pack, tables
from support import device_kernels
from support.gemm_params import Params, Raster, ReduceParams
from support.repository import ROOT

ELEMENT_BITS = {"e2m1": 4, "e2m3": 6, "e3m2": 6, "e4m3": 8, "e5m2": 8}
# In the order of csrc/numerics/formats.h and csrc/kernels/gemm_params.h.
ELEMENTS = ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2")
DTYPES = ("f32", "bf16", "f16")
WORD = {"f32": np.uint32, "bf16": np.uint16, "f16": np.uint16}
MAP_TYPE = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
GUARD = 4096  # bytes of poison on either side of every array
UNWRITTEN = {"f32": 0xA5A5A5A5, "bf16": 0xA5A5, "f16": 0xA5A5}  # D before the launch

Pair = tuple[np.ndarray, np.ndarray]  # of A and B


@dataclass(frozen=True)
class Variant:
    """A compiled kernel: kind, CTAs that share a tile, columns of a tile, family of chips."""

    kind: str = "nvfp4"
    group: int = 1
    tile_n: int = 128
    family: str = "sm100"  # or sm120

    @property
    def name(self) -> str:
        """In variants.def."""
        return f"gemm_{self.family}_{self.kind}_{self.tile_m}x{self.tile_n}"

    @property
    def chip(self) -> str:
        """The one on which it is run here."""
        return {"sm100": "100a", "sm120": "120a"}[self.family]

    @property
    def target(self) -> str:
        """Of the PTX that is assembled for all chips of the family."""
        return {"sm100": "100f", "sm120": "120f"}[self.family]

    @property
    def tile_m(self) -> int:
        return 128 * self.group

    @property
    def block(self) -> int:
        return 16 if self.kind == "nvfp4" else 32

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a stage."""
        return 64 if self.family == "sm120" and self.kind != "mxf8f6f4" else 128

    @property
    def stage_k(self) -> int:
        """Elements of K in a stage."""
        return self.row_bytes * (1 if self.kind == "mxf8f6f4" else 2)

    @property
    def split_k(self) -> int:
        """Elements of K that a split is a multiple of: four MMAs."""
        return 128 if self.kind == "mxf8f6f4" else 256

    @property
    def scale_groups(self) -> int:
        """Groups of four scales along K in a stage."""
        return self.stage_k // self.block // 4

    @property
    def warps(self) -> int:
        """Of gemm_sm120.cu, each of which has 32 rows and at most 64 columns of D."""
        return 4 * -(-self.tile_n // 64)

    @property
    def threads(self) -> int:
        return 192 if self.family == "sm100" else 32 * (1 + self.warps)

    @property
    def shared_bytes(self) -> int:
        """Stages, buffers of 4 KiB and 512 bytes of barriers in 226 or 99 KiB."""
        tiles = 1 + -(-self.tile_n // 128)
        rows = 128 + self.tile_n // self.group
        stage = self.row_bytes * rows + 512 * self.scale_groups * tiles
        stage = -(-stage // 1024) * 1024
        limit, buffers = (226, 8) if self.family == "sm100" else (99, self.warps)
        fixed = buffers * 4096 + 512
        return min(8, (limit * 1024 - fixed) // stage) * stage + fixed

    def product(self, codes: Pair, scales: Pair, elements: tuple[str, str]) -> np.ndarray:
        """Bits [m, n] of the sum over K, by the tensor-core model in this kernel's order."""
        (a, b), (sa, sb) = codes, scales
        if self.kind != "mxf8f6f4":
            return mma.product_k64(a, b, sa, sb, "ue4m3" if self.kind == "nvfp4" else "ue8m0")
        # By parts of A's rows: all 64-bit terms of a large M and N at once are too many.
        parts = [
            mma.product_k32(a[i : i + 32], b, sa[i : i + 32], sb, elements)
            for i in range(0, len(a), 32)
        ]
        return np.concatenate(parts)


def ptx(variant: Variant) -> str:
    """The PTX that is assembled for the chips of the family."""
    return device_kernels.ptx(variant.name, variant.target)


def _with_parts(source: str, seen: set[str]) -> str:
    """The source with the files of parts/ in place of their includes, each once."""

    def content(match: re.Match[str]) -> str:
        if match[1] in seen:
            return ""
        seen.add(match[1])
        part = (ROOT / "csrc" / "kernels" / "parts" / match[1]).read_text()
        return _with_parts(part.replace("#pragma once\n", ""), seen)

    return re.sub(r'#include "kernels/parts/([\w.]+)"\n', content, source)


def changed_ptx(variant: Variant, old: str, new: str, file: str = "") -> str:
    """The same with a change of the source or of a file of parts/, which has to fit one place."""
    row = device_kernels.kernel(variant.name)
    source = (ROOT / "csrc" / "kernels" / row.source).read_text()
    if file:
        seen: set[str] = set()
        source = _with_parts(source, seen)
        assert file in seen
    assert source.count(old) == 1, f"{source.count(old)} places for {old!r}"
    return device_kernels.compiler().compile_ptx(row, variant.target, source.replace(old, new))


@dataclass
class Operand:
    """codes [batch, rows, K], scale bytes [batch, rows, blocks], global scales [batch]."""

    element: str
    codes: np.ndarray
    scales: np.ndarray
    global_scale: np.ndarray

    @staticmethod
    def random(
        rng: np.random.Generator, batch: int, rows: int, k: int, element: str, block: int
    ) -> "Operand":
        blocks = -(-k // block)
        codes = rng.integers(0, 1 << ELEMENT_BITS[element], (batch, rows, k)).astype(np.uint8)
        # No infinities and NaNs; UE4M3 scales near 1, UE8M0 ones from 2^-4 to 2^4.
        finite = np.isfinite(tables.VALUES[element])[codes]
        low, high = (0x20, 0x60) if block == 16 else (123, 132)
        return Operand(
            element,
            np.where(finite, codes, 1).astype(np.uint8),
            rng.integers(low, high, (batch, rows, blocks)).astype(np.uint8),
            rng.uniform(0.5, 2, batch).astype(np.float32),
        )


@dataclass
class Problem:
    """A product and everything that goes with it."""

    variant: Variant
    a: Operand
    b: Operand
    out: str = "f32"
    bias: np.ndarray | None = None  # words of bias_type, [1 or batch, columns of D]
    bias_type: str = "f32"
    c: np.ndarray | None = None  # words of c_type, as D
    c_type: str = "f32"
    strip: int = 8
    splits: int = 1  # of K
    direct: bool = False  # D through no tensor map even where one could be used
    transposed: bool = False  # D is [batch, n, m]
    row_groups: list[int] | None = None  # of each tile of rows; -1, or more than there are: none
    k_groups: list[int] | None = None  # first k of each group, and the end of the last

    def k_of(self, group: int) -> slice:
        """What a group sums over: whole units of 128, as far as there is K."""
        assert self.k_groups is not None
        first, end = (min(self.k_groups[i] // 128 * 128, self.k) for i in (group, group + 1))
        return slice(first, max(first, end))

    @property
    def batch(self) -> int:
        """Matrices that D consists of."""
        if self.row_groups is not None:
            return 1
        if self.k_groups is not None:
            return len(self.k_groups) - 1
        return max(len(self.a.codes), len(self.b.codes))

    @property
    def m(self) -> int:
        return self.a.codes.shape[1]

    @property
    def n(self) -> int:
        return self.b.codes.shape[1]

    @property
    def k(self) -> int:
        return self.a.codes.shape[2]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of D."""
        return (self.batch, self.n, self.m) if self.transposed else (self.batch, self.m, self.n)

    @property
    def tiles_m(self) -> int:
        return -(-self.m // self.variant.tile_m)

    @property
    def tiles_n(self) -> int:
        return -(-self.n // self.variant.tile_n)

    @property
    def split_span(self) -> int:
        """Elements of K in a split."""
        unit = self.variant.split_k
        return -(-self.k // (unit * self.splits)) * unit


def words(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values rounded once to the type, as its bits."""
    if dtype == "f32":
        return values.astype(np.float32).view(np.uint32)
    return tables.f32_to_bf16(values) if dtype == "bf16" else tables.f32_to_f16(values)


def widened(bits: np.ndarray, dtype: str) -> np.ndarray:
    """The float32 of bits of the type."""
    if dtype == "f32":
        return bits.view(np.float32)
    return tables.bf16_to_f32(bits) if dtype == "bf16" else tables.f16_to_f32(bits)


def random_problem(
    variant: Variant,
    m: int,
    n: int,
    k: int,
    *,
    batch: tuple[int, int] = (1, 1),
    elements: tuple[str, str] | None = None,
    bias: str | None = None,
    bias_batch: int = 1,
    c: str | None = None,
    seed: int = 0,
    **more: object,
) -> Problem:
    """Random operands; `bias` and `c` are the types of theirs, or None."""
    rng = np.random.default_rng([seed, m, n, k])
    kinds = elements or (("e4m3",) * 2 if variant.kind == "mxf8f6f4" else ("e2m1",) * 2)
    a = Operand.random(rng, batch[0], m, k, kinds[0], variant.block)
    b = Operand.random(rng, batch[1], n, k, kinds[1], variant.block)
    p = Problem(variant, a, b, **more)  # pyright: ignore
    if bias:
        value = rng.standard_normal((bias_batch, p.shape[2])).astype(np.float32) * 8
        p.bias, p.bias_type = words(value, bias), bias
    if c:
        p.c, p.c_type = words(rng.standard_normal(p.shape).astype(np.float32) * 8, c), c
    return p


def expected(p: Problem) -> np.ndarray:
    """D's bits: the tensor-core model, K in one order, then each step rounded once."""
    result = np.full(p.shape, UNWRITTEN[p.out], WORD[p.out])
    if p.row_groups is not None:
        for tile, group in enumerate(p.row_groups):
            rows = slice(tile * p.variant.tile_m, (tile + 1) * p.variant.tile_m)
            if 0 <= group < len(p.b.codes):
                result[0, rows] = finished(p, group, 0, rows, 0, slice(0, p.k))
        return result
    for i in range(p.batch):
        k = slice(0, p.k) if p.k_groups is None else p.k_of(i)
        result[i] = finished(p, i, i, slice(None), i, k)
    return result


def finished(p: Problem, group: int, ia: int, rows: slice, ic: int, k: slice) -> np.ndarray:
    """D's bits of some rows of A, and of entry `group` of what has as many."""

    def entry(array: np.ndarray, i: int) -> np.ndarray:
        return array[i if len(array) > 1 else 0]

    codes = (entry(p.a.codes, ia)[rows], entry(p.b.codes, group))
    scales = (entry(p.a.scales, ia)[rows], entry(p.b.scales, group))
    total = None
    span = p.split_span
    for start in range(k.start, max(k.stop, k.start + 1), span):
        part = product(p, codes, scales, slice(start, min(start + span, k.stop)))
        total = part if total is None else total + part
    with np.errstate(over="ignore", invalid="ignore"):
        x = entry(p.a.global_scale, group) * entry(p.b.global_scale, group) * total
        x = x.T if p.transposed else x
        if p.bias is not None:
            x = x + widened(entry(p.bias, group), p.bias_type)
        if p.c is not None:
            x = x + widened(p.c[ic][slice(None) if p.transposed else rows], p.c_type)
    return words(x, p.out)


def product(p: Problem, codes: Pair, scales: Pair, k: slice) -> np.ndarray:
    """float32 [m, n] of the sum over a range of K, which starts with a block."""
    blocks = slice(k.start // p.variant.block, -(-k.stop // p.variant.block))
    (a, b), (sa, sb) = [x[:, k] for x in codes], [x[:, blocks] for x in scales]
    if k.start == k.stop:
        return np.zeros((len(a), len(b)), np.float32)
    return p.variant.product((a, b), (sa, sb), (p.a.element, p.b.element)).view(np.float32)


class Run:
    """A launch of a problem: its arrays in a machine's memory, its parameters."""

    def __init__(
        self, problem: Problem, machine: sim.Machine, module: sim.Module | None = None
    ) -> None:
        self.problem = p = problem
        self.machine = machine
        self.module = machine.load(ptx(p.variant)) if module is None else module
        self.reduce: sim.Module | None = None  # gemm_reduce, where it is not the shipped one
        size = WORD[p.out]().itemsize * int(np.prod(p.shape))
        self._d = np.full(size + 2 * GUARD, 0xA5, np.uint8)
        self._out = machine.address(self._d) + GUARD
        self._scales = [self._place(o.global_scale, 0xFF) for o in (p.a, p.b)]
        self._bias = 0 if p.bias is None else self._place(p.bias, 0xFF)
        self._c = 0 if p.c is None else self._place(p.c, 0xFF)

    def prepare(self, seed: int | None = None) -> list[sim.Launch]:
        """The launches, each of which may start before the one before has ended."""
        p = self.problem
        parts = None
        if p.splits > 1:
            parts = self.machine.empty((p.batch, p.splits, p.m * p.n), np.float32)
        launches = [
            self.module.prepare(
                p.variant.name,
                p.variant.group * p.tiles_m * p.tiles_n * p.batch * p.splits,
                p.variant.threads,
                cluster=p.variant.group,
                smem=p.variant.shared_bytes,
                args=[bytes(self._params(parts))],
                seed=seed,
            )
        ]
        if parts is not None:
            reduce = self.reduce or self.machine.load(
                device_kernels.ptx("gemm_reduce", p.variant.target)
            )
            arguments = [bytes(self._reduce(parts))]
            launches.append(
                reduce.prepare("gemm_reduce", (3, p.batch), 256, args=arguments, seed=seed)
            )
        return launches

    def launch(self, seed: int | None = None, max_instructions: int = 1 << 33) -> sim.Report:
        """Runs it; the report is that of the product."""
        return self.machine.run(self.prepare(seed), max_instructions)[0]

    def reads(self, other: "Run") -> None:
        """C is the D that another run writes."""
        self._c = other._out

    def result(self) -> np.ndarray:
        """D; raises AssertionError where something around it was written."""
        around = np.concatenate([self._d[:GUARD], self._d[-GUARD:]])
        assert (around == 0xA5).all(), "bytes around D were written"
        return self._d[GUARD:-GUARD].view(WORD[self.problem.out]).reshape(self.problem.shape)

    def _place(self, data: np.ndarray, poison: int) -> int:
        """The address of a copy of the data with poison around it."""
        array = np.full(data.nbytes + 2 * GUARD, poison, np.uint8)
        array[GUARD : GUARD + data.nbytes] = np.ascontiguousarray(data).view(np.uint8).ravel()
        return self.machine.address(array) + GUARD

    def _indices(self, values: list[int] | None) -> int:
        return (
            0 if values is None else self._place(np.array(values, np.int64).astype(np.uint32), 0xFF)
        )

    def _operand(self, o: Operand, box_rows: int, scale_tiles: int) -> tuple[bytes, bytes]:
        """The tensor maps of codes and scales."""
        v, bits = self.problem.variant, ELEMENT_BITS[o.element]
        packed = np.stack([pack.pack(codes, bits) for codes in o.codes])
        batch, rows, pitch = packed.shape
        expanded = v.kind == "mxf8f6f4" and bits < 8
        codes = sim.tensor_map(
            self._place(packed, 0x77),
            [-(-self.problem.k // 128) * 128 if expanded else pitch, rows, batch],
            [pitch, rows * pitch],
            [v.row_bytes, box_rows, 1],
            {4: "16u4_align16b", 6: "16u6_align16b"}[bits] if expanded else "uint8",
            f"{v.row_bytes}b",
        )
        tiled = np.stack([pack.tile_scales(s) for s in o.scales])
        _, row_tiles, groups = tiled.shape[:3]
        scales = sim.tensor_map(
            self._place(tiled, 0x7F if v.kind == "nvfp4" else 0xFF),
            [256, groups, row_tiles, batch],
            [512, groups * 512, row_tiles * groups * 512],
            [256, v.scale_groups, scale_tiles, 1],
            "uint16",
        )
        return codes, scales

    def _params(self, parts: np.ndarray | None) -> Params:
        p, v = self.problem, self.problem.variant
        whole = parts is None
        out_type, out = (p.out, self._out) if whole else ("f32", self.machine.address(parts))
        size = WORD[out_type]().itemsize
        a, scales_a = self._operand(p.a, 128, 1)
        b, scales_b = self._operand(p.b, v.tile_n // v.group, -(-v.tile_n // 128))
        by_map = p.n * size % 16 == 0 and not p.direct and not p.transposed
        d = bytes(128)
        if by_map:
            d = sim.tensor_map(
                out,
                [p.n, p.m, p.batch * p.splits],
                [p.n * size, p.m * p.n * size],
                [128 // size, 32, 1],
                MAP_TYPE[out_type],
                "128b",
            )
        params = Params(
            global_scale_a=self._scales[0] if whole else 0,
            global_scale_b=self._scales[1] if whole else 0,
            bias=self._bias if whole else 0,
            c=self._c if whole else 0,
            out=out,
            row_groups=self._indices(p.row_groups),
            k_groups=self._indices(p.k_groups),
            groups=len(p.b.codes),
            m=p.m,
            n=p.n,
            steps=-(-4 * p.k // v.split_k),
            split_steps=4 * p.split_span // v.split_k,
            batch_a=int(len(p.a.codes) > 1),
            batch_b=int(len(p.b.codes) > 1),
            raster=Raster.of(p.tiles_m, p.tiles_n, p.strip, p.splits),
            **self._shared_params(),
            out_type=DTYPES.index(out_type),
            element_a=ELEMENTS.index(p.a.element),
            element_b=ELEMENTS.index(p.b.element),
            d_by_map=int(by_map),
            c_by_vector=int(p.shape[2] * WORD[p.c_type]().itemsize % 16 == 0),
            transposed=int(p.transposed),
        )
        maps = {"a": a, "b": b, "scales_a": scales_a, "scales_b": scales_b, "d": d}
        for name, data in maps.items():
            getattr(params, name)[:] = list(data)
        return params

    def _reduce(self, parts: np.ndarray) -> ReduceParams:
        p = self.problem
        return ReduceParams(
            parts=self.machine.address(parts),
            global_scale_a=self._scales[0],
            global_scale_b=self._scales[1],
            bias=self._bias,
            c=self._c,
            out=self._out,
            elements=p.m * p.n,
            batch=p.batch,
            columns=p.shape[2],
            splits=p.splits,
            **self._shared_params(),
            out_type=DTYPES.index(p.out),
        )

    def _shared_params(self) -> dict[str, int]:
        p = self.problem
        return {
            "batch_scale_a": int(len(p.a.global_scale) > 1),
            "batch_scale_b": int(len(p.b.global_scale) > 1),
            "batch_bias": int(p.bias is not None and len(p.bias) > 1),
            "c_type": DTYPES.index(p.c_type),
            "bias_type": DTYPES.index(p.bias_type),
        }


def check(problem: Problem, seed: int = 0, kind: type[Run] = Run) -> sim.Report:
    """Runs the problem under all checks; D has to be what the model says, and nothing else."""
    run = kind(problem, sim.Machine(problem.variant.chip, seed, sim.Checks(strict=True)))
    report = run.launch()
    np.testing.assert_array_equal(run.result(), expected(problem))
    return report

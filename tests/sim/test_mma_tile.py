"""Whole tiles of MMA outputs equal the model's single outputs, bit for bit, at every vector level.

The single outputs are those of csrc/numerics, which tests/numerics holds against the oracles.
"""

import ctypes
import functools
from dataclasses import dataclass

import numpy as np
import pytest

from support.native import shared_library
from support.repository import ROOT

FORMATS = {"e2m1": 4, "e2m3": 6, "e3m2": 6, "e4m3": 8, "e5m2": 8, "f16": 16, "bf16": 16, "tf32": 19}
SUMS = ("model", "exact", "f32-chain")


@dataclass(frozen=True)
class Kind:
    """One kind of instruction; formats are names, or whether integers are signed."""

    terms: str
    k: int
    a: str | bool
    b: str | bool
    scale: int = 2  # ue4m3, ue8m0, none
    scales: int = 0
    half: bool = False
    saturates: bool = False

    def number(self, name: str | bool) -> int:
        """Of a format in mma_tile_c.cc."""
        return int(name) if isinstance(name, bool) else list(FORMATS).index(name)

    def width(self, name: str | bool) -> int:
        """Bits of a code."""
        return 8 if isinstance(name, bool) else FORMATS[name]


EIGHT_BIT = ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2")
KINDS = [
    Kind("groups", 64, "e2m1", "e2m1", 0, 4),
    Kind("groups", 64, "e2m1", "e2m1", 1, 4),
    Kind("groups", 64, "e2m1", "e2m1", 1, 2),
    *(Kind("products", 32, a, b, 1, 1) for a in EIGHT_BIT for b in EIGHT_BIT),
    *(Kind("products", 32, a, b, half=h) for a, b in zip(EIGHT_BIT, EIGHT_BIT[::-1], strict=True)
      for h in (False, True)),
    Kind("products", 16, "f16", "f16"),
    Kind("products", 16, "f16", "f16", half=True),
    Kind("products", 16, "bf16", "bf16"),
    Kind("products", 8, "tf32", "tf32"),
    *(Kind("integers", 32, a, b, saturates=s) for a in (False, True) for b in (False, True)
      for s in (False, True)),
]  # fmt: skip


class _Problem(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int)
        for name in (
            "terms", "k", "a_format", "b_format", "scale", "scales", "negate_a", "negate_b",
            "half", "saturates", "rows", "columns",
        )
    ]  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL:
    """The tile and the single outputs."""
    sources = [ROOT / "csrc" / "sim" / "ops" / "mma_tile.cc", ROOT / "tests/sim/mma_tile_c.cc"]
    return shared_library("mma_tile", sources, "-O3")


@dataclass
class Operands:
    """Codes and scales of a problem, and its accumulators."""

    a: np.ndarray
    b: np.ndarray
    sa: np.ndarray
    sb: np.ndarray
    c: np.ndarray


def call(
    kind: Kind, o: Operands, negate: tuple[bool, bool], sum_: str, level: int | None
) -> np.ndarray:
    """D of the tile at a level, or of the single outputs."""
    problem = _Problem(
        ("groups", "products", "integers").index(kind.terms), kind.k,
        kind.number(kind.a), kind.number(kind.b), kind.scale, kind.scales,
        *negate, kind.half, kind.saturates, *o.c.shape,
    )  # fmt: skip
    d = o.c.copy()
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (o.a, o.b, o.sa, o.sb)]
    arguments = [ctypes.byref(problem), *pointers, SUMS.index(sum_)]
    out = ctypes.c_void_p(d.ctypes.data)
    if level is None:
        library().c_single(*arguments, out)
    else:
        library().c_tile(*arguments, level, out)
    return d


def integer_sums(kind: Kind, o: Operands) -> np.ndarray:
    """D of the integer kinds."""
    a, b = (
        np.where(is_signed & (x > 127), x.astype(np.int64) - 256, x).astype(np.int64)
        for x, is_signed in ((o.a, bool(kind.a)), (o.b, bool(kind.b)))
    )
    total = a @ b.T + o.c.view(np.int32)
    if kind.saturates:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    return (total & 0xFFFFFFFF).astype(np.uint32)


def random_operands(kind: Kind, rng: np.random.Generator, rows: int, columns: int) -> Operands:
    """Codes of all values, scales near each other (in some rows any), accumulators of all kinds.

    Rows with infinities and NaN are rare, so that most outputs are numbers; some rows are zero.
    """

    def codes(n: int, name: str | bool) -> np.ndarray:
        width = kind.width(name)
        x = rng.integers(0, 1 << width, (n, kind.k)).astype(np.uint32)
        if name in ("f16", "bf16", "tf32", "e5m2", "e4m3"):
            # Most exponents are moderate; the field's top bit next to the sign bit is kept off.
            fraction = {"f16": 10, "bf16": 7, "tf32": 10, "e5m2": 2, "e4m3": 3}[name]
            bits = width - 1 - fraction
            bias = (1 << (bits - 1)) - 1
            spread = min(int(rng.integers(1, 13)), bias)
            field = bias + rng.integers(-spread, spread, x.shape)
            moderate = x & ~np.uint32(((1 << bits) - 1) << fraction) | (
                field.astype(np.uint32) << np.uint32(fraction)
            )
            wild = rng.random(n) < 0.1
            x = np.where(wild[:, None], x, moderate)
        zero = rng.random(x.shape) < rng.choice([0, 0.3, 0.95])
        x = np.where(zero, 0, x)
        x[rng.random(n) < 0.05] = 0
        return np.ascontiguousarray(x, np.uint32)

    def scales(n: int) -> np.ndarray:
        near = int(rng.integers(1, 120 if kind.scale == 0 else 240))
        s = rng.integers(max(near - 8, 0), near + 8, (n, max(kind.scales, 1)))
        s[rng.random(n) < 0.1] = rng.integers(0, 256)
        s[rng.random(s.shape) < 0.02] = 0
        return np.ascontiguousarray(s, np.uint8)

    shape = (rows, columns)
    if kind.terms == "integers":
        c = rng.integers(0, 1 << 32, shape).astype(np.uint32)
        c[:, ::3] = np.where(rng.random(c[:, ::3].shape) < 0.5, 0x7FFFFF00, 0x80000010)
    elif kind.half:
        c = (rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 12, shape)).astype(np.float16)
        c = c.view(np.uint16).astype(np.uint32)
        c[0, ::2] = rng.integers(0, 1 << 16, c[0, ::2].shape)
    else:
        c = rng.standard_normal(shape) * 2.0 ** rng.integers(-40, 40, shape)
        c = c.astype(np.float32).view(np.uint32)
        c[0, ::2] = rng.integers(0, 1 << 32, c[0, ::2].shape)
    c[:, 1::5] = 0
    if kind.terms != "integers":
        c[-1, :4] = (
            [0, 0x8000, 0x7C00, 0x7FFF] if kind.half else [1 << 31, 0xFF800000, 0x7FC00000, 1]
        )
    return Operands(codes(rows, kind.a), codes(columns, kind.b), scales(rows), scales(columns), c)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tiles_equal_single_outputs(kind: Kind) -> None:
    """Random operands with every special value, at widths around those of the vectors."""
    rng = np.random.default_rng(KINDS.index(kind))
    numbers = 0
    for case in range(24):
        columns = (8, 16, 24, 32, 40, 96, 248, 256)[case % 8]
        o = random_operands(kind, rng, 9, columns)
        negate = (bool(case & 1), bool(case & 2)) if kind.terms != "integers" else (False, False)
        if kind.terms == "integers":
            want = integer_sums(kind, o)
        else:
            want = call(kind, o, negate, "model", None)
        for level in range(library().c_best_level() + 1):
            got = call(kind, o, negate, "model", level)
            np.testing.assert_array_equal(got, want, f"level {level}, case {case}")
        numbers += len(np.unique(want))
    assert numbers > 9 * 24 * 8 // 4, "hardly any numbers among the outputs"


@pytest.mark.parametrize("sum_", SUMS[1:])
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], KINDS[5], KINDS[-12]], ids=str)
def test_other_sums(kind: Kind, sum_: str) -> None:
    """The sums that are set beside the model reach every output."""
    rng = np.random.default_rng(7)
    o = random_operands(kind, rng, 5, 24)
    want = call(kind, o, (False, False), sum_, None)
    np.testing.assert_array_equal(call(kind, o, (False, False), sum_, 0), want)
    assert (want != call(kind, o, (False, False), "model", None)).any()


def test_a_single_wrong_bit_is_seen() -> None:
    """The comparison above fails for an operand that differs in one place."""
    o = random_operands(KINDS[0], np.random.default_rng(3), 9, 32)
    want = call(KINDS[0], o, (False, False), "model", 0)
    column = int(np.argmax((o.b != 0).sum(axis=1)))
    k = int(np.argmax(o.b[column] != 0))
    o.b[column, k] ^= 8
    got = call(KINDS[0], o, (False, False), "model", 0)
    assert (got != want).any()
    assert (np.delete(got != want, column, axis=1) == 0).all()

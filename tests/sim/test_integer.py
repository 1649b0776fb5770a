"""Integer, logic and comparison instructions against Python's integers.

Operands are edge values paired with each other, and random ones; 16-bit unary forms are exhausted.
"""

from collections.abc import Callable

import numpy as np
import pytest

from support.integer_forms import INTEGERS, bits_of, check, clamp, cut, read, samples
from support.ptx_forms import evaluate


def divide(a: int, b: int, kind: str) -> int:
    if b == 0:
        return -1
    quotient = abs(a) // abs(b)
    return cut(kind, quotient if (a < 0) == (b < 0) else -quotient)


def remainder(a: int, b: int) -> int:
    if b == 0:
        return a
    return abs(a) % abs(b) * (-1 if a < 0 else 1)


BINARY: dict[str, Callable[[int, int, str], int]] = {
    "add": lambda a, b, k: a + b,
    "sub": lambda a, b, k: a - b,
    "mul.lo": lambda a, b, k: a * b,
    "mul.hi": lambda a, b, k: (a * b) >> bits_of(k),
    "div": divide,
    "rem": lambda a, b, k: remainder(a, b),
    "min": lambda a, b, k: min(a, b),
    "max": lambda a, b, k: max(a, b),
}


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("name", BINARY)
def test_two_operand_arithmetic(name: str, kind: str) -> None:
    """add, sub, mul, div, rem, min, max on every integer type; x / 0 is all ones, x % 0 is x."""
    oracle = BINARY[name]
    check(
        f"{name}.{kind} {{d0}}, {{s0}}, {{s1}};", [kind] * 2, kind, lambda a, b: oracle(a, b, kind)
    )


TERNARY: dict[str, Callable[[int, int, int, str], int]] = {
    "mad.lo": lambda a, b, c, k: a * b + c,
    "mad.hi": lambda a, b, c, k: ((a * b) >> bits_of(k)) + c,
    "sad": lambda a, b, c, k: abs(a - b) + c,
}


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("name", TERNARY)
def test_three_operand_arithmetic(name: str, kind: str) -> None:
    """mad and sad on every integer type."""
    oracle = TERNARY[name]
    check(
        f"{name}.{kind} {{d0}}, {{s0}}, {{s1}}, {{s2}};",
        [kind] * 3,
        kind,
        lambda a, b, c: oracle(a, b, c, kind),
    )


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_widening_products(kind: str) -> None:
    """mul.wide and mad.wide give twice the width."""
    wide = f"{kind[0]}{2 * bits_of(kind)}"
    check(f"mul.wide.{kind} {{d0}}, {{s0}}, {{s1}};", [kind] * 2, wide, lambda a, b: a * b)
    check(
        f"mad.wide.{kind} {{d0}}, {{s0}}, {{s1}}, {{s2}};",
        [kind, kind, wide],
        wide,
        lambda a, b, c: a * b + c,
    )


def low24(kind: str, x: int) -> int:
    x &= 0xFFFFFF
    return x - (1 << 24) if kind == "s32" and x >> 23 else x


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_24_bit_products(kind: str) -> None:
    """mul24 and mad24 take the low 24 bits; .hi is bits 47:16 of the product."""
    product = lambda a, b: low24(kind, a) * low24(kind, b)  # noqa: E731
    pair, triple = "{d0}, {s0}, {s1};", "{d0}, {s0}, {s1}, {s2};"
    check(f"mul24.lo.{kind} {pair}", [kind] * 2, kind, product)
    check(f"mul24.hi.{kind} {pair}", [kind] * 2, kind, lambda a, b: product(a, b) >> 16)
    check(f"mad24.lo.{kind} {triple}", [kind] * 3, kind, lambda a, b, c: product(a, b) + c)
    check(f"mad24.hi.{kind} {triple}", [kind] * 3, kind, lambda a, b, c: (product(a, b) >> 16) + c)


def test_saturating_forms() -> None:
    """.sat clamps to the range of s32."""
    pair, triple = "{d0}, {s0}, {s1};", "{d0}, {s0}, {s1}, {s2};"
    kinds = ["s32"] * 3
    check(f"add.sat.s32 {pair}", kinds[:2], "s32", lambda a, b: clamp("s32", a + b))
    check(f"sub.sat.s32 {pair}", kinds[:2], "s32", lambda a, b: clamp("s32", a - b))
    check(
        f"mad.hi.sat.s32 {triple}", kinds, "s32", lambda a, b, c: clamp("s32", ((a * b) >> 32) + c)
    )
    check(
        f"mad24.hi.sat.s32 {triple}",
        kinds,
        "s32",
        lambda a, b, c: clamp("s32", (low24("s32", a) * low24("s32", b) >> 16) + c),
    )


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
def test_absolute_value_and_negation(kind: str) -> None:
    """abs and neg wrap at the most negative number."""
    check(f"abs.{kind} {{d0}}, {{s0}};", [kind], kind, abs)
    check(f"neg.{kind} {{d0}}, {{s0}};", [kind], kind, lambda a: -a)


@pytest.mark.parametrize("kind", ["u16", "s16"])
@pytest.mark.parametrize("name", ["add", "min", "max", "min.relu", "max.relu"])
def test_packed_halves(name: str, kind: str) -> None:
    """u16x2 and s16x2 work on each half by itself."""
    functions = {"add": lambda a, b: a + b, "min": min, "max": max}
    base = functions[name.split(".")[0]]

    def oracle(a: int, b: int) -> int:
        result = 0
        for shift in (0, 16):
            value = base(read(kind, a >> shift & 0xFFFF), read(kind, b >> shift & 0xFFFF))
            value = max(value, 0) if "relu" in name else value
            result |= (value & 0xFFFF) << shift
        return result

    check(f"{name}.{kind}x2 {{d0}}, {{s0}}, {{s1}};", ["u32"] * 2, "u32", oracle)


@pytest.mark.parametrize("name", ["min", "max"])
def test_relu_of_s32(name: str) -> None:
    """min.relu and max.relu clamp at zero."""
    function = {"min": min, "max": max}[name]
    check(
        f"{name}.relu.s32 {{d0}}, {{s0}}, {{s1}};", ["s32"] * 2, "s32",
        lambda a, b: max(0, function(a, b)),
    )  # fmt: skip


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_counting(bits: int) -> None:
    """popc, clz, brev, bfind with and without shiftamt."""
    kind = f"u{bits}"
    check(f"popc.b{bits} {{d0}}, {{s0}};", [kind], "u32", lambda a: a.bit_count())
    check(f"clz.b{bits} {{d0}}, {{s0}};", [kind], "u32", lambda a: bits - a.bit_length())
    check(f"brev.b{bits} {{d0}}, {{s0}};", [kind], kind, lambda a: int(f"{a:0{bits}b}"[::-1], 2))
    for sign in "us":

        def find(a: int) -> int:
            return (~a if a < 0 else a).bit_length() - 1

        k = f"{sign}{bits}"
        check(f"bfind.{k} {{d0}}, {{s0}};", [k], "u32", find)
        check(
            f"bfind.shiftamt.{k} {{d0}}, {{s0}};", [k], "u32",
            lambda a: -1 if find(a) < 0 else bits - 1 - find(a),
        )  # fmt: skip


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields(bits: int) -> None:
    """bfe and bfi with positions and lengths beyond the register."""
    for sign in "us":
        kind = f"{sign}{bits}"

        def extract(a: int, position: int, length: int) -> int:
            position, length = position & 255, length & 255
            if kind[0] == "s":  # noqa: B023
                return (
                    a >> position & ((1 << length) - 1)
                    if length == 0
                    else _signed(a >> position, length)
                )
            return a >> position & ((1 << length) - 1)

        check(f"bfe.{kind} {{d0}}, {{s0}}, {{s1}}, {{s2}};", [kind, "u32", "u32"], kind, extract)

    def insert(a: int, b: int, position: int, length: int) -> int:
        position, length = position & 255, length & 255
        mask = ((1 << length) - 1) << position
        return (b & ~mask) | (a << position & mask)

    kinds = [f"u{bits}"] * 2 + ["u32"] * 2
    check(f"bfi.b{bits} {{d0}}, {{s0}}, {{s1}}, {{s2}}, {{s3}};", kinds, f"u{bits}", insert)


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_szext_and_bmsk(mode: str) -> None:
    """Sign or zero extension from a bit width, and masks from a start and a width."""
    count = (lambda n: min(n, 32)) if mode == "clamp" else (lambda n: n & 31)
    check(
        f"szext.{mode}.s32 {{d0}}, {{s0}}, {{s1}};", ["s32", "u32"], "s32",
        lambda a, n: _signed(a, count(n)) if count(n) else 0,
    )  # fmt: skip
    check(
        f"szext.{mode}.u32 {{d0}}, {{s0}}, {{s1}};", ["u32", "u32"], "u32",
        lambda a, n: a & ((1 << count(n)) - 1),
    )  # fmt: skip
    check(
        f"bmsk.{mode}.b32 {{d0}}, {{s0}}, {{s1}};", ["u32", "u32"], "u32",
        lambda a, b: ((1 << count(b)) - 1) << count(a),
    )  # fmt: skip


@pytest.mark.parametrize("b", ["u32", "s32"])
@pytest.mark.parametrize("a", ["u32", "s32"])
def test_dot_products(a: str, b: str) -> None:
    """dp4a and dp2a with every signedness."""

    def part(kind: str, x: int, at: int, bits: int) -> int:
        return read(f"{kind[0]}{bits}", x >> at & ((1 << bits) - 1))

    check(
        f"dp4a.{a}.{b} {{d0}}, {{s0}}, {{s1}}, {{s2}};", ["u32"] * 3, "u32",
        lambda x, y, z: z + sum(part(a, x, s, 8) * part(b, y, s, 8) for s in (0, 8, 16, 24)),
    )  # fmt: skip
    for half, first in (("lo", 0), ("hi", 16)):
        check(
            f"dp2a.{half}.{a}.{b} {{d0}}, {{s0}}, {{s1}}, {{s2}};", ["u32"] * 3, "u32",
            lambda x, y, z, first=first: z
            + sum(part(a, x, 16 * i, 16) * part(b, y, first + 8 * i, 8) for i in (0, 1)),
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_extended_precision(kind: str) -> None:
    """Carry chains over three words equal arithmetic on wide integers."""
    bits = bits_of(kind)
    mask = (1 << bits) - 1
    a = samples([kind] * 3, seed=1)
    b = samples([kind] * 3, seed=2)
    rng = np.random.default_rng(3)
    b = [rng.permutation(x) for x in b]

    def wide(words: list[np.ndarray], row: int) -> int:
        return sum(int(w[row]) << (bits * i) for i, w in enumerate(words))

    for op, sign in (("add", 1), ("sub", -1)):
        got = evaluate(
            f"{op}.cc.{kind} {{d0}}, {{s0}}, {{s3}}; {op}c.cc.{kind} {{d1}}, {{s1}}, {{s4}}; "
            f"{op}c.{kind} {{d2}}, {{s2}}, {{s5}};",
            [*a, *b], [bits] * 3,
        )  # fmt: skip
        for row in range(len(a[0])):
            want = wide(a, row) + sign * wide(b, row)
            assert [int(g[row]) for g in got] == [want >> (bits * i) & mask for i in range(3)]

    # (a1 a0) * b0 + (c1 c0), in three words.
    got = evaluate(
        f"mad.lo.cc.{kind} {{d0}}, {{s0}}, {{s2}}, {{s3}}; "
        f"madc.hi.cc.{kind} {{d1}}, {{s0}}, {{s2}}, {{s4}}; "
        f"madc.hi.{kind} {{d2}}, {{s1}}, {{s2}}, 0; "
        f"mad.hi.cc.{kind} {{d2}}, {{s0}}, {{s2}}, {{s4}}; "
        f"madc.lo.cc.{kind} {{d2}}, {{s1}}, {{s2}}, {{d2}}; madc.lo.{kind} {{d3}}, 0, 0, 0;",
        [a[0], a[1], b[0], b[1], b[2]],
        [bits] * 4,
    )
    for row in range(len(a[0])):
        x, y, p = (read(kind, int(v[row])) for v in (a[0], a[1], b[0]))
        c0, c1 = int(b[1][row]), int(b[2][row])
        low = ((x * p) & mask) + c0
        middle = ((x * p) >> bits & mask) + c1 + (low >> bits)
        again = ((x * p) >> bits & mask) + c1
        last = ((y * p) & mask) + (again & mask) + (again >> bits)
        assert [int(g[row]) for g in got] == [low & mask, middle & mask, last & mask, last >> bits]

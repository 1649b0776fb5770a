"""Logic, shifts, byte permutation, comparison and selection against Python's integers."""

import operator
from collections.abc import Callable

import numpy as np
import pytest

from support.integer_forms import INTEGERS, bits_of, check, read, samples
from support.ptx_forms import evaluate

UNSIGNED = ("u16", "u32", "u64")
COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "lo": operator.lt, "ls": operator.le,
    "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip
COMBINE: dict[str, Callable[[bool, bool], bool]] = {
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "xor": operator.ne,
}


@pytest.mark.parametrize("kind", UNSIGNED)
def test_bitwise_logic(kind: str) -> None:
    """and, or, xor, not, cnot on every width."""
    bits = bits_of(kind)
    for name, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        check(f"{name}.b{bits} {{d0}}, {{s0}}, {{s1}};", [kind] * 2, kind, function)
    check(f"not.b{bits} {{d0}}, {{s0}};", [kind], kind, lambda a: ~a)
    check(f"cnot.b{bits} {{d0}}, {{s0}};", [kind], kind, lambda a: int(a == 0))


def test_logic_on_predicates() -> None:
    """and, or, xor, not, mov on predicates."""
    a = np.array([0, 0, 1, 1], np.uint8)
    b = np.array([0, 1, 0, 1], np.uint8)
    for name, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        (got,) = evaluate(f"{name}.pred {{d0}}, {{s0}}, !{{s1}};", [a, b], [1], predicates=(0, 1))
        np.testing.assert_array_equal(got, function(a, 1 - b))
    (got,) = evaluate("not.pred {d0}, {s0};", [a], [1], predicates=(0,))
    np.testing.assert_array_equal(got, 1 - a)
    (got,) = evaluate("mov.pred {d0}, {s0};", [a], [1], predicates=(0,))
    np.testing.assert_array_equal(got, a)
    for constant, value in (("-1", 1), ("0", 0)):  # as NVRTC writes it
        (got,) = evaluate(
            f"mov.pred {{d0}}, {constant}; and.pred {{d0}}, {{d0}}, {{s0}};",
            [a],
            [1],
            predicates=(0,),
        )
        np.testing.assert_array_equal(got, a * value)


def test_integers_are_predicates() -> None:
    """As a source operand 0 is false and every other integer true."""
    a = np.array([0, 1], np.uint8)
    for text, want in (
        ("mov.pred {d0}, -1;", [1, 1]),
        ("mov.pred {d0}, 0;", [0, 0]),
        ("and.pred {d0}, {s0}, 2;", [0, 1]),
        ("or.pred {d0}, 0, {s0};", [0, 1]),
        ("xor.pred {d0}, {s0}, 1;", [1, 0]),
    ):
        (got,) = evaluate(text, [a], [1], predicates=(0,))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("table", [0x00, 0x80, 0xE8, 0x96, 0x3C, 0xFF, 0x1B])
def test_lop3_looks_up_its_table(table: int) -> None:
    """Bit 4a + 2b + c of the table is the result for bits a, b, c."""

    def oracle(a: int, b: int, c: int) -> int:
        return sum(
            (table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i
            for i in range(32)
        )

    check(f"lop3.b32 {{d0}}, {{s0}}, {{s1}}, {{s2}}, {table};", ["u32"] * 3, "u32", oracle)


@pytest.mark.parametrize("kind", [*INTEGERS, "b16", "b32", "b64"])
def test_shifts(kind: str) -> None:
    """Counts beyond the width give 0, or the sign for signed right shifts."""
    bits = bits_of(kind)
    check(f"shr.{kind} {{d0}}, {{s0}}, {{s1}};", [kind, "u32"], kind, lambda a, n: a >> min(n, 64))
    if kind[0] == "b":
        check(
            f"shl.{kind} {{d0}}, {{s0}}, {{s1}};", [kind, "u32"], kind,
            lambda a, n: a << n if n < bits else 0,
        )  # fmt: skip


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_funnel_shifts(mode: str) -> None:
    """shf shifts the pair {b, a}; .l gives its upper word, .r its lower one."""
    count = (lambda n: min(n, 32)) if mode == "clamp" else (lambda n: n & 31)
    operands = "{d0}, {s0}, {s1}, {s2};"
    check(
        f"shf.l.{mode}.b32 {operands}", ["u32"] * 3, "u32",
        lambda a, b, n: (b << 32 | a) << count(n) >> 32,
    )  # fmt: skip
    check(
        f"shf.r.{mode}.b32 {operands}",
        ["u32"] * 3,
        "u32",
        lambda a, b, n: (b << 32 | a) >> count(n),
    )


def permute(mode: str, a: int, b: int, selector: int) -> int:
    source = [(b << 32 | a) >> (8 * i) & 0xFF for i in range(8)]
    s = selector & 3
    index = {
        "f4e": lambda k: s + k,
        "b4e": lambda k: (s - k) % 8,
        "rc8": lambda k: s,
        "ecl": lambda k: max(k, s),
        "ecr": lambda k: min(k, s),
        "rc16": lambda k: 2 * (s & 1) + (k & 1),
    }
    result = 0
    for k in range(4):
        if mode:
            byte = source[index[mode](k)]
        else:
            nibble = selector >> (4 * k) & 15
            byte = source[nibble & 7]
            if nibble & 8:
                byte = 0xFF if byte & 0x80 else 0
        result |= byte << (8 * k)
    return result


@pytest.mark.parametrize("mode", ["", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"])
def test_byte_permutation(mode: str) -> None:
    """prmt in every mode; without one, bit 3 of a nibble replicates the byte's sign."""
    name = f"prmt.b32.{mode}" if mode else "prmt.b32"
    check(
        f"{name} {{d0}}, {{s0}}, {{s1}}, {{s2}};", ["u32"] * 3, "u32",
        lambda a, b, s: permute(mode, a, b, s),
    )  # fmt: skip


def test_find_nth_set_bit() -> None:
    """fns counts from a base upward or downward."""

    def oracle(mask: int, base: int, offset: int) -> int:
        if offset == 0:
            return base if base < 32 and mask >> base & 1 else 0xFFFFFFFF
        step = 1 if offset > 0 else -1
        found = [p for p in range(base, 32 if step > 0 else -1, step) if p < 32 and mask >> p & 1]
        return found[abs(offset) - 1] if len(found) >= abs(offset) else 0xFFFFFFFF

    rng = np.random.default_rng(0)
    mask = rng.integers(0, 2**32, 500, np.uint32)
    base = rng.integers(0, 32, 500).astype(np.uint32)
    offset = rng.integers(-8, 9, 500).astype(np.int32)
    (got,) = evaluate("fns.b32 {d0}, {s0}, {s1}, {s2};", [mask, base, offset.view(np.uint32)], [32])
    want = [oracle(int(m), int(b), int(o)) for m, b, o in zip(mask, base, offset, strict=True)]
    np.testing.assert_array_equal(got, np.array(want, np.uint32))


def comparisons(kind: str) -> list[str]:
    if kind[0] == "b":
        return ["eq", "ne"]
    signed = ["eq", "ne", "lt", "le", "gt", "ge"]
    return signed if kind[0] == "s" else [*signed, "lo", "ls", "hi", "hs"]


@pytest.mark.parametrize("kind", [*INTEGERS, "b16", "b32", "b64"])
def test_setp_of_integers(kind: str) -> None:
    """Both destinations; the second is the complement before the combination."""
    a, b = samples([kind] * 2)
    flag = np.arange(len(a)) % 3 % 2
    c = flag.astype(np.uint8)
    for name in comparisons(kind):
        p, q = evaluate(f"setp.{name}.{kind} {{d0}}|{{d1}}, {{s0}}, {{s1}};", [a, b], [1, 1])
        want = np.array(
            [
                COMPARE[name](read(kind, int(x)), read(kind, int(y)))
                for x, y in zip(a, b, strict=True)
            ]
        )
        np.testing.assert_array_equal(p, want)
        np.testing.assert_array_equal(q, ~want)
        for how, function in COMBINE.items():
            p, q = evaluate(
                f"setp.{name}.{how}.{kind} {{d0}}|{{d1}}, {{s0}}, {{s1}}, {{s2}};",
                [a, b, c], [1, 1], predicates=(2,),
            )  # fmt: skip
            np.testing.assert_array_equal(
                p, [function(bool(x), bool(y)) for x, y in zip(want, c, strict=True)]
            )
            np.testing.assert_array_equal(
                q, [function(not x, bool(y)) for x, y in zip(want, c, strict=True)]
            )


@pytest.mark.parametrize("kind", [*INTEGERS, "b16", "b32", "b64"])
def test_set_of_integers(kind: str) -> None:
    """set gives all ones, or 1.0 for f32."""
    a, b = samples([kind] * 2)
    c = (np.arange(len(a)) % 2).astype(np.uint8)
    for name in comparisons(kind):
        want = np.array(
            [
                COMPARE[name](read(kind, int(x)), read(kind, int(y)))
                for x, y in zip(a, b, strict=True)
            ]
        )
        for to, one in (("u32", 0xFFFFFFFF), ("s32", 0xFFFFFFFF), ("f32", 0x3F800000)):
            (got,) = evaluate(f"set.{name}.{to}.{kind} {{d0}}, {{s0}}, {{s1}};", [a, b], [32])
            np.testing.assert_array_equal(got, np.where(want, one, 0))
            if name not in ("eq", "ne", "lt", "le", "gt", "ge"):
                continue
            for how, function in COMBINE.items():
                (got,) = evaluate(
                    f"set.{name}.{how}.{to}.{kind} {{d0}}, {{s0}}, {{s1}}, {{s2}};",
                    [a, b, c], [32], predicates=(2,),
                )  # fmt: skip
                combined = [function(bool(x), bool(y)) for x, y in zip(want, c, strict=True)]
                np.testing.assert_array_equal(got, np.where(combined, one, 0))


SELECTED = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")


@pytest.mark.parametrize("kind", SELECTED)
def test_selection(kind: str) -> None:
    """selp by a predicate; slct by a sign, where a NaN counts as negative."""
    unsigned = f"u{bits_of(kind)}"
    a, b = samples([unsigned] * 2)
    p = (np.arange(len(a)) % 2).astype(np.uint8)
    (got,) = evaluate(
        f"selp.{kind} {{d0}}, {{s0}}, {{s1}}, {{s2}};", [a, b, p], [bits_of(kind)], predicates=(2,)
    )
    np.testing.assert_array_equal(got, np.where(p, a, b))
    sign = (np.arange(len(a)) % 7 - 3).astype(np.int32)
    (got,) = evaluate(
        f"slct.{kind}.s32 {{d0}}, {{s0}}, {{s1}}, {{s2}};",
        [a, b, sign.view(np.uint32)],
        [bits_of(kind)],
    )
    np.testing.assert_array_equal(got, np.where(sign >= 0, a, b))
    values = np.array([1.0, -1.0, 0.0, -0.0, np.nan, np.inf, -np.inf, -1e-40], np.float32)
    real = np.resize(values, len(a))
    for ftz in ("", ".ftz"):
        (got,) = evaluate(
            f"slct{ftz}.{kind}.f32 {{d0}}, {{s0}}, {{s1}}, {{s2}};",
            [a, b, real.view(np.uint32)],
            [bits_of(kind)],
        )
        flushed = np.where(np.abs(real) < 2.0**-126, np.float32(0), real) if ftz else real
        np.testing.assert_array_equal(got, np.where(flushed >= 0, a, b))

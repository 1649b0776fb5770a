"""f16 and bf16 arithmetic and comparison, scalar and packed.

The oracle computes with fractions and picks the nearest code from the table of all values; float64
serves for special values and signs of zero.
"""

from fractions import Fraction

import numpy as np
import pytest

from oracles import tables
from support.ptx_forms import evaluate

WIDEN = {"f16": tables.f16_to_f32, "bf16": tables.bf16_to_f32}
NARROW = {"f16": tables.f32_to_f16, "bf16": tables.f32_to_bf16}
NAN = 0x7FFF
INFINITY = {"f16": 0x7C00, "bf16": 0x7F80}


def codes(kind: str, n: int, seed: int) -> np.ndarray:
    """Edges (zeros, subnormals, largest, infinities, NaN) and random codes of near size."""
    rng = np.random.default_rng(seed)
    top = INFINITY[kind]
    edges = np.array(
        [0, 1, 2, 0x80, 0x400, 0x3C00, 0x3F80, top - 1, top, top + 1, 0x7FFF], np.uint16
    )
    edges = np.concatenate([edges, edges | 0x8000])
    near = NARROW[kind]((rng.standard_normal(n) * 8).astype(np.float32))
    return rng.permutation(np.concatenate([edges, near, rng.integers(0, 1 << 16, n, np.uint16)]))


def value_table(kind: str) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return WIDEN[kind](np.arange(1 << 16, dtype=np.uint16)).astype(np.float64)


TABLES = {kind: value_table(kind) for kind in WIDEN}
MAGNITUDES = {kind: TABLES[kind][: INFINITY[kind]] for kind in WIDEN}


def nearest(kind: str, exact: Fraction) -> int:
    """The code nearest to a number that is not zero, ties to even; from the table of magnitudes."""
    grid = MAGNITUDES[kind]
    magnitude = abs(exact)
    k = int(np.searchsorted(grid, min(float(magnitude), float(grid[-1])), side="right")) - 1
    while k > 0 and Fraction(float(grid[k])) > magnitude:
        k -= 1
    while k + 1 < len(grid) and Fraction(float(grid[k + 1])) <= magnitude:
        k += 1
    low = Fraction(float(grid[k]))
    step = (
        Fraction(float(grid[k + 1])) - low
        if k + 1 < len(grid)
        else low - Fraction(float(grid[k - 1]))
    )
    twice = 2 * (magnitude - low)
    code = k + (twice > step or (twice == step and k % 2 == 1))
    return code | (0x8000 if exact < 0 else 0)


def operate(kind: str, op: str, row: tuple[int, ...]) -> int:
    x = [float(TABLES[kind][c]) for c in row]
    with np.errstate(all="ignore"):
        a, b = np.float64(x[0]), np.float64(x[1])
        c = np.float64(x[2]) if len(x) > 2 else np.float64(0)
        host = {
            "add": lambda: a + b,
            "sub": lambda: a - b,
            "mul": lambda: a * b,
            "fma": lambda: a * b + c,
        }[op]()
    if np.isnan(host):
        return NAN
    if not np.isfinite(x).all():
        return INFINITY[kind] | (0x8000 if host < 0 else 0)
    f = [Fraction(v) for v in x]
    exact = {"add": lambda: f[0] + f[1], "sub": lambda: f[0] - f[1], "mul": lambda: f[0] * f[1],
             "fma": lambda: f[0] * f[1] + f[2]}[op]()  # fmt: skip
    if exact == 0:
        return 0x8000 if np.signbit(host) else 0
    return nearest(kind, exact)


def clamp(kind: str, code: int, modifier: str) -> int:
    one = {"f16": 0x3C00, "bf16": 0x3F80}[kind]
    if modifier == ".sat":
        return 0 if code & 0x7FFF > INFINITY[kind] or code & 0x8000 else min(code, one)
    if modifier == ".relu":
        return 0 if code & 0x8000 else code
    return code


FORMS = [("f16", op, m) for op in ("add", "sub", "mul", "fma") for m in ("", ".sat")]
FORMS += [("f16", "fma", ".relu"), ("bf16", "fma", ".relu")]
FORMS += [("bf16", op, "") for op in ("add", "sub", "mul", "fma")]


@pytest.mark.parametrize(("kind", "op", "modifier"), FORMS)
def test_half_arithmetic_rounds_once(kind: str, op: str, modifier: str) -> None:
    """add, sub, mul, fma of f16 and bf16, scalar and packed, .sat and .relu; NaN is 0x7FFF."""
    n = 3 if op == "fma" else 2
    args = [codes(kind, 150, seed) for seed in range(n)]
    operands = ", ".join(f"{{s{k}}}" for k in range(n))
    want = np.array(
        [
            clamp(kind, operate(kind, op, r), modifier)
            for r in zip(*(a.tolist() for a in args), strict=True)
        ],
        np.uint16,
    )
    rounding = ".rn"
    (got,) = evaluate(f"{op}{rounding}{modifier}.{kind} {{d0}}, {operands};", args, [16])
    np.testing.assert_array_equal(got, want)
    pairs = [a.astype(np.uint32) | np.roll(a, 3).astype(np.uint32) << 16 for a in args]
    (got,) = evaluate(f"{op}{rounding}{modifier}.{kind}x2 {{d0}}, {operands};", pairs, [32])
    np.testing.assert_array_equal(got & 0xFFFF, want)
    np.testing.assert_array_equal(got >> 16, np.roll(want, 3))


@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_f16_ftz_flushes_operands_and_results(op: str) -> None:
    """.ftz makes subnormal f16 operands and results zero of the same sign."""
    n = 3 if op == "fma" else 2
    args = [codes("f16", 100, seed) for seed in range(10, 10 + n)]

    def flush(code: int) -> int:
        return code & 0x8000 if code & 0x7C00 == 0 else code

    operands = ", ".join(f"{{s{k}}}" for k in range(n))
    (got,) = evaluate(f"{op}.rn.ftz.f16 {{d0}}, {operands};", args, [16])
    want = [
        flush(operate("f16", op, tuple(map(flush, r))))
        for r in zip(*(a.tolist() for a in args), strict=True)
    ]
    np.testing.assert_array_equal(got, np.array(want, np.uint16))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_unary_halves_exhaustively(kind: str) -> None:
    """abs and neg on every code; ex2 and tanh within half an ulp of float64."""
    a = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    np.testing.assert_array_equal(evaluate(f"abs.{kind} {{d0}}, {{s0}};", [a], [16])[0], a & 0x7FFF)
    np.testing.assert_array_equal(evaluate(f"neg.{kind} {{d0}}, {{s0}};", [a], [16])[0], a ^ 0x8000)
    pair = a.astype(np.uint32) << 16 | 0x8001
    (got,) = evaluate(f"neg.{kind}x2 {{d0}}, {{s0}};", [pair], [32])
    np.testing.assert_array_equal(got, pair ^ 0x80008000)
    (got,) = evaluate(f"abs.{kind}x2 {{d0}}, {{s0}};", [pair], [32])
    np.testing.assert_array_equal(got, pair & 0x7FFF7FFF)
    if kind == "f16":
        small = (a & 0x7C00) == 0
        for op, plain in (("abs", a & 0x7FFF), ("neg", a ^ 0x8000)):
            (got,) = evaluate(f"{op}.ftz.f16 {{d0}}, {{s0}};", [a], [16])
            np.testing.assert_array_equal(got, np.where(small, plain & 0x8000, plain))
    x = TABLES[kind]
    for name, function in (
        ("ex2.approx" + (".ftz" if kind == "bf16" else ""), np.exp2),
        ("tanh.approx", np.tanh),
    ):
        with np.errstate(over="ignore", invalid="ignore"):
            exact = function(x)
            want = NARROW[kind](exact.astype(np.float32))
            want = np.where(np.isnan(exact), NAN, want)
        if ".ftz" in name:
            want = np.where((want & 0x7F80) == 0, want & 0x8000, want)
        (got,) = evaluate(f"{name}.{kind} {{d0}}, {{s0}};", [a], [16])
        # Through f32 the oracle rounds twice: one code apart at most.
        assert np.abs(got.astype(int) - want.astype(int)).max() <= 1
        (two,) = evaluate(f"{name}.{kind}x2 {{d0}}, {{s0}};", [a.astype(np.uint32) << 16 | a], [32])
        np.testing.assert_array_equal(two, got.astype(np.uint32) << 16 | got)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_minimum_and_maximum_of_halves(kind: str, op: str) -> None:
    """A NaN loses unless .NaN; -0 is less than +0. .xorsign.abs: of magnitudes, with both signs."""
    a, b = codes(kind, 200, 1), codes(kind, 200, 2)
    for nan in ("", ".NaN"):
        for ftz in ("", ".ftz") if kind == "f16" else ("",):

            def oracle(x: int, y: int) -> int:
                if ftz:  # noqa: B023
                    x, y = (v & 0x8000 if v & 0x7C00 == 0 else v for v in (x, y))
                nx, ny = (v & 0x7FFF > INFINITY[kind] for v in (x, y))
                if nx or ny:
                    return NAN if nan or (nx and ny) else (y if nx else x)  # noqa: B023
                order = [(-(v & 0x7FFF) - 1 if v & 0x8000 else v) for v in (x, y)]
                return x if (order[0] > order[1]) == (op == "max") else y

            def signed(x: int, y: int) -> int:
                magnitude = oracle(x & 0x7FFF, y & 0x7FFF)
                return NAN if magnitude == NAN else magnitude | (x ^ y) & 0x8000

            for suffix, rule in (("", oracle), (".xorsign.abs", signed)):
                want = np.array(
                    [rule(int(x), int(y)) for x, y in zip(a, b, strict=True)], np.uint16
                )
                name = f"{op}{ftz}{nan}{suffix}.{kind}"
                (got,) = evaluate(f"{name} {{d0}}, {{s0}}, {{s1}};", [a, b], [16])
                np.testing.assert_array_equal(got, want)
                pairs = [v.astype(np.uint32) << 16 | v for v in (a, b)]
                (got,) = evaluate(f"{name}x2 {{d0}}, {{s0}}, {{s1}};", pairs, [32])
                np.testing.assert_array_equal(got, want.astype(np.uint32) << 16 | want)


COMPARISONS = {
    "eq": "e", "ne": "lg", "lt": "l", "le": "le", "gt": "g", "ge": "ge", "equ": "eu", "neu": "lgu",
    "ltu": "lu", "leu": "leu", "gtu": "gu", "geu": "geu", "num": "leg", "nan": "u",
}  # fmt: skip


def holds(name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    outcome = np.where(x < y, "l", np.where(x == y, "e", np.where(x > y, "g", "u")))
    return np.isin(outcome, list(COMPARISONS[name]))


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparison_of_floats(name: str) -> None:
    """setp and set of f32, f64, f16, bf16 and the packed types, ordered and unordered."""
    edges = np.array(
        [0, -0.0, 1, -1, 2**-130, -(2**-140), np.inf, -np.inf, np.nan, 3.5], np.float32
    )
    x, y = (v.ravel() for v in np.meshgrid(edges, edges))
    c = (np.arange(len(x)) % 2).astype(np.uint8)
    sources = {
        "f32": (x.view(np.uint32), y.view(np.uint32)),
        "f64": (x.astype(np.float64).view(np.uint64), y.astype(np.float64).view(np.uint64)),
    }
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for kind in ("f16", "bf16"):
            sources[kind] = (NARROW[kind](x), NARROW[kind](y))
        for kind, (a, b) in sources.items():
            values = [
                v.view({4: np.float32, 8: np.float64}[v.itemsize])
                if v.itemsize > 2
                else WIDEN[kind](v)
                for v in (a, b)
            ]
            want = holds(name, *values)
            p, q = evaluate(f"setp.{name}.{kind} {{d0}}|{{d1}}, {{s0}}, {{s1}};", [a, b], [1, 1])
            np.testing.assert_array_equal(p, want)
            np.testing.assert_array_equal(q, ~want)
            for how, f in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
                (p,) = evaluate(
                    f"setp.{name}.{how}.{kind} {{d0}}, {{s0}}, {{s1}}, {{s2}};",
                    [a, b, c],
                    [1],
                    predicates=(2,),
                )
                np.testing.assert_array_equal(p, f(want, c))
            tiny = {"f32": 2.0**-126, "f16": 2.0**-14}.get(kind)
            flushed = (
                holds(name, *(np.where(np.abs(v) < tiny, 0, v) for v in values)) if tiny else want
            )
            for ftz, result in (("", want), (".ftz", flushed)) if tiny else (("", want),):
                if ftz:
                    (p,) = evaluate(f"setp.{name}{ftz}.{kind} {{d0}}, {{s0}}, {{s1}};", [a, b], [1])
                    np.testing.assert_array_equal(p, result)
                for to in ("u32", "s32", "f32") if kind in ("f32", "f64") else ("u32", "s32"):
                    (got,) = evaluate(
                        f"set.{name}{ftz}.{to}.{kind} {{d0}}, {{s0}}, {{s1}};", [a, b], [32]
                    )
                    np.testing.assert_array_equal(
                        got, np.where(result, 0x3F800000 if to == "f32" else 0xFFFFFFFF, 0)
                    )
            if kind in ("f32", "f64"):
                continue
            one = {"f16": 0x3C00, "bf16": 0x3F80}[kind]
            pairs = [v.astype(np.uint32) | np.roll(v, 1).astype(np.uint32) << 16 for v in (a, b)]
            both = np.where(want, one, 0) | np.where(np.roll(want, 1), one << 16, 0)
            (got,) = evaluate(f"set.{name}.{kind}x2.{kind}x2 {{d0}}, {{s0}}, {{s1}};", pairs, [32])
            np.testing.assert_array_equal(got, both)
            if tiny:
                (got,) = evaluate(f"set.{name}.ftz.f16.f16 {{d0}}, {{s0}}, {{s1}};", [a, b], [16])
                np.testing.assert_array_equal(got, np.where(flushed, one, 0))
                (got,) = evaluate(
                    f"set.{name}.ftz.f16x2.f16x2 {{d0}}, {{s0}}, {{s1}};", pairs, [32]
                )
                np.testing.assert_array_equal(got & 0xFFFF, np.where(flushed, one, 0))
            (got,) = evaluate(f"set.{name}.{kind}.{kind} {{d0}}, {{s0}}, {{s1}};", [a, b], [16])
            np.testing.assert_array_equal(got, np.where(want, one, 0))
            p, q = evaluate(f"setp.{name}.{kind}x2 {{d0}}|{{d1}}, {{s0}}, {{s1}};", pairs, [1, 1])
            np.testing.assert_array_equal(p, want)
            np.testing.assert_array_equal(q, np.roll(want, 1))

"""Floating-point instructions against exact fractions, and against NumPy for special values.

An exact result is a Fraction and is rounded on the grid of its binade.
"""

import math
from fractions import Fraction

import numpy as np
import pytest

from support.ptx_forms import evaluate

MODES = ("rn", "rz", "rm", "rp")
NAN32 = 0x7FFFFFFF
F32_EDGES = np.array(
    [0.0, -0.0, 1.0, -1.0, 1.5, 2**-126, -(2**-126), 2**-149, 3 * 2**-149, 2**-127, 0.1, -3.7,
     1 + 2**-23, 1 - 2**-24, 3.4028234e38, -3.4028234e38, np.inf, -np.inf, np.nan, 6.0, 1 / 3],
    np.float32,
)  # fmt: skip


def f32_pairs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edge values with each other, and random bits with near exponents."""
    rng = np.random.default_rng(7)
    a, b = (x.ravel() for x in np.meshgrid(F32_EDGES, F32_EDGES))
    c = np.roll(a, 5)
    bits = rng.integers(0, 2**32, (3, 300), np.uint32).view(np.float32)
    scale = np.exp2(rng.integers(-6, 7, (3, 300))).astype(np.float32)
    near = rng.standard_normal((3, 300)).astype(np.float32) * scale
    return tuple(np.concatenate([x, y, z]) for x, y, z in zip((a, b, c), bits, near, strict=True))  # type: ignore[return-value]


# Smallest exponent and mantissa bits.
GRID = {np.float32: (-126, 23), np.float64: (-1022, 52)}


def rounded(exact: Fraction, mode: str, dtype: type) -> float:
    """`exact` (not zero) as a multiple of its binade's step, rounded once in the mode."""
    least, mantissa = GRID[dtype]
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, least) - mantissa)
    steps, rest = divmod(magnitude, step)
    up = {"rz": False, "rp": exact > 0 and rest > 0, "rm": exact < 0 and rest > 0}.get(
        mode, 2 * rest > step or (2 * rest == step and steps % 2 == 1)
    )
    value = (steps + up) * step
    top = float(np.finfo(dtype).max)
    if value > Fraction(top):
        value_float = top if mode == "rz" or mode == ("rm" if exact > 0 else "rp") else math.inf
    else:
        value_float = float(value)
    return -value_float if exact < 0 else value_float


def arithmetic(op: str, args: tuple[float, ...], mode: str, dtype: type) -> float:
    """One operation, rounded once in the mode."""
    with np.errstate(all="ignore"):
        x = [dtype(v) for v in args]
        if op == "add":
            host = x[0] + x[1]
        elif op == "sub":
            host = x[0] - x[1]
        elif op == "mul":
            host = x[0] * x[1]
        elif op == "div":
            host = x[0] / x[1]
        elif op == "rcp":
            host = dtype(1) / x[0]
        elif op == "sqrt":
            host = np.sqrt(x[0])
        else:
            host = x[0] * x[1] + x[2]  # only for its special values
    special = not all(math.isfinite(v) for v in x) or (op in ("div", "rcp") and x[-1] == 0)
    if special or (op == "sqrt" and x[0] <= 0):
        return float(host)
    f = [Fraction(float(v)) for v in x]
    if op == "sqrt":
        return _rounded_root(f[0], mode, dtype)
    exact = {
        "add": lambda: f[0] + f[1], "sub": lambda: f[0] - f[1], "mul": lambda: f[0] * f[1],
        "div": lambda: f[0] / f[1], "rcp": lambda: 1 / f[0], "fma": lambda: f[0] * f[1] + f[2],
    }[op]()  # fmt: skip
    if exact != 0:
        return float(rounded(exact, mode, dtype))
    if op in ("add", "sub", "fma"):
        first = x[0] if op != "fma" else dtype(math.copysign(1, x[0]) * math.copysign(1, x[1]))
        second = -x[1] if op == "sub" else x[-1]
        same = math.copysign(1, first) == math.copysign(1, second)
        zeros = f[0] == 0 and f[1] == 0 if op != "fma" else f[0] * f[1] == 0 and f[2] == 0
        if zeros and same:
            return math.copysign(0.0, first)
        return -0.0 if mode == "rm" else 0.0
    return float(host)


def _rounded_root(x: Fraction, mode: str, dtype: type) -> float:
    guess = dtype(math.sqrt(float(x)))
    while Fraction(float(guess)) ** 2 > x:
        guess = np.nextafter(guess, dtype(0))
    while Fraction(float(np.nextafter(guess, dtype(np.inf)))) ** 2 <= x:
        guess = np.nextafter(guess, dtype(np.inf))
    if Fraction(float(guess)) ** 2 == x or mode in ("rz", "rm"):
        return float(guess)
    above = np.nextafter(guess, dtype(np.inf))
    middle = (Fraction(float(guess)) + Fraction(float(above))) / 2
    return float(above) if mode == "rp" or middle**2 < x else float(guess)


def bits(values: list[float], dtype: type) -> np.ndarray:
    out = np.array(values, dtype).view({np.float32: np.uint32, np.float64: np.uint64}[dtype])
    return np.where(np.isnan(np.array(values, dtype)), NAN32, out) if dtype is np.float32 else out


SOURCES = {"add": 2, "sub": 2, "mul": 2, "div": 2, "rcp": 1, "sqrt": 1, "fma": 3, "mad": 3}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", SOURCES)
def test_f32_rounds_once_in_every_mode(op: str, mode: str) -> None:
    """add, sub, mul, div, rcp, sqrt, fma, mad .rn/.rz/.rm/.rp; NaN is 0x7FFFFFFF."""
    n = SOURCES[op]
    args = f32_pairs()[:n]
    operands = ", ".join(f"{{s{k}}}" for k in range(n))
    (got,) = evaluate(
        f"{op}.{mode}.f32 {{d0}}, {operands};", [a.view(np.uint32) for a in args], [32]
    )
    name = "fma" if op == "mad" else op
    want = [arithmetic(name, row, mode, np.float32) for row in zip(*args, strict=True)]
    np.testing.assert_array_equal(got, bits(want, np.float32))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", SOURCES)
def test_f64_rounds_once_in_every_mode(op: str, mode: str) -> None:
    """The same for f64, on finite operands and infinities."""
    n = SOURCES[op]
    rng = np.random.default_rng(3)
    edges = np.array(
        [0.0, -0.0, 1.0, -1.5, 2.0**-1022, 2.0**-1074, 1.7976931348623157e308, 0.1, np.inf]
    )
    args = [rng.permutation(np.concatenate([edges, rng.standard_normal(120)])) for _ in range(n)]
    operands = ", ".join(f"{{s{k}}}" for k in range(n))
    (got,) = evaluate(
        f"{op}.{mode}.f64 {{d0}}, {operands};", [a.view(np.uint64) for a in args], [64]
    )
    name = "fma" if op == "mad" else op
    want = np.array([arithmetic(name, row, mode, np.float64) for row in zip(*args, strict=True)])
    number = ~np.isnan(want)
    np.testing.assert_array_equal(got[number], want.view(np.uint64)[number])
    assert np.isnan(got.view(np.float64)[~number]).all()


def flush(x: np.ndarray) -> np.ndarray:
    small = np.abs(x) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), x), x).astype(np.float32)


@pytest.mark.parametrize("op", SOURCES)
def test_ftz_and_sat(op: str) -> None:
    """.ftz flushes operands and results, .sat clamps to [0, 1] and makes NaN 0."""
    n = SOURCES[op]
    args = f32_pairs()[:n]
    operands = ", ".join(f"{{s{k}}}" for k in range(n))
    name = "fma" if op == "mad" else op
    with np.errstate(invalid="ignore"):
        flushed = [flush(a) for a in args]
    plain = np.array(
        [arithmetic(name, row, "rn", np.float32) for row in zip(*flushed, strict=True)], np.float32
    )
    raw = [a.view(np.uint32) for a in args]
    with np.errstate(invalid="ignore"):
        want = flush(plain)
    (got,) = evaluate(f"{op}.rn.ftz.f32 {{d0}}, {operands};", raw, [32])
    np.testing.assert_array_equal(got, bits(list(want), np.float32))
    if op in ("div", "rcp", "sqrt"):
        return
    (got,) = evaluate(f"{op}.rn.ftz.sat.f32 {{d0}}, {operands};", raw, [32])
    with np.errstate(invalid="ignore"):
        clamped = np.where(
            np.isnan(want) | (want <= 0), np.float32(0), np.minimum(want, np.float32(1))
        )
    np.testing.assert_array_equal(got, clamped.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_f32x2_is_two_f32(op: str, mode: str) -> None:
    """Packed operations equal the scalar ones on each half, with and without .ftz."""
    n = SOURCES[op]
    args = f32_pairs()[:n]
    operands = ", ".join(f"{{s{k}}}" for k in range(n))
    for ftz in ("", ".ftz"):
        raw = [a.view(np.uint32) for a in args]
        (one,) = evaluate(f"{op}.{mode}{ftz}.f32 {{d0}}, {operands};", raw, [32])
        pairs = [
            r.astype(np.uint64) | np.roll(r, 1).astype(np.uint64) << np.uint64(32) for r in raw
        ]
        (two,) = evaluate(f"{op}.{mode}{ftz}.f32x2 {{d0}}, {operands};", pairs, [64])
        np.testing.assert_array_equal(two & np.uint64(0xFFFFFFFF), one)
        np.testing.assert_array_equal(two >> np.uint64(32), np.roll(one, 1))


def extremum(a: np.ndarray, b: np.ndarray, largest: bool, nan: bool) -> np.ndarray:
    """min or max with -0 < +0; a NaN loses unless `nan`."""
    key = lambda x: np.where(np.isnan(x), 0, x).astype(np.float64)  # noqa: E731
    order = (key(a) > key(b)) | ((key(a) == key(b)) & (np.signbit(b) & ~np.signbit(a)))
    result = np.where(order == largest, a, b)
    result = np.where(np.isnan(a), b, np.where(np.isnan(b), a, result))
    return np.where((np.isnan(a) | np.isnan(b)) & nan, np.nan, result).astype(a.dtype)


@pytest.mark.parametrize("op", ["min", "max"])
def test_minimum_and_maximum(op: str) -> None:
    """f32 with two and three operands, .NaN, .ftz and .xorsign.abs; f64."""
    a, b, c = f32_pairs()
    raw = [x.view(np.uint32) for x in (a, b, c)]
    with np.errstate(invalid="ignore"):
        for nan in ("", ".NaN"):
            for ftz in ("", ".ftz"):
                x, y, z = (flush(v) if ftz else v for v in (a, b, c))
                want = extremum(x, y, op == "max", bool(nan))
                (got,) = evaluate(f"{op}{ftz}{nan}.f32 {{d0}}, {{s0}}, {{s1}};", raw[:2], [32])
                np.testing.assert_array_equal(got, bits(list(want), np.float32))
                three = extremum(want, z, op == "max", bool(nan))
                (got,) = evaluate(f"{op}{ftz}{nan}.f32 {{d0}}, {{s0}}, {{s1}}, {{s2}};", raw, [32])
                np.testing.assert_array_equal(got, bits(list(three), np.float32))
                (got,) = evaluate(
                    f"{op}{ftz}{nan}.xorsign.abs.f32 {{d0}}, {{s0}}, {{s1}};", raw[:2], [32]
                )
                magnitude = extremum(np.abs(x), np.abs(y), op == "max", bool(nan))
                signed = np.where(np.signbit(x) != np.signbit(y), -magnitude, magnitude)
                np.testing.assert_array_equal(got, bits(list(signed), np.float32))
        (got,) = evaluate(
            f"{op}.f64 {{d0}}, {{s0}}, {{s1}};",
            [x.astype(np.float64).view(np.uint64) for x in (a, b)],
            [64],
        )
        want = extremum(a.astype(np.float64), b.astype(np.float64), op == "max", False)
        np.testing.assert_array_equal(got.view(np.float64), want)


def test_sign_operations_and_classes() -> None:
    """abs, neg, copysign and testp of f32 and f64."""
    a, b, _ = f32_pairs()
    for dtype, kind, width in ((np.float32, "f32", 32), (np.float64, "f64", 64)):
        raw = {32: np.uint32, 64: np.uint64}[width]
        with np.errstate(invalid="ignore"):
            x, y = a.astype(dtype), b.astype(dtype)
        sign = raw(1 << (width - 1))
        xs, ys = x.view(raw), y.view(raw)
        np.testing.assert_array_equal(
            evaluate(f"abs.{kind} {{d0}}, {{s0}};", [xs], [width])[0], xs & ~sign
        )
        np.testing.assert_array_equal(
            evaluate(f"neg.{kind} {{d0}}, {{s0}};", [xs], [width])[0], xs ^ sign
        )
        (got,) = evaluate(f"copysign.{kind} {{d0}}, {{s0}}, {{s1}};", [xs, ys], [width])
        np.testing.assert_array_equal(got, (xs & sign) | (ys & ~sign))
        tiny = np.finfo(dtype).tiny
        with np.errstate(invalid="ignore"):
            subnormal = (x != 0) & (np.abs(x) < tiny)
        classes = {
            "finite": np.isfinite(x),
            "infinite": np.isinf(x),
            "number": ~np.isnan(x),
            "notanumber": np.isnan(x),
            "normal": np.isfinite(x) & ~subnormal,
            "subnormal": subnormal,
        }
        for name, want in classes.items():
            (got,) = evaluate(f"testp.{name}.{kind} {{d0}}, {{s0}};", [xs], [1])
            np.testing.assert_array_equal(got, want)
    with np.errstate(invalid="ignore"):
        for op, function in (("abs", np.abs), ("neg", np.negative)):
            (got,) = evaluate(f"{op}.ftz.f32 {{d0}}, {{s0}};", [a.view(np.uint32)], [32])
            number = ~np.isnan(a)
            np.testing.assert_array_equal(got[number], function(flush(a)).view(np.uint32)[number])


APPROXIMATE = {
    "rcp.approx": lambda x: 1 / x, "sqrt.approx": np.sqrt, "rsqrt.approx": lambda x: 1 / np.sqrt(x),
    "sin.approx": np.sin, "cos.approx": np.cos, "lg2.approx": np.log2, "ex2.approx": np.exp2,
    "tanh.approx": np.tanh,
}  # fmt: skip


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximate_functions_are_correctly_rounded(name: str) -> None:
    """Within half an ulp of the float64 function (NumPy's own error: below 1e-15 of it)."""
    x = np.linspace(0.01, 20, 2000).astype(np.float32)
    exact = APPROXIMATE[name](x.astype(np.float64))
    for ftz in ("", ".ftz") if name != "tanh.approx" else ("",):
        (got,) = evaluate(f"{name}{ftz}.f32 {{d0}}, {{s0}};", [x.view(np.uint32)], [32])
        error = np.abs(got.view(np.float32).astype(np.float64) - exact)
        assert (error <= np.spacing(np.abs(exact).astype(np.float32)) * 0.5000001).all()


def test_approximate_division_and_f64_rsqrt() -> None:
    """div.approx and div.full equal div.rn here; rsqrt.approx.f64 is within an ulp."""
    a, b, _ = f32_pairs()
    raw = [a.view(np.uint32), b.view(np.uint32)]
    for ftz in ("", ".ftz"):
        (want,) = evaluate(f"div.rn{ftz}.f32 {{d0}}, {{s0}}, {{s1}};", raw, [32])
        for kind in ("approx", "full"):
            (got,) = evaluate(f"div.{kind}{ftz}.f32 {{d0}}, {{s0}}, {{s1}};", raw, [32])
            np.testing.assert_array_equal(got, want)
    x = np.linspace(0.1, 9, 500)
    (got,) = evaluate("rsqrt.approx.f64 {d0}, {s0};", [x.view(np.uint64)], [64])
    np.testing.assert_allclose(got.view(np.float64), 1 / np.sqrt(x), rtol=3e-16)

"""cvt between numbers against NumPy and exact integers; domains of up to 2**16 are exhausted."""

import numpy as np
import pytest

from oracles import tables
from support.integer_forms import bits_of, clamp, cut, dtype_of, read, samples
from support.ptx_forms import evaluate

INTEGERS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64")
F16_ALL = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def register(kind: str) -> int:
    """Width of the register that holds the type; 8-bit types also live in wider ones."""
    return bits_of(kind)


@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize("source", INTEGERS)
def test_integers_to_integers(source: str, to: str) -> None:
    """Truncation or extension by the source's sign; .sat clamps."""
    (a,) = samples([source])
    numbers = [read(source, int(x)) for x in a]
    (got,) = evaluate(f"cvt.{to}.{source} {{d0}}, {{s0}};", [a], [register(to)])
    np.testing.assert_array_equal(got, np.array([cut(to, x) for x in numbers], dtype_of(to)))
    (got,) = evaluate(f"cvt.sat.{to}.{source} {{d0}}, {{s0}};", [a], [register(to)])
    want = [cut(to, clamp(to, x)) for x in numbers]
    np.testing.assert_array_equal(got, np.array(want, dtype_of(to)))


@pytest.mark.parametrize("narrow", ["u8", "s8", "u16", "s16"])
def test_narrow_results_fill_wide_registers(narrow: str) -> None:
    """A narrow type in a wider register is extended by its own sign."""
    (a,) = samples(["u32"])
    (got,) = evaluate(f"cvt.{narrow}.u32 {{d0}}, {{s0}};", [a], [32])
    want = [read(narrow, int(x) & ((1 << bits_of(narrow)) - 1)) & 0xFFFFFFFF for x in a]
    np.testing.assert_array_equal(got, np.array(want, np.uint32))


FLOATS = {
    "f16": (np.uint16, tables.f16_to_f32),
    "bf16": (np.uint16, tables.bf16_to_f32),
    "f32": (np.uint32, lambda b: b.view(np.float32)),
    "f64": (np.uint64, lambda b: b.view(np.float64)),
}


def float_samples(kind: str) -> np.ndarray:
    if kind in ("f16", "bf16"):
        return F16_ALL
    rng = np.random.default_rng(5)
    dtype = {"f32": np.float32, "f64": np.float64}[kind]
    values = np.concatenate(
        [
            np.array(
                [
                    0,
                    -0.0,
                    0.5,
                    1.5,
                    2.5,
                    -0.5,
                    -1.5,
                    1e-40,
                    127.5,
                    128,
                    255.5,
                    -128.5,
                    65535.5,
                    2**31,
                    2**32,
                    -(2**31),
                    2**63,
                    2**64,
                    -(2**63),
                    np.inf,
                    -np.inf,
                    np.nan,
                    3e38,
                ]
            ),
            rng.standard_normal(400) * np.exp2(rng.integers(-3, 66, 400)),
        ]
    )
    with np.errstate(over="ignore"):
        return values.astype(dtype).view({4: np.uint32, 8: np.uint64}[np.dtype(dtype).itemsize])


@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize("source", FLOATS)
def test_floats_to_integers(source: str, to: str) -> None:
    """Every rounding; out of range clamps; NaN is 0, or the top bit where 64 bits take part."""
    a = float_samples(source)
    with np.errstate(invalid="ignore"):
        x = FLOATS[source][1](a).astype(np.float64)
    for mode, function in ROUND.items():

        def oracle(value: float) -> int:
            if np.isnan(value):
                wide = source == "f64" or bits_of(to) == 64
                return 1 << (bits_of(to) - 1) if wide else 0
            if np.isinf(value):
                return cut(to, clamp(to, 2**80 if value > 0 else -(2**80)))
            return cut(to, clamp(to, int(function(value))))  # noqa: B023

        (got,) = evaluate(f"cvt.{mode}.{to}.{source} {{d0}}, {{s0}};", [a], [register(to)])
        np.testing.assert_array_equal(got, np.array([oracle(v) for v in x], dtype_of(to)))
        (sat,) = evaluate(f"cvt.{mode}.sat.{to}.{source} {{d0}}, {{s0}};", [a], [register(to)])
        np.testing.assert_array_equal(sat, got)
        if source != "bf16":
            (ftz,) = evaluate(f"cvt.{mode}.ftz.{to}.{source} {{d0}}, {{s0}};", [a], [register(to)])
            small = (np.abs(x) < 2.0**-126) if source == "f32" else np.zeros(len(x), bool)
            np.testing.assert_array_equal(ftz, np.where(small, 0, got))


# (exponent bits, mantissa bits) of what conversions round to.
GRIDS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52), "tf32": (8, 10)}
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF}


def to_grid(kind: str, number: int | float, mode: str) -> int:
    """Code of an exact finite number: step arithmetic on integers scaled by 2**1100."""
    exponent_bits, mantissa = GRIDS[kind]
    sign_bit = 1 << (exponent_bits + mantissa)
    infinity = ((1 << exponent_bits) - 1) << mantissa
    ratio = number.as_integer_ratio()
    magnitude = abs(ratio[0]) * 2**1100 // ratio[1]
    negative = ratio[0] < 0 or (isinstance(number, float) and np.signbit(number))
    if magnitude == 0:
        return sign_bit if negative else 0
    least = 2 - (1 << (exponent_bits - 1))
    exponent = max(magnitude.bit_length() - 1 - 1100, least)
    steps, rest = divmod(magnitude, 1 << (exponent - mantissa + 1100))
    half = 1 << (exponent - mantissa + 1099)
    up = {
        "rn": rest > half or (rest == half and steps % 2 == 1), "rna": rest >= half, "rz": False,
        "rm": negative and rest > 0, "rp": not negative and rest > 0,
    }[mode]  # fmt: skip
    code = ((exponent - least) << mantissa) + steps + up
    if code >= infinity:
        keeps = mode == "rz" or mode == ("rp" if negative else "rm")
        code = infinity - 1 if keeps else infinity
    return code | (sign_bit if negative else 0)


@pytest.mark.parametrize("to", ["f16", "f32", "f64", "bf16"])
@pytest.mark.parametrize("source", INTEGERS)
def test_integers_to_floats(source: str, to: str) -> None:
    """Every rounding mode; .sat clamps to [0, 1]."""
    (a,) = samples([source])
    numbers = [read(source, int(x)) for x in a]
    dtype = FLOATS[to][0]
    for mode in ("rn", "rz", "rm", "rp"):
        (got,) = evaluate(f"cvt.{mode}.{to}.{source} {{d0}}, {{s0}};", [a], [dtype().itemsize * 8])
        np.testing.assert_array_equal(got, np.array([to_grid(to, x, mode) for x in numbers], dtype))
        if to != "bf16":
            (got,) = evaluate(
                f"cvt.{mode}.sat.{to}.{source} {{d0}}, {{s0}};", [a], [dtype().itemsize * 8]
            )
            want = [to_grid(to, min(max(x, 0), 1), mode) for x in numbers]
            np.testing.assert_array_equal(got, np.array(want, dtype))


def narrowed(to: str, x: np.ndarray, mode: str) -> np.ndarray:
    """Codes of float64 values that came from a source type; NaN canonical."""
    infinity = ((1 << GRIDS[to][0]) - 1) << GRIDS[to][1]
    sign = 1 << sum(GRIDS[to])

    def one(v: float) -> int:
        if np.isnan(v):
            return NAN[to]
        if np.isinf(v):
            return infinity | (sign if v < 0 else 0)
        return to_grid(to, float(v), mode)

    return np.array([one(v) for v in x.tolist()], FLOATS[to][0])


def f32_values() -> np.ndarray:
    rng = np.random.default_rng(9)
    edges = np.array(
        [
            0,
            -0.0,
            1,
            65504,
            65519,
            65520,
            2**-24,
            2**-25,
            3 * 2**-26,
            2**-14,
            1e-40,
            np.inf,
            -np.inf,
            np.nan,
            3.4e38,
            0.1,
            1 + 2**-11,
            1 + 2**-8,
            1 + 3 * 2**-9,
        ],
        np.float32,
    )
    bits = rng.integers(0, 2**32, 600, np.uint32).view(np.float32)
    bits = np.where(np.isnan(bits), np.float32(np.nan), bits)  # no signalling NaN
    return np.concatenate([edges, -edges, bits, rng.standard_normal(600).astype(np.float32)])


def f64_values() -> np.ndarray:
    x = f32_values().astype(np.float64)
    return np.concatenate([x, x * (1 + 2**-30), np.array([2.0**-149 * 0.75, 1e300, -1e-300])])


NARROWING = [("f32", "f64"), ("f16", "f64"), ("bf16", "f64"), ("f16", "f32")]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize(("to", "source"), NARROWING)
def test_narrowing_rounds_once(to: str, source: str, mode: str) -> None:
    """f64 to f32, f16, bf16 and f32 to f16 in every mode, with .sat and .ftz where they exist."""
    with np.errstate(invalid="ignore"):
        x = f64_values() if source == "f64" else f32_values()
    raw = x.view(FLOATS[source][0])
    wide = x.astype(np.float64)
    width = FLOATS[to][0]().itemsize * 8
    (got,) = evaluate(f"cvt.{mode}.{to}.{source} {{d0}}, {{s0}};", [raw], [width])
    np.testing.assert_array_equal(got, narrowed(to, wide, mode))
    if to != "bf16":
        with np.errstate(invalid="ignore"):
            clamped = np.where(wide > 0, np.minimum(wide, 1), 0)
        (got,) = evaluate(f"cvt.{mode}.sat.{to}.{source} {{d0}}, {{s0}};", [raw], [width])
        np.testing.assert_array_equal(got, narrowed(to, clamped, mode))
    if (to, source) in (("f32", "f64"), ("f16", "f32")):
        (got,) = evaluate(f"cvt.{mode}.ftz.{to}.{source} {{d0}}, {{s0}};", [raw], [width])
        if source == "f32":
            want = narrowed(
                to, np.where(np.abs(wide) < 2.0**-126, np.copysign(0, wide), wide), mode
            )
        else:
            want = narrowed(to, wide, mode)
            want = np.where((want & 0x7F800000) == 0, want & 0x80000000, want)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_f32_to_16_bit_with_relu_and_satfinite(mode: str) -> None:
    """bf16, f16, and both packed; .relu clamps at zero, .satfinite at the largest number."""
    x = f32_values()
    raw = x.view(np.uint32)
    for to in ("f16", "bf16"):
        for relu in ("", ".relu"):
            for finite in ("", ".satfinite"):
                wide = x.astype(np.float64)
                if relu:
                    wide = np.where(np.signbit(wide) & ~np.isnan(wide), 0.0, wide)
                want = narrowed(to, wide, mode)
                top = {"f16": 0x7C00, "bf16": 0x7F80}[to]
                if finite:
                    want = np.where((want & 0x7FFF) == top, want - 1, want).astype(np.uint16)
                (got,) = evaluate(f"cvt.{mode}{relu}{finite}.{to}.f32 {{d0}}, {{s0}};", [raw], [16])
                np.testing.assert_array_equal(got, want)
                (got,) = evaluate(
                    f"cvt.{mode}{relu}{finite}.{to}x2.f32 {{d0}}, {{s0}}, {{s1}};",
                    [raw, np.roll(raw, 1)],
                    [32],
                )
                np.testing.assert_array_equal(got, want.astype(np.uint32) << 16 | np.roll(want, 1))


def test_widening_is_exact() -> None:
    """f16, bf16 and f32 to wider types; every 16-bit code."""
    with np.errstate(invalid="ignore"):
        for source in ("f16", "bf16"):
            values = FLOATS[source][1](F16_ALL)
            (got,) = evaluate(f"cvt.f32.{source} {{d0}}, {{s0}};", [F16_ALL], [32])
            want = np.where(np.isnan(values), NAN["f32"], values.view(np.uint32))
            np.testing.assert_array_equal(got, want)
            (got,) = evaluate(f"cvt.f64.{source} {{d0}}, {{s0}};", [F16_ALL], [64])
            number = ~np.isnan(values)
            np.testing.assert_array_equal(
                got[number], values.astype(np.float64).view(np.uint64)[number]
            )
        values = FLOATS["f16"][1](F16_ALL)
        clamped = np.where(values > 0, np.minimum(values, 1), np.float32(0)).astype(np.float32)
        (got,) = evaluate("cvt.ftz.sat.f32.f16 {d0}, {s0};", [F16_ALL], [32])
        np.testing.assert_array_equal(got, clamped.view(np.uint32))
        (got,) = evaluate("cvt.sat.f64.f16 {d0}, {s0};", [F16_ALL], [64])
        np.testing.assert_array_equal(got.view(np.float64), clamped.astype(np.float64))
        x = f32_values()
        (got,) = evaluate("cvt.ftz.f64.f32 {d0}, {s0};", [x.view(np.uint32)], [64])
        flushed = np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)
        np.testing.assert_array_equal(got.view(np.float64), flushed.astype(np.float64))
        (got,) = evaluate("cvt.sat.f64.f32 {d0}, {s0};", [x.view(np.uint32)], [64])
        np.testing.assert_array_equal(got.view(np.float64), np.where(x > 0, np.minimum(x, 1), 0))


@pytest.mark.parametrize("kind", ["f16", "f32", "f64"])
def test_rounding_to_integral_values(kind: str) -> None:
    """cvt.r*i within a type keeps the sign of zero; plain cvt and .sat keep or clamp the value."""
    raw = float_samples(kind)
    with np.errstate(invalid="ignore"):
        x = FLOATS[kind][1](raw).astype(np.float64)
        number = ~np.isnan(x)
        width = raw.dtype.itemsize * 8
        for mode, function in ROUND.items():
            (got,) = evaluate(f"cvt.{mode}.{kind}.{kind} {{d0}}, {{s0}};", [raw], [width])
            np.testing.assert_array_equal(
                FLOATS[kind][1](got).astype(np.float64)[number], function(x)[number]
            )
            np.testing.assert_array_equal(
                np.signbit(FLOATS[kind][1](got))[number], np.signbit(x)[number]
            )
            (got,) = evaluate(f"cvt.{mode}.sat.{kind}.{kind} {{d0}}, {{s0}};", [raw], [width])
            want = np.where(function(x) > 0, np.minimum(function(x), 1), 0)
            np.testing.assert_array_equal(FLOATS[kind][1](got), want)
        if kind == "f16":
            return
        (got,) = evaluate(f"cvt.sat.{kind}.{kind} {{d0}}, {{s0}};", [raw], [width])
        np.testing.assert_array_equal(
            FLOATS[kind][1](got),
            np.where(x > 0, np.minimum(x, 1), 0).astype(FLOATS[kind][1](raw).dtype),
        )
        if kind == "f32":
            flushed = np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x)
            (got,) = evaluate("cvt.ftz.f32.f32 {d0}, {s0};", [raw], [32])
            np.testing.assert_array_equal(
                got.view(np.float32)[number], flushed[number].astype(np.float32)
            )
            (got,) = evaluate("cvt.rpi.ftz.f32.f32 {d0}, {s0};", [raw], [32])
            np.testing.assert_array_equal(
                got.view(np.float32)[number], np.ceil(flushed)[number].astype(np.float32)
            )


@pytest.mark.parametrize("mode", ["rna", "rn", "rz"])
def test_tf32(mode: str) -> None:
    """Ten mantissa bits in the upper part of a word."""
    x = f32_values()
    for relu in ("", ".relu") if mode != "rna" else ("",):
        for finite in ("", ".satfinite"):
            (got,) = evaluate(
                f"cvt.{mode}{relu}{finite}.tf32.f32 {{d0}}, {{s0}};", [x.view(np.uint32)], [32]
            )

            def oracle(v: float) -> int:
                if np.isnan(v):
                    return NAN["f32"]
                v = 0.0 if relu and np.signbit(v) else v  # noqa: B023
                code = (
                    (0x3FC00 | (np.signbit(v) << 18)) if np.isinf(v) else to_grid("tf32", v, mode)
                )
                return (code - 1 if finite and code & 0x3FFFF == 0x3FC00 else code) << 13  # noqa: B023

            np.testing.assert_array_equal(got, np.array([oracle(float(v)) for v in x], np.uint32))


@pytest.mark.parametrize("kind", ["u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"])
def test_pack(kind: str) -> None:
    """cvt.pack clamps a and b; b lies in the low bits, a above it, then the low bits of c."""
    bits, signed = int(kind[1:]), kind[0] == "s"
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    edges = [low - 1, low, low + 1, -1, 0, 1, high - 1, high, high + 1, -(2**31), 2**31 - 1]
    a, b = (x.ravel() for x in np.meshgrid(edges, edges))
    c = np.random.default_rng(1).integers(0, 1 << 32, len(a), np.uint32)
    cut = (1 << bits) - 1
    want = (np.clip(b, low, high) & cut) | (np.clip(a, low, high) & cut) << bits
    inputs = [x.astype(np.int32).view(np.uint32) for x in (a, b)]
    if bits == 16:
        (got,) = evaluate(f"cvt.pack.sat.{kind}.s32 {{d0}}, {{s0}}, {{s1}};", inputs, [32])
    else:
        want |= c.astype(np.int64) << 2 * bits
        (got,) = evaluate(
            f"cvt.pack.sat.{kind}.s32.b32 {{d0}}, {{s0}}, {{s1}}, {{s2}};", [*inputs, c], [32]
        )
    np.testing.assert_array_equal(got, (want & 0xFFFFFFFF).astype(np.uint32))

"""cvt to and from the elements and scales of block formats, against the table oracles."""

import numpy as np
import pytest

from oracles import tables
from support.ptx_forms import evaluate

KINDS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m3": 0x1F, "e3m2": 0x1F, "e2m1": 0x7}


def shift_of(kind: str) -> int:
    return 4 if kind == "e2m1" else 8


def pair_width(kind: str) -> int:
    return 8 if kind == "e2m1" else 16


def values(n: int = 3000) -> np.ndarray:
    """Codes' values, midpoints, their neighbours, and numbers of every size."""
    rng = np.random.default_rng(11)
    parts = [np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e38], np.float32)]
    for kind in KINDS:
        for grid in (tables.MAGNITUDES[kind], tables.MIDPOINTS[kind]):
            for sign in (1, -1):
                g = (grid * sign).astype(np.float32)
                parts += [
                    g,
                    np.nextafter(g, np.float32(np.inf)),
                    np.nextafter(g, np.float32(-np.inf)),
                ]
    parts.append((rng.standard_normal(n) * np.exp2(rng.integers(-20, 18, n))).astype(np.float32))
    return np.concatenate(parts)


def encode(kind: str, x: np.ndarray, relu: bool = False) -> np.ndarray:
    nan = np.isnan(x)
    x = np.where(nan, np.float32(0), x)
    if relu:
        x = np.where(np.signbit(x), np.float32(0), x)
    return np.where(nan, NAN_CODE[kind], tables.round_nearest(kind, x)).astype(np.uint32)


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("kind", KINDS)
def test_f32_to_elements(kind: str, relu: str) -> None:
    """Nearest with ties to even, saturating; the first source is the upper element."""
    x = values()
    y = np.roll(x, 1)
    raw = [x.view(np.uint32), y.view(np.uint32)]
    width = pair_width(kind)
    (got,) = evaluate(f"cvt.rn.satfinite{relu}.{kind}x2.f32 {{d0}}, {{s0}}, {{s1}};", raw, [width])
    want = encode(kind, x, bool(relu)) << shift_of(kind) | encode(kind, y, bool(relu))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("kind", KINDS)
def test_elements_to_f16_exhaustively(kind: str, relu: str) -> None:
    """Exact; every pair of codes."""
    width = pair_width(kind)
    dtype = np.uint8 if width == 8 else np.uint16
    pairs = np.arange(1 << width, dtype=np.uint32).astype(dtype)
    (got,) = evaluate(f"cvt.rn{relu}.f16x2.{kind}x2 {{d0}}, {{s0}};", [pairs], [32])

    def half(codes: np.ndarray) -> np.ndarray:
        table = tables.VALUES[kind].astype(np.float32)
        if relu:
            table = np.where(np.signbit(table) & ~np.isnan(table), np.float32(0), table)
        bits = np.where(np.isnan(table), 0x7FFF, tables.f32_to_f16(table))
        return bits[codes % len(table)].astype(np.uint32)

    shift = shift_of(kind)
    want = half(pairs >> shift) << 16 | half(pairs & ((1 << shift) - 1))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("source", ["f16", "bf16"])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "e2m1"])
def test_halves_to_elements_exhaustively(kind: str, source: str, relu: str) -> None:
    """Every 16-bit code in both places."""
    if source == "bf16" and kind != "e2m1":
        return  # the PTX ISA has bf16x2 sources for e2m1x2 only, among these
    codes = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    with np.errstate(invalid="ignore"):
        x = (tables.f16_to_f32 if source == "f16" else tables.bf16_to_f32)(codes)
    pairs = codes.astype(np.uint32) << 16 | np.roll(codes, 1)
    (got,) = evaluate(
        f"cvt.rn.satfinite{relu}.{kind}x2.{source}x2 {{d0}}, {{s0}};",
        [pairs],
        [pair_width(kind)],
        version="9.0",
    )
    want = encode(kind, x, bool(relu))
    np.testing.assert_array_equal(got, want << shift_of(kind) | np.roll(want, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_stochastic_rounding_of_four(kind: str) -> None:
    """d = {a, b, e, f} from the top; random bytes 31:24, 15:8, 23:16, 7:0 (assumption S7)."""
    x = values(500)
    args = [np.roll(x, k) for k in range(4)]
    random = np.random.default_rng(1).integers(0, 2**32, len(x), np.uint32)
    width = 16 if kind == "e2m1" else 32
    for relu in ("", ".relu"):
        (got,) = evaluate(
            f"cvt.rs.satfinite{relu}.{kind}x4.f32 {{d0}}, {{{{s0}}, {{s1}}, {{s2}}, {{s3}}}}, "
            f"{{s4}};",
            [*(a.view(np.uint32) for a in args), random],
            [width],
        )
        want = np.zeros(len(x), np.uint32)
        for a, at in zip(args, (24, 8, 16, 0), strict=True):
            nan = np.isnan(a)
            clean = np.where(nan, np.float32(0), a)
            if relu:
                clean = np.where(np.signbit(clean), np.float32(0), clean)
            code = tables.round_stochastic(kind, clean, (random >> at & 0xFF).astype(np.uint8))
            code = np.where(nan, NAN_CODE[kind], code).astype(np.uint32)
            want = want << shift_of(kind) | code
        np.testing.assert_array_equal(got, want.astype(got.dtype))


@pytest.mark.parametrize(("kind", "mantissa", "discarded"), [("f16", 10, 13), ("bf16", 7, 16)])
def test_stochastic_rounding_of_pairs(kind: str, mantissa: int, discarded: int) -> None:
    """The random bits are added to the discarded ones; a takes the upper half of the word."""
    rng = np.random.default_rng(2)
    x, y = (rng.standard_normal(1000).astype(np.float32) for _ in range(2))
    random = rng.integers(0, 2**32, 1000, np.uint32)
    raw = [x.view(np.uint32), y.view(np.uint32), random]
    noise = (1 << discarded) - 1

    def oracle(v: np.ndarray, r: np.ndarray) -> np.ndarray:
        # Where a value is normal in the format, adding to the f32's discarded bits is the rule.
        carried = ((v.view(np.uint32) + (r & noise)) >> discarded << discarded).astype(np.uint32)
        narrow = tables.f32_to_f16 if kind == "f16" else tables.f32_to_bf16
        return narrow(carried.view(np.float32)).astype(np.uint32)

    normal = (np.abs(x) > 2.0**-13) & (np.abs(y) > 2.0**-13)
    for relu in ("", ".relu"):
        for finite in ("", ".satfinite"):
            (got,) = evaluate(
                f"cvt.rs{relu}{finite}.{kind}x2.f32 {{d0}}, {{s0}}, {{s1}}, {{s2}};", raw, [32]
            )
            high, low = oracle(x, random >> 16), oracle(y, random)
            if relu:
                high, low = (np.where(v >> 15, 0, v) for v in (high, low))
            np.testing.assert_array_equal(got[normal], (high << 16 | low)[normal])


def ue8m0(x: np.ndarray, mode: str) -> np.ndarray:
    """The power of two below or above |x|, from a table of all 255; NaN is 255."""
    grid = np.ldexp(1.0, np.arange(-127, 128))
    magnitude = np.abs(np.where(np.isnan(x), 0, x)).astype(np.float64)
    if mode == "rp":
        code = np.searchsorted(grid, magnitude, side="left")
    else:
        code = np.searchsorted(grid, magnitude, side="right") - 1
    return np.where(np.isnan(x), 255, np.clip(code, 0, 254)).astype(np.uint32)


@pytest.mark.parametrize("finite", ["", ".satfinite"])
@pytest.mark.parametrize("mode", ["rz", "rp"])
def test_scales_from_f32_and_bf16(mode: str, finite: str) -> None:
    """ue8m0x2 from f32 pairs and from every bf16; the sign is ignored (assumption S8)."""
    x = values()
    y = np.roll(x, 1)
    (got,) = evaluate(
        f"cvt.{mode}{finite}.ue8m0x2.f32 {{d0}}, {{s0}}, {{s1}};",
        [x.view(np.uint32), y.view(np.uint32)],
        [16],
    )
    np.testing.assert_array_equal(got, ue8m0(x, mode) << 8 | ue8m0(y, mode))
    codes = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    with np.errstate(invalid="ignore"):
        want = ue8m0(tables.bf16_to_f32(codes), mode)
    pairs = codes.astype(np.uint32) << 16 | np.roll(codes, 1)
    (got,) = evaluate(f"cvt.{mode}{finite}.ue8m0x2.bf16x2 {{d0}}, {{s0}};", [pairs], [16])
    np.testing.assert_array_equal(got, want << 8 | np.roll(want, 1))


def test_bf16_from_scales_exhaustively() -> None:
    """2**(byte - 127); 255 is NaN."""
    pairs = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    (got,) = evaluate("cvt.rn.bf16x2.ue8m0x2 {d0}, {s0};", [pairs], [32])
    table = tables.f32_to_bf16(
        np.where(np.arange(256) == 255, 0, tables.VALUES["ue8m0"]).astype(np.float32)
    ).astype(np.uint32)
    table[255] = 0x7FFF
    np.testing.assert_array_equal(got, table[pairs >> 8] << 16 | table[pairs & 255])

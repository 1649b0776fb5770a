"""mma.sync without block scales: bit for bit against exact integers, for every generation."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from oracles import mma_plain
from support import mma_cases
from support.mma_kernel import multiply

KINDS8 = ("e4m3", "e5m2")
CONTAINERS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
WARPS = 24

# (shape, result, element kinds)
FLOATS = [
    (f"m16n8k{k}", result, (kind, kind))
    for kind, results, sizes in (
        ("f16", ("f32", "f16"), (8, 16)),
        ("bf16", ("f32",), (8, 16)),
        ("tf32", ("f32",), (4, 8)),
    )
    for result in results
    for k in sizes
]
FP8 = [
    (f"m16n8k{k}", result, (a, b))
    for k in (16, 32)
    for result in ("f32", "f16")
    for a in KINDS8
    for b in KINDS8
]


def name_of(shape: str, result: str, kinds: tuple[str, str], middle: str = "") -> str:
    return f"{shape}.row.col{middle}.{result}.{kinds[0]}.{kinds[1]}.{result}"


def operands(
    seed: int, shape: str, result: str, kinds: tuple[str, str], warps: int = WARPS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    k = int(shape.split("k")[1])
    a = mma_cases.operand(rng, kinds[0], (warps, 16, k))
    b = mma_cases.operand(rng, kinds[1], (warps, 8, k))
    mma_cases.cancel(rng, kinds[0], a, b)
    mma_cases.meet_specials(kinds[0], a, b)
    return a, b, mma_cases.accumulators(rng, result, warps)


def registers_of(kind: str, codes: np.ndarray) -> tuple[np.ndarray, int]:
    """What the registers hold, and the bits of an element in them."""
    if kind == "tf32":
        # The 13 low bits are not read.
        noise = np.random.default_rng(1).integers(0, 1 << 13, codes.shape)
        return codes << 13 | noise, 32
    return codes, mma_plain.bits_of(kind)


@pytest.mark.parametrize("chip", ["80", "90", "100a", "120a"])
@pytest.mark.parametrize(("shape", "result", "kinds"), FLOATS)
def test_floats(shape: str, result: str, kinds: tuple[str, str], chip: str) -> None:
    """f16, bf16 and TF32: values around 1, all exponents, subnormals, cancellation, NaN, Inf."""
    a, b, c = operands(len(shape), shape, result, kinds)
    want = mma_plain.model(kinds, a[:, :, None], b[:, None], c, result, int(chip.rstrip("a")))
    (ra, bits), (rb, _) = (registers_of(kinds[0], x) for x in (a, b))
    got = multiply(
        name_of(shape, result, kinds), ra, rb, c, bits=bits, half=result == "f16", sm=chip
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("chip", ["89", "90", "100a", "120a"])
@pytest.mark.parametrize(("shape", "result", "kinds"), FP8)
def test_fp8(shape: str, result: str, kinds: tuple[str, str], chip: str) -> None:
    """E4M3 and E5M2; 9.x to 11.x compute them as f16, as their assembler does."""
    a, b, c = operands(7, shape, result, kinds)
    want = mma_plain.model(kinds, a[:, :, None], b[:, None], c, result, int(chip.rstrip("a")))
    got = multiply(name_of(shape, result, kinds), a, b, c, bits=8, half=result == "f16", sm=chip)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("result", ["f32", "f16"])
@pytest.mark.parametrize("kind_b", CONTAINERS)
@pytest.mark.parametrize("kind_a", CONTAINERS)
def test_containers(kind_a: str, kind_b: str, result: str) -> None:
    """kind::f8f6f4: elements of 4, 6 and 8 bits, one a byte, in every pairing."""
    kinds = (kind_a, kind_b)
    a, b, c = operands(3, "m16n8k32", result, kinds, 12)
    want = mma_plain.model(kinds, a[:, :, None], b[:, None], c, result, 120)
    got = multiply(
        name_of("m16n8k32", result, kinds, ".kind::f8f6f4"),
        mma_cases.container(kind_a, a),
        mma_cases.container(kind_b, b),
        c,
        bits=8,
        half=result == "f16",
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("chip", "result", "kept"),
    [("120a", "f16", 46), ("80", "f16", 44), ("120a", "f32", 158), ("80", "f32", 156)],
)
def test_zeros_count_with_their_exponent(chip: str, result: str, kept: int) -> None:
    """Beside zeros, a bit at 2^-kept is the last that counts; it decides what the rest becomes."""
    kind = "f16" if result == "f16" else "bf16"

    def power(n: int) -> int:
        if kind == "bf16":
            return (127 - n) << 7
        return (15 - n) << 10 if n <= 14 else 1 << (24 - n)

    for last, want in ((kept, 1 if kind == "f16" else 0), (kept + 1, 0 if kind == "f16" else None)):
        a, b = np.zeros((1, 16, 16), np.int64), np.zeros((1, 8, 16), np.int64)
        # f16: half of the smallest number and a bit more. f32: its smallest number and a bit less.
        first = 25 if kind == "f16" else 149
        a[0, 0, :2] = power(first // 2), power(last // 2)
        b[0, 0, :2] = power(first - first // 2), power(last - last // 2)
        if kind == "bf16":
            a[0, 0, 0] |= 0x8000
        c = np.zeros((1, 16, 8), np.uint32)
        got = multiply(
            name_of("m16n8k16", result, (kind, kind)), a, b, c,
            bits=16, half=kind == "f16", sm=chip,
        )  # fmt: skip
        assert got[0, 0, 0] == (0x80000001 if want is None else want)


@pytest.mark.parametrize("saturate", ["", ".satfinite"])
@pytest.mark.parametrize("kind_b", ["s8", "u8"])
@pytest.mark.parametrize("kind_a", ["s8", "u8"])
@pytest.mark.parametrize("k", [16, 32])
def test_integers(k: int, kind_a: str, kind_b: str, saturate: str) -> None:
    """Exact sums that wrap at 32 bits, or are clamped with .satfinite; C reaches both ends."""
    rng = np.random.default_rng(k)
    a, b = (rng.integers(0, 256, (8, rows, k)) for rows in (16, 8))
    a[0], b[0] = 0x80, 0xFF
    c = rng.integers(-(2**31), 2**31, (8, 16, 8))
    c[:3] = np.sign(c[:3]) * (2**31 - rng.integers(1, 1000, (3, 16, 8)))
    numbers = [
        x.astype(np.int8).astype(np.int64) if kind == "s8" else x
        for kind, x in ((kind_a, a), (kind_b, b))
    ]
    total = np.einsum("wmk,wnk->wmn", *numbers) + c
    assert (total > 2**31 - 1).any() or (total < -(2**31)).any()
    if saturate:
        total = np.clip(total, -(2**31), 2**31 - 1)
    form = f"m16n8k{k}.row.col{saturate}.s32.{kind_a}.{kind_b}.s32"
    got = multiply(form, a, b, c.astype(np.uint32), bits=8, sm="80")
    np.testing.assert_array_equal(got, total.astype(np.uint32))


@pytest.mark.parametrize("how", ["exact", "f32-chain"])
@pytest.mark.parametrize(
    ("shape", "result", "kinds"),
    [
        ("m16n8k16", "f32", ("f16", "f16")),
        ("m16n8k16", "f16", ("f16", "f16")),
        ("m16n8k16", "f32", ("bf16", "bf16")),
        ("m16n8k8", "f32", ("tf32", "tf32")),
        ("m16n8k32", "f32", ("e5m2", "e4m3")),
    ],
)
def test_other_sums(shape: str, result: str, kinds: tuple[str, str], how: str) -> None:
    """Machine(mma=...): one rounding of the exact sum, or one after every product."""
    a, b, c = operands(11, shape, result, kinds, 6)
    a[a >> sum(mma_plain.FORMATS[kinds[0]]) == 2] = 0
    nan, sign = mma_plain._specials(kinds, a[:, :, None], b[:, None], c, result)
    want = np.zeros((6, 16, 8), np.uint32)
    rows = [0, 1, 6, 15]  # exact fractions are slow
    for w, m, n in itertools.product(range(6), rows, range(8)):
        if nan[w, m, n] or sign[w, m, n]:
            continue
        products = [
            mma_plain.fraction_of(kinds[0], x) * mma_plain.fraction_of(kinds[1], y)
            for x, y in zip(a[w, m], b[w, n], strict=True)
        ]
        want[w, m, n] = mma_plain.otherwise(
            products, mma_plain.fraction_of(result, c[w, m, n]), how, result
        )
    want = mma_plain._with_specials(want, nan, sign, result)
    (ra, bits), (rb, _) = (registers_of(kinds[0], x) for x in (a, b))
    for sm in ("100a", "120a"):
        got = multiply(
            name_of(shape, result, kinds), ra, rb, c,
            bits=bits, half=result == "f16", sm=sm, mma=how,
        )  # fmt: skip
        np.testing.assert_array_equal(got[:, rows], want[:, rows])


@pytest.mark.parametrize("how", ["exact", "f32-chain"])
@pytest.mark.parametrize(
    ("form", "scale"), [("mxf4nvf4", "ue4m3"), ("mxf4", "ue8m0"), ("mxf8f6f4", "ue8m0")]
)
def test_other_sums_of_block_scaled_kinds(form: str, scale: str, how: str) -> None:
    """Each product is taken with both scales; groups of the model play no part."""
    rng = np.random.default_rng(5)
    kind, k = ("e4m3", 32) if form == "mxf8f6f4" else ("e2m1", 64)
    a, b = (_codes_finite(rng, kind, (1, rows, k)) for rows in (16, 8))
    c = mma_cases.accumulators(rng, "f32", 1)
    count = {"mxf4nvf4": 4, "mxf4": 2, "mxf8f6f4": 1}[form]
    low, high = (1, 0x7F) if scale == "ue4m3" else (100, 150)
    sa, sb = (rng.integers(low, high, (1, rows, count)) for rows in (16, 8))
    value = {
        "ue4m3": lambda s: mma_plain.fraction_of("e4m3", s),
        "ue8m0": lambda s: Fraction(2) ** (int(s) - 127),
    }[scale]
    want = np.zeros((1, 16, 8), np.uint32)
    for w, m, n in np.ndindex(want.shape):
        scales = [value(x) * value(y) for x, y in zip(sa[w, m], sb[w, n], strict=True)]
        products = [
            mma_plain.fraction_of(kind, a[w, m, i]) * mma_plain.fraction_of(kind, b[w, n, i])
            * scales[i * count // k]
            for i in range(k)
        ]  # fmt: skip
        want[w, m, n] = mma_plain.otherwise(
            products, mma_plain.fraction_of("f32", c[w, m, n]), how, "f32"
        )
    words = [sum(s[..., i] << 8 * i for i in range(count)) for s in (sa, sb)]
    vector = {4: ".scale_vec::4X", 2: ".scale_vec::2X", 1: ".scale_vec::1X"}[count]
    got = multiply(
        f"m16n8k{k}.row.col.kind::{form}.block_scale{vector}.f32.{kind}.{kind}.f32.{scale}",
        a, b, c, bits=8 if k == 32 else 4, scales=(words[0], words[1]), mma=how,
    )  # fmt: skip
    np.testing.assert_array_equal(got, want)


def _codes_finite(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    codes = rng.integers(0, 1 << mma_plain.bits_of(kind), shape)
    return np.where(codes & 0x7F == 0x7F, 0, codes) if kind == "e4m3" else codes


def test_an_unknown_sum_is_refused() -> None:
    """The error names the argument, the choices and what came."""
    from jax_fp4 import sim

    with pytest.raises(
        ValueError, match=r"mma: expected one of 'model', 'exact', 'f32-chain', got"
    ):
        sim.Machine(mma="fast")  # type: ignore[arg-type]

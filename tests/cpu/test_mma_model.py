"""The tensor-core model: one instruction bit for bit, and products by the level `model`."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from oracles import mma
from support import gemm_native as native
from support.gemm_native import NVFP4, Format, Guarded, fp8, gemm, mx, random_operand

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "mma.npz")
KINDS = sorted({key.rsplit("/", 1)[0] for key in GOLDEN.files})
K64 = [kind for kind in KINDS if not kind.startswith("mxf8f6f4")]
K32 = [kind for kind in KINDS if kind.startswith("mxf8f6f4")]


def step_k64(scale: str, *fields: np.ndarray) -> np.ndarray:
    """mma_fp4_step on codes a, b, scales per 16 sa, sb and accumulators c."""
    a, b, sa, sb, c = (Guarded(np.ascontiguousarray(x)) for x in fields)
    d = Guarded(np.zeros(len(fields[4]), np.uint32))
    native.library().mma_fp4(
        ctypes.c_int64(len(fields[4])),
        *(ctypes.c_void_p(x.address) for x in (a, b)),
        native.SCALES.index(scale),
        *(ctypes.c_void_p(x.address) for x in (sa, sb, c, d)),
    )
    return d.read()


def step_k32(elements: tuple[str, str], *fields: np.ndarray) -> np.ndarray:
    """mma_fp8_step on codes a, b, scales sa, sb and accumulators c."""
    a, b, sa, sb, c = (Guarded(np.ascontiguousarray(x)) for x in fields)
    d = Guarded(np.zeros(len(fields[4]), np.uint32))
    first, second = (native.ELEMENTS.index(e) for e in elements)
    native.library().mma_fp8(
        ctypes.c_int64(len(fields[4])),
        *(first, ctypes.c_void_p(a.address), second, ctypes.c_void_p(b.address)),
        *(ctypes.c_void_p(x.address) for x in (sa, sb, c, d)),
    )
    return d.read()


def golden(kind: str) -> list[np.ndarray]:
    """The fields a, b, sa, sb, c, d of a kind."""
    return [GOLDEN[f"{kind}/{field}"] for field in ("a", "b", "sa", "sb", "c", "d")]


@pytest.mark.parametrize("kind", K64)
def test_k64_steps_equal_the_published_model(kind: str) -> None:
    """3,000 steps per kind, zero, subnormal, infinite and NaN accumulators among them."""
    a, b, sa, sb, c, d = golden(kind)
    a, b = (np.stack([x & 15, x >> 4], axis=-1).reshape(len(x), 64) for x in (a, b))
    sa, sb = (np.repeat(x, 4 // x.shape[1], axis=1) for x in (sa, sb))
    scale = "ue4m3" if "ue4m3" in kind else "ue8m0"
    np.testing.assert_array_equal(step_k64(scale, a, b, sa, sb, c), d)


@pytest.mark.parametrize("kind", K32)
def test_k32_steps_equal_the_published_model(kind: str) -> None:
    """200 steps per pair of element types."""
    a, b, sa, sb, c, d = golden(kind)
    first, second = kind.split("/")[1].split("_")
    np.testing.assert_array_equal(step_k32((first, second), a, b, sa, sb, c), d)


def random_accumulators(rng: np.random.Generator, count: int) -> np.ndarray:
    """Bits of any f32, a tenth of them zero."""
    bits = rng.integers(1 << 32, size=count, dtype=np.uint32)
    return np.where(rng.random(count) < 0.1, bits & 0x80000000, bits).astype(np.uint32)


@pytest.mark.parametrize("scale", ["ue4m3", "ue8m0"])
def test_k64_steps_equal_the_oracle(scale: str) -> None:
    """Any codes, scales and accumulators; the oracle was written from the model's text."""
    rng = np.random.default_rng(0)
    count = 20_000
    a, b = (rng.integers(16, size=(count, 64)).astype(np.uint8) for _ in range(2))
    a[: count // 4] &= 9  # small products, and groups that cancel
    top = 128 if scale == "ue4m3" else 256
    sa, sb = (rng.integers(top, size=(count, 4)).astype(np.uint8) for _ in range(2))
    c = random_accumulators(rng, count)
    expected = mma.mma_k64(a, b, sa, sb, c, scale)
    np.testing.assert_array_equal(step_k64(scale, a, b, sa, sb, c), expected)


@pytest.mark.parametrize("first", native.ELEMENTS)
@pytest.mark.parametrize("second", native.ELEMENTS)
def test_k32_steps_equal_the_oracle(first: str, second: str) -> None:
    """Any codes, scales and accumulators."""
    rng = np.random.default_rng(1)
    count = 4_000
    bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6, "e4m3": 8, "e5m2": 8}
    a, b = (rng.integers(1 << bits[e], size=(count, 32)).astype(np.uint8) for e in (first, second))
    # NaN and Inf codes would hide everything else: keep them in every fourth step only.
    a[np.arange(count) % 4 != 0] &= 0xFF >> (8 - bits[first]) & 0xBB
    b[np.arange(count) % 4 != 0] &= 0xFF >> (8 - bits[second]) & 0xBB
    sa, sb = (rng.integers(90, 165, size=count).astype(np.uint8) for _ in range(2))
    c = random_accumulators(rng, count)
    expected = mma.mma_k32(a, b, sa, sb, c, (first, second))
    assert (expected != mma.NAN_BITS).mean() > 0.5
    np.testing.assert_array_equal(step_k32((first, second), a, b, sa, sb, c), expected)


@pytest.mark.parametrize("shape", [(17, 9, 64), (5, 33, 150), (3, 4, 1), (2, 40, 1056), (4, 3, 0)])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (NVFP4, NVFP4),
        (mx("e2m1"), mx("e2m1")),
        (mx("e2m1"), mx("e4m3")),
        (mx("e5m2"), mx("e2m3")),
        (mx("e3m2"), mx("e3m2")),
        (fp8("e4m3"), fp8("e5m2")),
    ],
    ids=str,
)
def test_level_model_carries_steps_in_k_order(
    first: Format, second: Format, shape: tuple[int, int, int]
) -> None:
    """Steps of 64 for E2M1 pairs and of 32 for all others, an f32 accumulator between them."""
    m, n, k = shape
    rng = np.random.default_rng(2)
    a, b = random_operand(rng, first, m, k), random_operand(rng, second, n, k, tiled=True)
    codes = a.codes[0], b.codes[0]
    if first.element == second.element == "e2m1":
        scale = first.scale
        bits = mma.product_k64(*codes, a.scales[0], b.scales[0], scale)
    else:
        pair = first.element, second.element
        bits = mma.product_k32(*codes, a.scales[0], b.scales[0], pair)
    out = gemm(a, b, level="model")[0]
    np.testing.assert_array_equal(out.view(np.uint32), bits)


def test_level_model_shares_the_epilogue() -> None:
    """alpha, bias, accumulate and the output type are those of every level."""
    m, n, k = 9, 20, 96
    rng = np.random.default_rng(3)
    a = random_operand(rng, NVFP4, m, k, global_scale=0.3)
    b = random_operand(rng, NVFP4, n, k, global_scale=1.7)
    sums = mma.product_k64(a.codes[0], b.codes[0], a.scales[0], b.scales[0], "ue4m3")
    bias = rng.normal(size=n).astype(np.float32)
    c = rng.normal(size=(1, m, n)).astype(np.float32)
    alpha = a.global_scale[0] * b.global_scale[0]
    expected = alpha * sums.view(np.float32) + bias + c[0]
    out = gemm(a, b, level="model", bias=("f32", bias), accumulate=("f32", c))[0]
    np.testing.assert_array_equal(out, expected)

"""Products by the level `model`: the tensor-core model's steps, in k order.

One step is tested in tests/numerics/test_mma_accumulate.py.
"""

import numpy as np
import pytest

from oracles import mma
from support.gemm_native import NVFP4, Format, fp8, gemm, mx, random_operand


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

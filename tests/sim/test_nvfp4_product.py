"""A whole NVFP4 matrix product on the machine: quantized operands, mma.sync, K in steps."""

import numpy as np
import pytest

from jax_fp4 import sim
from oracles import mma, quantizer
from support.nvrtc import compile_to_ptx

SOURCE = r"""
// One warp computes a 16x8 tile of D = A B^T. A [M, K/2], B [N, K/2]: two codes a byte;
// scales [rows, K/16].
// Per step of 64: lane (g, t) loads words t and t + 4 of rows g and g + 8 of A and of row g of B.
extern "C" __global__ void product(const unsigned* a, const unsigned* b, const unsigned* sa,
                                   const unsigned* sb, float* d, int n, int k) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const int row = blockIdx.y * 16 + g, column = blockIdx.x * 8 + g, words = k / 8, steps = k / 64;
  float c0 = 0, c1 = 0, c2 = 0, c3 = 0;
  for (int step = 0; step < steps; ++step) {
    const unsigned *upper = a + row * words + step * 8 + t, *lower = upper + 8 * words;
    const unsigned* right = b + column * words + step * 8 + t;
    // Scales of rows g and g + 8 come from lanes t = 0 and 1, of the column from t = 0.
    const unsigned scale_a = sa[(row + (t & 1) * 8) * steps + step];
    const unsigned scale_b = sb[column * steps + step];
    asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X"
        ".f32.e2m1.e2m1.f32.ue4m3 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {0, 0}, %11, {0, 0};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(upper[0]), "r"(lower[0]), "r"(upper[4]), "r"(lower[4]), "r"(right[0]),
          "r"(right[4]), "r"(scale_a), "r"(scale_b));
  }
  float* out = d + (blockIdx.y * 16 + g) * n + blockIdx.x * 8 + 2 * t;
  out[0] = c0, out[1] = c1, out[8 * n] = c2, out[8 * n + 1] = c3;
}
"""


@pytest.mark.parametrize("shape", [(16, 8, 64), (32, 24, 256), (48, 16, 1024)])
def test_product_equals_the_model_and_nearly_the_exact_one(shape: tuple[int, int, int]) -> None:
    """Bit for bit the tensor core's model; within its truncation of the exact product.

    Bound: each of the K/64 steps truncates the running f32 sum once, by less than one ulp of a
    number not larger than the sum of the terms' magnitudes.
    """
    m, n, k = shape
    rng = np.random.default_rng(m)
    a, b = (
        quantizer.quantize(rng.standard_normal((rows, k)).astype(np.float32), "NVFP4")
        for rows in (m, n)
    )
    packed = [np.ascontiguousarray(q.codes[:, ::2] | q.codes[:, 1::2] << 4) for q in (a, b)]
    d = np.zeros((m, n), np.float32)
    module = sim.Machine("120a").load(compile_to_ptx(SOURCE, "sm_120a"))
    module.launch("product", (n // 8, m // 16), 32, args=[*packed, a.scales, b.scales, d, n, k])
    want = mma.product_k64(a.codes, b.codes, a.scales, b.scales, "ue4m3")
    np.testing.assert_array_equal(d.view(np.uint32), want)
    exact = a.values() @ b.values().T
    magnitude = np.abs(a.values()) @ np.abs(b.values()).T
    assert (np.abs(d - exact) <= (k // 64) * magnitude * 2.0**-23).all()

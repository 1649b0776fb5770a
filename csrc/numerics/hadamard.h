// The random Hadamard transform of 16 consecutive values along the contraction axis.
//
// y = x * diag(signs) * H16 / 4 with H16 the Sylvester (natural order) matrix. H16 / 4 is
// orthogonal and symmetric: rotating both operands of a product with the same signs leaves the
// product as it is.
#pragma once

#include "minifloat.h"

namespace jax_fp4 {

inline constexpr int kHadamardSize = 16;

// Bit i is set where element i is multiplied by -1. These are Transformer Engine's signs:
// 1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1.
inline constexpr u16 kDefaultHadamardSigns = 0b1101'0111'1110'1000;

// In place, in f32: butterflies with strides 1, 2, 4, 8 (this order is part of the definition,
// since every sum rounds), then times 0.25, then rounded to bf16 (kept as an f32).
JAX_FP4_FN void rotate16(float (&x)[kHadamardSize], u16 signs) {
  for (int i = 0; i < kHadamardSize; ++i)
    if ((signs >> i) & 1) x[i] = -x[i];
  for (int stride = 1; stride < kHadamardSize; stride *= 2)
    for (int i = 0; i < kHadamardSize; ++i)
      if ((i & stride) == 0) {
        const float a = x[i];
        const float b = x[i + stride];
        x[i] = a + b;
        x[i + stride] = a - b;
      }
  for (int i = 0; i < kHadamardSize; ++i) x[i] = decode_bf16(encode_bf16(x[i] * 0.25f));
}

}  // namespace jax_fp4

// Philox4x32-10, the counter-based generator behind stochastic rounding.
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once

#include "base.h"

namespace jax_fp4 {

struct PhiloxBlock {
  u32 word[4];

  // The random byte of element j of a group of 16: byte j % 4 of word j / 4.
  JAX_FP4_FN u32 byte(int j) const { return (word[j / 4] >> (8 * (j % 4))) & 0xFFu; }
};

struct Product {
  JAX_FP4_FN u64 operator()(u32 a, u32 b) const { return u64{a} * b; }
};

// `product`: of 32-bit numbers, where a compiler does not find the machine's instruction for it.
template <class WideProduct = Product>
JAX_FP4_FN PhiloxBlock philox4x32_10(PhiloxBlock counter, u32 key_low, u32 key_high,
                                     WideProduct product = {}) {
  for (int round = 0; round < 10; ++round) {
    const u64 p0 = product(0xD251'1F53u, counter.word[0]);
    const u64 p1 = product(0xCD9E'8D57u, counter.word[2]);
    counter = {{static_cast<u32>(p1 >> 32) ^ counter.word[1] ^ key_low, static_cast<u32>(p1),
                static_cast<u32>(p0 >> 32) ^ counter.word[3] ^ key_high, static_cast<u32>(p0)}};
    key_low += 0x9E37'79B9u;
    key_high += 0xBB67'AE85u;
  }
  return counter;
}

// The random bits of one group of 16 consecutive elements along the quantized axis.
//
// `group` is the group's number in the *logical* tensor, row * ceil(K / 16) + k / 16, so the bits
// depend on no tile size, thread or device count. `stream` keeps two uses of one seed apart.
template <class WideProduct = Product>
JAX_FP4_FN PhiloxBlock rounding_bits(u64 seed, u64 group, u32 stream, WideProduct product = {}) {
  return philox4x32_10({{static_cast<u32>(group), static_cast<u32>(group >> 32), stream, 0}},
                       static_cast<u32>(seed), static_cast<u32>(seed >> 32), product);
}

}  // namespace jax_fp4

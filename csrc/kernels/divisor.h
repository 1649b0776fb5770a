// Division by a number that the host knows: a multiplication and a shift, where a division is a sequence of
// twenty instructions, each waiting for the last.
#pragma once

#include "numerics/formats.h"

namespace jax_fp4 {

// With s = ceil(log2 d) and m = ceil(2^(31 + s) / d): m d = 2^(31 + s) + e with 0 <= e < d <= 2^s. So
// x m / 2^(31 + s) exceeds x / d by x e / (d 2^(31 + s)), which for x < 2^31 is less than 1 / d: too little to
// reach the next integer. And m <= 2^32 - 1, since d > 2^(s - 1).
struct Divisor {
  u32 value;       // d, from 1 to 2^31
  u32 multiplier;  // m
  u32 shift;       // 31 + s

  // floor(x / d) for x < 2^31.
  JAX_FP4_FN u32 divide(u32 x) const {
    return static_cast<u32>(static_cast<u64>(x) * multiplier >> shift);
  }
};

// For the host.
JAX_FP4_FN Divisor divisor(u32 d) {
  u32 s = 0;
  while ((u64{1} << s) < d) ++s;
  return {d, static_cast<u32>(((u64{1} << (31 + s)) + d - 1) / d), 31 + s};
}

}  // namespace jax_fp4

// mov of two registers into a wider one.
#pragma once

#include "numerics/base.h"

namespace jax_fp4::ptx {

__device__ inline u64 mov_b64(u32 low, u32 high) {
  u64 d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(high));
  return d;
}

}  // namespace jax_fp4::ptx

// Loads and stores that CUDA C++ has no expression for. One function an instruction.
#pragma once

#include "numerics/base.h"

namespace jax_fp4::ptx {

// 32 bytes that no thread of the grid writes, aligned to 32 (PTX ISA 9.7.9.8; sm_100).
__device__ inline void ld_global_nc_v8_b32(u32* d, const void* from) {
  asm("ld.global.nc.v8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]), "=r"(d[4]), "=r"(d[5]), "=r"(d[6]),
        "=r"(d[7])
      : "l"(from));
}

}  // namespace jax_fp4::ptx

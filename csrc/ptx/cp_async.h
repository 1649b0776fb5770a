// Copies from global to shared memory by the threads of a warp (PTX ISA 9.7.9.25.3). One function an
// instruction, named as it.
#pragma once

#include "numerics/base.h"

namespace jax_fp4::ptx {

// 16 bytes, both addresses aligned to 16, past L1. Of the source `bytes` are read, 16 or none: the rest
// arrives as zeros.
__device__ inline void cp_async_cg_shared_global_16(u32 to, const void* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

__device__ inline void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's groups have not arrived.
template <int kPending>
__device__ inline void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace jax_fp4::ptx

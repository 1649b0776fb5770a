// Loads and stores of shared memory by 32-bit address. One function an instruction, named as it.
#pragma once

#include "numerics/base.h"

namespace jax_fp4::ptx {

// The 32-bit shared address of an object, as instructions take it.
__device__ inline u32 shared_address(const void* object) {
  return static_cast<u32>(__cvta_generic_to_shared(object));
}

__device__ inline u32 ld_shared_b32(u32 from) {
  u32 d;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(d) : "r"(from) : "memory");
  return d;
}

__device__ inline u16 ld_shared_b16(u32 from) {
  u16 d;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(d) : "r"(from) : "memory");
  return d;
}

__device__ inline u32 ld_shared_u8(u32 from) {
  u32 d;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(d) : "r"(from) : "memory");
  return d;
}

// 8 and 16 bytes, aligned to as many.
__device__ inline void ld_shared_v2_b32(u32 from, u32& a, u32& b) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(from) : "memory");
}
__device__ inline void ld_shared_v4_b32(u32 from, u32& a, u32& b, u32& c, u32& d) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(from)
               : "memory");
}
__device__ inline void st_shared_u8(u32 to, u32 a) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(a) : "memory");
}
__device__ inline void st_shared_b32(u32 to, u32 a) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(a) : "memory");
}
__device__ inline void st_shared_v2_b32(u32 to, u32 a, u32 b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}
__device__ inline void st_shared_v4_b32(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace jax_fp4::ptx

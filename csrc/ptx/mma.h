// Matrix products of a warp, and loads of their operands from shared memory (PTX ISA 9.7.14.5). One
// function an instruction, named as it; the 32 lanes execute it together.
//
// D (16 x 8, f32) += A (16 x K, row-major) * B (K x 8, column-major). Lane 4 g + t holds, with e elements
// in a register of 32 bits (8 of 4 bits, 4 of 8 bits, 2 of bf16), the lowest k in the lowest bits:
//
//   A, register q   row g + 8 (q % 2),   k from e t + 4 e (q / 2) on
//   B, register q   column g,            k from e t + 4 e q on
//   D, register q   row g + 8 (q / 2),   column 2 t + q % 2
//
// Scales: a register holds those of a row (or column) for K, the first in the low byte. Rows g and g + 8
// are those of the lanes with t = 2 thread_a and 2 thread_a + 1; column g is that of the lane with
// t = thread_b. So the same registers serve two products along M and four along N.
#pragma once

#include "numerics/base.h"

namespace jax_fp4::ptx {

// Element types of kind mxf8f6f4. Each element has a byte of its own: 6-bit codes in bits 5:0, E2M1 in
// bits 5:2, the others 0.
struct E2M1 {
  static constexpr char kName[] = "e2m1";
};
struct E2M3 {
  static constexpr char kName[] = "e2m3";
};
struct E3M2 {
  static constexpr char kName[] = "e3m2";
};
struct E4M3 {
  static constexpr char kName[] = "e4m3";
};
struct E5M2 {
  static constexpr char kName[] = "e5m2";
};

// K = 64, E2M1, a UE4M3 scale for each 16 (9.7.14.5.14).
__device__ inline void mma_m16n8k64_mxf4nvf4_scale_vec_4x(float (&d)[4], const u32 (&a)[4],
                                                          const u32 (&b)[2], u32 scale_a,
                                                          u16 thread_a, u32 scale_b, u16 thread_b) {
  asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X"
      ".f32.e2m1.e2m1.f32.ue4m3 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {%11, %12}, %13, "
      "{%11, %14};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a),
        "h"(static_cast<u16>(0)), "h"(thread_a), "r"(scale_b), "h"(thread_b));
}

// K = 64, E2M1, a UE8M0 scale for each 32, in the two low bytes.
__device__ inline void mma_m16n8k64_mxf4_scale_vec_2x(float (&d)[4], const u32 (&a)[4],
                                                      const u32 (&b)[2], u32 scale_a, u16 thread_a,
                                                      u32 scale_b, u16 thread_b) {
  asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.scale_vec::2X"
      ".f32.e2m1.e2m1.f32.ue8m0 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {%11, %12}, %13, "
      "{%11, %14};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a),
        "h"(static_cast<u16>(0)), "h"(thread_a), "r"(scale_b), "h"(thread_b));
}

// K = 32, elements of two types, a UE8M0 scale in the low byte.
template <class A, class B>
__device__ inline void mma_m16n8k32_mxf8f6f4_scale_vec_1x(float (&d)[4], const u32 (&a)[4],
                                                          const u32 (&b)[2], u32 scale_a,
                                                          u16 thread_a, u32 scale_b, u16 thread_b) {
  asm("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X"
      ".f32.%15.%16.f32.ue8m0 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {%11, %12}, %13, "
      "{%11, %14};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a),
        "h"(static_cast<u16>(0)), "h"(thread_a), "r"(scale_b), "h"(thread_b), "C"(A::kName),
        "C"(B::kName));
}

// K = 16, bf16, no scales (sm_80).
__device__ inline void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 16 bits, as operands of any width hold them: register i of lane 4 g + t is bytes
// 4 t to 4 t + 3 of row g of matrix i, whose address lane 8 i + g gives; 16 bytes, aligned to 16
// (9.7.14.5.15).
__device__ inline void ldmatrix_m8n8_x4_b16(u32 (&d)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row)
               : "memory");
}
// The same from rows of 16 codes of 6 bits in 12 bytes, and 4 bytes of padding: a byte each.
__device__ inline void ldmatrix_m8n16_x4_b8x16_b6x16_p32(u32 (&d)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.b6x16_p32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row)
               : "memory");
}
// And of 4 bits in 8 bytes and 8 bytes of padding: a byte each, in its low bits.
__device__ inline void ldmatrix_m8n16_x4_b8x16_b4x16_p64(u32 (&d)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.b4x16_p64 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row)
               : "memory");
}

}  // namespace jax_fp4::ptx

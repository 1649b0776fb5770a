// Arithmetic that CUDA C++ has no operator for. One function an instruction, named as it.
#pragma once

#include "numerics/base.h"

namespace jax_fp4::ptx {

// The larger magnitude; a NaN if there is one (PTX ISA 9.7.3.12).
__device__ inline float max_nan_f32(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
// The larger magnitude with the product's sign; a NaN if there is one (PTX ISA 9.7.3.12; sm_86).
__device__ inline float max_nan_xorsign_abs_f32(float a, float b) {
  float d;
  asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
// a * b + c of two pairs of bf16, each rounded once to nearest even; subnormals count (PTX ISA 9.7.4.4).
__device__ inline u32 fma_rn_bf16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// The larger magnitudes of two pairs, with the products' signs; a NaN where there is one (PTX ISA
// 9.7.4.8; sm_86).
__device__ inline u32 max_nan_xorsign_abs_bf16x2(u32 a, u32 b) {
  u32 d;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ inline u32 max_nan_xorsign_abs_f16x2(u32 a, u32 b) {
  u32 d;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// The larger of two pairs; a NaN where there is one.
__device__ inline u32 max_nan_bf16x2(u32 a, u32 b) {
  u32 d;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ inline u32 max_nan_f16x2(u32 a, u32 b) {
  u32 d;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// The smaller magnitudes of two pairs, with the products' signs (PTX ISA 9.7.4.7; sm_86).
__device__ inline u32 min_xorsign_abs_f16x2(u32 a, u32 b) {
  u32 d;
  asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// Two f32 operations at a time, each rounded once to nearest even (PTX ISA 9.7.3; one instruction
// on sm_100 and later).
struct F32x2 {
  float x, y;
};
#if __CUDA_ARCH__ >= 1000
#define JAX_FP4_F32X2(name, instruction, sign)     \
  __device__ inline F32x2 name(F32x2 a, F32x2 b) { \
    F32x2 d;                                       \
    asm("{\n"                                      \
        ".reg .b64 a, b, d;\n"                     \
        "mov.b64 a, {%2, %3};\n"                   \
        "mov.b64 b, {%4, %5};\n" instruction       \
        " d, a, b;\n"                              \
        "mov.b64 {%0, %1}, d;\n"                   \
        "}"                                        \
        : "=f"(d.x), "=f"(d.y)                     \
        : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y)); \
    return d;                                      \
  }
#else
#define JAX_FP4_F32X2(name, instruction, sign) \
  __device__ inline F32x2 name(F32x2 a, F32x2 b) { return {a.x sign b.x, a.y sign b.y}; }
#endif
JAX_FP4_F32X2(add_rn_f32x2, "add.rn.f32x2", +)
JAX_FP4_F32X2(sub_rn_f32x2, "sub.rn.f32x2", -)
JAX_FP4_F32X2(mul_rn_f32x2, "mul.rn.f32x2", *)
#undef JAX_FP4_F32X2
// The whole product (PTX ISA 9.7.1.3).
__device__ inline u64 mul_wide_u32(u32 a, u32 b) {
  u64 d;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(d) : "r"(a), "r"(b));
  return d;
}
// Four bytes of the eight of {b, a}; nibble i of the selector names that of byte i (9.7.9.7).
__device__ inline u32 prmt_b32(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

}  // namespace jax_fp4::ptx

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
// The larger magnitude with the product's sign (PTX ISA 9.7.3.12; sm_86).
__device__ inline float max_xorsign_abs_f32(float a, float b) {
  float d;
  asm("max.xorsign.abs.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
__device__ inline float max_nan_xorsign_abs_f32(float a, float b) {
  float d;
  asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
__device__ inline float min_xorsign_abs_f32(float a, float b) {
  float d;
  asm("min.xorsign.abs.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
// a * b + c, rounded once, toward zero (PTX ISA 9.7.3.6).
__device__ inline float fma_rz_f32(float a, float b, float c) {
  float d;
  asm("fma.rz.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}
// a * b + c of two pairs of bf16, each rounded once to nearest even; subnormals count (PTX ISA 9.7.4.4).
__device__ inline u32 fma_rn_bf16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// Four bytes of the eight of {b, a}; nibble i of the selector names that of byte i (9.7.9.7).
__device__ inline u32 prmt_b32(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

}  // namespace jax_fp4::ptx

// Conversions to and from small floats. One function an instruction, named as the instruction.
//
// Every result equals numerics/minifloat.h for every finite input (tests/kernels holds them to it).
// The first operand of a pair is the low one, element 0; the PTX instructions take the high one
// first (PTX ISA 9.7.9.21, "cvt").
#pragma once

#include "numerics/base.h"

namespace jax_fp4::ptx {

// FP4, FP6 and UE8M0 conversions exist on targets with `a` or `f` of sm_100 and later only.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__)
inline constexpr bool kHasFp4 = __CUDA_ARCH__ >= 1000;
#else
inline constexpr bool kHasFp4 = false;
#endif
#if defined(__CUDA_ARCH__)
inline constexpr bool kHasFp8 = __CUDA_ARCH__ >= 890;
inline constexpr bool kHasXorSign = __CUDA_ARCH__ >= 860;
#endif

// Eight values to four bytes: four conversions, whose 8-bit results only a vector mov can join.
__device__ inline u32 cvt_rn_satfinite_e2m1x2_f32_4(const float (&x)[8]) {
  u32 d;
  asm("{\n"
      ".reg .b8 b0, b1, b2, b3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      "mov.b32 %0, {b0, b1, b2, b3};\n"
      "}"
      : "=r"(d)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return d;
}

__device__ inline u16 cvt_rn_satfinite_e2m3x2_f32(float low, float high) {
  u16 d;
  asm("cvt.rn.satfinite.e2m3x2.f32 %0, %2, %1;" : "=h"(d) : "f"(low), "f"(high));
  return d;
}
__device__ inline u16 cvt_rn_satfinite_e3m2x2_f32(float low, float high) {
  u16 d;
  asm("cvt.rn.satfinite.e3m2x2.f32 %0, %2, %1;" : "=h"(d) : "f"(low), "f"(high));
  return d;
}
__device__ inline u16 cvt_rn_satfinite_e4m3x2_f32(float low, float high) {
  u16 d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(d) : "f"(low), "f"(high));
  return d;
}
__device__ inline u16 cvt_rn_satfinite_e5m2x2_f32(float low, float high) {
  u16 d;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %2, %1;" : "=h"(d) : "f"(low), "f"(high));
  return d;
}

// Two f16 in a word, rounded toward zero; beyond the largest finite value: that value.
__device__ inline u32 cvt_rz_f16x2_f32(float low, float high) {
  u32 d;
  asm("cvt.rz.f16x2.f32 %0, %2, %1;" : "=r"(d) : "f"(low), "f"(high));
  return d;
}
// Two bf16 in a word, rounded to nearest even.
__device__ inline u32 cvt_rn_bf16x2_f32(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(d) : "f"(low), "f"(high));
  return d;
}
// Two f16 in a word, rounded to nearest even.
__device__ inline u32 cvt_rn_f16x2_f32(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(d) : "f"(low), "f"(high));
  return d;
}
__device__ inline u16 cvt_rn_f16_f32(float x) {
  u16 d;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(x));
  return d;
}
__device__ inline float cvt_f32_f16(u16 x) {
  float d;
  asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(x));
  return d;
}

}  // namespace jax_fp4::ptx

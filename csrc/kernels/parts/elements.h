// Elements of arrays whose type is known at run time.
#pragma once

#include "kernels/gemm_params.h"
#include "ptx/convert.h"

namespace jax_fp4 {

// A bf16 or f16, exactly widened.
__device__ inline float widen(Dtype type, u32 bits) {
  return type == Dtype::bf16 ? f32_of(bits << 16) : ptx::cvt_f32_f16(static_cast<u16>(bits));
}

// Element i of an array.
__device__ inline float load_element(Dtype type, const void* array, i64 i) {
  return type == Dtype::f32 ? static_cast<const float*>(array)[i]
                            : widen(type, static_cast<const u16*>(array)[i]);
}

// An f32 rounded to the type, as element i of an array.
__device__ inline void store_element(Dtype type, void* array, i64 i, float x) {
  if (type == Dtype::f32)
    static_cast<float*>(array)[i] = x;
  else
    static_cast<u16*>(array)[i] = static_cast<u16>(
        type == Dtype::bf16 ? ptx::cvt_rn_bf16x2_f32(x, 0.0f) : ptx::cvt_rn_f16x2_f32(x, 0.0f));
}

}  // namespace jax_fp4

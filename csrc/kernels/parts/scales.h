// From a block's largest magnitude to its scale byte and multiplier, as numerics/block_scale.h
// defines them, with what is the same for a whole tensor computed once.
#pragma once

#include "kernels/params.h"
#include "ptx/convert.h"

namespace jax_fp4 {

// Of one tensor and one copy; a CTA's first warp computes it.
struct TensorConstants {
  float encode;   // TensorScale::encode
  float inverse;  // fl(1 / encode)
  float sixth;    // fl(encode * fl(1/6))
  float amax;
};

__device__ inline TensorConstants tensor_constants(const Format& format, bool four_over_six,
                                                   float amax, float* global_scale) {
  const TensorScale scale = tensor_scale(format, amax, four_over_six);
  *global_scale = scale.global;
  return {scale.encode, 1.0f / scale.encode, scale.encode * (1.0f / 6.0f), amax};
}

__device__ inline u32 fast_encode_ue4m3(float x) {
  if constexpr (ptx::kHasFp8) return ptx::cvt_rn_satfinite_e4m3x2_f32(x, 0.0f);
  return encode_ue4m3(x);
}

// decode_ue4m3 of a byte that is no NaN: the same exponent and mantissa in an f32, times 2^120, is
// exact in the subnormal range too.
__device__ inline float finite_ue4m3(u32 byte) { return f32_of(byte << 20) * 0x1p120f; }

__device__ inline float fast_nvfp4_multiplier(u32 byte, float inverse) {
  return minimum(1.0f / (finite_ue4m3(byte) * inverse), kF32Max);
}

__device__ inline BlockEncoding fast_nvfp4_block(float block_amax, const TensorConstants& t) {
  const u32 byte = fast_encode_ue4m3(minimum(block_amax * t.sixth, kF32Max));
  return {static_cast<u8>(byte), fast_nvfp4_multiplier(byte, t.inverse)};
}

}  // namespace jax_fp4

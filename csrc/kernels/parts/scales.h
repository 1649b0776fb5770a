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
                                                   float amax) {
  const float encode = tensor_scale(format, amax, four_over_six).encode;
  return {encode, 1.0f / encode, encode * (1.0f / 6.0f), amax};
}

// decode_ue4m3 of a byte that is no NaN: the same exponent and mantissa in an f32, times 2^120, is
// exact in the subnormal range too.
__device__ inline float finite_ue4m3(u32 byte) { return f32_of(byte << 20) * 0x1p120f; }

__device__ inline float fast_nvfp4_multiplier(u32 byte, float inverse) {
  return minimum(1.0f / (finite_ue4m3(byte) * inverse), kF32Max);
}

constexpr int kUE4M3Codes = 128;

// The scale byte of a block, from the bits of its largest magnitude; NaN for Inf and NaN.
__device__ inline u32 fast_nvfp4_scale(u32 block_amax, float sixth) {
  const float amax = f32_of(block_amax);
  if constexpr (ptx::kHasFp8)  // adds 0, or NaN; what overflows is saturated
    return ptx::cvt_rn_satfinite_e4m3x2_f32(__fmaf_rn(amax, sixth, amax * 0.0f), 0.0f);
  return block_amax < kF32InfBits ? encode_ue4m3(minimum(amax * sixth, kF32Max)) : kUE4M3NaN;
}

}  // namespace jax_fp4

// From amax to scale: the per-tensor scale, the scale byte of a block, and the f32 by which the
// block's elements are multiplied before they are rounded.
//
// The NVFP4 chain is Transformer Engine's without fast-math, bit for bit: every operation below is
// one IEEE f32 rounding, division is true division, subnormals are kept, nothing is contracted. An
// algebraically equal chain gives other bytes.
#pragma once

#include "formats.h"

namespace jax_fp4 {

// What quantizing needs to know of one tensor.
struct TensorScale {
  float encode;  // multiplies values before the block scale is taken
  float global;  // what consumers multiply by: value = code * block scale * global
};

enum class ScaleRule : u8 {
  rceil,  // 2^ceil(log2(amax / max)), through fl(amax * fl(1/max)): never saturates
  floor,  // 2^(floor(log2 amax) - floor(log2 max)), the text of OCP MX v1.0: may saturate
};

inline constexpr float kNVFP4TensorMax = 2688.0f;  // 6 * 448
// 6 * 256: leaves room for scales that are 1.5x larger.
inline constexpr float kFourOverSixTensorMax = 1536.0f;

// The value that the largest element of a tensor is mapped to; 0 where there is no per-tensor
// scale.
JAX_FP4_FN float tensor_max(const Format& format, bool four_over_six) {
  switch (format.scale) {
    case BlockScale::ue4m3: return four_over_six ? kFourOverSixTensorMax : kNVFP4TensorMax;
    case BlockScale::unit: return minifloat(format.element).max;
    case BlockScale::ue8m0: return 0.0f;
  }
  return 0.0f;
}

// amax >= 0 is the largest finite magnitude of the logical tensor. One that a caller gave can be
// anything: a negative or non-finite one makes the tensor NaN instead of nonsense.
JAX_FP4_FN TensorScale tensor_scale(const Format& format, float amax, bool four_over_six = false) {
  const float target = tensor_max(format, four_over_six);
  if (target == 0.0f) return {1.0f, 1.0f};
  if (amax == 0.0f) return {1.0f, 0.0f};
  if (!(amax > 0.0f) || !is_finite(amax)) return {1.0f, kF32NaN};
  const float encode = minimum(target / amax, kF32Max);
  // A clamped encode scale no longer maps amax to target; its reciprocal is what was applied.
  return {encode, encode < kF32Max ? amax / target : 1.0f / kF32Max};
}

// A block's scale byte and the multiplier of its elements: code = round(x * multiplier).
struct BlockEncoding {
  u8 scale;
  float multiplier;
};

// The multiplier that belongs to the stored (rounded) UE4M3 scale. A scale of 0 gives FLT_MAX:
// 0 stays 0, anything else saturates and is decoded as 0.
JAX_FP4_FN float nvfp4_multiplier(u32 scale_byte, float encode) {
  const float decode_scale = decode_ue4m3(scale_byte) * (1.0f / encode);
  return minimum(1.0f / decode_scale, kF32Max);
}

JAX_FP4_FN BlockEncoding nvfp4_block(float block_amax, float encode) {
  constexpr float kSixth = 1.0f / 6.0f;  // 0x3E2AAAAB
  const u32 scale = encode_ue4m3(minimum(block_amax * (encode * kSixth), kF32Max));
  return {static_cast<u8>(scale), nvfp4_multiplier(scale, encode)};
}

// The two candidates of four-over-six: the block maximum goes to 6, or to 4 with a scale 1.5x
// larger.
struct FourOverSix {
  BlockEncoding six;
  BlockEncoding four;
};

JAX_FP4_FN FourOverSix four_over_six_block(float block_amax, float encode) {
  const float base = minimum(block_amax / 6.0f * encode, kF32Max);
  const u32 six = encode_ue4m3(minimum(base, 448.0f));
  const u32 four = encode_ue4m3(minimum(base * 1.5f, 448.0f));
  return {{static_cast<u8>(six), nvfp4_multiplier(six, encode)},
          {static_cast<u8>(four), nvfp4_multiplier(four, encode)}};
}

// What four-over-six compares: the error |decoded - x| of one element, in f32. The candidate "four"
// is taken only where its sum of errors (16 elements, in order) is strictly smaller; a 16x16 tile
// adds its 16 row sums pairwise with strides 8, 4, 2, 1.
JAX_FP4_FN float four_over_six_error(float x, u32 code, u32 scale_byte, float amax) {
  const float product = decode(kE2M1, code) * decode_ue4m3(scale_byte);
  return absolute(product * amax / kFourOverSixTensorMax - x);
}

// floor(log2 x) of a finite x > 0.
JAX_FP4_FN int floor_log2(float x) {
  const u32 bits = bits_of(x);
  if ((bits >> 23) != 0) return static_cast<int>(bits >> 23) - 127;
  int exponent = -149;
  for (u32 rest = bits >> 1; rest != 0; rest >>= 1) ++exponent;
  return exponent;
}

JAX_FP4_FN u32 mx_scale(Element element, float block_amax, ScaleRule rule) {
  const float max = minifloat(element).max;
  if (rule == ScaleRule::rceil) return encode_ue8m0_up(block_amax * (1.0f / max));
  if (block_amax == 0.0f) return 0;
  const int exponent = floor_log2(block_amax) - floor_log2(max);
  return exponent < -127 ? 0u : static_cast<u32>(exponent + 127);
}

// The reciprocal of a UE8M0 scale, exact: 2^(127 - byte), subnormal for byte 254.
JAX_FP4_FN float mx_multiplier(u32 scale_byte) {
  return power_of_two(127 - static_cast<int>(scale_byte));
}

// Scale byte and multiplier of a block of finite values, for every format but four-over-six.
JAX_FP4_FN BlockEncoding encode_block(const Format& format, float block_amax, float encode,
                                      ScaleRule rule) {
  switch (format.scale) {
    case BlockScale::ue4m3: return nvfp4_block(block_amax, encode);
    case BlockScale::ue8m0: {
      const u32 scale = mx_scale(format.element, block_amax, rule);
      return {static_cast<u8>(scale), mx_multiplier(scale)};
    }
    case BlockScale::unit: return {static_cast<u8>(kUE8M0One), encode};
  }
  return {0, 0.0f};
}

// A block that holds NaN or Inf stores the NaN scale and zero codes: all its products are NaN, and
// no other block changes, since amax is taken over the finite values only.

}  // namespace jax_fp4

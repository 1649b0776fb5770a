// Codes to bf16: value times block scale.
//
// A code's exponent and mantissa fields, put into those of a bf16, are its value times 2^(bias - 127), also for
// subnormal codes. One product makes it the value, which is exact; a second one multiplies by the scale:
// at most 6 significant bits (an element has at most 4, UE4M3 has 4 and meets elements of 2), so it is exact
// where bf16 has the exponent, that is from 2^-126 to below 2^128. UE4M3 scales never leave that range. With
// UE8M0 scales results below it are rounded to a multiple of 2^-133, to nearest even, and 2^128 and more
// become infinite.
#pragma once

#include "numerics/formats.h"
#include "ptx/arithmetic.h"

namespace jax_fp4 {

inline constexpr u32 kTwice = 0x0001'0001u;       // a bf16 to both halves of a word
inline constexpr u32 kMinusZeros = 0x8000'8000u;  // the sum of a product and -0 is the product
inline constexpr u32 kBf16Infinity = 0x7F80u;
inline constexpr u32 kBf16NaN = 0x7FC0u;

// Codes 2 i and 2 i + 1 of a group, in the halves of a word.
template <u32 kBits>
__device__ inline u32 code_pair(const u32 (&word)[kBits / 2], u32 i) {
  constexpr u32 kMask = (1u << kBits) - 1;
  const u32 bit = 2 * i * kBits;
  u32 both = word[bit / 32] >> (bit % 32);
  if (bit % 32 + 2 * kBits > 32) both |= word[bit / 32 + 1] << (32 - bit % 32);
  return (both & kMask) | (both & kMask << kBits) << (16 - kBits);
}

// Two bf16, the codes' values.
template <Element kElement>
__device__ inline u32 bf16_values(u32 codes) {
  constexpr Minifloat kKind = minifloat(kElement);
  constexpr u32 kBits = static_cast<u32>(kKind.bits());
  constexpr u32 kUnit = static_cast<u32>(127 + 127 - kKind.bias) << 7;  // 2^(127 - bias)
  const u32 magnitudes = codes & (kKind.sign_code() - 1) * kTwice;
  const u32 signs = codes & kKind.sign_code() * kTwice;
  u32 x = ptx::fma_rn_bf16x2(magnitudes << (7 - kKind.mantissa_bits) | signs << (16 - kBits),
                             kUnit * kTwice, kMinusZeros);
  if constexpr (kBits == 8) {
    // E5M2 has an infinity, whose mantissa is 0, and NaN; E4M3 has a NaN, whose mantissa is not.
    if ((magnitudes & 0xFFFF) > kKind.max_code) x |= kBf16Infinity;
    if (magnitudes >> 16 > kKind.max_code) x |= kBf16Infinity << 16;
  }
  return x;
}

// The scale, in both halves of a word.
template <BlockScale kScale>
__device__ inline u32 bf16_scales(u32 byte) {
  if constexpr (kScale == BlockScale::ue4m3) {
    const u32 magnitude = byte & 0x7F;
    const u32 x = bf16_values<Element::e4m3>(magnitude * kTwice);
    return magnitude == kUE4M3NaN ? kBf16NaN * kTwice : x;
  } else {
    // 2^-127 is a subnormal.
    const u32 x = byte == kUE8M0NaN ? kBf16NaN : byte == 0 ? 0x0040u : byte << 7;
    return x * kTwice;
  }
}

// 16 codes that share a scale, as 16 bf16.
template <Element kElement, u32 kBits>
__device__ inline void decode_group(const u32 (&word)[kBits / 2], u32 scales, u32 (&out)[8]) {
#pragma unroll
  for (u32 i = 0; i < 8; ++i)
    out[i] =
        ptx::fma_rn_bf16x2(bf16_values<kElement>(code_pair<kBits>(word, i)), scales, kMinusZeros);
}

}  // namespace jax_fp4

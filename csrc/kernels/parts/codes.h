// From 16 scaled values to packed codes.
//
// numerics/minifloat.h defines the results; here are the instructions that give them quickest. Both
// are compared over all midpoints, neighbours and random bytes by tests/kernels.
#pragma once

#include "numerics/formats.h"
#include "numerics/philox.h"
#include "ptx/arithmetic.h"
#include "ptx/convert.h"

namespace jax_fp4 {

inline constexpr int kGroup = 16;  // elements that a thread encodes at a time

// kBits = bits of a code; a group of codes fills kBits / 2 words.
template <int kBits>
struct Codes {
  u32 word[kBits / 2];
};

// Four 6-bit codes in each of three bytes, from four codes in a word.
__device__ inline u32 squeeze6(u32 bytes) {
  return (bytes & 0x3Fu) | ((bytes >> 2) & 0xFC0u) | ((bytes >> 4) & 0x3'F000u) |
         ((bytes >> 6) & 0xFC'0000u);
}

// Codes, one per byte, to kBits each.
template <int kBits>
__device__ Codes<kBits> pack_bytes(const u32 (&four)[4]) {
  Codes<kBits> codes;
  if constexpr (kBits == 8) {
#pragma unroll
    for (int i = 0; i < 4; ++i) codes.word[i] = four[i];
  } else if constexpr (kBits == 6) {
    const u32 a = squeeze6(four[0]), b = squeeze6(four[1]);
    const u32 c = squeeze6(four[2]), d = squeeze6(four[3]);
    codes.word[0] = a | b << 24;
    codes.word[1] = b >> 8 | c << 16;
    codes.word[2] = c >> 16 | d << 8;
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 word = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        word |= ((four[2 * i + j / 4] >> (8 * (j % 4))) & 0xFu) << (4 * j);
      codes.word[i] = word;
    }
  }
  return codes;
}

// numerics/minifloat.h in few instructions, for a finite x that is below 2^127: what has no
// conversion instruction. A code is linear in the bits of an f32 from the smallest normal number
// on, and 2^min_exponent + |x| gives smaller ones the same property, one binade up.
template <Element kElement>
struct Software {
  static constexpr Minifloat kKind = minifloat(kElement);
  static constexpr int kDropped = 23 - kKind.mantissa_bits;
  static constexpr u32 kNormal = static_cast<u32>(127 + kKind.min_exponent()) << 23;
  static constexpr u32 kBinade = 1u << kKind.mantissa_bits;  // codes of one binade

  __device__ static u32 finish(float x, u32 rounded, bool subnormal) {
    const u32 code = (rounded >> kDropped) - (kNormal >> kDropped) + (subnormal ? 0 : kBinade);
    return with_sign(kKind, x, code);
  }
  __device__ static u32 nearest(float x) {
    const bool subnormal = (bits_of(x) & kF32AbsMask) < kNormal;
    // The sum is rounded to even as well, long before the bits that matter here.
    const float step = f32_of(kNormal + (static_cast<u32>(kDropped) << 23));
    if (subnormal) return with_sign(kKind, x, bits_of(absolute(x) + step) - bits_of(step));
    const u32 bits = bits_of(x) & kF32AbsMask;
    return finish(x, bits + ((1u << (kDropped - 1)) - 1) + ((bits >> kDropped) & 1), false);
  }
  __device__ static u32 stochastic(float x, u32 random) {
    const bool subnormal = (bits_of(x) & kF32AbsMask) < kNormal;
    const float shifted = __fadd_rz(absolute(x), f32_of(kNormal));
    const u32 bits = subnormal ? bits_of(shifted) : bits_of(x) & kF32AbsMask;
    return finish(x, bits + (random << (kDropped - 8)), subnormal);
  }
};

template <int kBits, Element kElement>
__device__ Codes<kBits> software_nearest(const float (&y)[kGroup]) {
  u32 four[4] = {};
#pragma unroll
  for (int i = 0; i < kGroup; ++i)
    four[i / 4] |= Software<kElement>::nearest(y[i]) << (8 * (i % 4));
  return pack_bytes<kBits>(four);
}
template <int kBits, Element kElement>
__device__ Codes<kBits> software_stochastic(const float (&y)[kGroup], const PhiloxBlock& random) {
  u32 four[4] = {};
#pragma unroll
  for (int i = 0; i < kGroup; ++i)
    four[i / 4] |= Software<kElement>::stochastic(y[i], random.byte(i)) << (8 * (i % 4));
  return pack_bytes<kBits>(four);
}

template <Element kElement>
__device__ u32 nearest_pair(float low, float high) {
  if constexpr (kElement == Element::e2m3) return ptx::cvt_rn_satfinite_e2m3x2_f32(low, high);
  if constexpr (kElement == Element::e3m2) return ptx::cvt_rn_satfinite_e3m2x2_f32(low, high);
  if constexpr (kElement == Element::e4m3) return ptx::cvt_rn_satfinite_e4m3x2_f32(low, high);
  return ptx::cvt_rn_satfinite_e5m2x2_f32(low, high);
}

template <int kBits, Element kElement>
__device__ Codes<kBits> hardware_nearest(const float (&y)[kGroup]) {
  u32 four[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    four[i] = nearest_pair<kElement>(y[4 * i], y[4 * i + 1]) |
              nearest_pair<kElement>(y[4 * i + 2], y[4 * i + 3]) << 16;
  return pack_bytes<kBits>(four);
}

template <int kBits, Element kElement>
__device__ Codes<kBits> nearest_of(const float (&y)[kGroup]) {
  constexpr bool kHardware = kBits == 8 ? ptx::kHasFp8 : ptx::kHasFp4;
  if constexpr (!kHardware) {
    return software_nearest<kBits, kElement>(y);
  } else if constexpr (kBits == 4) {
    return {{ptx::cvt_rn_satfinite_e2m1x2_f32_4(reinterpret_cast<const float (&)[8]>(y[0])),
             ptx::cvt_rn_satfinite_e2m1x2_f32_4(reinterpret_cast<const float (&)[8]>(y[8]))}};
  } else {
    return hardware_nearest<kBits, kElement>(y);
  }
}

// Round to nearest even, saturating. `element` has kBits.
template <int kBits>
__device__ Codes<kBits> nearest_codes(Element element, const float (&y)[kGroup]) {
  if constexpr (kBits == 4) return nearest_of<kBits, Element::e2m1>(y);
  constexpr Element kFirst = kBits == 6 ? Element::e2m3 : Element::e4m3;
  constexpr Element kSecond = kBits == 6 ? Element::e3m2 : Element::e5m2;
  return element == kFirst ? nearest_of<kBits, kFirst>(y) : nearest_of<kBits, kSecond>(y);
}

// What stochastic_codes() wants its values multiplied by.
template <int kBits>
inline constexpr float kStochasticScale = kBits == 4 && ptx::kHasXorSign ? 0x1p-14f : 1.0f;

// E2M1 with eight random bits an element, in the f16 format, two elements a word; u is 2^-14 y.
//
// A magnitude of 2^-14 y is a subnormal f16 where y < 1, and E2M1 is subnormal there too: the f16
// has the code in bits 9 to 11, and below them the eight bits that the random ones are added to; the
// carry decides. Truncation to f16 loses nothing that eight random bits can see.
__device__ inline u32 stochastic_e2m1_8(const float (&u)[8], u32 random_low, u32 random_high) {
  u32 word[4];  // elements 0 and 2, 1 and 3, 4 and 6, 5 and 7
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    constexpr u32 kSixes = 0x0E00'0E00u;
    const int first = i / 2 * 4 + i % 2;
    const u32 random = ptx::prmt_b32(i < 2 ? random_low : random_high, 0, i % 2 ? 0x4341 : 0x4240);
    word[i] = ptx::min_xorsign_abs_f16x2(ptx::cvt_rz_f16x2_f32(u[first], u[first + 2]), kSixes) +
              2 * random;  // no carry: 0x0E00 + 2 * 255 < 0x1000
  }
  // High bytes of the eight halves: sign in bit 7, code in bits 3:1, zeros between.
  const u32 even = ptx::prmt_b32(word[0], word[2], 0x7531);
  const u32 odd = ptx::prmt_b32(word[1], word[3], 0x7531);
  return (((even >> 1) | (even >> 4)) & 0x0F0F'0F0Fu) | (((odd << 3) | odd) & 0xF0F0'F0F0u);
}

// Of values that are multiplied by kStochasticScale.
template <int kBits>
__device__ Codes<kBits> stochastic_codes(Element element, const float (&y)[kGroup],
                                         const PhiloxBlock& random) {
  if constexpr (kBits == 4 && ptx::kHasXorSign)
    return {{stochastic_e2m1_8(reinterpret_cast<const float (&)[8]>(y[0]), random.word[0],
                               random.word[1]),
             stochastic_e2m1_8(reinterpret_cast<const float (&)[8]>(y[8]), random.word[2],
                               random.word[3])}};
  if constexpr (kBits == 4) return software_stochastic<kBits, Element::e2m1>(y, random);
  constexpr Element kFirst = kBits == 6 ? Element::e2m3 : Element::e4m3;
  constexpr Element kSecond = kBits == 6 ? Element::e3m2 : Element::e5m2;
  return element == kFirst ? software_stochastic<kBits, kFirst>(y, random)
                           : software_stochastic<kBits, kSecond>(y, random);
}

}  // namespace jax_fp4

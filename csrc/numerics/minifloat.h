// Small floating-point numbers: what a code means and how an f32 becomes one.
//
// Sources: OCP Microscaling Formats (MX) v1.0 for E2M1, E2M3, E3M2, E4M3, E5M2 and E8M0; the PTX
// ISA (cvt, "satfinite") for saturation and for what a NaN becomes; IEEE 754 for bf16 and f16.
#pragma once

#include "base.h"

namespace jax_fp4 {

// One sign bit, then `exponent_bits`, then `mantissa_bits`; value of a normal code
// (1 + m / 2^mantissa_bits) * 2^(e - bias), of a subnormal one m / 2^mantissa_bits * 2^(1 - bias).
struct Minifloat {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  u32 max_code;  // magnitude bits of the largest finite value
  u32 nan_code;  // what cvt.satfinite makes of a NaN: the largest value where the format has no NaN
  float max;     // the value of max_code

  JAX_FP4_FN int bits() const { return 1 + exponent_bits + mantissa_bits; }
  JAX_FP4_FN u32 sign_code() const { return 1u << (exponent_bits + mantissa_bits); }
  JAX_FP4_FN int min_exponent() const { return 1 - bias; }
};

inline constexpr Minifloat kE2M1{2, 1, 1, 0x07, 0x07, 6.0f};
inline constexpr Minifloat kE2M3{2, 3, 1, 0x1F, 0x1F, 7.5f};
inline constexpr Minifloat kE3M2{3, 2, 3, 0x1F, 0x1F, 28.0f};
inline constexpr Minifloat kE4M3{4, 3, 7, 0x7E, 0x7F, 448.0f};     // 0x7F is its only NaN; no Inf
inline constexpr Minifloat kE5M2{5, 2, 15, 0x7B, 0x7F, 57344.0f};  // 0x7C is Inf, above it NaN
inline constexpr u32 kE5M2InfCode = 0x7C;

// 2^exponent for -149 <= exponent <= 127, subnormals included.
JAX_FP4_FN float power_of_two(int exponent) {
  return exponent >= -126 ? f32_of(static_cast<u32>(exponent + 127) << 23)
                          : f32_of(1u << (exponent + 149));
}

inline constexpr float kF32NaN = __builtin_bit_cast(float, 0x7FC0'0000u);

// The value of a code of `kind` (bits above the format's width are ignored). Exact.
JAX_FP4_FN float decode(const Minifloat& kind, u32 code) {
  const bool negative = (code & kind.sign_code()) != 0;
  const u32 magnitude = code & (kind.sign_code() - 1);
  float value = 0.0f;
  if (magnitude > kind.max_code) {
    // Only E4M3 and E5M2 have codes above their largest finite value.
    const bool inf = kind.mantissa_bits == 2 && magnitude == kE5M2InfCode;
    value = inf ? f32_of(kF32InfBits) : kF32NaN;
  } else {
    const u32 field = magnitude >> kind.mantissa_bits;
    const u32 mantissa = magnitude & ((1u << kind.mantissa_bits) - 1);
    const u32 significand = field == 0 ? mantissa : mantissa | (1u << kind.mantissa_bits);
    const int exponent = (field == 0 ? 1 : static_cast<int>(field)) - kind.bias;
    value = static_cast<float>(significand) * power_of_two(exponent - kind.mantissa_bits);
  }
  return negative ? -value : value;
}

// An f32 magnitude taken apart for rounding to `kind`: the code without its discarded bits, and
// these bits. A code is linear in (exponent, significand), so adding one to it is one step up, also
// across a power of two.
struct Truncated {
  u32 code;  // floor(|x| / step) in codes; may exceed max_code
  // The fraction of a step, in units of 2^-31, rounded toward zero. That loses bits only of values
  // below 2^-8 steps, so `discarded` alone decides whether a value lies above or on a midpoint.
  u32 discarded;
};

JAX_FP4_FN Truncated truncate(const Minifloat& kind, float x) {
  const u32 magnitude = bits_of(x) & kF32AbsMask;
  const int field = static_cast<int>(magnitude >> 23);
  const u32 significand = (magnitude & 0x7F'FFFFu) | (field == 0 ? 0u : 1u << 23);
  const int exponent = (field == 0 ? 1 : field) - 127;
  const int target = exponent > kind.min_exponent() ? exponent : kind.min_exponent();
  // Bits of the 24-bit significand that the code has no room for; at least 20.
  const int dropped = 23 - kind.mantissa_bits + target - exponent;
  if (dropped >= 55) return {0, 0};
  // The significand as a fixed-point number with 31 fraction bits below the code's last place.
  const u64 scaled = (static_cast<u64>(significand) << 31) >> dropped;
  const u32 steps = static_cast<u32>(scaled >> 31);
  const u32 base = static_cast<u32>(target - kind.min_exponent()) << kind.mantissa_bits;
  return {base + steps, static_cast<u32>(scaled & 0x7FFF'FFFFu)};
}

JAX_FP4_FN u32 with_sign(const Minifloat& kind, float x, u32 magnitude) {
  const u32 saturated = magnitude < kind.max_code ? magnitude : kind.max_code;
  return (bits_of(x) & kF32SignMask) ? saturated | kind.sign_code() : saturated;
}

// Round to nearest, ties to the even code; saturates at the largest finite value; -0 keeps its
// sign; NaN gives nan_code (PTX: cvt.rn.satfinite).
JAX_FP4_FN u32 encode_nearest(const Minifloat& kind, float x) {
  if (x != x) return kind.nan_code;
  const Truncated t = truncate(kind, x);
  constexpr u32 half = 1u << 30;
  const bool up = t.discarded > half || (t.discarded == half && (t.code & 1) != 0);
  return with_sign(kind, x, t.code + (up ? 1 : 0));
}

// Stochastic rounding: eight random bits are added to the first eight discarded bits, the carry
// decides. P(away from zero) = floor(256 * fraction) / 256; an exact value never moves. Saturates.
JAX_FP4_FN u32 encode_stochastic(const Minifloat& kind, float x, u32 random_byte) {
  if (x != x) return kind.nan_code;
  const Truncated t = truncate(kind, x);
  return with_sign(kind, x, t.code + (((t.discarded >> 23) + random_byte) >> 8));
}

// ---- Scale bytes

inline constexpr u32 kUE4M3NaN = 0x7F;
inline constexpr u32 kUE8M0NaN = 0xFF;
inline constexpr u32 kUE8M0One = 127;

// UE4M3: E4M3 whose sign bit is ignored (PTX ISA, block-scaled mma).
JAX_FP4_FN float decode_ue4m3(u32 byte) { return decode(kE4M3, byte & 0x7F); }
JAX_FP4_FN u32 encode_ue4m3(float x) { return encode_nearest(kE4M3, x); }

// UE8M0: 2^(byte - 127); 0xFF is NaN. Byte 0 is 2^-127, a subnormal f32.
JAX_FP4_FN float decode_ue8m0(u32 byte) {
  return byte == kUE8M0NaN ? kF32NaN : power_of_two(static_cast<int>(byte) - 127);
}

// The smallest power of two not below x >= 0, at most 2^127 (PTX: cvt.rp.satfinite.ue8m0x2.f32).
JAX_FP4_FN u32 encode_ue8m0_up(float x) {
  if (x != x) return kUE8M0NaN;
  const u32 bits = bits_of(x);
  const u32 field = bits >> 23;
  const u32 mantissa = bits & 0x7F'FFFFu;
  // In the subnormal range the step from byte 0 to byte 1 lies at 2^-127 = 0x400000.
  const bool up = field == 0 ? mantissa > 0x40'0000u : mantissa != 0;
  const u32 byte = field + (up ? 1 : 0);
  return byte < 254 ? byte : 254;
}

// ---- 16-bit floats

JAX_FP4_FN float decode_bf16(u32 bits) { return f32_of(bits << 16); }

// Round to nearest even on integers; subnormals are kept; a NaN keeps its sign and becomes quiet.
JAX_FP4_FN u32 encode_bf16(float x) {
  const u32 bits = bits_of(x);
  if (x != x) return (bits >> 16) | 0x40u;
  return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}

JAX_FP4_FN float decode_f16(u32 bits) {
  const u32 sign = (bits & 0x8000u) << 16;
  const u32 field = (bits >> 10) & 0x1F;
  const u32 mantissa = bits & 0x3FFu;
  if (field == 0x1F) return f32_of(sign | kF32InfBits | mantissa << 13);
  if (field == 0) {
    const float value = static_cast<float>(mantissa) * power_of_two(-24);
    return sign ? -value : value;
  }
  return f32_of(sign | (field + 112) << 23 | mantissa << 13);
}

// Round to nearest even; overflow gives Inf (IEEE), a NaN becomes quiet.
JAX_FP4_FN u32 encode_f16(float x) {
  const u32 sign = (bits_of(x) & kF32SignMask) >> 16;
  const u32 magnitude = bits_of(x) & kF32AbsMask;
  if (magnitude > kF32InfBits) return sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu);
  if (magnitude >= 0x477F'F000u) return sign | 0x7C00u;  // 65520 and above round to Inf
  if (magnitude < 0x3880'0000u) {                        // below 2^-14: a multiple of 2^-24
    const u32 field = magnitude >> 23;
    const u32 significand = (magnitude & 0x7F'FFFFu) | (field == 0 ? 0u : 1u << 23);
    const u32 dropped = 126 - (field == 0 ? 1 : field);
    if (dropped > 25) return sign;
    const u32 q = significand >> dropped;
    const u32 rest = significand & ((1u << dropped) - 1);
    const u32 half = 1u << (dropped - 1);
    return sign | (q + (rest > half || (rest == half && (q & 1)) ? 1 : 0));
  }
  const u32 rebased = magnitude - (112u << 23);
  return sign | (rebased + 0xFFFu + ((rebased >> 13) & 1u)) >> 13;
}

}  // namespace jax_fp4

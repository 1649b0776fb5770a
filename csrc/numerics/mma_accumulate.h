// How a tensor core is assumed to add: the dot product of one block-scaled MMA instruction, for one
// element of D, on integers.
//
// The PTX ISA promises "at least single precision" and leaves order and rounding open. This file is
// the one place that says more. Its model is the published one of MMA-Sim (arXiv 2511.10909), whose
// authors report bit equality with B200 and RTX Blackwell; nothing here was checked on hardware by
// us. The assumptions, numbered so that a later measurement can name the one it refutes:
//
//   M1  Kinds mxf4 and mxf4nvf4 take 64 products per instruction, mxf8f6f4 takes 32 (E2M1 with any
//       partner other than E2M1 counts as mxf8f6f4). Instructions follow each other in k order and
//       carry an f32 accumulator.
//   M2  mxf4, mxf4nvf4: products are summed exactly in four groups of 16, also where 32 elements
//       share a scale; a group's term is its sum times both scales. mxf8f6f4: each product is a
//       term of its own.
//   M3  A term's exponent is the sum of the exponent fields of its factors; a significand is not
//       normalised, so a subnormal counts with the smallest exponent of its format. A group of M2
//       takes the exponents of its scales alone.
//   M4  Terms whose factors make them zero (all products of the group, or a scale), and a zero
//       accumulator, have the exponent -139 (mxf4, mxf4nvf4) or -133 (mxf8f6f4).
//   M5  All terms and the accumulator are truncated toward zero at 35 (mxf4, mxf4nvf4) or 25
//       (mxf8f6f4) bits below the largest exponent, and then added exactly.
//   M6  The sum is truncated toward zero to f32. Subnormals are kept, overflow gives infinity, a
//       zero sum is +0.
//   M7  Any NaN among scales, elements and accumulator, an infinity times zero, and infinities of
//       both signs give 0x7FFFFFFF; other infinities stay. UE4M3's sign bit is ignored.
//   M8  A K tail is padded with zero codes and zero scale bytes.
//   M9  The unscaled FP8 kind (f8f6f4) equals mxf8f6f4 with scales of 1.
#pragma once

#include "formats.h"
#include "mma_sum.h"

namespace jax_fp4 {

inline constexpr u32 kMmaNaN = 0x7FFF'FFFFu;

inline constexpr int kFp4StepK = 64;           // M1
inline constexpr int kFp8StepK = 32;           // M1
inline constexpr int kFp4Group = 16;           // M2
inline constexpr int kFp4ZeroExponent = -139;  // M4
inline constexpr int kFp8ZeroExponent = -133;  // M4
inline constexpr int kFp4GuardBits = 35;       // M5
inline constexpr int kFp8GuardBits = 25;       // M5

// Anything of the form significand * 2^exponent that is not a NaN or an infinity.
struct MmaFactor {
  u32 significand;
  int exponent;  // of the significand's last place
  int weight;
  bool nan;
};

JAX_FP4_FN MmaFactor mma_scale(BlockScale scale, u32 byte) {
  if (scale == BlockScale::ue4m3) {
    const u32 field = (byte >> 3) & 0xFu;
    const u32 mantissa = byte & 7u;
    const int weight = (field == 0 ? 1 : static_cast<int>(field)) - kE4M3.bias;
    return {field == 0 ? mantissa : mantissa | 8u, weight - 3, weight, (byte & 0x7Fu) == kUE4M3NaN};
  }
  const int weight = static_cast<int>(byte) - static_cast<int>(kUE8M0One);
  return {1, weight, weight, byte == kUE8M0NaN};
}

// magnitude * 2^exponent truncated to a multiple of 2^last_place, in units of it.
JAX_FP4_FN i64 truncate_at(i64 significand, int exponent, int last_place) {
  if (significand == 0) return 0;
  const int shift = exponent - last_place;
  if (shift >= 0) return significand << shift;
  if (shift <= -63) return 0;
  return significand < 0 ? -(-significand >> -shift) : significand >> -shift;
}

// total * 2^exponent truncated toward zero to f32 (M6).
JAX_FP4_FN u32 truncate_to_f32(i64 total, int exponent) {
  if (total == 0) return 0;
  const u32 sign = total < 0 ? kF32SignMask : 0;
  const u64 magnitude = static_cast<u64>(total < 0 ? -total : total);
  int top = 63;
  while ((magnitude >> top) == 0) --top;
  const int value_exponent = top + exponent;
  if (value_exponent > 127) return sign | kF32InfBits;
  const int last_place = (value_exponent > -126 ? value_exponent : -126) - 23;
  const int shift = exponent - last_place;
  const u64 significand = shift >= 0 ? magnitude << shift : shift > -63 ? magnitude >> -shift : 0;
  if (significand == 0) return 0;
  // A significand with its leading bit set adds one to the exponent field it is added to.
  return sign | ((static_cast<u32>(last_place + 149) << 23) + static_cast<u32>(significand));
}

JAX_FP4_FN bool f32_bits_nan(u32 bits) { return (bits & kF32AbsMask) > kF32InfBits; }
JAX_FP4_FN bool f32_bits_inf(u32 bits) { return (bits & kF32AbsMask) == kF32InfBits; }

// The accumulator as a term (M4).
JAX_FP4_FN MmaTerm mma_accumulator(u32 c, int zero_exponent) {
  const int field = static_cast<int>((c >> 23) & 0xFFu);
  const i64 magnitude = static_cast<i64>((c & 0x7F'FFFFu) | (field == 0 ? 0u : 1u << 23));
  const int weight = (field == 0 ? 1 : field) - 127;
  return {(c & kF32SignMask) ? -magnitude : magnitude, weight - 23,
          magnitude == 0 ? zero_exponent : weight};
}

// Aligns, truncates and adds `count` terms (M5), in units of 2^last_place. It all fits into 63
// bits: a group of mxf4 is below 2^(weight + 12), so five terms in units of 2^(weight - 35) stay
// below 2^50; a product of mxf8f6f4 is below 2^(weight + 2), so 33 terms in units of 2^(weight -
// 25) do as well.
JAX_FP4_FN i64 mma_total(const MmaTerm* terms, int count, int guard_bits, int& last_place) {
  int largest = terms[0].weight;
  for (int i = 1; i < count; ++i)
    if (terms[i].weight > largest) largest = terms[i].weight;
  last_place = largest - guard_bits;
  i64 total = 0;
  for (int i = 0; i < count; ++i)
    total += truncate_at(terms[i].significand, terms[i].exponent, last_place);
  return total;
}

JAX_FP4_FN u32 mma_add(const MmaTerm* terms, int count, int guard_bits) {
  int last_place = 0;
  const i64 total = mma_total(terms, count, guard_bits, last_place);
  return truncate_to_f32(total, last_place);
}

// c + one instruction of kind mxf4 or mxf4nvf4. `a`, `b`: 64 E2M1 codes, one per byte; `scale_a`,
// `scale_b`: the scale byte of each group of 16 (given twice where 32 elements share it).
JAX_FP4_FN u32 mma_fp4_step(const u8* a, const u8* b, BlockScale scale, const u8* scale_a,
                            const u8* scale_b, u32 c, MmaSum how = MmaSum::model) {
  constexpr int kGroups = kFp4StepK / kFp4Group;
  constexpr int kDoubled[8] = {0, 1, 2, 3, 4, 6, 8, 12};  // E2M1 magnitudes times two
  MmaTerm terms[kGroups + 1] = {};
  MmaTerm products[kFp4StepK + 1] = {};  // only where the model's groups are not wanted
  bool nan = f32_bits_nan(c);
  for (int group = 0; group < kGroups; ++group) {
    int sum = 0;  // times four
    bool zero = true;
    for (int k = group * kFp4Group; k < (group + 1) * kFp4Group; ++k) {
      const int product = kDoubled[a[k] & 7] * kDoubled[b[k] & 7];
      zero = zero && product == 0;
      sum += ((a[k] ^ b[k]) & 8) ? -product : product;
    }
    const MmaFactor sa = mma_scale(scale, scale_a[group]);
    const MmaFactor sb = mma_scale(scale, scale_b[group]);
    nan = nan || sa.nan || sb.nan;
    zero = zero || sa.significand == 0 || sb.significand == 0;
    terms[group] = {static_cast<i64>(sum) * sa.significand * sb.significand,
                    sa.exponent + sb.exponent - 2, zero ? kFp4ZeroExponent : sa.weight + sb.weight};
    if (how == MmaSum::model) continue;
    for (int k = group * kFp4Group; k < (group + 1) * kFp4Group; ++k) {
      const i64 product = static_cast<i64>(kDoubled[a[k] & 7]) * kDoubled[b[k] & 7] *
                          static_cast<i64>(sa.significand) * sb.significand;
      products[k] = {((a[k] ^ b[k]) & 8) ? -product : product, sa.exponent + sb.exponent - 2, 0};
    }
  }
  if (nan) return kMmaNaN;
  if (f32_bits_inf(c)) return c;
  terms[kGroups] = products[kFp4StepK] = mma_accumulator(c, kFp4ZeroExponent);
  if (how != MmaSum::model) return mma_add_otherwise(products, kFp4StepK + 1, how, kMmaF32);
  return mma_add(terms, kGroups + 1, kFp4GuardBits);
}

// c + one instruction of kind mxf8f6f4. `a`, `b`: 32 codes, one per byte; one UE8M0 byte each.
JAX_FP4_FN u32 mma_fp8_step(Element element_a, const u8* a, u32 scale_a, Element element_b,
                            const u8* b, u32 scale_b, u32 c, MmaSum how = MmaSum::model) {
  const Minifloat kind_a = minifloat(element_a);
  const Minifloat kind_b = minifloat(element_b);
  const MmaFactor sa = mma_scale(BlockScale::ue8m0, scale_a);
  const MmaFactor sb = mma_scale(BlockScale::ue8m0, scale_b);
  bool nan = f32_bits_nan(c) || sa.nan || sb.nan;
  bool positive_inf = f32_bits_inf(c) && (c & kF32SignMask) == 0;
  bool negative_inf = f32_bits_inf(c) && (c & kF32SignMask) != 0;
  MmaTerm terms[kFp8StepK + 1] = {};
  for (int k = 0; k < kFp8StepK; ++k) {
    const u32 magnitude_a = a[k] & (kind_a.sign_code() - 1);
    const u32 magnitude_b = b[k] & (kind_b.sign_code() - 1);
    const bool negative = ((a[k] & kind_a.sign_code()) != 0) != ((b[k] & kind_b.sign_code()) != 0);
    const bool special_a = magnitude_a > kind_a.max_code;
    const bool special_b = magnitude_b > kind_b.max_code;
    if (special_a || special_b) {
      // M7. Only E5M2 has an infinity.
      const bool inf_a = element_a == Element::e5m2 && magnitude_a == kE5M2InfCode;
      const bool inf_b = element_b == Element::e5m2 && magnitude_b == kE5M2InfCode;
      nan = nan || (special_a && !inf_a) || (special_b && !inf_b) || magnitude_a == 0 ||
            magnitude_b == 0;
      positive_inf = positive_inf || !negative;
      negative_inf = negative_inf || negative;
      continue;
    }
    const u32 field_a = magnitude_a >> kind_a.mantissa_bits;
    const u32 field_b = magnitude_b >> kind_b.mantissa_bits;
    const u32 significand_a = (magnitude_a & ((1u << kind_a.mantissa_bits) - 1)) |
                              (field_a == 0 ? 0u : 1u << kind_a.mantissa_bits);
    const u32 significand_b = (magnitude_b & ((1u << kind_b.mantissa_bits) - 1)) |
                              (field_b == 0 ? 0u : 1u << kind_b.mantissa_bits);
    const i64 product = static_cast<i64>(significand_a) * significand_b;
    const int weight = static_cast<int>(field_a == 0 ? 1 : field_a) - kind_a.bias +
                       static_cast<int>(field_b == 0 ? 1 : field_b) - kind_b.bias + sa.weight +
                       sb.weight;
    terms[k] = {negative ? -product : product, weight - kind_a.mantissa_bits - kind_b.mantissa_bits,
                product == 0 ? kFp8ZeroExponent : weight};
  }
  if (nan || (positive_inf && negative_inf)) return kMmaNaN;
  if (positive_inf) return kF32InfBits;
  if (negative_inf) return kF32InfBits | kF32SignMask;
  terms[kFp8StepK] = mma_accumulator(c, kFp8ZeroExponent);
  if (how != MmaSum::model) return mma_add_otherwise(terms, kFp8StepK + 1, how, kMmaF32);
  return mma_add(terms, kFp8StepK + 1, kFp8GuardBits);
}

}  // namespace jax_fp4

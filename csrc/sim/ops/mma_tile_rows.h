// One row of an MMA's outputs by the tensor-core model, kWidth columns at a time: the inner loops of
// mma_tile.cc and mma_warp.cc.
//
// They are plain loops over columns, which compilers vectorise, and are compiled once for each instruction
// level. Everything is an integer, or a double that holds one exactly: all levels give the same bits, those of
// mma_fp4_step and mma_plain_step (csrc/numerics).
//
// Terms are added in units of 2^(largest - guard bits) (M5). A term with the weight `largest` needs a shift
// to the left that depends on its format alone; one with a smaller weight is then shifted right by the
// difference, which truncates.
#pragma once

#include <bit>

#include "numerics/mma_plain.h"

namespace jax_fp4::sim {

using i16 = short;

// ---- Kinds mxf4 and mxf4nvf4

inline constexpr int kGroups = kFp4StepK / kFp4Group;

struct GroupRow {
  i16 value[kFp4StepK];  // twice the element
  u16 nonzero[kGroups];  // of the group, a bit for each element; 0 where the scale is zero
  i16 scale[kGroups];    // significand in eighths, 1 to 15
  i16 weight[kGroups];   // of the scale
  bool nan;
};
template <int kWidth>
struct GroupStrip {
  i16 value[kFp4StepK][kWidth];
  u16 nonzero[kGroups][kWidth];
  i16 scale[kGroups][kWidth];
  i16 weight[kGroups][kWidth];
  u32 nan[kWidth];  // all ones or 0
};

// ---- All other floating-point kinds

// The weight of a zero: too small to ever be the largest.
inline constexpr i16 kNoWeight = -10'000;

struct ProductRow {
  i16 significand[kMmaMostProducts];
  i16 weight[kMmaMostProducts];  // with that of the scale
};
template <int kWidth>
struct ProductStrip {
  i16 significand[kMmaMostProducts][kWidth];
  i16 weight[kMmaMostProducts][kWidth];
};
struct ProductParameters {
  int count;  // products
  int left;   // shift of a product of the largest weight
  MmaCore core;
};

#define JAX_FP4_INLINE [[gnu::always_inline]] inline

JAX_FP4_INLINE i32 smaller(i32 a, i32 b) { return a < b ? a : b; }
JAX_FP4_INLINE i32 larger(i32 a, i32 b) { return a > b ? a : b; }

// An f32 accumulator: significand and weight of all columns (M4); `largest` starts from it.
template <int kWidth>
struct Accumulators {
  i32 significand[kWidth];
  i32 weight[kWidth];
  i32 largest[kWidth];
};

template <int kWidth>
JAX_FP4_INLINE void take_f32(const u32* c, int zero_exponent, Accumulators<kWidth>& out) {
  for (int n = 0; n < kWidth; ++n) {
    const i32 field = static_cast<i32>(c[n] >> 23 & 0xFF);
    const i32 magnitude = static_cast<i32>((c[n] & 0x7F'FFFF) | (field == 0 ? 0 : 0x80'0000));
    const i32 weight = magnitude == 0 ? zero_exponent : (field == 0 ? 1 : field) - 127;
    out.significand[n] = (c[n] >> 31) ? -magnitude : magnitude;
    out.weight[n] = weight;
    // A zero accumulator has this exponent, and any other one a larger weight.
    out.largest[n] = larger(weight, zero_exponent);
  }
}

// significand * 2^left, truncated after a shift to the right.
JAX_FP4_INLINE i64 aligned(i32 significand, int left, i32 right) {
  const u64 magnitude =
      static_cast<u64>(static_cast<u32>(significand < 0 ? -significand : significand));
  const i64 term = static_cast<i64>((magnitude << left) >> smaller(right, 63));
  return significand < 0 ? -term : term;
}

// The f32 of total * 2^last_place, |total| < 2^52, truncated (M6).
JAX_FP4_INLINE u32 f32_of_total(i64 total, i32 last_place) {
  constexpr u64 kTwo52 = u64{0x433} << 52;  // 2^52 as a double; its last place is 1
  const u64 magnitude = static_cast<u64>(total < 0 ? -total : total);
  const double exact = std::bit_cast<double>(kTwo52 | magnitude) - 0x1p52;
  const u64 bits = std::bit_cast<u64>(exact);
  const i64 exponent = static_cast<i64>(bits >> 52) - 1023 + last_place;
  const u64 significand = (bits >> 29 & 0x7F'FFFF) | 0x80'0000;
  const i64 below = exponent < -126 ? -126 - exponent : 0;  // places that a subnormal lacks
  const u64 kept = significand >> (below < 31 ? below : 31);
  const u64 field = static_cast<u64>(exponent < -126 ? 0 : exponent + 126) << 23;
  // A significand with its leading bit set adds one to the exponent field it is added to.
  u64 value = exponent > 127 ? u64{kF32InfBits} : field + kept;
  value = kept == 0 || magnitude == 0 ? 0 : value | (total < 0 ? u64{kF32SignMask} : 0);
  return static_cast<u32>(value);
}

// d = c + products of a row and kWidth columns.
template <int kWidth>
JAX_FP4_INLINE void group_row(const GroupRow& a, const GroupStrip<kWidth>& b, u32* d) {
  constexpr int kScaleLeft = kFp4GuardBits - 2 - 6;  // sums are in quarters, scales in eighths
  Accumulators<kWidth> c;
  take_f32(d, kFp4ZeroExponent, c);
  i32 sum[kGroups][kWidth], weight[kGroups][kWidth];
  for (int g = 0; g < kGroups; ++g) {
    i16 products[kWidth];
    for (int n = 0; n < kWidth; ++n) {
      i16 total = 0;
      for (int k = 0; k < kFp4Group; ++k)
        total =
            static_cast<i16>(total + a.value[kFp4Group * g + k] * b.value[kFp4Group * g + k][n]);
      products[n] = total;
    }
    for (int n = 0; n < kWidth; ++n) {
      sum[g][n] = products[n] * (a.scale[g] * b.scale[g][n]);
      weight[g][n] =
          (a.nonzero[g] & b.nonzero[g][n]) ? a.weight[g] + b.weight[g][n] : kFp4ZeroExponent;
      c.largest[n] = larger(c.largest[n], weight[g][n]);
    }
  }
  i64 total[kWidth];
  for (int n = 0; n < kWidth; ++n)
    total[n] = aligned(c.significand[n], kFp4GuardBits - 23, c.largest[n] - c.weight[n]);
  for (int g = 0; g < kGroups; ++g)
    for (int n = 0; n < kWidth; ++n)
      total[n] += aligned(sum[g][n], kScaleLeft, c.largest[n] - weight[g][n]);
  const u32 row_nan = a.nan ? ~0u : 0;
  for (int n = 0; n < kWidth; ++n) {
    const u32 magnitude = d[n] & kF32AbsMask;
    const u32 value = f32_of_total(total[n], c.largest[n] - kFp4GuardBits);
    const bool nan = (row_nan | b.nan[n]) != 0 || magnitude > kF32InfBits;
    d[n] = nan ? kMmaNaN : magnitude == kF32InfBits ? d[n] : value;
  }
}

// The same for single products; infinities and NaN among elements and scales are for the caller to see.
template <int kWidth>
JAX_FP4_INLINE void product_totals(const ProductRow& a, const ProductStrip<kWidth>& b,
                                   const ProductParameters& p, Accumulators<kWidth>& c,
                                   i64* total) {
  i16 top[kWidth];
  for (int n = 0; n < kWidth; ++n) top[n] = 2 * kNoWeight;
  for (int k = 0; k < p.count; ++k) {
    for (int n = 0; n < kWidth; ++n) {
      const i16 weight = static_cast<i16>(a.weight[k] + b.weight[k][n]);
      top[n] = weight > top[n] ? weight : top[n];
    }
  }
  for (int n = 0; n < kWidth; ++n) c.largest[n] = larger(c.largest[n], top[n]);
  // Sixteen products stay below 2^31: each is below 4 in units of 2^(weight - 25).
  constexpr int kFit = 16;
  for (int first = 0; first < p.count; first += kFit) {
    i32 sum[kWidth] = {};
    for (int k = first; k < smaller(p.count, first + kFit); ++k) {
      for (int n = 0; n < kWidth; ++n) {
        const i32 product = a.significand[k] * b.significand[k][n];
        const i32 right = smaller(c.largest[n] - (a.weight[k] + b.weight[k][n]), 31);
        const i32 magnitude = product < 0 ? -product : product;
        const i32 term = static_cast<i32>((static_cast<u32>(magnitude) << p.left) >> right);
        sum[n] += product < 0 ? -term : term;
      }
    }
    for (int n = 0; n < kWidth; ++n) total[n] += sum[n];
  }
}

template <int kWidth>
JAX_FP4_INLINE void product_row_f32(const ProductRow& a, const ProductStrip<kWidth>& b,
                                    const ProductParameters& p, u32* d) {
  Accumulators<kWidth> c;
  take_f32(d, p.core.zero_exponent, c);
  i64 total[kWidth] = {};
  product_totals(a, b, p, c, total);
  for (int n = 0; n < kWidth; ++n)
    total[n] += aligned(c.significand[n], p.core.guard_bits - 23, c.largest[n] - c.weight[n]);
  for (int n = 0; n < kWidth; ++n) {
    const u32 magnitude = d[n] & kF32AbsMask;
    const u32 value = f32_of_total(total[n], c.largest[n] - p.core.guard_bits);
    d[n] = magnitude > kF32InfBits ? kMmaNaN : magnitude == kF32InfBits ? d[n] : value;
  }
}

// total * 2^last_place, |total| < 2^52, rounded to f16, ties to even (M12).
JAX_FP4_INLINE u32 f16_of_total(i64 total, i32 last_place) {
  if (total == 0) return 0;
  const u64 magnitude = static_cast<u64>(total < 0 ? -total : total);
  const i32 exponent = 63 - std::countl_zero(magnitude) + last_place;
  const i32 binade = larger(exponent, -14);
  const i32 dropped = binade - 10 - last_place;  // bits of the magnitude below the last place
  if (dropped > 62) return 0;
  u64 code = magnitude;
  if (dropped <= 0) {
    code <<= -dropped;
  } else {
    const u64 half = u64{1} << (dropped - 1), rest = magnitude & (2 * half - 1);
    code >>= dropped;
    code += rest > half || (rest == half && (code & 1));
  }
  code += static_cast<u64>(binade + 14) << 10;
  if (code > 0x7C00) code = 0x7C00;
  return code == 0 ? 0 : static_cast<u32>(code) | (total < 0 ? 0x8000u : 0);
}

template <int kWidth>
JAX_FP4_INLINE void product_row_f16(const ProductRow& a, const ProductStrip<kWidth>& b,
                                    const ProductParameters& p, u32* d) {
  Accumulators<kWidth> c;
  for (int n = 0; n < kWidth; ++n) {
    const i32 field = static_cast<i32>(d[n] >> 10 & 0x1F);
    const i32 magnitude = static_cast<i32>((d[n] & 0x3FF) | (field == 0 ? 0 : 0x400));
    c.significand[n] = (d[n] & 0x8000) ? -magnitude : magnitude;
    c.weight[n] = magnitude == 0 ? p.core.zero_exponent : (field == 0 ? 1 : field) - 15;
    c.largest[n] = larger(c.weight[n], p.core.zero_exponent);
  }
  i64 total[kWidth] = {};
  product_totals(a, b, p, c, total);
  for (int n = 0; n < kWidth; ++n) {
    total[n] += aligned(c.significand[n], p.core.guard_bits - 10, c.largest[n] - c.weight[n]);
    const u32 magnitude = d[n] & 0x7FFF;
    const u32 value = f16_of_total(total[n], c.largest[n] - p.core.guard_bits);
    d[n] = magnitude > 0x7C00 ? 0x7FFF : magnitude == 0x7C00 ? d[n] & 0xFFFF : value;
  }
}

// ---- Integers: the elements are the significands

// Exact sums; what leaves 32 bits wraps or saturates (M16).
template <int kWidth>
JAX_FP4_INLINE void integer_row(const ProductRow& a, const ProductStrip<kWidth>& b, bool saturates,
                                u32* d) {
  i32 sum[kWidth] = {};
  for (int k = 0; k < kMmaMostProducts; ++k)
    for (int n = 0; n < kWidth; ++n) sum[n] += a.significand[k] * b.significand[k][n];
  for (int n = 0; n < kWidth; ++n) {
    const i64 total = i64{static_cast<i32>(d[n])} + sum[n];
    const i64 clamped = total > 0x7FFF'FFFF      ? 0x7FFF'FFFF
                        : total < -0x8000'0000LL ? -0x8000'0000LL
                                                 : total;
    d[n] = static_cast<u32>(saturates ? clamped : total);
  }
}

#undef JAX_FP4_INLINE

}  // namespace jax_fp4::sim

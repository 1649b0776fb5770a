// Sums of products that round less, or otherwise, than a tensor core is assumed to: to be set
// beside its model (mma_accumulate.h), and to tell an error of a kernel from an error of the model.
#pragma once

#include "minifloat.h"

namespace jax_fp4 {

// How an MMA instruction adds its products and its accumulator.
enum class MmaSum : u8 {
  model,      // as the tensor core is assumed to
  exact,      // without rounding, and the whole once to nearest even
  f32_chain,  // product after product in k order, every partial sum rounded to nearest even in f32
};

// significand * 2^exponent, as the tensor-core model sees a term: `weight` is the exponent that
// takes part in the alignment, which is not that of the significand's leading bit.
struct MmaTerm {
  i64 significand;
  int exponent;
  int weight;
};

// A sum in fixed point that holds every product and accumulator of every kind exactly. The smallest
// place is 2^-286: two E5M2 subnormals (2^-16) times two UE8M0 scales (2^-127). The largest term is
// below 2^286: 57344^2 * 2^254.
struct ExactSum {
  static constexpr int kLowest = -288;
  static constexpr int kWords = 10;  // two's complement, least significant first
  u64 words[kWords] = {};

  JAX_FP4_FN void add(i64 significand, int exponent) {
    if (significand == 0) return;
    const bool negative = significand < 0;
    const u64 magnitude = static_cast<u64>(negative ? -significand : significand);
    const int at = exponent - kLowest, shift = at % 64;
    const u64 parts[2] = {magnitude << shift, shift ? magnitude >> (64 - shift) : 0};
    u64 carry = 0;
    for (int i = at / 64, part = 0; i < kWords && (part < 2 || carry); ++i, ++part) {
      const u64 term = part < 2 ? parts[part] : 0, old = words[i];
      const u64 first = negative ? old - term : old + term;
      const bool carried = negative ? old < term : first < old;
      words[i] = negative ? first - carry : first + carry;
      carry = carried || (negative ? first < carry : words[i] < first);
    }
  }

  // The code of the sum in a format with infinities, rounded to nearest even; a zero sum is +0.
  JAX_FP4_FN u32 round(const Minifloat& kind) const {
    u64 magnitude[kWords] = {};
    const bool negative = words[kWords - 1] >> 63;
    u64 borrow = negative;
    for (int i = 0; i < kWords; ++i) {
      magnitude[i] = (negative ? ~words[i] : words[i]) + borrow;
      borrow = borrow && magnitude[i] == 0;
    }
    int top = 64 * kWords - 1;
    while (top >= 0 && !(magnitude[top / 64] >> (top % 64) & 1)) --top;
    if (top < 0) return 0;
    const int base = top + kLowest > kind.min_exponent() ? top + kLowest : kind.min_exponent();
    const int last = base - kind.mantissa_bits - kLowest;  // bit that becomes the last place
    const auto bit = [&](int n) {
      return n >= 0 && n <= top ? magnitude[n / 64] >> (n % 64) & 1 : 0;
    };
    u32 code = 0;
    for (int n = top; n >= last; --n) code = code << 1 | static_cast<u32>(bit(n));
    bool below = false;
    for (int n = 0; n < last - 1 && n <= top; ++n) below = below || bit(n);
    const bool up = bit(last - 1) && (below || (code & 1));
    // A significand with its leading bit set adds one to the exponent field it is added to.
    code += (static_cast<u32>(base - kind.min_exponent()) << kind.mantissa_bits) + (up ? 1 : 0);
    const u32 infinity = kind.max_code + 1;
    return (negative ? kind.sign_code() : 0) | (code < infinity ? code : infinity);
  }
};

// f32, f16, bf16 and TF32 as numbers that an MMA instruction reads and writes.
inline constexpr Minifloat kMmaF32{8, 23, 127, 0x7F7F'FFFF, 0x7FFF'FFFF, kF32Max};
inline constexpr Minifloat kMmaF16{5, 10, 15, 0x7BFF, 0x7FFF, 65504.0f};
inline constexpr Minifloat kMmaBF16{8, 7, 127, 0x7F7F, 0x7FFF, 0x1.FEp127f};
inline constexpr Minifloat kMmaTF32{8, 10, 127, 0x3'FBFF, 0x3'FFFF, 0x1.FFCp127f};

// The sum of finite terms, of which the last is the accumulator, in a format with infinities.
JAX_FP4_FN u32 mma_add_otherwise(const MmaTerm* terms, int count, MmaSum sum,
                                 const Minifloat& kind) {
  if (sum == MmaSum::exact) {
    ExactSum total;
    for (int i = 0; i < count; ++i) total.add(terms[i].significand, terms[i].exponent);
    return total.round(kind);
  }
  MmaTerm partial = terms[count - 1];
  for (int i = 0; i + 1 < count; ++i) {
    ExactSum total;
    total.add(partial.significand, partial.exponent);
    total.add(terms[i].significand, terms[i].exponent);
    const u32 bits = total.round(kMmaF32);
    const u32 field = bits >> 23 & 0xFF;
    if (field == 0xFF) {
      const u32 sign = bits >> 31 ? kind.sign_code() : 0;
      return sign | (kind.max_code + 1);
    }
    const i64 significand = static_cast<i64>((bits & 0x7F'FFFF) | (field ? 1u << 23 : 0));
    partial.significand = bits >> 31 ? -significand : significand;
    partial.exponent = static_cast<int>(field ? field : 1) - 150;
  }
  ExactSum total;
  total.add(partial.significand, partial.exponent);
  return total.round(kind);
}

}  // namespace jax_fp4

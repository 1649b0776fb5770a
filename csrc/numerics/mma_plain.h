// The dot product of an MMA instruction without block scales (mma.sync and tcgen05.mma of f16,
// bf16, TF32 and 8-bit kinds), for one element of D, on integers.
//
// The model is that of mma_accumulate.h, MMA-Sim's (arXiv 2511.10909). Its assumptions, continued:
//
//   M10 A step takes 32 bytes of K (16 f16 or bf16, 8 TF32, 32 bytes of 8-bit elements) on compute
//       capability 9.0 and later, 16 bytes on 8.x; steps follow each other in k order.
//   M11 In a step each product is a term with the sum of its factors' exponents (M3). Terms and
//       accumulator are truncated toward zero at 25 bits (8.x: 24) below the largest exponent and
//       added exactly. Zero products and a zero accumulator have the exponent -133 (8.x: -132);
//       with an f16 accumulator -21 (8.x: -20).
//   M12 An f32 result is truncated toward zero (M6), an f16 result rounded to nearest even. M7
//       holds; the NaN of f16 is 0x7FFF.
//   M13 TF32 operands are the upper 19 bits of their registers.
//   M14 8-bit elements on 8.9: truncated at 13 bits, f32 results cut to 13 bits of fraction.
//   M15 mma.sync of E4M3 and E5M2 on 9.x, 10.x and 11.x is what ptxas 12.9 makes of it: two f16
//       MMAs from a zero accumulator, the first over k with k % 4 in {0, 1}, then an addition of C
//       to nearest even.
//   M16 Integer kinds add exactly; .satfinite clamps the whole sum, without it the sum wraps.
#pragma once

#include "mma_accumulate.h"

namespace jax_fp4 {

// An operand: significand * 2^exponent; an infinity has a significand of 1 or -1.
struct MmaNumber {
  i32 significand;
  int exponent;
  int weight;
  bool inf;
  bool nan;
};

JAX_FP4_FN MmaNumber mma_number(const Minifloat& kind, u32 code) {
  const bool negative = (code & kind.sign_code()) != 0;
  const u32 magnitude = code & (kind.sign_code() - 1);
  if (magnitude > kind.max_code) {
    // A format has an infinity if the code after its largest number has no mantissa bits.
    const bool inf = magnitude == kind.max_code + 1 && magnitude % (1u << kind.mantissa_bits) == 0;
    return {negative ? -1 : 1, 0, 0, inf, !inf};
  }
  const u32 field = magnitude >> kind.mantissa_bits;
  const i32 significand = static_cast<i32>((magnitude & ((1u << kind.mantissa_bits) - 1)) |
                                           (field == 0 ? 0u : 1u << kind.mantissa_bits));
  const int weight = static_cast<int>(field == 0 ? 1 : field) - kind.bias;
  return {negative ? -significand : significand, weight - kind.mantissa_bits, weight, false, false};
}

// What M10, M11 and M14 make depend on chip and kind.
struct MmaCore {
  bool half;  // C and D are f16, otherwise f32
  int step;   // products
  int guard_bits;
  int zero_exponent;
  u32 kept = ~0u;  // bits of an f32 result
};
inline constexpr int kMmaMostProducts = 32;  // of an instruction; of a step, for tcgen05.mma

// `chip`: compute capability times ten, at least 80.
JAX_FP4_FN MmaCore mma_core(int chip, int element_bits, bool half) {
  const bool older = chip < 90;
  MmaCore core{half, (older ? 128 : 256) / element_bits, older ? 24 : 25, 0};
  core.zero_exponent = half ? 4 - core.guard_bits : -108 - core.guard_bits;
  if (older && element_bits == 8) {
    core.guard_bits = 13;
    if (!half) core.kept = ~0u << 10;
  }
  return core;
}
JAX_FP4_FN Minifloat mma_result(const MmaCore& core) { return core.half ? kMmaF16 : kMmaF32; }

// c plus `count` products; `sum` other than `model` takes them all in one sum.
JAX_FP4_FN u32 mma_plain_step(const MmaNumber* a, const MmaNumber* b, int count, u32 c,
                              const MmaCore& core, MmaSum sum) {
  const Minifloat result = mma_result(core);
  const MmaNumber accumulator = mma_number(result, c);
  bool nan = accumulator.nan;
  bool positive_inf = accumulator.inf && accumulator.significand > 0;
  bool negative_inf = accumulator.inf && accumulator.significand < 0;
  MmaTerm terms[kMmaMostProducts + 1] = {};
  for (int k = 0; k < count; ++k) {
    const i64 product = static_cast<i64>(a[k].significand) * b[k].significand;
    if (a[k].inf || b[k].inf || a[k].nan || b[k].nan) {
      nan = nan || a[k].nan || b[k].nan || product == 0;
      positive_inf = positive_inf || product > 0;
      negative_inf = negative_inf || product < 0;
    }
    terms[k] = {product, a[k].exponent + b[k].exponent,
                product == 0 ? core.zero_exponent : a[k].weight + b[k].weight};
  }
  const u32 infinity = result.max_code + 1;
  if (nan || (positive_inf && negative_inf)) return result.nan_code;
  if (positive_inf || negative_inf) return negative_inf ? infinity | result.sign_code() : infinity;
  terms[count] = {accumulator.significand, accumulator.exponent,
                  accumulator.significand == 0 ? core.zero_exponent : accumulator.weight};
  if (sum != MmaSum::model) return mma_add_otherwise(terms, count + 1, sum, result);
  int last_place = 0;
  const i64 total = mma_total(terms, count + 1, core.guard_bits, last_place);
  if (!core.half) return truncate_to_f32(total, last_place) & core.kept;
  ExactSum rounded;
  rounded.add(total, last_place);
  const u32 code = rounded.round(result);
  return code == result.sign_code() ? 0 : code;
}

// c plus `count` products, at most kMmaMostProducts.
JAX_FP4_FN u32 mma_plain(const MmaNumber* a, const MmaNumber* b, int count, u32 c,
                         const MmaCore& core, MmaSum sum = MmaSum::model) {
  const int step = sum == MmaSum::model && core.step < count ? core.step : count;
  for (int k = 0; k < count; k += step) c = mma_plain_step(a + k, b + k, step, c, core, sum);
  return c;
}

// M15: `a` and `b` hold 8-bit elements as f16 numbers (mma_number of the f16 of equal value);
// `core` is that of f16 operands.
JAX_FP4_FN u32 mma_fp8_by_f16(const MmaNumber* a, const MmaNumber* b, int count, u32 c,
                              const MmaCore& core, MmaSum sum = MmaSum::model) {
  if (sum != MmaSum::model) return mma_plain(a, b, count, c, core, sum);
  u32 d = 0;
  for (int half = 0; half < 2; ++half) {
    MmaNumber part_a[kMmaMostProducts / 2] = {}, part_b[kMmaMostProducts / 2] = {};
    for (int k = 0; k < count / 2; ++k) {
      const int from = 4 * (k / 2) + 2 * half + k % 2;
      part_a[k] = a[from];
      part_b[k] = b[from];
    }
    d = mma_plain(part_a, part_b, count / 2, d, core);
  }
  // The addition of C: one more product, with 1, that nothing truncates.
  const MmaNumber one{1, 0, 0, false, false}, sum_of_products = mma_number(mma_result(core), d);
  return mma_plain_step(&sum_of_products, &one, 1, c, core, MmaSum::exact);
}

}  // namespace jax_fp4

// Exact numbers and their rounding to any binary format, in any of PTX's rounding modes.
//
// An `Exact` is sign * significand * 2^exponent, plus something smaller than one unit of the
// significand's last place where `sticky` is set. Every conversion and every 16-bit operation is an
// Exact that is rounded once.
#pragma once

#include <bit>
#include <cmath>

#include "numerics/base.h"

namespace jax_fp4::sim {

enum class Rounding : u8 { nearest, zero, down, up, nearest_away };

struct BinaryFormat {
  int exponent_bits;
  int mantissa_bits;
  constexpr u64 infinity() const { return ((u64{1} << exponent_bits) - 1) << mantissa_bits; }
  constexpr u64 sign() const { return u64{1} << (exponent_bits + mantissa_bits); }
  constexpr int min_exponent() const { return 2 - (1 << (exponent_bits - 1)); }
};
inline constexpr BinaryFormat kF16{5, 10}, kBF16{8, 7}, kF32{8, 23}, kF64{11, 52};

// The NaN that arithmetic gives (PTX ISA 9.7.3 to 9.7.6: 0x7FFFFFFF for f32, 0x7FFF for f16 and bf16).
inline constexpr u32 kCanonicalNaN32 = 0x7FFF'FFFFu;
inline constexpr u16 kCanonicalNaN16 = 0x7FFF;

struct Exact {
  bool negative = false;
  u64 significand = 0;
  int exponent = 0;
  bool sticky = false;
};

inline Exact exact_of(double x) {
  const u64 bits = std::bit_cast<u64>(x);
  const u64 fraction = bits & ((u64{1} << 52) - 1);
  const int field = static_cast<int>(bits >> 52 & 0x7FF);
  return {bits >> 63 != 0, field == 0 ? fraction : fraction | u64{1} << 52,
          (field == 0 ? 1 : field) - 1075, false};
}

// hi + lo, |lo| at most half a unit in the last place of hi.
inline Exact exact_of_sum(double hi, double lo) {
  Exact e = exact_of(hi);
  if (lo == 0 || e.significand == 0) return e;
  // Room for the remainder below: where it pulls toward zero, the significand is one less.
  e.significand <<= 8;
  e.exponent -= 8;
  if ((lo < 0) != e.negative) --e.significand;
  e.sticky = true;
  return e;
}

inline Exact exact_of_product_sum(double a, double b, double c) {
  // a and b have at most 24 bits: their product is exact in 53.
  const double product = a * b;
  const double sum = product + c;
  const double part = sum - product;
  const double error = (product - (sum - part)) + (c - part);
  return exact_of_sum(sum, std::isfinite(sum) ? error : 0.0);
}

// The code of a finite number in the format.
inline u64 round_exact(const Exact& x, const BinaryFormat& format, Rounding mode) {
  const u64 sign = x.negative ? format.sign() : 0;
  const bool away = mode == Rounding::up ? !x.negative : mode == Rounding::down && x.negative;
  if (x.significand == 0) return sign | (x.sticky && away ? 1 : 0);
  const int top = 63 - std::countl_zero(x.significand);
  const int exponent = top + x.exponent;
  const int base = exponent > format.min_exponent() ? exponent : format.min_exponent();
  const int shift = base - format.mantissa_bits - x.exponent;
  u64 kept, rest = 0, half = 1;  // compared as rest : half
  if (shift <= 0) {
    kept = x.significand << -shift;
    half = 2;
  } else if (shift <= 63) {
    kept = x.significand >> shift;
    rest = x.significand & ((u64{1} << shift) - 1);
    half = u64{1} << (shift - 1);
  } else {
    kept = 0;
    rest = 1;  // below half whatever it is, since the significand has at most 63 bits
    half = 2;
  }
  const bool inexact = rest != 0 || x.sticky;
  bool up = false;
  switch (mode) {
    case Rounding::nearest:
      up = rest > half || (rest == half && (x.sticky || (kept & 1) != 0));
      break;
    case Rounding::nearest_away: up = rest >= half; break;
    case Rounding::zero: break;
    case Rounding::down:
    case Rounding::up: up = away && inexact; break;
  }
  const u64 code = (static_cast<u64>(base - format.min_exponent()) << format.mantissa_bits) + kept +
                   (up ? 1 : 0);
  if (code < format.infinity()) return sign | code;
  const bool infinite = mode == Rounding::nearest || mode == Rounding::nearest_away || away;
  return sign | (infinite ? format.infinity() : format.infinity() - 1);
}

}  // namespace jax_fp4::sim

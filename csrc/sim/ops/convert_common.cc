// Common conversions (PTX ISA 9.7.9.21), lane by lane without branches.
#include "sim/ops/convert_common.h"

#include "numerics/minifloat.h"
#include "sim/ops/lanes.h"
#include "sim/ops/rounding.h"

namespace jax_fp4::sim {
namespace {

bool has_any(const Form& form, std::initializer_list<std::string_view> modifiers) {
  for (std::string_view m : modifiers)
    if (form.has(m)) return true;
  return false;
}

// ---- Integers

// Takes the low bits of a word, with their sign where they have one, or not at all.
template <class U>
struct Extension {
  U mask, sign;
  Extension(int bits, bool is_signed)
      : mask(bits >= static_cast<int>(8 * sizeof(U)) ? ~U{0} : (U{1} << bits) - 1),
        sign(is_signed ? U{1} << (bits - 1) : U{0}) {}
  U operator()(U word) const { return ((word & mask) ^ sign) - sign; }
};

template <class From, class To>
void integer_lanes(Warp& w, const Code& c, u32 mask) {
  using U = std::conditional_t<sizeof(From) == 8 || sizeof(To) == 8, u64, u32>;
  const Form& form = w.launch->program->forms[c.form];
  const Type to = form.type(0), from = form.type(1);
  const Extension<U> take(bits_of_type(from), is_signed(from));
  const Extension<U> fill(bits_of_type(to), is_signed(to));
  const Extension<U> cut(c.width, false);
  const In<From> a(w, c.src[0]);
  const Out<To> d(w, c.dst[0]);
  each_lane(mask, [&](int i) { d.set(i, static_cast<To>(cut(fill(take(a[i]))))); });
}

// ---- Floating point and integers

// Rounds a number below 2^51 to an integer.
template <Rounding kMode>
double to_integral(double x) {
  constexpr double kShift = 0x1.8p52;  // its last place is 1
  const double nearest = (x + kShift) - kShift;
  if constexpr (kMode == Rounding::down) return nearest - (nearest > x ? 1.0 : 0.0);
  if constexpr (kMode == Rounding::up) return nearest + (nearest < x ? 1.0 : 0.0);
  return nearest;
}

template <class T, Rounding kMode>
void float_to_integer_lanes(Warp& w, const Code& c, u32 mask) {
  constexpr double kLeast = std::is_signed_v<T> ? -0x1p31 : 0.0;
  constexpr double kMost = std::is_signed_v<T> ? 0x1p31 - 1 : 0x1p32 - 1;
  const In<u32> a(w, c.src[0]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    const float number = f32_of(a[i]);
    double x = number == number ? static_cast<double>(number) : 0.0;
    x = x < -0x1p33 ? -0x1p33 : x > 0x1p33 ? 0x1p33 : x;
    if constexpr (kMode != Rounding::zero) x = to_integral<kMode>(x);
    x = x < kLeast ? kLeast : x > kMost ? kMost : x;
    d.set(i, static_cast<u32>(static_cast<i64>(x)));
  });
}

template <class T>
void integer_to_float_lanes(Warp& w, const Code& c, u32 mask) {
  const In<u32> a(w, c.src[0]);
  const Out<float> d(w, c.dst[0]);
  each_lane(mask, [&](int i) { d.set(i, static_cast<float>(static_cast<T>(a[i]))); });
}

// ---- f16 and bf16

template <bool kBrain>
void widening_lanes(Warp& w, const Code& c, u32 mask) {
  const In<u32> a(w, c.src[0]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    const u32 half = a[i] & 0xFFFF;
    const float x = kBrain ? decode_bf16(half) : decode_f16(half);
    d.set(i, x == x ? bits_of(x) : kCanonicalNaN32);
  });
}

// f32 to 16 bits, to nearest or toward zero.
template <bool kBrain, bool kTruncates>
u32 narrow(u32 bits) {
  const u32 magnitude = bits & kF32AbsMask, sign = (bits & kF32SignMask) >> 16;
  u32 result;
  if constexpr (!kTruncates) {
    result = kBrain ? encode_bf16(f32_of(bits)) : encode_f16(f32_of(bits));
  } else if constexpr (kBrain) {
    result = bits >> 16;
  } else {
    constexpr u32 kRebias = 112u << 23;
    const u32 field = magnitude >> 23;
    const u32 shift = 126 - field;  // of a subnormal result
    const u32 subnormal = field > 101 ? ((magnitude & 0x7F'FFFF) | 0x80'0000) >> shift : 0;
    const u32 normal = magnitude >= 0x4780'0000u ? 0x7BFF : (magnitude - kRebias) >> 13;
    const u32 number = field > 112 ? normal : subnormal;
    result = sign | (magnitude == kF32InfBits ? 0x7C00 : number);
  }
  return magnitude > kF32InfBits ? kCanonicalNaN16 : result;
}

template <bool kBrain, bool kTruncates>
void narrowing_lanes(Warp& w, const Code& c, u32 mask) {
  const In<u32> a(w, c.src[0]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) { d.set(i, narrow<kBrain, kTruncates>(a[i])); });
}

template <bool kBrain, bool kTruncates>
void pair_lanes(Warp& w, const Code& c, u32 mask) {
  const In<u32> a(w, c.src[0]), b(w, c.src[1]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    d.set(i, narrow<kBrain, kTruncates>(a[i]) << 16 | narrow<kBrain, kTruncates>(b[i]));
  });
}

// ---- Elements of block formats

// encode_nearest in a form that the compiler can vectorize: a sum with a power of two whose last place is the
// step of the format at x rounds x to that step, and counts the steps in its low bits.
template <Minifloat kKind>
u32 nearest_element(u32 bits) {
  constexpr i32 kSmallest = 128 - kKind.bias;  // f32's exponent field of the smallest normal number
  constexpr i32 kLargest = std::bit_cast<i32>(kKind.max);
  const i32 magnitude = static_cast<i32>(bits & kF32AbsMask);
  const i32 x = magnitude < kLargest ? magnitude : kLargest;
  const i32 field = (x >> 23) > kSmallest ? x >> 23 : kSmallest;
  const float step = std::bit_cast<float>((field + 23 - kKind.mantissa_bits) << 23);
  const i32 steps = std::bit_cast<i32>(std::bit_cast<float>(x) + step) - std::bit_cast<i32>(step);
  const u32 code = static_cast<u32>(((field - kSmallest) << kKind.mantissa_bits) + steps);
  const u32 sign = (bits >> 31) * kKind.sign_code();
  return magnitude > static_cast<i32>(kF32InfBits) ? kKind.nan_code : code | sign;
}

template <Minifloat kKind>
void element_lanes(Warp& w, const Code& c, u32 mask) {
  constexpr int kBits = kKind.bits() == 4 ? 4 : 8;
  const In<u32> a(w, c.src[0]), b(w, c.src[1]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    d.set(i, nearest_element<kKind>(a[i]) << kBits | nearest_element<kKind>(b[i]));
  });
}

}  // namespace

Exec common_integer_conversion(const Form& form, const Code& code) {
  if (form.has("sat")) return nullptr;
  const bool wide_source = bits_of_type(form.type(1)) == 64 || code.source_width == 64;
  if (code.width == 64) return wide_source ? integer_lanes<u64, u64> : integer_lanes<u32, u64>;
  return wide_source ? integer_lanes<u64, u32> : integer_lanes<u32, u32>;
}

Exec common_float_to_integer(const Form& form, const Code& code) {
  const Type to = form.type(0);
  if (form.type(1) != Type::f32 || bits_of_type(to) != 32 || code.width != 32 || form.has("ftz"))
    return nullptr;
  const auto of = [&]<class T>() -> Exec {
    if (form.has("rzi")) return float_to_integer_lanes<T, Rounding::zero>;
    if (form.has("rmi")) return float_to_integer_lanes<T, Rounding::down>;
    if (form.has("rpi")) return float_to_integer_lanes<T, Rounding::up>;
    return float_to_integer_lanes<T, Rounding::nearest>;
  };
  return is_signed(to) ? of.operator()<i32>() : of.operator()<u32>();
}

Exec common_integer_to_float(const Form& form, const Code& code) {
  const Type from = form.type(1);
  if (form.type(0) != Type::f32 || bits_of_type(from) > 32 || code.source_width == 64 ||
      !form.has("rn") || form.has("sat"))
    return nullptr;
  return by_integer(from, []<class T>() -> Exec {
    if constexpr (sizeof(T) <= 4) return integer_to_float_lanes<T>;
    return nullptr;
  });
}

Exec common_float_to_float(const Form& form, const Code&) {
  if (has_any(form, {"sat", "ftz", "relu", "satfinite", "rm", "rp", "rni", "rzi", "rmi", "rpi"}))
    return nullptr;
  const Type to = form.type(0), from = form.type(1);
  const bool truncates = form.has("rz");
  if (to == Type::f32 && from == Type::bf16) return widening_lanes<true>;
  if (to == Type::f32 && from == Type::f16) return widening_lanes<false>;
  if (to == Type::bf16 && from == Type::f32)
    return truncates ? narrowing_lanes<true, true> : narrowing_lanes<true, false>;
  if (to == Type::f16 && from == Type::f32)
    return truncates ? narrowing_lanes<false, true> : narrowing_lanes<false, false>;
  return nullptr;
}

Exec common_pair(const Form& form, const Code&) {
  if (has_any(form, {"relu", "satfinite"})) return nullptr;
  const bool truncates = form.has("rz");
  if (form.type(0) == Type::bf16x2)
    return truncates ? pair_lanes<true, true> : pair_lanes<true, false>;
  return truncates ? pair_lanes<false, true> : pair_lanes<false, false>;
}

Exec common_elements(const Form& form, const Code&) {
  if (form.has("relu")) return nullptr;
  switch (form.type(0)) {
    case Type::e4m3x2: return element_lanes<kE4M3>;
    case Type::e5m2x2: return element_lanes<kE5M2>;
    case Type::e2m3x2: return element_lanes<kE2M3>;
    case Type::e3m2x2: return element_lanes<kE3M2>;
    default: return element_lanes<kE2M1>;
  }
}

}  // namespace jax_fp4::sim

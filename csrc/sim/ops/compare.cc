// Comparison and selection (PTX ISA 9.7.7): setp, set, selp, slct.
//
// Two numbers are less, equal, greater or unordered; a comparison is the set of these outcomes that it
// holds for, one bit each.
#include <array>

#include "numerics/minifloat.h"
#include "sim/ops/lanes.h"

namespace jax_fp4::sim {
namespace {

constexpr u16 kLess = 1, kEqual = 2, kGreater = 4, kUnordered = 8;
constexpr int kCombineShift = 4;  // of variant: 1 and, 2 or, 3 xor with the predicate operand
constexpr u16 kFtz = 1 << 6;

struct Comparison {
  std::string_view name;
  u16 outcomes;
};
constexpr Comparison kComparisons[] = {{"eq", kEqual},
                                       {"ne", kLess | kGreater},
                                       {"lt", kLess},
                                       {"le", kLess | kEqual},
                                       {"gt", kGreater},
                                       {"ge", kGreater | kEqual},
                                       {"lo", kLess},
                                       {"ls", kLess | kEqual},
                                       {"hi", kGreater},
                                       {"hs", kGreater | kEqual},
                                       {"equ", kEqual | kUnordered},
                                       {"neu", kLess | kGreater | kUnordered},
                                       {"ltu", kLess | kUnordered},
                                       {"leu", kLess | kEqual | kUnordered},
                                       {"gtu", kGreater | kUnordered},
                                       {"geu", kGreater | kEqual | kUnordered},
                                       {"num", kLess | kEqual | kGreater},
                                       {"nan", kUnordered}};

u16 variant_of(const Form& form) {
  u16 variant = form.has("ftz") ? kFtz : 0;
  for (const Comparison& c : kComparisons)
    if (form.modifier(0) == c.name) variant |= c.outcomes;
  if (form.has("and")) variant |= 1 << kCombineShift;
  if (form.has("or")) variant |= 2 << kCombineShift;
  if (form.has("xor")) variant |= 3 << kCombineShift;
  return variant;
}

template <class T>
u32 outcome(T a, T b) {
  return a < b ? 0 : a == b ? 1 : a > b ? 2 : 3;
}

struct F16Value {
  static float load(u32 bits) { return decode_f16(bits & 0xFFFF); }
};
struct BF16Value {
  static float load(u32 bits) { return decode_bf16(bits & 0xFFFF); }
};

float flushed(float x, u16 variant) {
  return (variant & kFtz) && (bits_of(x) & kF32InfBits) == 0 ? 0.0f : x;
}

// Bit i is byte i, which is 0 or 1.
u32 bits_of_bytes(const u8 (&bytes)[kLanes]) {
  u32 result = 0;
  for (int first = 0; first < kLanes; first += 8) {
    u64 eight = 0;
    for (int k = 0; k < 8; ++k) eight |= u64{bytes[first + k]} << (8 * k);
    // The product's top byte gathers byte k at bit k; no two terms meet.
    result |= static_cast<u32>(eight * 0x0102'0408'1020'4080u >> 56) << first;
  }
  return result;
}

// One bit for each lane for which the comparison holds; those outside the mask may be anything.
template <class T>
u32 compare_lanes(const Warp& w, const Code& c, u32) {
  const In<T> a(w, c.src[0]), b(w, c.src[1]);
  const u8 less = c.variant & 1, equal = c.variant >> 1 & 1, greater = c.variant >> 2 & 1,
           unordered = c.variant >> 3 & 1;
  u8 holds[kLanes];
  const auto all = [&](auto value) {
    for (int i = 0; i < kLanes; ++i) {
      const T x = value(a[i]), y = value(b[i]);
      holds[i] = static_cast<u8>((x < y ? less : 0) | (x == y ? equal : 0) | (x > y ? greater : 0));
      if constexpr (std::is_floating_point_v<T>)
        holds[i] |= static_cast<u8>(x != x || y != y ? unordered : 0);
    }
  };
  if constexpr (std::is_same_v<T, float>) {
    if (c.variant & kFtz) {
      all([&](float x) { return flushed(x, kFtz); });
      return bits_of_bytes(holds);
    }
  }
  all([](T x) { return x; });
  return bits_of_bytes(holds);
}

template <class Value>
u32 compare_halves(const Warp& w, const Code& c, u32 mask, int shift) {
  const In<u32> a(w, c.src[0]), b(w, c.src[1]);
  const u32 outcomes = c.variant & 15;
  const auto load = [&](u32 bits) {
    const float x = Value::load(bits >> shift);
    // Subnormal f16 numbers are normal as f32.
    const bool small = std::is_same_v<Value, F16Value> && (bits >> shift & 0x7C00) == 0;
    return (c.variant & kFtz) && small ? 0.0f : flushed(x, c.variant);
  };
  u32 result = 0;
  each_lane(mask, [&](int i) { result |= (outcomes >> outcome(load(a[i]), load(b[i])) & 1) << i; });
  return result;
}

u32 combine(const Warp& w, const Code& c, u32 value) {
  const int how = c.variant >> kCombineShift & 3;
  if (how == 0) return value;
  const u32 other = w.predicate(c.src[2]);
  return how == 1 ? value & other : how == 2 ? value | other : value ^ other;
}

template <class T>
void setp_lanes(Warp& w, const Code& c, u32 mask) {
  const u32 value = compare_lanes<T>(w, c, mask);
  const u32 first = combine(w, c, value), second = combine(w, c, ~value);
  w.set_predicate(c.dst[0], mask, first);
  w.set_predicate(c.dst[1], mask, second);
}

template <class Value, bool kPacked>
void setp_halves(Warp& w, const Code& c, u32 mask) {
  const u32 low = compare_halves<Value>(w, c, mask, 0);
  // Packed: the second predicate is the upper half's result, not a complement.
  const u32 high = kPacked ? compare_halves<Value>(w, c, mask, 16) : ~low;
  const u32 first = combine(w, c, low), second = combine(w, c, high);
  w.set_predicate(c.dst[0], mask, first);
  w.set_predicate(c.dst[1], mask, second);
}

// set: true is all ones, or 1.0 for a floating-point destination.
template <class D, class T>
void set_lanes(Warp& w, const Code& c, u32 mask) {
  const u32 value = combine(w, c, compare_lanes<T>(w, c, mask));
  const Out<D> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    const bool set = value >> i & 1;
    if constexpr (std::is_same_v<D, float>) {
      d.set(i, set ? 1.0f : 0.0f);
    } else {
      d.set(i, set ? static_cast<D>(~D{0}) : D{0});
    }
  });
}

// set on halves: ones of the destination's kind in the half that holds.
template <class Value, bool kPacked>
void set_halves(Warp& w, const Code& c, u32 mask) {
  const u32 low = combine(w, c, compare_halves<Value>(w, c, mask, 0));
  const u32 high = kPacked ? combine(w, c, compare_halves<Value>(w, c, mask, 16)) : 0;
  const u32 one = c.width == 32 && !kPacked         ? ~0u
                  : std::is_same_v<Value, F16Value> ? 0x3C00
                                                    : 0x3F80;
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask,
            [&](int i) { d.set(i, (low >> i & 1 ? one : 0) | (high >> i & 1 ? one << 16 : 0)); });
}

constexpr auto kLaneBits = [] {
  std::array<u32, kLanes> bits{};
  for (u32 lane = 0; lane < kLanes; ++lane) bits[lane] = 1u << lane;
  return bits;
}();

template <class T>
void selp_lanes(Warp& w, const Code& c, u32 mask) {
  const In<T> a(w, c.src[0]), b(w, c.src[1]);
  const u32 choice = w.predicate(c.src[2]);
  const Out<T> d(w, c.dst[0]);
  each_lane(mask, [&](int i) { d.set(i, choice & kLaneBits[i] ? a[i] : b[i]); });
}

// slct: a if c >= 0, else b; a NaN selects b.
template <class T, class C>
void slct_lanes(Warp& w, const Code& c, u32 mask) {
  const In<T> a(w, c.src[0]), b(w, c.src[1]);
  const In<C> sign(w, c.src[2]);
  const Out<T> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    C value = sign[i];
    if constexpr (std::is_same_v<C, float>) value = flushed(value, c.variant);
    d.set(i, value >= 0 ? a[i] : b[i]);
  });
}

template <class F>
Exec by_comparable(Type type, F f) {
  if (type == Type::f32) return f.template operator()<float>();
  if (type == Type::f64) return f.template operator()<double>();
  return by_integer(type, f);
}

}  // namespace

Exec setp(const Form& form, Code& code) {
  code.variant = variant_of(form);
  switch (form.type(0)) {
    case Type::f16: return setp_halves<F16Value, false>;
    case Type::bf16: return setp_halves<BF16Value, false>;
    case Type::f16x2: return setp_halves<F16Value, true>;
    case Type::bf16x2: return setp_halves<BF16Value, true>;
    default: break;
  }
  return by_comparable(form.type(0), []<class T>() -> Exec { return setp_lanes<T>; });
}

Exec set(const Form& form, Code& code) {
  code.variant = variant_of(form);
  switch (form.type(1)) {
    case Type::f16: return set_halves<F16Value, false>;
    case Type::bf16: return set_halves<BF16Value, false>;
    case Type::f16x2: return set_halves<F16Value, true>;
    case Type::bf16x2: return set_halves<BF16Value, true>;
    default: break;
  }
  if (form.type(0) == Type::f32)
    return by_comparable(form.type(1), []<class T>() -> Exec { return set_lanes<float, T>; });
  return by_comparable(form.type(1), []<class T>() -> Exec { return set_lanes<u32, T>; });
}

Exec selp(const Form& form, Code&) {
  switch (bits_of_type(form.type(0))) {
    case 16: return selp_lanes<u16>;
    case 32: return selp_lanes<u32>;
    default: return selp_lanes<u64>;
  }
}

Exec slct(const Form& form, Code& code) {
  code.variant = form.has("ftz") ? kFtz : 0;
  const bool real = form.type(1) == Type::f32;
  switch (bits_of_type(form.type(0))) {
    case 16: return real ? slct_lanes<u16, float> : slct_lanes<u16, i32>;
    case 32: return real ? slct_lanes<u32, float> : slct_lanes<u32, i32>;
    default: return real ? slct_lanes<u64, float> : slct_lanes<u64, i32>;
  }
}

}  // namespace jax_fp4::sim

// Integer arithmetic (PTX ISA 9.7.1) and extended precision (9.7.2). Logic and shifts: logic.cc.
#include <algorithm>

#include "sim/ops/lanes.h"

namespace jax_fp4::sim {
namespace {

template <class T>
T wrap_add(T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
}
template <class T>
T wrap_sub(T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
}
template <class T>
T multiply_low(T a, T b) {
  // Through 64 bits: a product of promoted 16-bit numbers could overflow int.
  return static_cast<T>(static_cast<u64>(a) * static_cast<u64>(b));
}
template <class T>
T multiply_high(T a, T b) {
  return static_cast<T>((static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b)) >> (8 * sizeof(T)));
}

i32 saturate32(i64 x) {
  return static_cast<i32>(std::clamp<i64>(x, -0x8000'0000LL, 0x7FFF'FFFFLL));
}

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return wrap_add(a, b);
  }
};
struct Sub {
  template <class T>
  T operator()(T a, T b) const {
    return wrap_sub(a, b);
  }
};
struct AddSat {
  i32 operator()(i32 a, i32 b) const { return saturate32(i64{a} + b); }
};
struct SubSat {
  i32 operator()(i32 a, i32 b) const { return saturate32(i64{a} - b); }
};
struct Min {
  template <class T>
  T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};
struct MinRelu {
  template <class T>
  T operator()(T a, T b) const {
    return std::max<T>(0, std::min(a, b));
  }
};
struct MaxRelu {
  template <class T>
  T operator()(T a, T b) const {
    return std::max<T>(0, std::max(a, b));
  }
};
struct MulLow {
  template <class T>
  T operator()(T a, T b) const {
    return multiply_low(a, b);
  }
};
struct MulHigh {
  template <class T>
  T operator()(T a, T b) const {
    return multiply_high(a, b);
  }
};
struct MulWide {
  template <class T>
  Wide<T> operator()(T a, T b) const {
    return static_cast<Wide<T>>(static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b));
  }
};
struct MadLow {
  template <class T>
  T operator()(T a, T b, T c) const {
    return wrap_add(multiply_low(a, b), c);
  }
};
struct MadHigh {
  template <class T>
  T operator()(T a, T b, T c) const {
    return wrap_add(multiply_high(a, b), c);
  }
};
struct MadHighSat {
  i32 operator()(i32 a, i32 b, i32 c) const { return saturate32(i64{multiply_high(a, b)} + c); }
};
struct MadWide {
  template <class T>
  Wide<T> operator()(T a, T b, Wide<T> c) const {
    return wrap_add(MulWide{}(a, b), c);
  }
};
// 24-bit operands: bits 31:24 do not take part.
template <class T>
i64 product24(T a, T b) {
  const auto low = [](T x) {
    return static_cast<i64>(static_cast<T>(static_cast<u32>(x) << 8) >> 8);
  };
  return low(a) * low(b);
}
struct Mul24Low {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(product24(a, b));
  }
};
struct Mul24High {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(product24(a, b) >> 16);
  }
};
struct Mad24Low {
  template <class T>
  T operator()(T a, T b, T c) const {
    return wrap_add(static_cast<T>(product24(a, b)), c);
  }
};
struct Mad24High {
  template <class T>
  T operator()(T a, T b, T c) const {
    return wrap_add(static_cast<T>(product24(a, b) >> 16), c);
  }
};
struct Mad24HighSat {
  i32 operator()(i32 a, i32 b, i32 c) const { return saturate32((product24(a, b) >> 16) + c); }
};
struct Sad {
  template <class T>
  T operator()(T a, T b, T c) const {
    return wrap_add(c, a < b ? wrap_sub(b, a) : wrap_sub(a, b));
  }
};
// PTX leaves x / 0 unspecified; hardware gives all ones, and x for the remainder (assumption S5).
// The most negative number divided by -1 wraps.
struct Div {
  template <class T>
  T operator()(T a, T b) const {
    if (b == 0) return static_cast<T>(~T{0});
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return wrap_sub<T>(0, a);
    return static_cast<T>(a / b);
  }
};
struct Rem {
  template <class T>
  T operator()(T a, T b) const {
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
    return static_cast<T>(a % b);
  }
};
struct Abs {
  template <class T>
  T operator()(T a) const {
    return a < 0 ? wrap_sub<T>(0, a) : a;
  }
};
struct Neg {
  template <class T>
  T operator()(T a) const {
    return wrap_sub<T>(0, a);
  }
};
struct Popc {
  template <class T>
  u32 operator()(T a) const {
    return static_cast<u32>(std::popcount(a));
  }
};
struct Clz {
  template <class T>
  u32 operator()(T a) const {
    return static_cast<u32>(std::countl_zero(a));
  }
};
struct BitReverse {
  template <class T>
  T operator()(T a) const {
    T result = 0;
    for (std::size_t i = 0; i < 8 * sizeof(T); ++i)
      result |= (a >> i & 1) << (8 * sizeof(T) - 1 - i);
    return result;
  }
};
// Position of the most significant bit that is not a sign bit; -1 if there is none.
template <bool kShiftAmount>
struct BitFind {
  template <class T>
  u32 operator()(T a) const {
    if constexpr (std::is_signed_v<T>)
      if (a < 0) a = static_cast<T>(~a);
    const int zeros = std::countl_zero(static_cast<Unsigned<T>>(a));
    if (zeros == 8 * sizeof(T)) return ~0u;
    return static_cast<u32>(kShiftAmount ? zeros : static_cast<int>(8 * sizeof(T)) - 1 - zeros);
  }
};
// Extracts `length` bits from `position`; a field that runs over the top is filled with the sign.
struct BitExtract {
  template <class T>
  T operator()(T a, u32 position, u32 length) const {
    constexpr u32 kBits = 8 * sizeof(T);
    const u32 p = position & 0xFF, n = length & 0xFF;
    bool sign = false;
    if (std::is_signed_v<T> && n > 0)
      sign = static_cast<Unsigned<T>>(a) >> std::min(p + n - 1, kBits - 1) & 1;
    Unsigned<T> result = sign ? static_cast<Unsigned<T>>(~Unsigned<T>{0}) : 0;
    for (u32 i = 0; i < std::min(n, kBits) && p + i < kBits; ++i) {
      const Unsigned<T> bit = Unsigned<T>{1} << i;
      result = (static_cast<Unsigned<T>>(a) >> (p + i) & 1) ? result | bit : result & ~bit;
    }
    return static_cast<T>(result);
  }
};
template <class T>
void bit_insert(Warp& w, const Code& c, u32 mask) {
  const In<T> a(w, c.src[0]), b(w, c.src[1]);
  const In<u32> position(w, c.src[2]), length(w, c.src[3]);
  const Out<T> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    constexpr u32 kBits = 8 * sizeof(T);
    const u32 p = position[i] & 0xFF, n = length[i] & 0xFF;
    T result = b[i];
    for (u32 k = 0; k < n && p + k < kBits; ++k)
      result = (a[i] >> k & 1) ? result | T{1} << (p + k) : result & ~(T{1} << (p + k));
    d.set(i, result);
  });
}
template <bool kClamp, class T>
struct SignExtend {
  T operator()(T a, u32 count) const {
    const u32 n = kClamp ? std::min(count, 32u) : count & 31;
    if (n == 0) return 0;
    if (n >= 32) return a;
    if (std::is_signed_v<T>) return static_cast<T>(static_cast<u32>(a) << (32 - n)) >> (32 - n);
    return a & ((1u << n) - 1);
  }
};
template <bool kClamp>
struct BitMask {
  u32 operator()(u32 a, u32 b) const {
    const u32 start = kClamp ? std::min(a, 32u) : a & 31;
    const u32 count = kClamp ? std::min(b, 32u) : b & 31;
    const u64 ones = (u64{1} << count) - 1;
    return static_cast<u32>(ones << start);
  }
};

template <class A, class B>
void dot4(Warp& w, const Code& c, u32 mask) {
  const In<u32> a(w, c.src[0]), b(w, c.src[1]), addend(w, c.src[2]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    i64 sum = 0;
    for (int k = 0; k < 4; ++k)
      sum += i64{static_cast<A>(a[i] >> (8 * k))} * static_cast<B>(b[i] >> (8 * k));
    d.set(i, addend[i] + static_cast<u32>(sum));
  });
}
template <class A, class B>
void dot2(Warp& w, const Code& c, u32 mask) {
  using Half = std::conditional_t<std::is_signed_v<A>, i16, u16>;
  const In<u32> a(w, c.src[0]), b(w, c.src[1]), addend(w, c.src[2]);
  const Out<u32> d(w, c.dst[0]);
  const int first = c.variant == 0 ? 0 : 16;  // .lo or .hi half of b
  each_lane(mask, [&](int i) {
    i64 sum = 0;
    for (int k = 0; k < 2; ++k)
      sum += i64{static_cast<Half>(a[i] >> (16 * k))} * static_cast<B>(b[i] >> (first + 8 * k));
    d.set(i, addend[i] + static_cast<u32>(sum));
  });
}

// Two 16-bit numbers in a register.
template <class T, class Op>
void packed_binary(Warp& w, const Code& c, u32 mask) {
  const In<u32> a(w, c.src[0]), b(w, c.src[1]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    const auto half = [&](int s) {
      return static_cast<u32>(
          static_cast<u16>(Op{}(static_cast<T>(a[i] >> s), static_cast<T>(b[i] >> s))));
    };
    d.set(i, half(0) | half(16) << 16);
  });
}

template <class Op>
Exec binary(const Form& form) {
  if (form.type(0) == Type::u16x2) return packed_binary<u16, Op>;
  if (form.type(0) == Type::s16x2) return packed_binary<i16, Op>;
  return by_integer(form.type(0), []<class T>() -> Exec { return binary_lanes<T, T, Op>; });
}
template <class Op>
Exec unary(const Form& form) {
  return by_integer(form.type(0), []<class T>() -> Exec { return unary_lanes<T, T, Op>; });
}
template <class Op>
Exec unary_to_u32(const Form& form) {
  return by_integer(form.type(0), []<class T>() -> Exec { return unary_lanes<u32, T, Op>; });
}
template <class Op>
Exec ternary(const Form& form) {
  return by_integer(form.type(0), []<class T>() -> Exec { return ternary_lanes<T, T, T, Op>; });
}

template <class T, class Op>
void shift_lanes(Warp& w, const Code& c, u32 mask) {
  const In<T> a(w, c.src[0]);
  const In<u32> n(w, c.src[1]);
  const Out<T> d(w, c.dst[0]);
  each_lane(mask, [&](int i) { d.set(i, Op{}(a[i], n[i])); });
}

// add.cc and its like: d = a + b (+ carry) on T; bits of `variant`: carry in, carry out, subtract.
template <class T>
void add_with_carry(Warp& w, const Code& c, u32 mask) {
  const In<T> a(w, c.src[0]), b(w, c.src[1]);
  const Out<T> d(w, c.dst[0]);
  const bool in = c.variant & 1, out = c.variant & 2, subtract = c.variant & 4;
  u32 carry = w.carry;
  each_lane(mask, [&](int i) {
    // a - b = a + ~b + 1; the condition code holds the borrow's opposite inside this sum.
    const u32 bit = 1u << i;
    const bool flag = (w.carry & bit) != 0;
    const unsigned __int128 extra = in ? (subtract ? !flag : flag) : subtract;
    const unsigned __int128 sum =
        static_cast<unsigned __int128>(a[i]) + static_cast<T>(subtract ? ~b[i] : b[i]) + extra;
    const bool over = (sum >> (8 * sizeof(T))) != 0;
    d.set(i, static_cast<T>(sum));
    carry = (over != subtract) ? carry | bit : carry & ~bit;
  });
  if (out) w.carry = carry;
}
template <class T, bool kHigh>
void multiply_with_carry(Warp& w, const Code& c, u32 mask) {
  const In<T> a(w, c.src[0]), b(w, c.src[1]), addend(w, c.src[2]);
  const Out<T> d(w, c.dst[0]);
  const bool in = c.variant & 1, out = c.variant & 2;
  u32 carry = w.carry;
  each_lane(mask, [&](int i) {
    const T product = kHigh ? multiply_high(a[i], b[i]) : multiply_low(a[i], b[i]);
    const u32 bit = 1u << i;
    const unsigned __int128 sum =
        static_cast<unsigned __int128>(static_cast<Unsigned<T>>(product)) +
        static_cast<Unsigned<T>>(addend[i]) + (in && (w.carry & bit) != 0 ? 1 : 0);
    d.set(i, static_cast<T>(sum));
    carry = (sum >> (8 * sizeof(T))) != 0 ? carry | bit : carry & ~bit;
  });
  if (out) w.carry = carry;
}

// Position of the n-th set bit from `base` upward (n > 0) or downward (n < 0); ~0 if there is none.
void find_nth_set(Warp& w, const Code& c, u32 mask) {
  const In<u32> a(w, c.src[0]), base(w, c.src[1]);
  const In<i32> offset(w, c.src[2]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    u32 result = ~0u;
    const i32 step = offset[i] < 0 ? -1 : 1;
    i32 left = offset[i] < 0 ? -offset[i] : offset[i];
    if (left == 0) {
      if (base[i] < 32 && (a[i] >> base[i] & 1)) result = base[i];
    } else {
      for (i64 k = base[i]; k >= 0 && k < 32; k += step)
        if ((a[i] >> k & 1) && --left == 0) {
          result = static_cast<u32>(k);
          break;
        }
    }
    d.set(i, result);
  });
}

}  // namespace

Exec add_int(const Form& form, Code&) {
  return form.has("sat") ? binary_lanes<i32, i32, AddSat> : binary<Add>(form);
}
Exec sub_int(const Form& form, Code&) {
  return form.has("sat") ? binary_lanes<i32, i32, SubSat> : binary<Sub>(form);
}
Exec min_int(const Form& form, Code&) {
  return form.has("relu") ? binary<MinRelu>(form) : binary<Min>(form);
}
Exec max_int(const Form& form, Code&) {
  return form.has("relu") ? binary<MaxRelu>(form) : binary<Max>(form);
}
Exec mul_int(const Form& form, Code&) {
  return form.has("hi") ? binary<MulHigh>(form) : binary<MulLow>(form);
}
Exec mul_wide(const Form& form, Code&) {
  return by_integer(form.type(0), []<class T>() -> Exec {
    if constexpr (sizeof(T) <= 4) return binary_lanes<Wide<T>, T, MulWide>;
    return nullptr;
  });
}
Exec mad_int(const Form& form, Code&) {
  if (form.has("sat")) return ternary_lanes<i32, i32, i32, MadHighSat>;
  return form.has("hi") ? ternary<MadHigh>(form) : ternary<MadLow>(form);
}
Exec mad_wide(const Form& form, Code&) {
  return by_integer(form.type(0), []<class T>() -> Exec {
    if constexpr (sizeof(T) <= 4) return ternary_lanes<Wide<T>, T, Wide<T>, MadWide>;
    return nullptr;
  });
}
Exec mul24(const Form& form, Code&) {
  const bool high = form.has("hi");
  if (form.type(0) == Type::u32)
    return high ? binary_lanes<u32, u32, Mul24High> : binary_lanes<u32, u32, Mul24Low>;
  return high ? binary_lanes<i32, i32, Mul24High> : binary_lanes<i32, i32, Mul24Low>;
}
Exec mad24(const Form& form, Code&) {
  if (form.has("sat")) return ternary_lanes<i32, i32, i32, Mad24HighSat>;
  const bool high = form.has("hi");
  if (form.type(0) == Type::u32)
    return high ? ternary_lanes<u32, u32, u32, Mad24High> : ternary_lanes<u32, u32, u32, Mad24Low>;
  return high ? ternary_lanes<i32, i32, i32, Mad24High> : ternary_lanes<i32, i32, i32, Mad24Low>;
}
Exec sad(const Form& form, Code&) { return ternary<Sad>(form); }
Exec div_int(const Form& form, Code&) { return binary<Div>(form); }
Exec rem_int(const Form& form, Code&) { return binary<Rem>(form); }
Exec abs_int(const Form& form, Code&) { return unary<Abs>(form); }
Exec neg_int(const Form& form, Code&) { return unary<Neg>(form); }
Exec popc(const Form& form, Code&) {
  return form.type(0) == Type::b32 ? unary_lanes<u32, u32, Popc> : unary_lanes<u32, u64, Popc>;
}
Exec clz(const Form& form, Code&) {
  return form.type(0) == Type::b32 ? unary_lanes<u32, u32, Clz> : unary_lanes<u32, u64, Clz>;
}
Exec brev(const Form& form, Code&) {
  return form.type(0) == Type::b32 ? unary_lanes<u32, u32, BitReverse>
                                   : unary_lanes<u64, u64, BitReverse>;
}
Exec bfind(const Form& form, Code&) {
  return form.has("shiftamt") ? unary_to_u32<BitFind<true>>(form)
                              : unary_to_u32<BitFind<false>>(form);
}
Exec bfe(const Form& form, Code&) {
  return by_integer(form.type(0), []<class T>() -> Exec {
    return [](Warp& w, const Code& c, u32 mask) {
      const In<T> a(w, c.src[0]);
      const In<u32> position(w, c.src[1]), length(w, c.src[2]);
      const Out<T> d(w, c.dst[0]);
      each_lane(mask, [&](int i) { d.set(i, BitExtract{}(a[i], position[i], length[i])); });
    };
  });
}
Exec bfi(const Form& form, Code&) {
  return form.type(0) == Type::b32 ? bit_insert<u32> : bit_insert<u64>;
}
Exec fns(const Form&, Code&) { return find_nth_set; }
Exec szext(const Form& form, Code&) {
  const bool clamp = form.has("clamp");
  if (form.type(0) == Type::u32)
    return clamp ? shift_lanes<u32, SignExtend<true, u32>>
                 : shift_lanes<u32, SignExtend<false, u32>>;
  return clamp ? shift_lanes<i32, SignExtend<true, i32>> : shift_lanes<i32, SignExtend<false, i32>>;
}
Exec bmsk(const Form& form, Code&) {
  return form.has("clamp") ? binary_lanes<u32, u32, BitMask<true>>
                           : binary_lanes<u32, u32, BitMask<false>>;
}
Exec dp4a(const Form& form, Code&) {
  const bool a = is_signed(form.type(0)), b = is_signed(form.type(1));
  return a ? (b ? dot4<i8, i8> : dot4<i8, u8>) : (b ? dot4<u8, i8> : dot4<u8, u8>);
}
Exec dp2a(const Form& form, Code& code) {
  code.variant = form.has("hi");
  const bool a = is_signed(form.type(0)), b = is_signed(form.type(1));
  return a ? (b ? dot2<i8, i8> : dot2<i8, u8>) : (b ? dot2<u8, i8> : dot2<u8, u8>);
}
Exec add_carry(const Form& form, Code& code) {
  const std::string_view opcode = form.row->opcode;
  code.variant = static_cast<u16>((opcode == "addc" || opcode == "subc" ? 1 : 0) |
                                  (form.has("cc") ? 2 : 0) | (opcode.starts_with("sub") ? 4 : 0));
  return bits_of_type(form.type(0)) == 32 ? add_with_carry<u32> : add_with_carry<u64>;
}
Exec mad_carry(const Form& form, Code& code) {
  code.variant = static_cast<u16>((form.row->opcode == "madc" ? 1 : 0) | (form.has("cc") ? 2 : 0));
  const bool high = form.has("hi");
  return by_integer(form.type(0), [high]<class T>() -> Exec {
    if constexpr (sizeof(T) >= 4)
      return high ? multiply_with_carry<T, true> : multiply_with_carry<T, false>;
    return nullptr;
  });
}

}  // namespace jax_fp4::sim

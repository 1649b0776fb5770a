// How handlers read and write lanes: typed views of registers, loops over a mask, choice by type.
#pragma once

#include <bit>
#include <cstring>
#include <type_traits>

#include "sim/machine/core.h"
#include "sim/ops/ops.h"

namespace jax_fp4::sim {

using i8 = signed char;
using i16 = short;

// Calls f(lane) for every lane of the mask. The full warp is the common case and vectorizes.
template <class F>
inline void each_lane(u32 mask, F f) {
  if (mask == kAllLanes) {
#pragma GCC ivdep
    for (int lane = 0; lane < kLanes; ++lane) f(lane);
  } else {
    for (; mask != 0; mask &= mask - 1) f(std::countr_zero(mask));
  }
}

template <std::size_t kBytes>
struct LaneBits {
  using type [[gnu::may_alias]] = u32;
};
template <>
struct LaneBits<8> {
  using type [[gnu::may_alias]] = u64;
};
template <class T>
using LaneOf = typename LaneBits<sizeof(T)>::type;

// A register seen as 32 values of type T; 8- and 16-bit values are stored zero-extended.
template <class T>
struct In {
  const LaneOf<T>* lanes;
  In(const Warp& w, u32 slot) : lanes(reinterpret_cast<const LaneOf<T>*>(w.in(slot))) {}
  T operator[](int lane) const {
    if constexpr (std::is_floating_point_v<T>) {
      using Bits = std::conditional_t<sizeof(T) == 8, u64, u32>;
      return std::bit_cast<T>(static_cast<Bits>(lanes[lane]));
    } else {
      return static_cast<T>(lanes[lane]);
    }
  }
};

template <class T>
struct Out {
  LaneOf<T>* lanes;
  Out(Warp& w, u32 slot) : lanes(reinterpret_cast<LaneOf<T>*>(w.out(slot))) {}
  void set(int lane, T value) const {
    if constexpr (std::is_floating_point_v<T>) {
      using Bits = std::conditional_t<sizeof(T) == 8, u64, u32>;
      lanes[lane] = std::bit_cast<Bits>(value);
    } else {
      lanes[lane] = static_cast<std::make_unsigned_t<T>>(value);
    }
  }
};

// Handlers of a function object on one, two or three operands of type A, result D.
template <class D, class A, class Op>
void unary_lanes(Warp& w, const Code& c, u32 mask) {
  const In<A> a(w, c.src[0]);
  const Out<D> d(w, c.dst[0]);
  each_lane(mask, [&](int i) { d.set(i, Op{}(a[i])); });
}
template <class D, class A, class Op>
void binary_lanes(Warp& w, const Code& c, u32 mask) {
  const In<A> a(w, c.src[0]), b(w, c.src[1]);
  const Out<D> d(w, c.dst[0]);
  each_lane(mask, [&](int i) { d.set(i, Op{}(a[i], b[i])); });
}
template <class D, class A, class C, class Op>
void ternary_lanes(Warp& w, const Code& c, u32 mask) {
  const In<A> a(w, c.src[0]), b(w, c.src[1]);
  const In<C> e(w, c.src[2]);
  const Out<D> d(w, c.dst[0]);
  each_lane(mask, [&](int i) { d.set(i, Op{}(a[i], b[i], e[i])); });
}

// f.template operator()<T>() for the C++ type of an integer PTX type; b types count as unsigned.
template <class F>
Exec by_integer(Type type, F f) {
  switch (type) {
    case Type::u8:
    case Type::b8: return f.template operator()<u8>();
    case Type::s8: return f.template operator()<i8>();
    case Type::u16:
    case Type::b16: return f.template operator()<u16>();
    case Type::s16: return f.template operator()<i16>();
    case Type::u32:
    case Type::b32: return f.template operator()<u32>();
    case Type::s32: return f.template operator()<i32>();
    case Type::u64:
    case Type::b64: return f.template operator()<u64>();
    case Type::s64: return f.template operator()<i64>();
    default: return nullptr;
  }
}

template <class T>
using Unsigned = std::make_unsigned_t<T>;
// Twice as wide, same signedness.
template <class T>
using Wide = std::conditional_t<
    sizeof(T) == 1, std::conditional_t<std::is_signed_v<T>, i16, u16>,
    std::conditional_t<
        sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, i32, u32>,
        std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, i64, u64>,
                           std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>>;

}  // namespace jax_fp4::sim

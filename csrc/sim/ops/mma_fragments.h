// Which lane holds which element of the operands of mma.sync with 16x8 outputs (PTX ISA 9.7.14.5).
//
// Lane T holds, with g = T / 4, t = T % 4 and e elements in a register of 32 bits:
//   A, register q, element i   row g + 8 (q & 1), k = e t + i + 4 e (q >> 1)
//   B, register q, element i   column g,          k = e t + i + 4 e q
//   C, D of 32 bits, register q            row g + 8 (q >> 1), column 2 t + (q & 1)
//   C, D of f16, register q, half i        row g + 8 q,        column 2 t + i
#pragma once

#include "numerics/formats.h"
#include "sim/ops/lanes.h"

namespace jax_fp4::sim {

inline constexpr int kMmaRows = 16, kMmaColumns = 8;

// Calls f(lane, row, k, bits) for every element of A.
template <class F>
void each_a_element(const Warp& w, const u32* slots, int registers, int element_bits, F f) {
  const int e = 32 / element_bits;
  const u32 bits = element_bits == 32 ? ~0u : (1u << element_bits) - 1;
  for (int q = 0; q < registers; ++q) {
    const Lane32* lanes = w.in(slots[q]);
    for (int lane = 0; lane < kLanes; ++lane)
      for (int i = 0; i < e; ++i)
        f(lane, lane / 4 + 8 * (q & 1), e * (lane % 4) + i + 4 * e * (q >> 1),
          lanes[lane] >> (element_bits * i) & bits);
  }
}

// Calls f(lane, column, k, bits) for every element of B.
template <class F>
void each_b_element(const Warp& w, const u32* slots, int registers, int element_bits, F f) {
  const int e = 32 / element_bits;
  const u32 bits = element_bits == 32 ? ~0u : (1u << element_bits) - 1;
  for (int q = 0; q < registers; ++q) {
    const Lane32* lanes = w.in(slots[q]);
    for (int lane = 0; lane < kLanes; ++lane)
      for (int i = 0; i < e; ++i)
        f(lane, lane / 4, e * (lane % 4) + i + 4 * e * q, lanes[lane] >> (element_bits * i) & bits);
  }
}

// An element in its 8-bit container: FP4 in bits 5:2, FP6 in bits 5:0; the other bits must be zero,
// since hardware is said to take them as further mantissa bits.
inline u8 from_container(Warp& w, const Code& c, int lane, Element element, u32 byte) {
  const int shift = element == Element::e2m1 ? 2 : 0;
  const u32 code = byte >> shift & (2 * minifloat(element).sign_code() - 1);
  if (code << shift != byte)
    w.fault(c, lane, FaultKind::argument, "padding bits of a container of 8 bits are not zero");
  return static_cast<u8>(code);
}

inline Element element_of(Type type) {
  switch (type) {
    case Type::e2m1: return Element::e2m1;
    case Type::e2m3: return Element::e2m3;
    case Type::e3m2: return Element::e3m2;
    case Type::e5m2: return Element::e5m2;
    default: return Element::e4m3;
  }
}

}  // namespace jax_fp4::sim

// The 16 x 8 outputs of one mma.sync, bit for bit those of mma_fp4_step and mma_plain_step (csrc/numerics), at the
// speed of the host's vector units.
//
// The loops of mma_tile_rows.h run over the 16 rows of A; a column of B is what they call a row. Products
// commute, and so do their weights.
#pragma once

#include "sim/ops/mma_fragments.h"
#include "sim/ops/mma_tile_rows.h"

namespace jax_fp4::sim {

// Outputs, or accumulators, by column.
using MmaColumns = u32[kMmaColumns][kMmaRows];

// From and to the four registers of C and D of 32 bits.
inline void load_columns(const Warp& w, const u32* slots, MmaColumns& d) {
  for (int q = 0; q < 4; ++q) {
    const Lane32* lanes = w.in(slots[q]);
    for (int lane = 0; lane < kLanes; ++lane)
      d[2 * (lane % 4) + (q & 1)][lane / 4 + 8 * (q >> 1)] = lanes[lane];
  }
}
inline void store_columns(Warp& w, const u32* slots, const MmaColumns& d) {
  for (int q = 0; q < 4; ++q) {
    const Out<u32> out(w, slots[q]);
    for (int lane = 0; lane < kLanes; ++lane)
      out.set(lane, d[2 * (lane % 4) + (q & 1)][lane / 4 + 8 * (q >> 1)]);
  }
}

// Operands of kinds mxf4 and mxf4nvf4, 64 elements along K.
struct WarpGroups {
  GroupStrip<kMmaRows> a;
  GroupRow b[kMmaColumns];
};
// Operands of one step of other kinds; no infinities and NaN.
struct WarpProducts {
  ProductStrip<kMmaRows> a;
  ProductRow b[kMmaColumns];
};

void add_groups(const WarpGroups& operands, MmaColumns& d);
// d are f32.
void add_products(const WarpProducts& operands, const ProductParameters& parameters, MmaColumns& d);

// A scale byte as the loops take it.
struct GroupScale {
  i16 significand;  // in eighths
  i16 weight;
  bool nan;
};
inline GroupScale group_scale(BlockScale kind, u32 byte) {
  const MmaFactor factor = mma_scale(kind, byte);
  return {static_cast<i16>(factor.significand << (3 - (factor.weight - factor.exponent))),
          static_cast<i16>(factor.weight), factor.nan};
}

// A code as the loops take it.
struct ProductFactor {
  i16 significand;
  i16 weight;    // kNoWeight: a zero
  bool special;  // an infinity or a NaN
};
inline ProductFactor product_factor(const MmaNumber& x) {
  if (x.inf || x.nan) return {0, kNoWeight, true};
  return {static_cast<i16>(x.significand),
          x.significand == 0 ? kNoWeight : static_cast<i16>(x.weight), false};
}

}  // namespace jax_fp4::sim

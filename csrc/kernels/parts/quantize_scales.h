// From the largest magnitudes of a thread's groups to the scales and multipliers of their blocks.
#pragma once

#include "kernels/parts/quantize_tile.h"
#include "kernels/parts/scales.h"

namespace jax_fp4 {
namespace {

// One pass: the row pass encodes along the columns of x, the column pass along its rows.
struct PassState {
  const CopyParams& copy;
  Format format;
  InputType input;
  TensorConstants constants;
  const float* multiplier;  // of each scale byte of NVFP4
  const CopyTile& tile;
};

// A thread's two groups: where they begin in the copy's tile, values, bits of the largest magnitudes,
// scale bytes and codes.
struct Pair {
  u32 row[2], k;
  float v[2][kGroup];
  u32 amax[2];
  u32 scale[2];
  Codes<kBits> codes[2];
};

__device__ u32 xor_max(u32 x, int mask) {
  const u32 other = __shfl_xor_sync(kAllLanes, x, mask);
  return x > other ? x : other;
}
__device__ float xor_add(float x, int mask) { return x + __shfl_xor_sync(kAllLanes, x, mask); }

// From the largest magnitudes of a thread's groups to those of their blocks or tiles.
template <bool kColumns>
__device__ void combine(u32 (&amax)[2], bool tiles) {
  if constexpr (kBlock == 32)
#pragma unroll
    for (u32& a : amax) a = xor_max(a, kColumns ? 16 : 1);
  if (!tiles) return;
  u32 a = amax[0] > amax[1] ? amax[0] : amax[1];
  // The lanes with the tile's other rows (row pass) or other columns.
  int mask = kColumns ? 1 : kBlock == 16 ? 4 : 2;
#pragma unroll
  for (int i = 0; i < (kBlock == 16 ? 3 : 4); ++i, mask *= 2) a = xor_max(a, mask);
  amax[0] = amax[1] = a;
}

__device__ float four_over_six_errors(const BlockEncoding& candidate, const float (&v)[kGroup],
                                      float amax) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const u32 code = Software<Element::e2m1>::nearest(v[i] * candidate.multiplier);
    sum = sum + four_over_six_error(v[i], code, candidate.scale, amax);
  }
  return sum;
}

// numerics/block_scale.h: the better of two scales for each block or tile. A bad block has any.
template <bool kColumns>
__device__ void four_over_six(const PassState& s, const Pair& pair, BlockEncoding (&block)[2]) {
  float error[2][2];  // [candidate][group]
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const FourOverSix both = four_over_six_block(f32_of(pair.amax[g]), s.constants.encode);
    error[0][g] = four_over_six_errors(both.six, pair.v[g], s.constants.amax);
    error[1][g] = four_over_six_errors(both.four, pair.v[g], s.constants.amax);
  }
  if (s.copy.tiles) {
    // The 16 rows of the copy in a tile pairwise, with strides 8, 4, 2, 1. In the row pass a thread
    // has rows i and i + 8, lanes 4 apart the next ones; in the column pass it has rows 2i, 2i + 1
    // of the copy, the last pair.
#pragma unroll
    for (auto& e : error) {
      if (!kColumns) e[0] = e[1] = e[0] + e[1];
#pragma unroll
      for (int mask = kColumns ? 4 : 16, i = 0; i < 3; ++i, mask /= 2) {
        e[0] = xor_add(e[0], mask);
        e[1] = xor_add(e[1], mask);
      }
      if (kColumns) e[0] = e[1] = e[0] + e[1];
    }
  }
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const FourOverSix both = four_over_six_block(f32_of(pair.amax[g]), s.constants.encode);
    block[g] = error[1][g] < error[0][g] ? both.four : both.six;
  }
}

// The scale bytes and multipliers of a pair.
template <bool kColumns>
__device__ void scale_pair(const PassState& s, Pair& pair, float (&multiplier)[2]) {
  if (kFourOverSix && s.copy.four_over_six) {
    BlockEncoding block[2];
    four_over_six<kColumns>(s, pair, block);
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      pair.scale[g] = pair.amax[g] < kF32InfBits ? block[g].scale : kUE4M3NaN;
      multiplier[g] = block[g].multiplier;
    }
  } else if constexpr (kNVFP4Kernel) {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      pair.scale[g] = fast_nvfp4_scale(pair.amax[g], s.constants.sixth);
      multiplier[g] = s.multiplier[pair.scale[g]];
    }
  } else {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const BlockEncoding block =
          encode_block(s.format, f32_of(pair.amax[g]), s.constants.encode, s.copy.rule);
      pair.scale[g] = pair.amax[g] < kF32InfBits ? block.scale : kUE8M0NaN;
      multiplier[g] = block.multiplier;
    }
  }
}

}  // namespace
}  // namespace jax_fp4

// From sums to D: what is added, rounded and stored, on 32 columns of a row a thread.
//
// A warp has 32 rows, one a lane. Results go through a buffer of the warp, 32 rows of 128 bytes with the
// 128-byte swizzle, whence a tensor copy or the warp itself takes them to D.
#pragma once

#include "kernels/gemm_params.h"
#include "kernels/parts/elements.h"
#include "kernels/parts/raster.h"
#include "numerics/mma_descriptor.h"
#include "ptx/shared.h"

namespace jax_fp4 {

inline constexpr u32 kPiece = 32;  // columns that a thread holds at a time

// 1 where there are no scales: parts of a sum are scaled when they have been added.
__device__ inline float alpha_of(const GemmParams& p, const Tile& tile) {
  if (p.global_scale_a == nullptr) return 1.0f;
  return __fmul_rn(p.global_scale_a[tile.batch * p.batch_scale_a],
                   p.global_scale_b[tile.batch * p.batch_scale_b]);
}

// x + bias[column .. column + 31]; columns that do not exist take the last one's. A lane fetches one
// column's, and all take it from there.
__device__ inline void add_bias(float (&x)[kPiece], const GemmParams& p, const Tile& tile,
                                u32 column) {
  const u32 lane = threadIdx.x % 32;
  const u32 own_column = column + lane < p.n ? column + lane : p.n - 1;
  const i64 at = static_cast<i64>(tile.batch * p.batch_bias) * p.n + own_column;
  const float own = load_element(p.bias_type, p.bias, at);
#pragma unroll
  for (u32 j = 0; j < kPiece; ++j) x[j] = __fadd_rn(x[j], __shfl_sync(0xFFFF'FFFFu, own, j));
}

// x + C[row, column .. column + 31], each sum rounded once. Places outside C take a neighbour's value:
// they have no result either.
__device__ inline void add_c(float (&x)[kPiece], const GemmParams& p, const Tile& tile, u32 row,
                             u32 column) {
  const i64 at = (static_cast<i64>(tile.matrix) * p.m + (row < p.m ? row : p.m - 1)) * p.n;
  const u32 last = p.n - 1;
  if (!p.c_by_vector) {
#pragma unroll
    for (u32 j = 0; j < kPiece; ++j) {
      const u32 existing = column + j < last ? column + j : last;
      x[j] = __fadd_rn(x[j], load_element(p.c_type, p.c, at + existing));
    }
    return;
  }
  // Rows are multiples of 16 bytes: a vector exists or does not.
  const u32 per_vector = 16 / dtype_bytes(p.c_type);
  const uint4* vectors = static_cast<const uint4*>(p.c) + at / per_vector;
  const u32 first = column / per_vector, last_vector = last / per_vector;
  if (p.c_type == Dtype::f32) {
#pragma unroll
    for (u32 v = 0; v < kPiece / 4; ++v) {
      const uint4 c = vectors[first + v < last_vector ? first + v : last_vector];
      x[4 * v] = __fadd_rn(x[4 * v], f32_of(c.x));
      x[4 * v + 1] = __fadd_rn(x[4 * v + 1], f32_of(c.y));
      x[4 * v + 2] = __fadd_rn(x[4 * v + 2], f32_of(c.z));
      x[4 * v + 3] = __fadd_rn(x[4 * v + 3], f32_of(c.w));
    }
    return;
  }
#pragma unroll
  for (u32 v = 0; v < kPiece / 8; ++v) {
    const uint4 c = vectors[first + v < last_vector ? first + v : last_vector];
    const u32 words[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 j = 8 * v + 2 * i;
      x[j] = __fadd_rn(x[j], widen(p.c_type, words[i] & 0xFFFF));
      x[j + 1] = __fadd_rn(x[j + 1], widen(p.c_type, words[i] >> 16));
    }
  }
}

// 32 results rounded to a type of 16 bits, two a word.
__device__ inline void round_piece(const float (&x)[kPiece], Dtype type, u32 (&pairs)[kPiece / 2]) {
  if (type == Dtype::bf16) {
#pragma unroll
    for (u32 j = 0; j < kPiece; j += 2) pairs[j / 2] = ptx::cvt_rn_bf16x2_f32(x[j], x[j + 1]);
  } else {
#pragma unroll
    for (u32 j = 0; j < kPiece; j += 2) pairs[j / 2] = ptx::cvt_rn_f16x2_f32(x[j], x[j + 1]);
  }
}

// Where the lane's row of the warp's buffer starts; byte b of the row is at this address ^ b.
__device__ inline u32 swizzled_row(u32 buffer) {
  return swizzle_128b(buffer + threadIdx.x % 32 * kGemmRowBytes);
}

// Puts them at a column of the lane's row of the warp's buffer.
__device__ inline void store_pairs(const u32 (&pairs)[kPiece / 2], u32 buffer, u32 column) {
  const u32 row = swizzled_row(buffer);
#pragma unroll
  for (u32 j = 0; j < kPiece; j += 8)
    ptx::st_shared_v4_b32(row ^ 2 * (column + j), pairs[j / 2], pairs[j / 2 + 1], pairs[j / 2 + 2],
                          pairs[j / 2 + 3]);
}

// Rounds 32 results of the lane's row to D's type, and puts them at a column of the warp's buffer.
__device__ inline void store_piece(const float (&x)[kPiece], Dtype type, u32 buffer, u32 column) {
  if (type == Dtype::f32) {
    const u32 row = swizzled_row(buffer);
#pragma unroll
    for (u32 j = 0; j < kPiece; j += 4)
      ptx::st_shared_v4_b32(row ^ 4 * (column + j), bits_of(x[j]), bits_of(x[j + 1]),
                            bits_of(x[j + 2]), bits_of(x[j + 3]));
    return;
  }
  u32 pairs[kPiece / 2];
  round_piece(x, type, pairs);
  store_pairs(pairs, buffer, column);
}

// Copies what exists of the warp's buffer, `width` columns wide, to D: for rows that no tensor map can
// address. Neighbouring lanes take neighbouring columns.
__device__ inline void copy_out(const GemmParams& p, const Tile& tile, u32 row, u32 column,
                                u32 width, u32 buffer) {
  const u32 rows = p.m - row < 32 ? p.m - row : 32;
  const u32 columns = p.n - column < width ? p.n - column : width;
  i64 at = (static_cast<i64>(tile.matrix) * p.m + row) * p.n + column;
  for (u32 r = 0; r < rows; ++r, at += p.n, buffer += kGemmRowBytes)
    for (u32 c = threadIdx.x % 32; c < columns; c += 32) {
      if (p.out_type == Dtype::f32)
        static_cast<u32*>(p.out)[at + c] = ptx::ld_shared_b32(swizzle_128b(buffer + 4 * c));
      else
        static_cast<u16*>(p.out)[at + c] = ptx::ld_shared_b16(swizzle_128b(buffer + 2 * c));
    }
}

// The same for the transpose of D, [n, m], from alpha * sum in f32 of 32 columns: neighbouring lanes have
// neighbouring rows. Adds bias, which goes with rows here, and C, which lies as D does.
__device__ inline void copy_out_transposed(const GemmParams& p, const Tile& tile, u32 first_row,
                                           u32 column, u32 buffer) {
  const u32 lane = threadIdx.x % 32, row = first_row + lane;
  if (row >= p.m) return;
  const i64 bias_at = static_cast<i64>(tile.batch * p.batch_bias) * p.m + row;
  const float bias = p.bias == nullptr ? 0.0f : load_element(p.bias_type, p.bias, bias_at);
  const u32 columns = p.n - column < kPiece ? p.n - column : kPiece;
  i64 at = (static_cast<i64>(tile.matrix) * p.n + column) * p.m + row;
  for (u32 c = 0; c < columns; ++c, at += p.m) {
    float x = f32_of(ptx::ld_shared_b32(swizzle_128b(buffer + lane * kGemmRowBytes + 4 * c)));
    if (p.bias != nullptr) x = __fadd_rn(x, bias);
    if (p.c != nullptr) x = __fadd_rn(x, load_element(p.c_type, p.c, at));
    store_element(p.out_type, p.out, at, x);
  }
}

}  // namespace jax_fp4

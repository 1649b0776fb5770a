// A warp's part of a tile of D where mma.sync multiplies: 32 rows and kColumns columns, as 2 x kColumns / 8
// products of 16 x 8. Where a lane finds operands in shared memory, and the way of its sums to D.
#pragma once

#include "kernels/parts/epilogue.h"
#include "ptx/mma.h"

namespace jax_fp4 {

inline constexpr u32 kWarpRows = kGemmStoreRows;
inline constexpr u32 kWarpTilesM = kWarpRows / 16;

// As mma.sync has them: of a product along M and one along N.
template <u32 kColumns>
struct WarpSums {
  float tile[kWarpTilesM][kColumns / 8][4];
  __device__ WarpSums() : tile{} {}
};

// ---- Operands -----------------------------------------------------------------------------------

// Rows of kRowBytes in shared memory, with the swizzle of as many bytes. The eight rows of a matrix that
// ldmatrix loads are neighbours, which the swizzle puts into different banks.
template <u32 kRowBytes>
__device__ constexpr u32 swizzled(u32 address) {
  static_assert(kRowBytes == 64 || kRowBytes == 128, "spans of swizzles that are used");
  return kRowBytes == 128 ? swizzle_128b(address) : swizzle_64b(address);
}

// Where the lane's rows of four matrices are, for K from the start of a row. K of 32 bytes s further on is
// at this address ^ 32 s, as the swizzle permutes parts of a row; rows 8 i further on at + 8 i kRowBytes.
//
// Of A: 16 rows from `row` on, the first 16 bytes of K, then the next 16.
template <u32 kRowBytes>
__device__ inline u32 operand_a_at(u32 address, u32 row) {
  const u32 lane = threadIdx.x % 32;
  return swizzled<kRowBytes>(address + (row + lane % 16) * kRowBytes + lane / 16 * 16);
}
// Of B: 8 columns from `column` on, both halves of K, then the next 8 columns.
template <u32 kRowBytes>
__device__ inline u32 operand_b_at(u32 address, u32 column) {
  const u32 lane = threadIdx.x % 32;
  return swizzled<kRowBytes>(address + (column + lane / 16 * 8 + lane % 8) * kRowBytes +
                             lane / 8 % 2 * 16);
}

// ---- To D ---------------------------------------------------------------------------------------

// alpha * sum of 32 columns into the warp's buffer, 32 rows of f32.
template <u32 kColumns>
__device__ inline void put_piece(const WarpSums<kColumns>& sums, u32 piece, float alpha,
                                 u32 buffer) {
  const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 first = swizzle_128b(buffer + g * kGemmRowBytes + 8 * t);
#pragma unroll
  for (u32 i = 0; i < kWarpTilesM; ++i)
#pragma unroll
    for (u32 j = 0; j < kPiece / 8; ++j) {
      const float* sum = sums.tile[i][piece * (kPiece / 8) + j];
      const u32 to = (first ^ 32 * j) + 16 * i * kGemmRowBytes;  // column 8 j + 2 t, row 16 i + g
      ptx::st_shared_v2_b32(to, bits_of(__fmul_rn(alpha, sum[0])),
                            bits_of(__fmul_rn(alpha, sum[1])));
      ptx::st_shared_v2_b32(to + 8 * kGemmRowBytes, bits_of(__fmul_rn(alpha, sum[2])),
                            bits_of(__fmul_rn(alpha, sum[3])));
    }
}

// The lane's row of the buffer.
__device__ inline void take_row(float (&x)[kPiece], u32 buffer) {
  const u32 row = swizzled_row(buffer);
#pragma unroll
  for (u32 j = 0; j < kPiece; j += 4) {
    u32 word[4];
    ptx::ld_shared_v4_b32(row ^ 4 * j, word[0], word[1], word[2], word[3]);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) x[j + i] = f32_of(word[i]);
  }
}

// How a warp's buffer gets to D: class Store has
//   reuse()                       all lanes: the buffer may be written again
//   store(tile, row, column, columns)   all lanes: their writes to the buffer are done
template <u32 kColumns, class Store>
__device__ inline void finish_sums(const WarpSums<kColumns>& sums, const GemmParams& p,
                                   const Tile& tile, u32 first_row, u32 first_column, u32 buffer,
                                   const Store& store) {
  constexpr u32 kPieces = kColumns / kPiece;
  const u32 lane = threadIdx.x % 32;
  if (first_row >= p.m) return;
  const float alpha = alpha_of(p, tile);
  const bool in_f32 = p.transposed || p.out_type == Dtype::f32;
  u32 first_half[kPiece / 2];  // of a row of 16-bit results
#pragma unroll
  for (u32 piece = 0; piece < kPieces; ++piece) {
    const u32 column = first_column + piece * kPiece;
    if (column >= p.n) break;
    store.reuse();
    put_piece(sums, piece, alpha, buffer);
    __syncwarp();
    if (p.transposed) {
      copy_out_transposed(p, tile, first_row, column, buffer);
      continue;
    }
    float x[kPiece];
    take_row(x, buffer);
    if (p.bias != nullptr) add_bias(x, p, tile, column);
    if (p.c != nullptr) add_c(x, p, tile, first_row + lane, column);
    if (!in_f32 && piece + 1 < kPieces && column + kPiece < p.n) {
      round_piece(x, p.out_type, first_half);
      continue;
    }
    // Each lane has read its row, and writes it.
    if (!in_f32 && piece != 0) store_pairs(first_half, buffer, 0);
    store_piece(x, p.out_type, buffer, in_f32 ? 0 : piece * kPiece);
    const u32 stored = in_f32 ? column : first_column;
    store.store(tile, first_row, stored, column + kPiece - stored);
  }
}

}  // namespace jax_fp4

// The variant of quantize.cu that is being compiled, and its maps: which thread has which groups,
// and where they lie in shared memory.
#pragma once

#include "kernels/parts/groups.h"
#include "kernels/parts/scales.h"

namespace jax_fp4 {
namespace {

constexpr int kBits = JAX_FP4_BITS;
constexpr int kBlock = JAX_FP4_BLOCK;
constexpr int kInputBits = JAX_FP4_INPUT_BITS;
constexpr bool kNVFP4Kernel = kBlock == 16;
constexpr bool kFourOverSix = JAX_FP4_FOUR_OVER_SIX;
// CTAs of a multiprocessor, at least: what registers allow without spills. Rounding in software
// takes many.
constexpr int kResident = !ptx::kHasFp4 ? 1 : kFourOverSix || kBits != 4 ? 2 : 3;
constexpr u32 kAllLanes = 0xFFFF'FFFFu;

constexpr int kRows = kQuantizeTileRows, kCols = kQuantizeTileCols;
constexpr int kBlocksDown = kRows / kBlock;
constexpr int kPieceBytes = kGroup * kBits / 8;  // codes of a group

constexpr int kTilePitch = kCols * kInputBits / 8;
// A column's codes, and a gap after them: 18, 25 or 36 words keep the lanes of a warp, which write
// one piece each at this distance, in different banks.
constexpr int kStagePitch = kRows * kBits / 8 + (kBits == 4 ? 8 : kBits == 6 ? 4 : 16);

struct alignas(16) Shared {
  u8 tile[kRows * kTilePitch];
  u8 codes[kCols * kStagePitch];  // columns in the order of stage_slot
  u8 scales[kBlocksDown][kCols];
  TensorConstants constants[2];  // row copy, column copy
};

// Where the 16-byte chunk of a row of the tile lies in its row. Rows are written in chunks by lanes
// with neighbouring groups and rows, and read in words across columns, at rows r and r + 16 by the
// halves of a warp (block 32); both spread over all banks.
__device__ int swizzled(int row, int chunk) {
  if constexpr (kInputBits == 16)
    return chunk ^ ((row & 1) | ((((row >> 1) ^ (row >> 4)) & 1) << 2));
  return chunk ^ (((row & 1) << 1) | (((row >> 1) ^ (chunk >> 3)) & 1));
}

// The address of 16-byte chunk i of the group that begins at a column.
template <class Byte>
__device__ Byte* chunk_address(Byte* tile, int row, int col, int i) {
  return tile + row * kTilePitch + 16 * swizzled(row, col * kInputBits / 128 + i);
}

// Even columns first: the lanes of a warp write even columns, then odd ones.
__device__ int stage_slot(int column) { return column / 2 + (column % 2) * (kCols / 2); }

constexpr int kRowStep = kBlock == 16 ? 8 : 16;  // between a thread's two rows

struct RowLane {
  int row, col;  // of the first group in the tile; the second is kRowStep rows below
};
__device__ RowLane row_lane() {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (kBlock == 16) return {16 * warp + lane / 4, kGroup * (lane % 4)};
  return {32 * (warp / 2) + lane / 2, 32 * (warp % 2) + kGroup * (lane % 2)};
}

// Where a thread's two groups of the column pass begin: at this row, in this column and the next.
struct ColumnLane {
  int row, col;
};
__device__ ColumnLane column_lane() {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (kBlock == 16) return {16 * warp, 2 * lane};
  return {32 * (warp / 2) + 16 * (lane / 16), 32 * (warp % 2) + 2 * (lane % 16)};
}

}  // namespace
}  // namespace jax_fp4

// The variant of quantize.cu that is being compiled, and its maps: which thread has which groups,
// and where they lie in shared memory.
#pragma once

#include "kernels/parts/groups.h"
#include "kernels/parts/scales.h"
#include "ptx/shared.h"

namespace jax_fp4 {
namespace {

constexpr int kBits = JAX_FP4_BITS;
constexpr int kBlock = JAX_FP4_BLOCK;
constexpr int kInputBits = JAX_FP4_INPUT_BITS;
constexpr bool kNVFP4Kernel = kBlock == 16;
constexpr bool kFourOverSix = JAX_FP4_FOUR_OVER_SIX;
// CTAs of a multiprocessor, at least: what registers allow without spills. Rounding in software
// takes many.
constexpr int kResident = !ptx::kHasFp4                ? 2
                          : kFourOverSix || kBits != 4 ? 4
                          : kInputBits == 32           ? 4
                                                       : 6;
// Both halves in one run of instructions, where these are few.
constexpr int kUnrolledHalves = ptx::kHasFp4 && kBits == 4 && !kFourOverSix ? 2 : 1;
constexpr u32 kAllLanes = 0xFFFF'FFFFu;

constexpr int kRows = kQuantizeTileRows, kCols = kQuantizeTileCols;
constexpr int kHalfRows = kRows / 2;  // a thread takes two groups in each half, and each pass
constexpr int kBlocksDown = kRows / kBlock;
constexpr int kRowBlocks = kCols / kBlock;
constexpr int kPieceBytes = kGroup * kBits / 8;  // codes of a group
// One of the elements of this many bits; what depends on the width alone is then a constant.
constexpr Element kElement = kBits == 4   ? Element::e2m1
                             : kBits == 6 ? Element::e2m3
                                          : Element::e4m3;

// A tile of x, and where it lies.
struct Place {
  u32 matrix, example;
  u32 row, col;          // of the tile
  i64 lead, row0, col0;  // of x's first element, in the logical tensor
};

// What a tile of x gives of one copy, in the copy's own rows and blocks; computed once a CTA.
struct CopyTile {
  u8* values;                    // of the first code
  u8* scales;                    // of the first scale
  u32 pitch;                     // bytes of a row
  u32 bytes;                     // of a row from here on, padding included
  u32 rows, codes, blocks;       // that exist, from here on
  u32 scale_rows, scale_blocks;  // that are stored
  u32 scale_pitch;               // blocks of a row
  bool whole;                    // everything exists
  bool tiled;
  u32 row_in_atom;  // of the first row, in the 128 of a tiled layout
  // Of stochastic copies only.
  u64 seed;
  u64 number;  // of the first group of 16 in the logical copy
  u64 groups;  // of a row of it

  // Where the scale of a block lies, counted from the tile's first row and block.
  __device__ u64 scale_at(u32 row, u32 block) const {
    if (!tiled) return static_cast<u64>(row) * scale_pitch + block;
    const u32 r = row_in_atom + row;  // numerics/scale_layout.h
    return r % 32 * 16 + r / 32 * 4 + block % 4 + block / 4 * kScaleTileBytes;
  }
};

__device__ u32 remaining(i64 size, u32 begin) {
  return size > begin ? static_cast<u32>(size - begin) : 0;
}

__device__ CopyTile copy_tile(const QuantizeParams& p, const CopyParams& copy, bool columns,
                              const Place& place) {
  const u32 rows = columns ? p.cols : p.rows, k = columns ? p.rows : p.cols;
  const u32 row = columns ? place.col : place.row, first = columns ? place.row : place.col;
  const u32 blocks = (k + kBlock - 1) / kBlock, block = first / kBlock;
  CopyTile t{};
  t.pitch = static_cast<u32>(row_bytes(kElement, k));
  const u32 byte = first / 8 * kBits;  // `first` is a multiple of 64
  t.values = copy.values + (static_cast<u64>(place.matrix) * rows + row) * t.pitch + byte;
  t.bytes = remaining(t.pitch, byte);
  t.rows = remaining(rows, row);
  t.codes = remaining(k, first);
  t.blocks = remaining(blocks, block);
  t.tiled = copy.layout == ScaleLayout::tiled;
  t.scale_pitch = blocks;
  t.row_in_atom = row % kScaleTileRows;
  t.scales = copy.scales + place.matrix * scale_bytes(copy.layout, rows, blocks) +
             scale_offset(copy.layout, t.tiled ? row - t.row_in_atom : row, block, blocks);
  t.scale_rows = t.tiled ? remaining(round_up(rows, kScaleTileRows), row) : t.rows;
  t.scale_blocks = t.tiled ? remaining(round_up(blocks, kScaleTileBlocks), block) : t.blocks;
  t.whole = t.rows >= (columns ? kCols : kRows) && t.codes >= (columns ? kRows : kCols);
  if (copy.stochastic) {
    const i64 logical_rows = columns ? p.logical_cols : p.logical_rows;
    const i64 logical_row = (columns ? place.col0 : place.row0) + row;
    const i64 logical_k = (columns ? place.row0 : place.col0) + first;
    t.seed =
        static_cast<u64>(copy.seed[2 * place.example + 1]) << 32 | copy.seed[2 * place.example];
    t.groups = ceil_div(columns ? p.logical_rows : p.logical_cols, kGroup);
    t.number = (place.lead * logical_rows + logical_row) * t.groups + logical_k / kGroup;
  }
  return t;
}

constexpr int kTilePitch = kCols * kInputBits / 8;
// A column's codes, and a gap after them: 18, 25 or 36 words keep the lanes of a warp, which write
// one piece each at this distance, in different banks.
constexpr int kStagePitch = kRows * kBits / 8 + (kBits == 4 ? 8 : kBits == 6 ? 4 : 16);

constexpr int kScaleWords = kBlocksDown / 4;  // of a column: four scales side by side

struct alignas(16) Shared {
  u8 tile[kRows * kTilePitch];
  u8 codes[kCols * kStagePitch];                 // columns in the order of stage_slot
  u32 col_scales[kScaleWords * kCols];           // also
  alignas(4) u8 row_scales[kRows * kRowBlocks];  // rows in the order of the tiled layout
  float multiplier[2][kUE4M3Codes];              // of each scale byte: row copy, column copy
  TensorConstants constants[2];
  CopyTile tiles[2];
};

// Where the 16-byte chunk of a row of the tile lies in its row. Rows are written in chunks by lanes
// with neighbouring groups and rows, and read in words across columns, at rows r and r + 16 by the
// halves of a warp (block 32); both spread over all banks.
__device__ int swizzled(int row, int chunk) {
  if constexpr (kInputBits == 16)
    return chunk ^ ((row & 1) | ((((row >> 1) ^ (row >> 4)) & 1) << 2));
  return chunk ^ (((row & 1) << 1) | (((row >> 1) ^ (chunk >> 3)) & 1));
}

// Even columns first: the lanes of a warp write even columns, then odd ones.
__device__ int stage_slot(int column) { return column / 2 + (column % 2) * (kCols / 2); }

__device__ int column_of(int slot) { return slot % (kCols / 2) * 2 + slot / (kCols / 2); }

constexpr int kRowStep = kBlock == 16 ? 8 : 16;  // between a thread's two rows

struct RowLane {
  int row, col;  // of the first group in the tile's upper half; the second is kRowStep rows below
};
__device__ RowLane row_lane() {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (kBlock == 16) return {16 * warp + lane / 4, kGroup * (lane % 4)};
  return {32 * (warp / 2) + lane / 2, 32 * (warp % 2) + kGroup * (lane % 2)};
}

// Where a thread's two groups of the column pass begin in the upper half: at this row, in this
// column and the next.
struct ColumnLane {
  int row, col;
};
__device__ ColumnLane column_lane() {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (kBlock == 16) return {16 * warp, 2 * lane};
  return {32 * (warp / 2) + 16 * (lane / 16), 32 * (warp % 2) + 2 * (lane % 16)};
}

// The place in the tile of 16-byte chunk i of a thread's group g of the row pass. From one of its
// rows to the other, swizzled() changes nothing, or (16 bits, rows 16 apart) the upper bit of a
// chunk; from half to half, nothing.
__device__ u32 row_chunk(const RowLane& at, int g, int i) {
  const int chunk = swizzled(at.row, at.col * kInputBits / 128 + i);
  const int flip = kInputBits == 16 && kRowStep == 16 && g == 1 ? 4 : 0;
  return (at.row * kTilePitch + 16 * (chunk ^ flip)) + g * kRowStep * kTilePitch;
}

// The place of a thread's two columns in its row i of the column pass. at.row is a multiple of 16,
// of which swizzled() sees the lowest bit only.
__device__ u32 column_word(const ColumnLane& at, int i) {
  const int byte = at.col * kInputBits / 8;
  const int first = at.row * kTilePitch + 16 * swizzled(at.row, byte / 16) + byte % 16;
  return (first ^ (16 * swizzled(i, 0))) + i * kTilePitch;
}

}  // namespace
}  // namespace jax_fp4

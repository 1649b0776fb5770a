// What the host passes to the kernels that bring operands of a product into the layout it reads.
#pragma once

#include "kernels/params.h"
#include "numerics/scale_layout.h"

namespace jax_fp4 {

inline constexpr u32 kRelayoutThreads = 256;

// Linear scales to tiled ones, padding bytes zero. block: kRelayoutThreads; grid: any x.
struct TileScalesParams {
  const u8* linear;  // [matrices, rows, blocks]
  u8* tiled;         // [matrices, scale_bytes(tiled, rows, blocks)], aligned to 4 bytes
  u32 matrices, rows, blocks;
};

// Rows to rows of another pitch, zeros between them. block: kRelayoutThreads; grid: any x.
struct PadRowsParams {
  const u8* from;  // [rows, from_bytes], aligned to 16 bytes, as are all rows
  u8* to;          // [rows, to_bytes], likewise
  u64 rows;
  u32 from_bytes, to_bytes;  // multiples of 16, from_bytes <= to_bytes
};

// `items` of one thread each; threads loop where there are more.
JAX_FP4_FN Grid relayout_grid(u64 items) {
  const u64 ctas = (items + kRelayoutThreads - 1) / kRelayoutThreads;
  return {static_cast<u32>(ctas < 65536 ? ctas : 65536), 1, 1};
}
JAX_FP4_FN u64 tile_scales_items(const TileScalesParams& p) {  // four scales each
  return static_cast<u64>(p.matrices) *
         static_cast<u64>(scale_bytes(ScaleLayout::tiled, p.rows, p.blocks) / kScaleTileBlocks);
}
JAX_FP4_FN u64 pad_rows_items(const PadRowsParams& p) { return p.rows * (p.to_bytes / 16); }

}  // namespace jax_fp4

// Where the scale of (row, block) lies.
//
// linear: [rows, blocks], row-major; everything public or stored.
// tiled:  [ceil(rows/128), ceil(blocks/4), 32, 4, 4]
//         = (row tile, block tile, row % 32, row / 32 % 4, block % 4), the 512-byte atom that
//         tcgen05.cp and the block-scaled MMA read (PTX ISA, "scale factor layout"; the cuBLAS
//         documentation has the same index as pseudo-code). Bytes of rows and blocks that do not
//         exist are 0.
#pragma once

#include "base.h"

namespace jax_fp4 {

enum class ScaleLayout : u8 { linear, tiled };

inline constexpr i64 kScaleTileRows = 128;
inline constexpr i64 kScaleTileBlocks = 4;
inline constexpr i64 kScaleTileBytes = kScaleTileRows * kScaleTileBlocks;

JAX_FP4_FN i64 scale_bytes(ScaleLayout layout, i64 rows, i64 blocks) {
  return layout == ScaleLayout::linear ? rows * blocks
                                       : ceil_div(rows, kScaleTileRows) *
                                             ceil_div(blocks, kScaleTileBlocks) * kScaleTileBytes;
}

JAX_FP4_FN i64 scale_offset(ScaleLayout layout, i64 row, i64 block, i64 blocks) {
  if (layout == ScaleLayout::linear) return row * blocks + block;
  const i64 tile =
      row / kScaleTileRows * ceil_div(blocks, kScaleTileBlocks) + block / kScaleTileBlocks;
  return tile * kScaleTileBytes + row % 32 * 16 + row / 32 % 4 * 4 + block % 4;
}

}  // namespace jax_fp4

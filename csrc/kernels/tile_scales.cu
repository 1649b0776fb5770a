// Linear scales [rows, blocks] to the tiled layout that block-scaled products read.
//
// A thread writes one word: the scales of four neighbouring blocks of a row, which lie together in
// both layouts. Neighbouring threads write neighbouring words. Rows and blocks that do not exist get
// zeros. Scales are a sixteenth of the codes or less, so loads of single bytes do.
#include "kernels/relayout_params.h"

namespace jax_fp4 {

extern "C" __global__ void __launch_bounds__(kRelayoutThreads)
    JAX_FP4_KERNEL(const __grid_constant__ TileScalesParams p) {
  constexpr u32 kTileWords = kScaleTileBytes / kScaleTileBlocks;
  const u32 groups = (p.blocks + 3) / 4;
  const u64 tiles = static_cast<u64>((p.rows + 127) / 128) * groups;
  const u64 items = tile_scales_items(p);
  for (u64 item = static_cast<u64>(blockIdx.x) * kRelayoutThreads + threadIdx.x; item < items;
       item += static_cast<u64>(gridDim.x) * kRelayoutThreads) {
    const u64 tile = item / kTileWords;
    const u64 matrix = tile / tiles;
    const u32 in_matrix = static_cast<u32>(tile - matrix * tiles);
    const u32 word = static_cast<u32>(item % kTileWords);
    const u32 row = in_matrix / groups * 128 + word % 4 * 32 + word / 4;
    const u32 block = in_matrix % groups * 4;
    u32 scales = 0;
    if (row < p.rows) {
      const u8* from = p.linear + (matrix * p.rows + row) * p.blocks + block;
#pragma unroll
      for (u32 i = 0; i < 4; ++i)
        if (block + i < p.blocks) scales |= static_cast<u32>(from[i]) << 8 * i;
    }
    reinterpret_cast<u32*>(p.tiled)[item] = scales;
  }
}

}  // namespace jax_fp4

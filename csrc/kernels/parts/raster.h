// In which order tiles of D are computed, and over which K.
//
// Groups are read from device memory, where the host cannot look at them: whatever is there, no access
// lies outside an operand.
#pragma once

#include "kernels/gemm_params.h"

namespace jax_fp4 {

struct Tile {
  u32 m, n;               // in tiles
  u32 batch;              // or group
  u32 matrix;             // of those that are written
  u32 first_step, steps;  // of K; no steps: there is no such tile
};

// Where a group of K starts.
template <u32 kStepK>
__device__ inline u32 group_step(const GemmParams& p, u32 group) {
  const u32 step = p.k_groups[group] / kGroupUnit * (kGroupUnit / kStepK);
  return step < p.steps ? step : p.steps;
}

// Tile number `index`. Matrices follow each other; in each, strips of `strip` tile rows are walked
// column by column, so that the tiles in flight at a time form a compact patch of D and share both
// operands in L2.
template <u32 kStepK>
__device__ inline Tile tile_at(const GemmParams& p, u32 index) {
  Tile tile;
  const GemmRaster& r = p.raster;
  tile.matrix = r.matrix_tiles.divide(index);
  const u32 in_matrix = index - tile.matrix * r.matrix_tiles.value;
  const u32 strip = r.strip_tiles.divide(in_matrix);
  const u32 in_strip = in_matrix - strip * r.strip_tiles.value;
  const u32 first = strip * r.strip.value;
  const Divisor& rows = r.tiles_m - first < r.strip.value ? r.last_strip : r.strip;
  tile.n = rows.divide(in_strip);
  tile.m = first + in_strip - tile.n * rows.value;

  tile.batch = r.splits.divide(tile.matrix);
  tile.first_step = (tile.matrix - tile.batch * r.splits.value) * p.split_steps;
  const u32 left = p.steps - tile.first_step;
  tile.steps = left < p.split_steps ? left : p.split_steps;
  if (p.row_groups != nullptr) {
    tile.batch = p.row_groups[tile.m];
    if (tile.batch >= p.groups) tile.steps = 0;
  } else if (p.k_groups != nullptr) {
    tile.first_step = group_step<kStepK>(p, tile.batch);
    const u32 end = group_step<kStepK>(p, tile.batch + 1);
    tile.steps = end > tile.first_step ? end - tile.first_step : 0;
    // The sum over nothing: a step behind the end of K, where there are zeros.
    if (tile.steps == 0) tile.first_step = p.steps, tile.steps = 1;
  }
  return tile;
}

}  // namespace jax_fp4

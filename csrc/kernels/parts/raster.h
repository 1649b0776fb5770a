// In which order tiles of D are computed, and over which K.
#pragma once

#include "kernels/gemm_params.h"

namespace jax_fp4 {

struct Tile {
  u32 m, n;               // in tiles
  u32 batch;              // or group
  u32 matrix;             // of those that are written
  u32 first_step, steps;  // of K; no steps: there is no such tile
};

// Tile number `index`. Matrices follow each other; in each, strips of `strip` tile rows are walked
// column by column, so that the tiles in flight at a time form a compact patch of D and share both
// operands in L2.
template <u32 kStepK>
__device__ inline Tile tile_at(const GemmParams& p, u32 index) {
  Tile tile;
  const u32 matrix_tiles = p.tiles_m * p.tiles_n;
  tile.matrix = index / matrix_tiles;
  const u32 in_matrix = index - tile.matrix * matrix_tiles;
  const u32 strip_tiles = p.strip * p.tiles_n;
  const u32 strip = in_matrix / strip_tiles;
  const u32 in_strip = in_matrix - strip * strip_tiles;
  const u32 first = strip * p.strip;
  const u32 rows = p.tiles_m - first < p.strip ? p.tiles_m - first : p.strip;
  tile.m = first + in_strip % rows;
  tile.n = in_strip / rows;

  tile.batch = tile.matrix / p.splits;
  tile.first_step = (tile.matrix - tile.batch * p.splits) * p.split_steps;
  const u32 left = p.steps - tile.first_step;
  tile.steps = left < p.split_steps ? left : p.split_steps;
  if (p.row_groups != nullptr) {
    tile.batch = p.row_groups[tile.m];
    if (tile.batch >= kNoGroup) tile.steps = 0;
  } else if (p.k_groups != nullptr) {
    tile.first_step = p.k_groups[tile.batch] / kStepK;
    tile.steps = p.k_groups[tile.batch + 1] / kStepK - tile.first_step;
    // The sum over nothing: a step behind the end of K, where there are zeros.
    if (tile.steps == 0) tile.first_step = p.steps, tile.steps = 1;
  }
  return tile;
}

}  // namespace jax_fp4

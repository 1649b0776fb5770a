// amax, quantize and dequantize on the CPU.
//
// Everything here works on one *example*: a tensor x[leads, rows, cols], row-major. A lead is one
// tensor with an amax of its own (a leading dimension of jax_fp4.quantize). An example is one
// element of a vmap: its block numbers start again at 0. Handlers call these functions once per
// example.
#pragma once

#include <cstdint>

#include "cpu/cpu.h"
#include "numerics/block_scale.h"
#include "numerics/hadamard.h"
#include "numerics/scale_layout.h"

namespace jax_fp4::cpu {

// x is part of a logical tensor (a shard): its element (l, r, c) is (lead + l, row + r, col + c)
// there. Random bits and fingerprints depend on logical indices only.
struct Placement {
  std::int64_t lead = 0, row = 0, col = 0;
  std::int64_t logical_rows = 0, logical_cols = 0;
};

struct Input {
  const void* data;  // [leads, rows, cols]
  Dtype dtype;
  std::int64_t leads, rows, cols;
  Placement placement;
};

enum class Axis : std::uint8_t {
  cols,  // blocks run along the last axis; the copy is [rows, cols] packed along cols
  rows,  // blocks run along the rows; the copy is the transpose, [cols, rows] packed along rows
};

// What one pass over x reports. All amax values are bits of an f32 >= 0, taken over finite values.
struct AmaxRequest {
  bool rotate = false;  // also the amax of the values after the Hadamard transform along `axis`
  Axis axis = Axis::cols;
  std::uint16_t signs = 0;
  std::uint32_t* amax = nullptr;          // [leads]
  std::uint32_t* amax_rotated = nullptr;  // [leads]; only where rotate
  // Sum mod 2^32 over all elements of bits * (2 * i + 1), i the logical index mod 2^32, bits the 16
  // or 32 bits of the element: a data-derived seed, or nullptr. A sum, so that shards can add
  // theirs.
  std::uint32_t* fingerprint = nullptr;  // [1]
};

void amax(const Input& x, const AmaxRequest& request, Parallel& parallel);

// One quantized copy of x: how it is made and where it goes.
struct Copy {
  Axis axis = Axis::cols;
  Format format = kNVFP4;
  ScaleRule rule = ScaleRule::rceil;
  bool tiles = false;  // one scale per 16x16 tile (block x block), stored once per row of the tile
  bool stochastic = false;
  bool four_over_six = false;  // NVFP4, nearest only
  bool hadamard = false;       // rotate groups of 16 along `axis` first; not with tiles
  std::uint16_t signs = kDefaultHadamardSigns;
  std::uint32_t stream = 0;
  ScaleLayout layout = ScaleLayout::linear;

  const std::uint32_t* amax =
      nullptr;  // [leads] amax bits of the logical (rotated, if hadamard) tensor
  std::uint64_t seed = 0;

  std::uint8_t* values =
      nullptr;  // [leads, R, row_bytes(K)]: R, K = rows, cols or cols, rows; fully written
  std::uint8_t* scales =
      nullptr;                    // [leads, scale_bytes(layout, R, ceil(K / block))]; fully written
  float* global_scale = nullptr;  // [leads]
};

// Makes one copy or both (row != nullptr, col != nullptr) from one pass over x.
void quantize(const Input& x, const Copy* row, const Copy* col, Parallel& parallel);

struct Quantized {
  Format format;
  ScaleLayout layout;
  std::int64_t leads, rows, k;  // k: logical length of a row
  const std::uint8_t* values;
  const std::uint8_t* scales;
  const float* global_scale;  // [leads]
};

// out[leads, rows, k] = cvt(fl(fl(code * scale) * global_scale)), each step rounded once.
void dequantize(const Quantized& q, Dtype dtype, void* out, Parallel& parallel);

}  // namespace jax_fp4::cpu

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
// there. Random bits and fingerprints depend on logical indices only. The caller sees to it that
// the offset along a quantized axis is a multiple of 16, and that tiles of a shard are tiles of the
// logical tensor.
struct Placement {
  std::int64_t lead = 0, row = 0, col = 0;
  std::int64_t logical_rows = 0, logical_cols = 0;  // 0: those of x
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
  std::uint32_t* amax = nullptr;          // [leads], or nullptr
  std::uint32_t* amax_rotated = nullptr;  // [leads]; only where rotate
  // Sum mod 2^32 over all elements of bits * (2 * i + 1), i the logical index mod 2^32, bits the 16
  // or 32 bits of the element: a data-derived seed, or nullptr. A sum, so that shards can add
  // theirs.
  std::uint32_t* fingerprint = nullptr;  // [1]
};

void amax(const Input& x, const AmaxRequest& request, Parallel& parallel);

// One quantized copy of x: how it is made and where it goes. R, K are rows, cols (Axis::cols) or
// cols, rows (Axis::rows): quantizing along the rows equals quantizing the transpose along cols.
//
// * With `hadamard`, K is padded with zeros to a multiple of 16 before the rotation, and all
//   rotated values are kept: dropping some would change products. Neither row_bytes nor the number
//   of blocks differs, but codes K .. round_up(K, 16) - 1 are then part of the row.
// * A block (or tile) that holds NaN or Inf, after the rotation if any, gets the NaN scale and zero
//   codes.
// * Random bits of a group of 16: rounding_bits(seed, group, stream) with
//   group = (lead * R + row) * ceil(K / 16) + k / 16, all of the logical copy.
// * Codes and tiled scales that stand for no element are 0.
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

  // [leads] amax bits of the logical (rotated, if hadamard) tensor; may be nullptr for MX formats.
  const std::uint32_t* amax = nullptr;
  std::uint64_t seed = 0;

  // Outputs, fully written.
  std::uint8_t* values = nullptr;  // [leads, R, row_bytes(K)]
  std::uint8_t* scales = nullptr;  // [leads, scale_bytes(layout, R, ceil(K / block))]
  float* global_scale = nullptr;   // [leads]
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

// out[leads, rows, k] = cvt(fl(fl(code * scale) * global_scale)), each step rounded once. A NaN
// becomes the positive quiet NaN, since its bits would depend on the processor otherwise.
void dequantize(const Quantized& q, Dtype dtype, void* out, Parallel& parallel);

}  // namespace jax_fp4::cpu

// What the host passes to the kernels of this folder: one structure a kernel, by value.
//
// Included by kernels (NVRTC) and by the host code that plans launches (g++), so it holds plain data
// only. Names as in python/jax_fp4/copies.py: x[V, L, R, C] is V examples of a vmap, L leading
// dimensions with an amax each, and R x C matrices. Every array is contiguous and row-major.
#pragma once

#include "numerics/block_scale.h"
#include "numerics/scale_layout.h"

namespace jax_fp4 {

enum class InputType : u8 { f32, bf16, f16 };

// ---- quantize.cu --------------------------------------------------------------------------------

// A CTA takes a tile of kQuantizeTileRows x kQuantizeTileCols of x.
inline constexpr int kQuantizeTileRows = 128;
inline constexpr int kQuantizeTileCols = 64;
inline constexpr int kQuantizeThreads = 128;

// One quantized copy; csrc/cpu/quantize.h says what each option means. The row copy has its blocks
// along the columns of x; the column copy is the transpose, with its blocks along the rows of x.
struct CopyParams {
  u8* values;  // [V, L, R, row_bytes(K)], aligned to 16 bytes; nullptr: this copy is not made
  u8* scales;  // [V, L, scale_bytes(layout, R, ceil(K / block))], aligned to 4 bytes
  float* global_scale;  // [V, L]
  const u32* amax;      // [V, L] f32 bits of the logical tensor; unused by MX formats
  const u32* seed;      // [V, 2], low word first; unused unless stochastic
  u32 stream;
  u16 signs;
  u8 stochastic, hadamard, tiles, four_over_six;
  ScaleRule rule;
  ScaleLayout layout;
};

// grid: quantize_grid(); block: kQuantizeThreads; no dynamic shared memory.
struct QuantizeParams {
  const void* x;      // [V, L, rows, cols]
  const u32* origin;  // [V, 3]: lead, row, col of x's first element in the logical tensor
  i64 logical_rows, logical_cols;
  u32 leads;     // L
  u32 matrices;  // V * L
  u32 rows, cols;
  // The variant's code width and scale kind fit; both copies have this format.
  Format format;
  InputType input;
  CopyParams row, col;
};

struct Grid {
  u32 x, y, z;
};

inline constexpr u32 kMaxGridYZ = 65535;  // CUDA C++ Programming Guide, compute capabilities

// Covers all padding too: rows are padded to 128 rows and codes at most. At least one CTA a matrix,
// which writes global_scale. Kernels loop where y or z would be too large.
JAX_FP4_FN Grid quantize_grid(const QuantizeParams& p) {
  const i64 x = 2 * ceil_div(p.cols, 2 * kQuantizeTileCols);
  const i64 y = ceil_div(p.rows, kQuantizeTileRows);
  return {static_cast<u32>(x == 0 ? 1 : x),
          static_cast<u32>(y == 0           ? 1
                           : y < kMaxGridYZ ? y
                                            : kMaxGridYZ),
          p.matrices < kMaxGridYZ ? p.matrices : kMaxGridYZ};
}

// ---- amax.cu ------------------------------------------------------------------------------------

// The outputs must be zero before the launch: CTAs add their part by atomic max and add. The
// variant says whether there is a rotation, and along what.
struct AmaxParams {
  const void* x;      // [V, L, rows, cols]
  const u32* origin;  // [V, 3]
  i64 logical_rows, logical_cols;
  u32 leads, matrices, rows, cols;
  InputType input;
  u16 signs;
  u32* amax;         // [V, L] f32 bits, over finite values
  u32* rotated;      // [V, L] the same after the Hadamard transform; nullptr: not wanted
  u32* fingerprint;  // [V], csrc/cpu/quantize.h; nullptr: not wanted
};

inline constexpr int kAmaxTileRows = 128;
inline constexpr int kAmaxTileCols = 64;
inline constexpr int kAmaxThreads = 256;

// `resident` CTAs keep the device busy; each takes several tiles, so that atomics are few.
JAX_FP4_FN Grid amax_grid(const AmaxParams& p, u32 resident) {
  const i64 x = ceil_div(p.cols, kAmaxTileCols);
  const i64 rows = ceil_div(p.rows, kAmaxTileRows);
  const i64 z = p.matrices < kMaxGridYZ ? p.matrices : kMaxGridYZ;
  i64 y = x * z == 0 ? 1 : ceil_div(resident, x * z);
  y = y < rows ? y : rows;
  y = y < kMaxGridYZ ? y : kMaxGridYZ;
  return {static_cast<u32>(x == 0 ? 1 : x), static_cast<u32>(y == 0 ? 1 : y), static_cast<u32>(z)};
}

// ---- dequantize.cu ------------------------------------------------------------------------------

struct DequantizeParams {
  const u8* values;           // [matrices, rows, row_bytes(k)]
  const u8* scales;           // [matrices, scale_bytes(layout, rows, ceil(k / block))]
  const float* global_scale;  // [matrices]
  void* out;                  // [matrices, rows, k]
  u32 matrices, rows, k;
  Format format;
  ScaleLayout layout;
  InputType output;
};

// A CTA takes kDequantizeTileRows rows of kDequantizeTileCodes codes, 16 codes a thread.
inline constexpr int kDequantizeTileRows = 16;
inline constexpr int kDequantizeTileCodes = 256;
inline constexpr int kDequantizeThreads = 256;

JAX_FP4_FN Grid dequantize_grid(const DequantizeParams& p) {
  const i64 y = ceil_div(p.rows, kDequantizeTileRows);
  return {static_cast<u32>(ceil_div(p.k, kDequantizeTileCodes)),
          static_cast<u32>(y < kMaxGridYZ ? y : kMaxGridYZ),
          p.matrices < kMaxGridYZ ? p.matrices : kMaxGridYZ};
}

}  // namespace jax_fp4

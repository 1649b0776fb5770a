// What the host passes to the GEMM kernels, by value.
//
//   D[b, m, n] = cvt(fl(fl(alpha_b * sum) + bias[n]) + C[b, m, n])    steps without operand left out
//   sum        = sum over k of A[b, m, k] * B[b, n, k], codes times block scales
//   alpha_b    = fl(global_scale_a * global_scale_b)
//
// Included by kernels (NVRTC) and by the host code that plans launches (g++), so it holds plain data
// only. Operands that one batch entry shares with all others have a batch of 1.
#pragma once

#include "kernels/divisor.h"
#include "numerics/formats.h"
#include "numerics/scale_layout.h"

namespace jax_fp4 {

enum class Dtype : u8 { f32, bf16, f16 };

JAX_FP4_FN u32 dtype_bytes(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// A CUtensorMap, which the driver writes.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// ---- gemm_sm100.cu and gemm_sm120.cu --------------------------------------------------------------

// Threads of a CTA of gemm_sm100.cu: a producer warp, an MMA warp, four epilogue warps.
inline constexpr u32 kGemmThreads = 192;
// The span of the 128-byte swizzle. In gemm_sm100.cu a stage holds this much of every row of A and B.
inline constexpr u32 kGemmRowBytes = 128;
// Rows of A and D in a CTA.
inline constexpr u32 kGemmRows = 128;
// Warps finish D in buffers of 32 rows, in columns of D that fill a swizzle span.
inline constexpr u32 kGemmStoreRows = 32;
inline constexpr u32 kGemmBufferBytes = kGemmStoreRows * kGemmRowBytes;
// In gemm_sm100.cu each of the four epilogue warps has two.
inline constexpr u32 kGemmBuffers = 8;
// Of a CTA on sm_100 and sm_103: 227 KiB, less 1 KiB that CUDA keeps (CUDA C++ Programming Guide).
inline constexpr u32 kGemmSharedLimit = 232448 - 1024;
// On sm_120 and sm_121: 99 KiB.
inline constexpr u32 kGemmSharedLimitSm120 = 101376;
inline constexpr u32 kGemmBarrierBytes = 512;

// MMAs that a split of K is a multiple of, and that a stage of gemm_sm100.cu has.
inline constexpr u32 kGemmStageSteps = 4;
// Groups of rows and of K start at multiples of this, so that no tile and no block holds two of them.
inline constexpr u32 kGroupUnit = 128;

enum class GemmKind : u8 { nvfp4, mxfp4, mxf8f6f4 };

// What multiplies: tcgen05 is gemm_sm100.cu, mma_sync is gemm_sm120.cu.
enum class GemmCore : u8 { tcgen05, mma_sync };

// What distinguishes the kernels that the two files are compiled to. A tile of D is tile_m() x tile_n.
struct GemmVariant {
  GemmKind kind;
  u32 ctas;  // that share a tile, 1 or 2 (mma_sync: 1)
  u32 tile_n;
  GemmCore core = GemmCore::tcgen05;

  JAX_FP4_FN u32 tile_m() const { return kGemmRows * ctas; }
  // Rows of B that a CTA loads.
  JAX_FP4_FN u32 rows_b() const { return tile_n / ctas; }
  // Of every row of A and B in a stage, a whole span of the swizzle: 128-byte swizzle, or 64-byte. The
  // copies that expand codes know the former only.
  JAX_FP4_FN u32 row_bytes() const {
    return core == GemmCore::tcgen05 || kind == GemmKind::mxf8f6f4 ? kGemmRowBytes
                                                                   : kGemmRowBytes / 2;
  }
  // Elements of K in a stage; expanded codes take a byte each.
  JAX_FP4_FN u32 stage_k() const {
    return kind == GemmKind::mxf8f6f4 ? row_bytes() : 2 * row_bytes();
  }
  // And in an MMA.
  JAX_FP4_FN u32 step_k() const { return kind == GemmKind::mxf8f6f4 ? 32 : 64; }
  // MMAs along K in a stage.
  JAX_FP4_FN u32 stage_steps() const { return stage_k() / step_k(); }
  // Elements that share a scale.
  JAX_FP4_FN u32 block() const { return kind == GemmKind::nvfp4 ? 16 : 32; }
  // Tiles of 128 x 4 scales in a stage: along K, and along the columns of a tile.
  JAX_FP4_FN u32 scale_groups() const { return stage_k() / block() / 4; }
  JAX_FP4_FN u32 scale_tiles_b() const { return (tile_n + 127) / 128; }
  JAX_FP4_FN u32 scale_bytes() const {
    return scale_groups() * (1 + scale_tiles_b()) * static_cast<u32>(kScaleTileBytes);
  }
  // Stages start at multiples of 1024 bytes, where a swizzle pattern repeats.
  JAX_FP4_FN u32 stage_bytes() const {
    return static_cast<u32>(round_up((kGemmRows + rows_b()) * row_bytes() + scale_bytes(), 1024));
  }
  // Of gemm_sm120.cu: columns of D, and of 32 rows, that a warp computes; warps that multiply.
  JAX_FP4_FN u32 warp_n() const { return tile_n < 64 ? tile_n : 64; }
  JAX_FP4_FN u32 warps() const { return kGemmRows / kGemmStoreRows * (tile_n / warp_n()); }
  // Of a CTA.
  JAX_FP4_FN u32 threads() const {
    return core == GemmCore::tcgen05 ? kGemmThreads : 32 * (1 + warps());
  }
  JAX_FP4_FN u32 buffers() const { return core == GemmCore::tcgen05 ? kGemmBuffers : warps(); }
  JAX_FP4_FN u32 shared_limit() const {
    return core == GemmCore::tcgen05 ? kGemmSharedLimit : kGemmSharedLimitSm120;
  }
  // As many as there is room for; more than 8 hide no more latency.
  JAX_FP4_FN u32 stages() const {
    const u32 room = shared_limit() - buffers() * kGemmBufferBytes - kGemmBarrierBytes;
    const u32 most = room / stage_bytes();
    return most < 8 ? most : 8;
  }
  // Dynamic shared memory of a CTA.
  JAX_FP4_FN u32 shared_bytes() const {
    return stages() * stage_bytes() + buffers() * kGemmBufferBytes + kGemmBarrierBytes;
  }
};

// In which order tiles of D are computed; see tile_at() of parts/raster.h.
struct GemmRaster {
  u32 tiles_m;
  Divisor matrix_tiles;  // tiles of a matrix
  Divisor strip_tiles;   // tiles of a strip
  Divisor strip;         // tile rows that are walked together
  Divisor last_strip;    // those of the last strip
  Divisor splits;        // of K: each has a sum of its own
};

// For the host: at least one tile, strip at most tiles_m.
JAX_FP4_FN GemmRaster gemm_raster(u32 tiles_m, u32 tiles_n, u32 strip, u32 splits) {
  const u32 last = tiles_m - (tiles_m - 1) / strip * strip;
  return {tiles_m,
          divisor(tiles_m * tiles_n),
          divisor(strip * tiles_n),
          divisor(strip),
          divisor(last),
          divisor(splits)};
}

// Tensor maps, innermost dimension first, all zero-filled outside:
//
//   a, b      [row_bytes(k), rows, batch] uint8, or in elements [k padded, rows, batch] where codes are
//             expanded (kind mxf8f6f4 with 4-bit codes: 16U4_ALIGN16B, 6-bit: 16U6_ALIGN16B);
//             box: row_bytes() of shared memory x kGemmRows or rows_b() x 1; swizzle of as many bytes
//   scales    [256, ceil(blocks / 4), ceil(rows / 128), batch] uint16 over the tiled layout;
//             box: 256 x scale_groups() x (A: 1, B: scale_tiles_b()) x 1; no swizzle
//   d         [n, m, batch * splits] of D's type; box: 128 bytes x kGemmStoreRows x 1; swizzle 128B
//
// grid: ctas * tiles_m * tiles_n * batch * splits in x; cluster: ctas; block: threads(); dynamic shared
// memory: shared_bytes().
struct GemmParams {
  TensorMap a, b, scales_a, scales_b;
  TensorMap d;                  // not used unless d_by_map
  const float* global_scale_a;  // [batch of A]; nullptr: alpha is 1, also for B
  const float* global_scale_b;  // [batch of B]
  const void* bias;             // [bias batch, n], or nullptr
  const void* c;                // as D, or nullptr
  void* out;                    // D [batch, m, n], or its parts [batch, splits, m, n]
  // Groups of rows, such as the tokens of an expert, instead of a batch: B, bias and global scales are
  // those of the group of a tile of rows, [tiles_m] in device memory; `groups` or more: rows of no
  // group, whose D is not written. Or nullptr.
  const u32* row_groups;
  // Groups of K: entry g of the batch sums over K from k_groups[g] to k_groups[g + 1], rounded down to
  // multiples of kGroupUnit, as far as there is K; [batch + 1] in device memory. `steps` is then that of
  // all K, and splits 1. Or nullptr.
  const u32* k_groups;
  u32 groups;  // of rows; not used without row_groups
  u32 m, n;
  u32 steps;        // of K, at least 1: MMAs of step_k() elements
  u32 split_steps;  // of every split but the last, which has at least 1; of kGemmStageSteps
  GemmRaster raster;
  // What the next entry of the batch adds to an operand's index: 0 or 1.
  u32 batch_a, batch_b;              // of codes and block scales
  u32 batch_scale_a, batch_scale_b;  // of global scales
  u32 batch_bias;
  Dtype out_type, c_type, bias_type;
  Element element_a, element_b;  // of kind mxf8f6f4
  u8 d_by_map;                   // D is stored through its map: its rows are a multiple of 16 bytes
  u8 c_by_vector;                // rows of C are a multiple of 16 bytes, and so is its address
  // D and C are [batch, n, m], bias is [bias batch, m]: A and B have changed places, so that a few rows of
  // activations are the columns of a narrow tile. d_by_map must be 0.
  u8 transposed;
};

// ---- gemm_bf16.cu -------------------------------------------------------------------------------

// What distinguishes the kernels that gemm_bf16.cu is compiled to, for chips without block-scaled MMAs.
// kind mxf8f6f4 also takes operands of two different formats with blocks of 32.
struct GemmBf16Variant {
  GemmKind kind;
  u32 tile_n;

  JAX_FP4_FN u32 tile_m() const { return kGemmRows; }
  // Elements of K in a stage: of bf16 they fill a span of the 128-byte swizzle.
  JAX_FP4_FN u32 stage_k() const { return 64; }
  // The unit of GemmParams::steps and split_steps, as in GemmVariant.
  JAX_FP4_FN u32 step_k() const { return kind == GemmKind::mxf8f6f4 ? 32 : 64; }
  JAX_FP4_FN u32 block() const { return kind == GemmKind::nvfp4 ? 16 : 32; }
  JAX_FP4_FN u32 warp_n() const { return tile_n < 64 ? tile_n : 64; }
  JAX_FP4_FN u32 warps() const { return kGemmRows / kGemmStoreRows * (tile_n / warp_n()); }
  JAX_FP4_FN u32 threads() const { return 32 * warps(); }
  // Of a row in a stage before it is decoded: as many as the widest codes take.
  JAX_FP4_FN u32 row_bytes() const { return kind == GemmKind::mxf8f6f4 ? 64 : 32; }
  // Codes of A and B, and a tile of scales of each.
  JAX_FP4_FN u32 stage_bytes() const {
    return (kGemmRows + tile_n) * row_bytes() + 2 * static_cast<u32>(kScaleTileBytes);
  }
  JAX_FP4_FN u32 decoded_bytes() const { return (kGemmRows + tile_n) * kGemmRowBytes; }
  // As many stages as fit beside two that are decoded, also on chips with 99 KiB (8.6, 8.9).
  JAX_FP4_FN u32 stages() const {
    const u32 most = (kGemmSharedLimitSm120 - 2 * decoded_bytes()) / stage_bytes();
    return most < 4 ? most : 4;
  }
  JAX_FP4_FN u32 shared_bytes() const { return stages() * stage_bytes() + 2 * decoded_bytes(); }
};

// grid: tiles_m * tiles_n * batch * splits in x; block: threads(); dynamic shared memory: shared_bytes().
struct GemmBf16Params {
  GemmParams gemm;  // tensor maps are not used, d_by_map is 0
  // [batch, rows, pitch], of row_bytes() each; starts at a multiple of 16.
  const u8* values_a;
  const u8* values_b;
  // Tiled layout, [batch, ceil(rows / 128), scale_groups, 512].
  const u8* scales_a;
  const u8* scales_b;
  u32 pitch_a, pitch_b;  // bytes of a row of values
  u32 scale_groups;      // ceil(blocks / 4)
};

// ---- gemm_reduce.cu -----------------------------------------------------------------------------

inline constexpr u32 kGemmReduceThreads = 256;

// Adds the parts of a sum that was split along K. D's rows and columns, whether transposed or not.
// grid: any x, any y, over elements and batch.
struct GemmReduceParams {
  const float* parts;  // [batch, splits, rows * columns]; not read where splits is 0
  const float* global_scale_a;
  const float* global_scale_b;
  const void* bias;  // [bias batch, columns], or nullptr
  const void* c;     // as D, or nullptr
  void* out;         // D [batch, rows * columns]
  i64 elements;      // rows * columns
  u32 batch;
  u32 columns;
  u32 splits;
  u32 batch_scale_a, batch_scale_b, batch_bias;  // as in GemmParams
  Dtype out_type, c_type, bias_type;
};

}  // namespace jax_fp4

// Block-scaled GEMM for GPUs without block-scaled MMAs (sm_80 to sm_90): D = cvt(fl(fl(alpha sum) + bias) + C),
// each code times its scale decoded to bf16 (decode.h says when that is exact), products by mma.sync of bf16
// with f32 accumulators. Operands and formulas: gemm_params.h.
//
//   operand    in global memory                 in a stage of shared memory        decoded
//   A          [batch, m, pitch_a] codes        128 rows of 64 codes               128 rows x 128 bytes
//   B          [batch, n, pitch_b] codes        kTileN rows of 64 codes            kTileN rows x 128 bytes
//   scales     128x4 tiles of 512 bytes         one tile of A, one of B            -
//
// Decoded rows have the 128-byte swizzle. A CTA computes a tile of D of 128 x kTileN, a warp 32 rows and
// kWarpN columns of it. While stage i is multiplied, stage i + 1 is decoded and the later ones are on
// their way (cp.async); a barrier of the CTA between stages is all that is needed.
//
// Shared memory:  | decoded 0: A | B | decoded 1 | stage 0: A | B | scales A | scales B | stage 1 ... |
//   When the sums are complete, each warp has a buffer of D in place of what was decoded.
//
// Every sum goes through K in steps of 16 from 0 in one accumulator.
//
// Compiled for each of variants.def with JAX_FP4_KIND (nvfp4, mxfp4 or mxf8f6f4) and JAX_FP4_TILE_N.
#include "kernels/parts/decode.h"
#include "kernels/parts/raster.h"
#include "kernels/parts/warp_tile.h"
#include "ptx/cluster.h"
#include "ptx/cp_async.h"
#include "ptx/shared.h"

namespace jax_fp4 {
namespace {

constexpr GemmBf16Variant kVariant{GemmKind::JAX_FP4_KIND, JAX_FP4_TILE_N};
constexpr BlockScale kScale =
    kVariant.kind == GemmKind::nvfp4 ? BlockScale::ue4m3 : BlockScale::ue8m0;
constexpr u32 kRows = kGemmRows;
constexpr u32 kTileN = kVariant.tile_n;
constexpr u32 kThreads = kVariant.threads();
constexpr u32 kStages = kVariant.stages();
static_assert(kStages >= 2, "one stage arrives while another is decoded");
constexpr u32 kStageK = kVariant.stage_k();
constexpr u32 kGroups = kStageK / 16;          // of 16 codes, in a row of a stage
constexpr u32 kScaleK = 4 * kVariant.block();  // elements whose scales are in one tile

constexpr u32 kWarpN = kVariant.warp_n();
constexpr u32 kWarpsM = kRows / kWarpRows;
constexpr u32 kTilesN = kWarpN / 8;
using Sums = WarpSums<kWarpN>;

// Places in shared memory, relative to its start; in a stage; in what is decoded.
constexpr u32 kStagesAt = 2 * kVariant.decoded_bytes();
constexpr u32 kStageB = kRows * kVariant.row_bytes();
constexpr u32 kStageScales = kStageB + kTileN * kVariant.row_bytes();
constexpr u32 kDecodedB = kRows * kGemmRowBytes;
static_assert(kVariant.warps() * kGemmBufferBytes <= kStagesAt, "buffers of D");

struct Cta {
  u32 shared;  // address of shared memory
  __device__ u32 decoded(u32 i) const { return shared + i % 2 * kVariant.decoded_bytes(); }
  __device__ u32 stage(u32 i) const {
    return shared + kStagesAt + i % kStages * kVariant.stage_bytes();
  }
};

__device__ u32 bits_of_codes(Element element) {
  return kVariant.kind == GemmKind::mxf8f6f4 ? minifloat(element).bits() : 4;
}

// ---- Global memory to a stage -------------------------------------------------------------------

// One operand of a tile.
struct Source {
  const u8* values;  // of the tile's first row
  const u8* scales;  // of the tile's rows, or the 128 rows around them
  u32 rows;          // that exist, from the first one on
  u32 pitch, scale_groups, bits;

  __device__ Source(const u8* values, const u8* scales, const GemmBf16Params& p, u32 batch,
                    u32 all_rows, u32 first_row, u32 pitch, Element element)
      : values(values + (static_cast<i64>(batch) * all_rows + first_row) * pitch),
        scales(scales + (static_cast<i64>(batch) * ceil_div(all_rows, kScaleTileRows) +
                         first_row / kScaleTileRows) *
                            p.scale_groups * kScaleTileBytes),
        rows(all_rows - first_row),
        pitch(pitch),
        scale_groups(p.scale_groups),
        bits(bits_of_codes(element)) {}

  // Codes k .. k + 63 of kTileRows rows, densely; zeros where there are none. All threads.
  template <u32 kTileRows>
  __device__ void copy_codes(u32 to, u32 k) const {
    const u32 chunks = bits / 2;  // of 16 bytes, in a row
    const u32 first_byte = k / 8 * bits;
    for (u32 i = threadIdx.x; i < kTileRows * chunks; i += kThreads) {
      const u32 row = i / chunks, byte = first_byte + i % chunks * 16;
      const bool exists = row < rows && byte < pitch;
      const u8* from = values + (exists ? static_cast<i64>(row) * pitch + byte : 0);
      ptx::cp_async_cg_shared_global_16(to + 16 * i, from, exists ? 16 : 0);
    }
  }
  // The tile of scales of element k; 32 threads, `thread` of them this one.
  __device__ void copy_scales(u32 to, u32 k, u32 thread) const {
    const u32 group = k / kScaleK;
    const bool exists = group < scale_groups;
    const u8* from =
        scales + (exists ? group * static_cast<u32>(kScaleTileBytes) + 16 * thread : 0);
    ptx::cp_async_cg_shared_global_16(to + 16 * thread, from, exists ? 16 : 0);
  }
};

__device__ void copy_stage(const Source& a, const Source& b, u32 stage, u32 k) {
  a.copy_codes<kRows>(stage, k);
  b.copy_codes<kTileN>(stage + kStageB, k);
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0) a.copy_scales(stage + kStageScales, k, lane);
  if (warp == 1) b.copy_scales(stage + kStageScales + kScaleTileBytes, k, lane);
}

// ---- A stage to bf16 ----------------------------------------------------------------------------

template <u32 kBits>
__device__ void load_group(u32 (&word)[kBits / 2], u32 from) {
  if constexpr (kBits == 8) {
    ptx::ld_shared_v4_b32(from, word[0], word[1], word[2], word[3]);
  } else if constexpr (kBits == 4) {
    ptx::ld_shared_v2_b32(from, word[0], word[1]);
  } else {
#pragma unroll
    for (u32 i = 0; i < 3; ++i) word[i] = ptx::ld_shared_b32(from + 4 * i);
  }
}

// kTileRows rows, the first of which is row `first_row` of the tile of scales. All threads: a thread has
// 16 codes, neighbours have neighbouring ones.
template <u32 kTileRows, Element kElement>
__device__ void decode_rows(u32 to, u32 codes, u32 scales, u32 first_row, u32 k) {
  constexpr u32 kBits = static_cast<u32>(minifloat(kElement).bits());
  for (u32 i = threadIdx.x; i < kTileRows * kGroups; i += kThreads) {
    const u32 row = i / kGroups, group = i % kGroups;
    const u32 block = (k + 16 * group) / kVariant.block() % 4, scale_row = first_row + row;
    const u32 scale = ptx::ld_shared_u8(scales + scale_row % 32 * 16 + scale_row / 32 * 4 + block);
    u32 word[kBits / 2], out[8];
    load_group<kBits>(word, codes + i * (2 * kBits));
    decode_group<kElement, kBits>(word, bf16_scales<kScale>(scale), out);
    const u32 at = swizzle_128b(to + row * kGemmRowBytes + group * 32);
    ptx::st_shared_v4_b32(at, out[0], out[1], out[2], out[3]);
    ptx::st_shared_v4_b32(at ^ 16, out[4], out[5], out[6], out[7]);
  }
}

template <u32 kTileRows>
__device__ void decode_operand(Element element, u32 to, u32 codes, u32 scales, u32 first_row,
                               u32 k) {
  if constexpr (kVariant.kind != GemmKind::mxf8f6f4) {
    decode_rows<kTileRows, Element::e2m1>(to, codes, scales, first_row, k);
  } else {
    switch (element) {
#define JAX_FP4_CASE(e) \
  case Element::e: return decode_rows<kTileRows, Element::e>(to, codes, scales, first_row, k);
      JAX_FP4_CASE(e2m1)
      JAX_FP4_CASE(e2m3)
      JAX_FP4_CASE(e3m2)
      JAX_FP4_CASE(e4m3)
      JAX_FP4_CASE(e5m2)
#undef JAX_FP4_CASE
    }
  }
}

__device__ void decode_stage(const GemmParams& p, u32 to, u32 stage, u32 first_column, u32 k) {
  const u32 scales = stage + kStageScales;
  decode_operand<kRows>(p.element_a, to, stage, scales, 0, k);
  decode_operand<kTileN>(p.element_b, to + kDecodedB, stage + kStageB, scales + kScaleTileBytes,
                         first_column % static_cast<u32>(kScaleTileRows), k);
}

// ---- Products -----------------------------------------------------------------------------------

__device__ void multiply_stage(Sums& sums, u32 decoded, u32 warp_m, u32 warp_n) {
  const u32 at_a = operand_a_at<kGemmRowBytes>(decoded, warp_m * kWarpRows);
  const u32 at_b = operand_b_at<kGemmRowBytes>(decoded + kDecodedB, warp_n * kWarpN);
#pragma unroll
  for (u32 step = 0; step < kStageK / 16; ++step) {
    u32 a[kWarpTilesM][4], b[kTilesN][2];
#pragma unroll
    for (u32 i = 0; i < kWarpTilesM; ++i)
      ptx::ldmatrix_m8n8_x4_b16(a[i], (at_a ^ 32 * step) + i * 16 * kGemmRowBytes);
#pragma unroll
    for (u32 j = 0; j < kTilesN; j += 2) {
      u32 pair[4];
      ptx::ldmatrix_m8n8_x4_b16(pair, (at_b ^ 32 * step) + j * 8 * kGemmRowBytes);
      b[j][0] = pair[0], b[j][1] = pair[1], b[j + 1][0] = pair[2], b[j + 1][1] = pair[3];
    }
#pragma unroll
    for (u32 i = 0; i < kWarpTilesM; ++i)
#pragma unroll
      for (u32 j = 0; j < kTilesN; ++j) ptx::mma_m16n8k16_bf16(sums.tile[i][j], a[i], b[j]);
  }
}

// A warp's buffer to D.
struct Store {
  const GemmParams& p;
  u32 buffer;

  __device__ void reuse() const { __syncwarp(); }
  __device__ void store(const Tile& tile, u32 row, u32 column, u32 columns) const {
    __syncwarp();
    copy_out(p, tile, row, column, columns, buffer);
  }
};

__device__ void compute_tile(const GemmBf16Params& params, const Cta& cta, const Tile& tile) {
  const GemmParams& p = params.gemm;
  const u32 first_row = tile.m * kRows, first_column = tile.n * kTileN;
  const Source a(params.values_a, params.scales_a, params, tile.batch * p.batch_a, p.m, first_row,
                 params.pitch_a, p.element_a);
  const Source b(params.values_b, params.scales_b, params, tile.batch * p.batch_b, p.n,
                 first_column, params.pitch_b, p.element_b);
  const u32 first_k = tile.first_step * kVariant.step_k();
  const u32 stages = (tile.steps * kVariant.step_k() + kStageK - 1) / kStageK;
  const u32 warp = threadIdx.x / 32, warp_m = warp % kWarpsM, warp_n = warp / kWarpsM;

  const auto copy = [&](u32 i) {
    if (i < stages) copy_stage(a, b, cta.stage(i), first_k + i * kStageK);
    ptx::cp_async_commit_group();
  };
  const auto decode = [&](u32 i) {
    decode_stage(p, cta.decoded(i), cta.stage(i), first_column, first_k + i * kStageK);
  };

  Sums sums;
#pragma unroll 1
  for (u32 i = 0; i < kStages; ++i) copy(i);
  ptx::cp_async_wait_group<kStages - 1>();
  __syncthreads();
  decode(0);
#pragma unroll 1
  for (u32 i = 0; i < stages; ++i) {
    // Of all threads: stage i + 1 has arrived, stage i is decoded, stage i - 1 is multiplied.
    ptx::cp_async_wait_group<kStages - 2>();
    __syncthreads();
    copy(i + kStages);
    if (i + 1 < stages) decode(i + 1);
    multiply_stage(sums, cta.decoded(i), warp_m, warp_n);
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  const Store store{p, cta.shared + warp * kGemmBufferBytes};
  finish_sums(sums, p, tile, first_row + warp_m * kWarpRows, first_column + warp_n * kWarpN,
              store.buffer, store);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    JAX_FP4_KERNEL(const __grid_constant__ GemmBf16Params p) {
  extern __shared__ __align__(1024) u8 memory[];
  const Cta cta{.shared = ptx::shared_address(memory)};
  ptx::griddepcontrol_wait();
  const Tile tile = tile_at<kVariant.step_k()>(p.gemm, blockIdx.x);
  if (tile.steps != 0) compute_tile(p, cta, tile);
}

}  // namespace jax_fp4

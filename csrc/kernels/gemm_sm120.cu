// Block-scaled GEMM for mma.sync with block scales (sm_120, sm_121): D = cvt(fl(fl(alpha sum) + bias) + C).
// Operands, tensor maps and formulas: gemm_params.h. The same sums in the same order as gemm_sm100.cu.
//
//   operand    in global memory                 in a stage of shared memory
//   A          [batch, m, k] codes, K-major     128 rows x kRowBytes, swizzle of as many bytes
//   B          [batch, n, k] codes, K-major     kTileN rows x kRowBytes, the same
//   scales A   128x4 tiles of 512 bytes         kScaleGroups tiles
//   scales B   the same                         kScaleGroups tiles: those that hold the tile's columns
//   D          [batch, m, n] f32, bf16, f16     32 rows x 128 bytes a warp, swizzle 128B
//
// A tile of D is 128 x kTileN. There is a CTA for every tile; those that run take over the tiles of those
// that have not been launched (tiles.h).
//
//   warp 0      producer   one thread: tensor copies into the stages
//   others      multiply   each has 32 rows and kWarpN columns of D: 2 x kTilesN products of 16 x 8. The
//                          operands of the next step are loaded before the products of this one.
//
//   barrier        filled by -> awaited by              a phase completes on
//   full[stage]    producer -> multiplying warps        1 arrival and the bytes
//   empty[stage]   multiplying warps -> producer        an arrival of each
//   next[slot]     producer, launch control -> all      1 arrival and 16 bytes
//   taken[slot]    all -> producer                      kReaders arrivals
//
// Shared memory:  | stage 0: A | B | scales A | scales B | stage 1 ... | D buffers | barriers |
//
// Every sum goes through K in steps of 64 (mxf8f6f4: 32) from 0 in one accumulator.
//
// Compiled for each of variants.def with JAX_FP4_KIND (nvfp4, mxfp4 or mxf8f6f4) and JAX_FP4_TILE_N.
#include "kernels/parts/raster.h"
#include "kernels/parts/tiles.h"
#include "kernels/parts/warp_tile.h"
#include "ptx/cp_async_bulk.h"
#include "ptx/shared.h"

namespace jax_fp4 {
namespace {

constexpr GemmVariant kVariant{GemmKind::JAX_FP4_KIND, 1, JAX_FP4_TILE_N, GemmCore::mma_sync};
constexpr u32 kTileN = kVariant.tile_n;
static_assert(kTileN == 32 || kTileN == 64 || kTileN == 128, "whole quarters of a tile of scales");

constexpr u32 kRows = kGemmRows;
constexpr u32 kRowBytes = kVariant.row_bytes();
constexpr u32 kSteps = kVariant.stage_steps();  // along K in a stage
constexpr u32 kStepBytes = kRowBytes / kSteps;
static_assert(kSteps % 2 == 0 && kStepBytes == 32, "operands of two steps are in registers");
constexpr u32 kScaleGroups = kVariant.scale_groups();
constexpr u32 kStepsPerGroup = kSteps / kScaleGroups;  // that share a word of scales

// A warp's part of a tile.
constexpr u32 kWarpN = kVariant.warp_n();
constexpr u32 kWarpsM = kRows / kWarpRows;
constexpr u32 kWarps = kVariant.warps();
constexpr u32 kTilesM = kWarpTilesM;
constexpr u32 kTilesN = kWarpN / 8;
constexpr u32 kQuarters = kWarpN / 32;  // of a tile of scales

// ---- Shared memory ------------------------------------------------------------------------------

constexpr u32 kBytesA = kRows * kRowBytes;
constexpr u32 kBytesB = kTileN * kRowBytes;
constexpr u32 kBytesScales = kScaleGroups * kScaleTileBytes;  // of A, and of B
constexpr u32 kStageBytes = kVariant.stage_bytes();
constexpr u32 kStages = kVariant.stages();
static_assert(kStages >= 2, "one stage is loaded while another is multiplied");

constexpr u32 kReaders = 1 + kWarps;  // of answers about tiles

// Places in shared memory, relative to its start.
constexpr u32 kBuffersAt = kStages * kStageBytes;
constexpr u32 kFullAt = kBuffersAt + kVariant.buffers() * kGemmBufferBytes;
constexpr u32 kEmptyAt = kFullAt + 8 * kStages;
constexpr u32 kTilesAt = kEmptyAt + 8 * kStages;
static_assert(kTilesAt % 16 == 0 && kTilesAt + Tiles<1>::kBytes <= kVariant.shared_bytes(),
              "kGemmBarrierBytes is too small");

using StagePlace = RingPlace<kStages>;

// What all roles know.
struct Cta {
  u32 shared;  // address of shared memory
  __device__ u32 full(u32 stage) const { return shared + kFullAt + 8 * stage; }
  __device__ u32 empty(u32 stage) const { return shared + kEmptyAt + 8 * stage; }
  __device__ Tiles<1> tiles() const { return {shared + kTilesAt, 0}; }
  __device__ u32 stage(u32 stage) const { return shared + kStageBytes * stage; }
};

// ---- Producer -----------------------------------------------------------------------------------

// Bytes that a copy of a row counts: padded codes count as packed ones do.
__device__ u32 row_bytes_counted(Element element) {
  return kVariant.kind == GemmKind::mxf8f6f4 ? kRowBytes / 8 * minifloat(element).bits()
                                             : kRowBytes;
}

__device__ void produce(const GemmParams& p, const Cta& cta) {
  const u32 bytes = kRows * row_bytes_counted(p.element_a) +
                    kTileN * row_bytes_counted(p.element_b) + 2 * kBytesScales;
  StagePlace place;
  for (auto tiles = cta.tiles(); tiles.more(); tiles.advance()) {
    tiles.request();
    const Tile tile = tile_at<kVariant.step_k()>(p, tiles.index());
    const u32 row_a = tile.m * kRows, row_b = tile.n * kTileN;
    const u32 batch_a = tile.batch * p.batch_a, batch_b = tile.batch * p.batch_b;
    for (u32 step = 0; step < tile.steps; step += kSteps, place.advance()) {
      // In elements of the maps: bytes, or codes that take a byte each; and in tiles of scales.
      const u32 k = (tile.first_step + step) * kStepBytes;
      const u32 group = (tile.first_step + step) / kStepsPerGroup;
      wait(cta.empty(place.slot), place.parity ^ 1);
      const u32 full = cta.full(place.slot);
      ptx::mbarrier_arrive_expect_tx(full, bytes);
      const u32 a = cta.stage(place.slot), b = a + kBytesA, scales = b + kBytesB;
      ptx::cp_async_bulk_tensor_3d_shared_global(a, &p.a, k, row_a, batch_a, full);
      ptx::cp_async_bulk_tensor_3d_shared_global(b, &p.b, k, row_b, batch_b, full);
      ptx::cp_async_bulk_tensor_4d_shared_global(scales, &p.scales_a, 0, group,
                                                 row_a / kScaleTileRows, batch_a, full);
      ptx::cp_async_bulk_tensor_4d_shared_global(scales + kBytesScales, &p.scales_b, 0, group,
                                                 row_b / kScaleTileRows, batch_b, full);
    }
  }
  // Everything is on its way: grids that depend on this one may take the SMs that become free.
  ptx::griddepcontrol_launch_dependents();
}

// ---- Products -----------------------------------------------------------------------------------

// What a lane holds of one step's operands.
struct Fragments {
  u32 a[kTilesM][4];
  u32 b[kTilesN][2];
  u32 scale_a;             // of row 8 t + g of the warp: of both products along M
  u32 scale_b[kQuarters];  // of column 8 t + g of 32: of four products along N each
};

using Sums = WarpSums<kWarpN>;

// Where a lane finds its operands, relative to a stage.
struct Place {
  u32 a, b;              // step 0; step s is at this address ^ 32 s
  u32 scale_a, scale_b;  // words

  __device__ Place(u32 warp, u32 first_column) {
    const u32 lane = threadIdx.x % 32, warp_m = warp % kWarpsM, warp_n = warp / kWarpsM;
    a = operand_a_at<kRowBytes>(0, warp_m * kWarpRows);
    b = operand_b_at<kRowBytes>(kBytesA, warp_n * kWarpN);
    // A tile of scales has the four words of rows r, r + 32, r + 64 and r + 96 side by side.
    const u32 word = kBytesA + kBytesB + (8 * (lane % 4) + lane / 4) * 16;
    const u32 column = first_column % static_cast<u32>(kScaleTileRows) + warp_n * kWarpN;
    scale_a = word + 4 * warp_m;
    scale_b = word + kBytesScales + 4 * (column / 32);
  }
};

// Four matrices of 8 rows x 16 bytes: one code a byte where there were 6 or 4 bits.
__device__ void load_matrices(u32 (&d)[4], u32 row, Element element) {
  if (kVariant.kind != GemmKind::mxf8f6f4) {
    ptx::ldmatrix_m8n8_x4_b16(d, row);
  } else if (element == Element::e2m1) {
    ptx::ldmatrix_m8n16_x4_b8x16_b4x16_p64(d, row);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) d[i] <<= 2;  // mma.sync wants them in bits 5:2
  } else if (element == Element::e2m3 || element == Element::e3m2) {
    ptx::ldmatrix_m8n16_x4_b8x16_b6x16_p32(d, row);
  } else {
    ptx::ldmatrix_m8n8_x4_b16(d, row);
  }
}

// The operands of step `step` of a stage.
__device__ void load(Fragments& f, const Place& at, u32 stage, u32 step, const GemmParams& p) {
  const u32 a = stage + (at.a ^ kStepBytes * step), b = stage + (at.b ^ kStepBytes * step);
#pragma unroll
  for (u32 i = 0; i < kTilesM; ++i) load_matrices(f.a[i], a + i * 16 * kRowBytes, p.element_a);
#pragma unroll
  for (u32 j = 0; j < kTilesN; j += 2) {
    u32 pair[4];  // both halves of K of column tile j, then of j + 1
    load_matrices(pair, b + j * 8 * kRowBytes, p.element_b);
    f.b[j][0] = pair[0], f.b[j][1] = pair[1];
    f.b[j + 1][0] = pair[2], f.b[j + 1][1] = pair[3];
  }
  const u32 group = stage + step / kStepsPerGroup * static_cast<u32>(kScaleTileBytes);
  f.scale_a = ptx::ld_shared_b32(group + at.scale_a);
  if constexpr (kQuarters == 2)
    ptx::ld_shared_v2_b32(group + at.scale_b, f.scale_b[0], f.scale_b[1]);
  else
    f.scale_b[0] = ptx::ld_shared_b32(group + at.scale_b);
  // The step's own scales come first.
  const u32 shift = step % kStepsPerGroup * (32 / kStepsPerGroup);
  f.scale_a >>= shift;
#pragma unroll
  for (u32 i = 0; i < kQuarters; ++i) f.scale_b[i] >>= shift;
}

template <class Mma>
__device__ void multiply_tiles(Sums& sums, const Fragments& f, Mma mma) {
#pragma unroll
  for (u32 i = 0; i < kTilesM; ++i)
#pragma unroll
    for (u32 j = 0; j < kTilesN; ++j)
      mma(sums.tile[i][j], f.a[i], f.b[j], f.scale_a, static_cast<u16>(i), f.scale_b[j / 4],
          static_cast<u16>(j % 4));
}

// Kind mxf8f6f4: the instruction names the element types, which are known when the kernel runs.
template <class A>
__device__ void multiply_codes(Sums& sums, const Fragments& f, Element b) {
  switch (b) {
#define JAX_FP4_CASE(element, type) \
  case Element::element:            \
    return multiply_tiles(sums, f, ptx::mma_m16n8k32_mxf8f6f4_scale_vec_1x<A, ptx::type>);
    JAX_FP4_CASE(e2m1, E2M1)
    JAX_FP4_CASE(e2m3, E2M3)
    JAX_FP4_CASE(e3m2, E3M2)
    JAX_FP4_CASE(e4m3, E4M3)
    JAX_FP4_CASE(e5m2, E5M2)
#undef JAX_FP4_CASE
  }
}
__device__ void multiply_codes(Sums& sums, const Fragments& f, Element a, Element b) {
  switch (a) {
    case Element::e2m1: return multiply_codes<ptx::E2M1>(sums, f, b);
    case Element::e2m3: return multiply_codes<ptx::E2M3>(sums, f, b);
    case Element::e3m2: return multiply_codes<ptx::E3M2>(sums, f, b);
    case Element::e4m3: return multiply_codes<ptx::E4M3>(sums, f, b);
    case Element::e5m2: return multiply_codes<ptx::E5M2>(sums, f, b);
  }
}

__device__ void multiply(Sums& sums, const Fragments& f, const GemmParams& p) {
  if constexpr (kVariant.kind == GemmKind::nvfp4)
    multiply_tiles(sums, f, ptx::mma_m16n8k64_mxf4nvf4_scale_vec_4x);
  else if constexpr (kVariant.kind == GemmKind::mxfp4)
    multiply_tiles(sums, f, ptx::mma_m16n8k64_mxf4_scale_vec_2x);
  else
    multiply_codes(sums, f, p.element_a, p.element_b);
}

// The sums of a tile that has steps; walks the ring from `place`.
__device__ void multiply_tile(Sums& sums, const GemmParams& p, const Cta& cta, const Tile& tile,
                              StagePlace& place) {
  const Place at(threadIdx.x / 32 - 1, tile.n * kTileN);
  Fragments even, odd;  // of steps
  wait(cta.full(place.slot), place.parity);
  load(even, at, cta.stage(place.slot), 0, p);
  for (u32 step = 0;;) {
    const u32 stage = cta.stage(place.slot);
    const u32 in_stage = step % kSteps;
    load(odd, at, stage, in_stage + 1, p);
    multiply(sums, even, p);
    step += 2;
    if (step % kSteps != 0) {
      load(even, at, stage, in_stage + 2, p);
    } else {
      // All lanes have what they need of this stage.
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(cta.empty(place.slot));
      place.advance();
      if (step < tile.steps) {
        wait(cta.full(place.slot), place.parity);
        load(even, at, cta.stage(place.slot), 0, p);
      }
    }
    // Of a stage that K does not fill, the rest is zeros.
    multiply(sums, odd, p);
    if (step % kSteps == 0 && step >= tile.steps) break;
  }
}

// ---- Epilogue -----------------------------------------------------------------------------------

// A warp's buffer to D.
struct Store {
  const GemmParams& p;
  u32 buffer;

  __device__ void reuse() const {
    // The last copy from this buffer has read it, and so have all lanes.
    if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<0>();
    __syncwarp();
  }
  __device__ void store(const Tile& tile, u32 row, u32 column, u32 columns) const {
    if (!p.d_by_map) {
      __syncwarp();
      copy_out(p, tile, row, column, columns, buffer);
      return;
    }
    // 9.7.13.4: every lane's writes, before the copy reads them in the asynchronous proxy.
    ptx::fence_proxy_async_shared_cta();
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    ptx::cp_async_bulk_tensor_3d_global_shared(&p.d, column, row, tile.matrix, buffer);
    ptx::cp_async_bulk_commit_group();
  }
};

__device__ void consume(const GemmParams& p, const Cta& cta) {
  const u32 warp = threadIdx.x / 32 - 1;
  const Store store{p, cta.shared + kBuffersAt + warp * kGemmBufferBytes};
  StagePlace place;
  for (auto tiles = cta.tiles(); tiles.more(); tiles.advance<true>()) {
    const Tile tile = tile_at<kVariant.step_k()>(p, tiles.index());
    if (tile.steps == 0) continue;
    Sums sums;
    multiply_tile(sums, p, cta, tile, place);
    finish_sums(sums, p, tile, tile.m * kRows + warp % kWarpsM * kWarpRows,
                tile.n * kTileN + warp / kWarpsM * kWarpN, store.buffer, store);
  }
  // Shared memory must outlive the stores that read it.
  if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<0>();
}

__device__ void initialize_barriers(const Cta& cta) {
  for (u32 stage = 0; stage < kStages; ++stage) {
    ptx::mbarrier_init(cta.full(stage), 1);
    ptx::mbarrier_init(cta.empty(stage), kWarps);
  }
  Tiles<1>::initialize(cta.shared + kTilesAt, kReaders);
  ptx::fence_mbarrier_init_release_cluster();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kVariant.threads(), 1)
    JAX_FP4_KERNEL(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  const Cta cta{.shared = ptx::shared_address(memory)};
  if (threadIdx.x == 0) initialize_barriers(cta);
  __syncthreads();
  // Until here nothing of global memory was touched.
  ptx::griddepcontrol_wait();
  if (threadIdx.x >= 32) {
    consume(p, cta);
  } else if (ptx::elect_sync()) {
    produce(p, cta);
  }
}

}  // namespace jax_fp4

// Block-scaled GEMM for tcgen05 tensor cores (sm_100, sm_103): D = cvt(fl(fl(alpha sum) + bias) + C).
// Operands, tensor maps and formulas: gemm_params.h.
//
//   operand    in global memory                 in a stage of shared memory
//   A          [batch, m, k] codes, K-major     128 rows x 128 bytes, swizzle 128B
//   B          [batch, n, k] codes, K-major     kTileN / kGroup rows x 128 bytes, swizzle 128B
//   scales A   128x4 tiles of 512 bytes         kScaleGroups tiles: those of the CTA's rows
//   scales B   the same                         kScaleTilesB x kScaleGroups tiles: of all columns
//   D          [batch, m, n] f32, bf16, f16     32 rows x 128 bytes a warp, twice, swizzle 128B
//
// A tile of D is 128 x kTileN, or 256 x kTileN where two CTAs share it (kGroup = 2): each then loads
// its own 128 rows of A and half of the columns of B, they take turns to copy the scales of B to both,
// and the even one of the pair, the leader, starts the MMAs of both. There is a CTA (or pair) for every
// tile; those that run take over the tiles of those that have not been launched (tiles.h).
//
//   warp 0      producer   one thread: tensor copies into the stages
//   warp 1      MMA        allocates tensor memory; one thread (of the leader): scales to tensor
//                          memory, four MMAs a stage
//   warps 2..5  epilogue   warp w reads lanes 32 (w % 4) to +31: a thread has a row of D
//
//   barrier        filled by -> awaited by              a phase completes on
//   full[stage]    producers -> MMA                     1 arrival and the bytes of all CTAs (leader's)
//   empty[stage]   MMA commit -> producers              1 arrival
//   done[acc]      MMA commit -> epilogue               1 arrival
//   next[slot]     producer, launch control -> all      1 arrival and 16 bytes
//   taken[slot]    all -> producer                      kReaders arrivals (leader's)
//   drained[acc]   epilogue -> MMA                      kGroup x 4 arrivals, one a warp (leader's)
//
// empty is also awaited by the MMA thread, kScaleSlots stages later, if there are fewer slots than stages.
//
// Shared memory:  | stage 0: A | B | scales A | scales B | stage 1 ... | D buffers | barriers |
// Tensor memory:  | accumulator 0 | accumulator 1 ... | scales of slot 0: A | B | slot 1 ... |
//   Accumulators of 256 columns overlap: the second one starts at kAccumulatorStride. The epilogue
//   drains the columns that both have first, and releases the accumulator then.
//   Scales have a ring of slots of their own, as long as that of the stages where there is room. A slot
//   is overwritten only when the MMAs that read it have ended (`empty` of their stage), so no order
//   between an MMA and a later tcgen05.cp is relied upon, which the PTX ISA (9.7.16.6) does not promise.
//
// Every sum goes through K in steps of 64 (mxf8f6f4: 32) from 0 in one accumulator.
//
// Compiled for each of variants.def with JAX_FP4_KIND (nvfp4, mxfp4 or mxf8f6f4), JAX_FP4_CTAS and
// JAX_FP4_TILE_N.
#include "kernels/parts/copies.h"
#include "kernels/parts/epilogue.h"
#include "kernels/parts/raster.h"
#include "kernels/parts/tiles.h"
#include "numerics/mma_descriptor.h"
#include "ptx/cp_async_bulk.h"
#include "ptx/mov.h"
#include "ptx/shared.h"
#include "ptx/tcgen05.h"

namespace jax_fp4 {
namespace {

constexpr GemmVariant kVariant{GemmKind::JAX_FP4_KIND, JAX_FP4_CTAS, JAX_FP4_TILE_N};
constexpr u32 kGroup = kVariant.ctas;
constexpr u32 kTileN = kVariant.tile_n;
static_assert(kGroup == 1 || kGroup == 2, "tcgen05 works in one CTA or in a pair");
// The scales of B start at an even column of tensor memory, that is at a multiple of 64 rows: a tile of
// 32 columns is for n <= 32.
static_assert((kTileN % 64 == 0 && kTileN <= 256) || kTileN == 32, "32, 64, 128, 192 or 256");

constexpr u32 kRows = kGemmRows;
constexpr u32 kColsB = kVariant.rows_b();
constexpr u32 kSteps = kGemmStageSteps;             // MMAs a stage
constexpr u32 kStepBytes = kGemmRowBytes / kSteps;  // of each row in an MMA
constexpr u32 kScaleGroups = kVariant.scale_groups();
constexpr u32 kStepsPerGroup = kSteps / kScaleGroups;  // MMAs that share a word of scales
constexpr u32 kScaleTilesB = kVariant.scale_tiles_b();
constexpr auto kMma = kVariant.kind == GemmKind::nvfp4   ? ptx::MmaKind::mxf4nvf4_block16
                      : kVariant.kind == GemmKind::mxfp4 ? ptx::MmaKind::mxf4_block32
                                                         : ptx::MmaKind::mxf8f6f4_block32;

__device__ constexpr u32 least(u32 a, u32 b) { return a < b ? a : b; }

// ---- Shared memory ------------------------------------------------------------------------------

constexpr u32 kBytesA = kRows * kGemmRowBytes;
constexpr u32 kBytesB = kColsB * kGemmRowBytes;
constexpr u32 kBytesScalesA = kScaleGroups * kScaleTileBytes;
constexpr u32 kBytesScalesB = kScaleTilesB * kBytesScalesA;
constexpr u32 kStageBytes = kVariant.stage_bytes();
constexpr u32 kStages = kVariant.stages();
constexpr u32 kEpilogueWarps = 4;
constexpr u32 kBuffers = kGemmBuffers / kEpilogueWarps;  // a warp

// ---- Tensor memory ------------------------------------------------------------------------------

constexpr u32 kColumns = 512;     // all of it
constexpr u32 kAccumulators = 2;  // one is computed while the other is drained
constexpr u32 kScaleColumnsA = kScaleGroups * 4;
constexpr u32 kScaleColumnsB = kScaleGroups * 4 * kScaleTilesB;
constexpr u32 kScaleColumns = kScaleColumnsA + kScaleColumnsB;
// Slots of scales: one for each stage, or as few as keep the tensor cores busy where accumulators need
// the room.
constexpr u32 kScaleSlots = kTileN <= 128 ? kStages : 2;
constexpr u32 kScaleColumn = kColumns - kScaleSlots * kScaleColumns;  // the first one
// In whole pieces, which the epilogue drains.
constexpr u32 kAccumulatorStride = least(kTileN, (kScaleColumn - kTileN) / kPiece * kPiece);
constexpr u32 kOverlap = kTileN - kAccumulatorStride;

static_assert(kStages >= kScaleSlots, "a slot's stage must not have been used again");
static_assert(kScaleColumn >= kTileN + kAccumulatorStride, "accumulators and scales overlap");

// Of answers about tiles: producers, the MMA thread, epilogue warps.
constexpr u32 kReaders = kGroup * (1 + kEpilogueWarps) + 1;

// Places in shared memory, relative to its start.
constexpr u32 kBuffersAt = kStages * kStageBytes;
constexpr u32 kFullAt = kBuffersAt + kGemmBuffers * kGemmBufferBytes;
constexpr u32 kEmptyAt = kFullAt + 8 * kStages;
constexpr u32 kDoneAt = kEmptyAt + 8 * kStages;
constexpr u32 kDrainedAt = kDoneAt + 8 * kAccumulators;
constexpr u32 kTensorAddressAt = kDrainedAt + 8 * kAccumulators;
constexpr u32 kTilesAt = (kTensorAddressAt + 4 + 15) / 16 * 16;
static_assert(kTilesAt + Tiles<kGroup>::kBytes <= kVariant.shared_bytes(),
              "kGemmBarrierBytes is too small");

using StagePlace = RingPlace<kStages>;
using AccumulatorPlace = RingPlace<kAccumulators>;

// What all roles know.
struct Cta {
  u32 shared;  // address of shared memory
  u32 tensor;  // address of tensor memory, the same in both CTAs of a pair
  u32 rank;    // in the pair; 0 is the leader
  __device__ u32 full(u32 stage) const { return shared + kFullAt + 8 * stage; }
  __device__ u32 empty(u32 stage) const { return shared + kEmptyAt + 8 * stage; }
  __device__ u32 done(u32 accumulator) const { return shared + kDoneAt + 8 * accumulator; }
  __device__ u32 drained(u32 accumulator) const { return shared + kDrainedAt + 8 * accumulator; }
  __device__ Tiles<kGroup> tiles() const { return {shared + kTilesAt, rank}; }
  __device__ u32 stage(u32 stage) const { return shared + kStageBytes * stage; }
};

// ---- Producer -----------------------------------------------------------------------------------

// Bytes that a copy of 128 bytes of shared memory counts: padded codes count as packed ones do.
__device__ u32 row_bytes_counted(Element element) {
  return kVariant.kind == GemmKind::mxf8f6f4 ? kGemmRowBytes / 8 * minifloat(element).bits()
                                             : kGemmRowBytes;
}

__device__ void produce(const GemmParams& p, const Cta& cta) {
  const u32 bytes =
      kGroup * (kRows * row_bytes_counted(p.element_a) + kColsB * row_bytes_counted(p.element_b) +
                kBytesScalesA + kBytesScalesB);
  StagePlace place;
  for (auto tiles = cta.tiles(); tiles.more(); tiles.advance()) {
    tiles.request();
    const Tile tile = tile_at<kVariant.step_k()>(p, tiles.index());
    const u32 row_a = (tile.m * kGroup + cta.rank) * kRows;
    const u32 row_b = tile.n * kTileN + cta.rank * kColsB;
    const u32 scale_tile_b = tile.n * kTileN / kScaleTileRows;
    const u32 batch_a = tile.batch * p.batch_a, batch_b = tile.batch * p.batch_b;
    for (u32 step = 0; step < tile.steps; step += kSteps, place.advance()) {
      // In elements of the maps: bytes, or codes that take a byte each; and in tiles of scales.
      const u32 k = (tile.first_step + step) * kStepBytes;
      const u32 group = (tile.first_step + step) / kStepsPerGroup;
      // The MMAs that read this stage have ended; commits arrive from the leader.
      wait<kGroup == 2>(cta.empty(place.slot), place.parity ^ 1);
      // Both CTAs' copies count at the leader's barrier. Bytes of the other CTA may come before they are
      // expected: the phase cannot complete without this arrival.
      if (cta.rank == 0) ptx::mbarrier_arrive_expect_tx(cta.full(place.slot), bytes);
      const u32 full =
          kGroup == 2 ? ptx::mapa_shared_cluster(cta.full(place.slot), 0) : cta.full(place.slot);
      const u32 a = cta.stage(place.slot), b = a + kBytesA, scales_a = b + kBytesB;
      copy_rows<kGroup>(a, p.a, k, row_a, batch_a, full);
      copy_rows<kGroup>(b, p.b, k, row_b, batch_b, full);
      copy_scales<kGroup>(scales_a, p.scales_a, group, row_a / kScaleTileRows, batch_a, full);
      // Both CTAs need all scales of B. The other one's stage is free too: the MMAs have read both.
      if (kGroup == 1 || place.slot % 2 == cta.rank)
        copy_scales_to_all<kGroup>(scales_a + kBytesScalesA, p.scales_b, group, scale_tile_b,
                                   batch_b, full);
    }
  }
  // Everything is on its way: grids that depend on this one may take the SMs that become free.
  ptx::griddepcontrol_launch_dependents();
  // A CTA must not end while commits still arrive at its barriers.
  for (u32 i = 0; i < kStages; ++i, place.advance())
    wait<kGroup == 2>(cta.empty(place.slot), place.parity ^ 1);
}

// ---- MMA ----------------------------------------------------------------------------------------

__device__ void commit(u32 barrier) {
  if constexpr (kGroup == 2)
    ptx::tcgen05_commit_multicast<kGroup>(barrier, 0b11);
  else
    ptx::tcgen05_commit<kGroup>(barrier);
}

// Operands: rows of 128 bytes in groups of eight.
__device__ u64 rows_descriptor(u32 address) {
  return ptx::mov_b64(address, descriptor_layout(8 * kGemmRowBytes, Swizzle::span_128b));
}
// Scales: 32 rows of 16 bytes in groups of eight, not swizzled.
__device__ u64 scales_descriptor(u32 address) {
  return ptx::mov_b64(address, descriptor_layout(8 * 16, Swizzle::none));
}

// Waits until the columns of the next accumulator are drained: by the tile before the last, which had the
// same one, or by the last, where it overlaps.
__device__ void wait_for_accumulator(const Cta& cta, const AccumulatorPlace& next) {
  if constexpr (kOverlap == 0)
    wait<kGroup == 2>(cta.drained(next.slot), next.parity ^ 1);
  else  // the last tile had the other accumulator, in the same round if that is the first one
    wait<kGroup == 2>(cta.drained(next.slot ^ 1), next.slot == 0 ? next.parity ^ 1 : next.parity);
}

__device__ void multiply(const GemmParams& p, const Cta& cta) {
  const u32 instruction =
      kVariant.kind == GemmKind::mxf8f6f4
          ? instruction_descriptor_mxf8f6f4(kRows * kGroup, kTileN, p.element_a, p.element_b)
          : instruction_descriptor_fp4(
                kRows * kGroup, kTileN,
                kVariant.kind == GemmKind::nvfp4 ? BlockScale::ue4m3 : BlockScale::ue8m0);
  const u32 memory = descriptor_address(cta.shared);
  StagePlace place, behind;  // behind: kScaleSlots stages before
  u32 started = 0;           // stages
  AccumulatorPlace target;
  auto tiles = cta.tiles();
  Tile next = tile_at<kVariant.step_k()>(p, tiles.index());
  const auto look_up_next = [&] {
    tiles.advance();
    if (tiles.more()) next = tile_at<kVariant.step_k()>(p, tiles.index());
  };
  while (tiles.more()) {
    const Tile tile = next;
    if (tile.steps == 0) {
      look_up_next();
      continue;
    }
    // Odd tiles of 64 (or 192) columns start in the middle of a tile of scales, two columns in.
    const u32 half = tile.n * kTileN % kScaleTileRows / 32;
    const u32 accumulator = cta.tensor + target.slot * kAccumulatorStride;
    wait_for_accumulator(cta, target);
    for (u32 step = 0; step < tile.steps; step += kSteps, place.advance(), ++started) {
      // Copies and tensor cores both work in the asynchronous proxy: no proxy fence.
      wait<kGroup == 2>(cta.full(place.slot), place.parity);
      // The MMAs that read this slot of scales have ended: with a slot for each stage, because the stage
      // has been filled again.
      if constexpr (kScaleSlots < kStages) {
        if (started >= kScaleSlots) {
          wait<kGroup == 2>(cta.empty(behind.slot), behind.parity);
          behind.advance();
        }
      }
      // 9.7.16.6.4: the tcgen05.cp below follow the MMAs whose end was awaited, and the MMAs the tcgen05.ld
      // of the epilogue that has drained the accumulator.
      ptx::tcgen05_fence_after_thread_sync();
      const u32 slot = kScaleSlots < kStages ? started % kScaleSlots : place.slot;
      const u32 columns_a = cta.tensor + kScaleColumn + slot * kScaleColumns;
      const u32 columns_b = columns_a + kScaleColumnsA;
      // In the unit of descriptors, to which 32-bit additions are all that this thread has time for.
      const u32 rows_a = memory + place.slot * descriptor_address(kStageBytes);
      const u32 rows_b = rows_a + descriptor_address(kBytesA);
      const u32 scales_a = rows_b + descriptor_address(kBytesB);
      const u32 scales_b = scales_a + descriptor_address(kBytesScalesA);
#pragma unroll
      for (u32 g = 0; g < kScaleGroups; ++g) {
        ptx::tcgen05_cp_32x128b_warpx4<kGroup>(
            columns_a + 4 * g,
            scales_descriptor(scales_a + descriptor_address(g * kScaleTileBytes)));
#pragma unroll
        for (u32 t = 0; t < kScaleTilesB; ++t)
          ptx::tcgen05_cp_32x128b_warpx4<kGroup>(
              columns_b + 4 * (g * kScaleTilesB + t),
              scales_descriptor(scales_b +
                                descriptor_address((t * kScaleGroups + g) * kScaleTileBytes)));
      }
      const auto multiply_step = [&](u32 s) {
        const u32 g = s / kStepsPerGroup;
        const u32 byte = s % kStepsPerGroup * kScaleGroups;
        ptx::tcgen05_mma_block_scale<kMma, kGroup>(
            accumulator, rows_descriptor(rows_a + descriptor_address(s * kStepBytes)),
            rows_descriptor(rows_b + descriptor_address(s * kStepBytes)),
            instruction | scale_bytes_at(byte), columns_a + 4 * g,
            columns_b + 4 * g * kScaleTilesB + half, step + s > 0);
      };
      if (step + kSteps <= tile.steps) {
#pragma unroll
        for (u32 s = 0; s < kSteps; ++s) multiply_step(s);
      } else {
#pragma unroll 1
        for (u32 s = 0; step + s < tile.steps; ++s) multiply_step(s);
      }
      commit(cta.empty(place.slot));
      // Early, while the tensor cores have work: between two tiles it would keep them waiting.
      if (step == 0) look_up_next();
    }
    commit(cta.done(target.slot));
    target.advance();
  }
}

// ---- Epilogue -----------------------------------------------------------------------------------

// Lets the MMA warp overwrite the accumulator; all lanes of the warp have loaded what they need.
__device__ void release(const Cta& cta, u32 accumulator) {
  // 9.7.16.6.4: the loads precede what the MMA thread does after the barrier.
  ptx::tcgen05_fence_before_thread_sync();
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive_at_leader<kGroup>(cta.drained(accumulator));
}

// Pieces that a thread holds: all that the other accumulator overlaps.
constexpr u32 kHeld = kOverlap == 0 ? 1 : kOverlap / kPiece;

// The warp's 32 rows of a tile, from accumulator `source`.
__device__ void finish(const GemmParams& p, const Cta& cta, const Tile& tile, u32 source,
                       float alpha, u32& stores) {
  const u32 lane = threadIdx.x % 32, quarter = threadIdx.x / 32 % 4;
  const u32 first_row = (tile.m * kGroup + cta.rank) * kRows + quarter * 32;
  const u32 tensor = cta.tensor + source * kAccumulatorStride + (quarter * 32 << 16);
  // Pieces that exist. A warp whose rows do not loads one all the same, and releases as others do.
  const bool exists = first_row < p.m;
  const u32 columns = least(kTileN, p.n - tile.n * kTileN);
  const u32 pieces = exists ? (columns + kPiece - 1) / kPiece : 1;
  // Those that the other accumulator overlaps come first: the last ones of 0, the first ones of 1.
  const bool backwards = kOverlap != 0 && source == 0;

  const bool in_f32 = p.transposed || p.out_type == Dtype::f32;
  const u32 per_buffer = in_f32 ? 1 : 2;  // pieces
  u32 buffer = 0;
  const auto finish_piece = [&](u32 i, float (&x)[kPiece]) {
    const u32 piece = backwards ? pieces - 1 - i : i;
    const u32 column = tile.n * kTileN + piece * kPiece;
    const u32 in_buffer = piece % per_buffer;
    if (i == 0 || in_buffer == (backwards ? per_buffer - 1 : 0)) {
      buffer =
          cta.shared + kBuffersAt + (quarter * kBuffers + stores++ % kBuffers) * kGemmBufferBytes;
      // The last store from this buffer has read it.
      if (lane == 0) ptx::cp_async_bulk_wait_group_read<kBuffers - 1>();
      __syncwarp();
    }
    if (p.transposed) {
      store_piece(x, Dtype::f32, buffer, 0);  // the lane's row, which it reads itself
      copy_out_transposed(p, tile, first_row, column, buffer);
      return;
    }
    if (p.bias != nullptr) add_bias(x, p, tile, column);
    if (p.c != nullptr) add_c(x, p, tile, first_row + lane, column);
    store_piece(x, p.out_type, buffer, in_buffer * kPiece);

    if (i + 1 < pieces && in_buffer != (backwards ? 0 : per_buffer - 1)) return;
    const u32 first_column = column - in_buffer * kPiece;
    if (p.d_by_map) {
      // 9.7.13.4: every lane's writes, before the copy reads them in the asynchronous proxy.
      ptx::fence_proxy_async_shared_cta();
      __syncwarp();
      if (lane == 0) {
        ptx::cp_async_bulk_tensor_3d_global_shared(&p.d, first_column, first_row, tile.matrix,
                                                   buffer);
        ptx::cp_async_bulk_commit_group();
      }
    } else {
      __syncwarp();
      copy_out(p, tile, first_row, first_column, per_buffer * kPiece, buffer);
    }
  };

  u32 sum[kHeld][kPiece];
  const auto load = [&](u32(&to)[kPiece], u32 i) {
    const u32 piece = backwards ? pieces - 1 - i : i;
    if (i < pieces) ptx::tcgen05_ld_32x32b_x32(to, tensor + piece * kPiece);
  };
#pragma unroll
  for (u32 h = 0; h < kHeld; ++h) load(sum[h], h);
  // Where accumulators overlap, the next tile waits for nothing but these loads.
  const u32 last_needed = kOverlap == 0 ? pieces - 1 : 0;
  for (u32 first = 0; first < pieces; first += kHeld) {
#pragma unroll
    for (u32 h = 0; h < kHeld; ++h) {
      const u32 i = first + h;
      if (i >= pieces) break;
      ptx::tcgen05_wait_ld(sum[h]);
      if (i == last_needed) release(cta, source);
      float x[kPiece];
#pragma unroll
      for (u32 j = 0; j < kPiece; ++j) x[j] = __fmul_rn(alpha, f32_of(sum[h][j]));
      // Another piece is on its way while this one is finished.
      load(sum[h], i + kHeld);
      if (exists) finish_piece(i, x);
    }
  }
}

__device__ void drain(const GemmParams& p, const Cta& cta) {
  AccumulatorPlace source;
  u32 stores = 0;
  for (auto tiles = cta.tiles(); tiles.more(); tiles.advance<true>()) {
    const Tile tile = tile_at<kVariant.step_k()>(p, tiles.index());
    if (tile.steps == 0) continue;
    const float alpha = alpha_of(p, tile);
    wait<kGroup == 2>(cta.done(source.slot), source.parity);
    // 9.7.16.6.4: the tcgen05.ld below follow the MMAs whose end was awaited.
    ptx::tcgen05_fence_after_thread_sync();
    finish(p, cta, tile, source.slot, alpha, stores);
    source.advance();
  }
  // 9.7.16.6.4: the last loads precede the deallocation. Where accumulators do not overlap, a release follows
  // all loads and has said so.
  if constexpr (kOverlap != 0) ptx::tcgen05_fence_before_thread_sync();
  // Shared memory must outlive the stores that read it.
  if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<0>();
}

// ---- Begin and end ------------------------------------------------------------------------------

// All threads of the CTA, or of the pair.
__device__ void synchronize() {
  if constexpr (kGroup == 2) {
    ptx::barrier_cluster_arrive_release_aligned();
    ptx::barrier_cluster_wait_acquire_aligned();
  } else {
    __syncthreads();
  }
}

__device__ void initialize_barriers(const Cta& cta) {
  for (u32 stage = 0; stage < kStages; ++stage) {
    ptx::mbarrier_init(cta.full(stage), 1);
    ptx::mbarrier_init(cta.empty(stage), 1);
  }
  for (u32 accumulator = 0; accumulator < kAccumulators; ++accumulator) {
    ptx::mbarrier_init(cta.done(accumulator), 1);
    ptx::mbarrier_init(cta.drained(accumulator), kGroup * kEpilogueWarps);
  }
  Tiles<kGroup>::initialize(cta.shared + kTilesAt, kReaders);
  ptx::fence_mbarrier_init_release_cluster();
}

}  // namespace

#if JAX_FP4_CTAS == 2
#define JAX_FP4_CLUSTER __cluster_dims__(2, 1, 1)
#else
#define JAX_FP4_CLUSTER
#endif

extern "C" __global__ void JAX_FP4_CLUSTER __launch_bounds__(kGemmThreads, 1)
    JAX_FP4_KERNEL(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 warp = threadIdx.x / 32;
  Cta cta{.shared = ptx::shared_address(memory),
          .tensor = 0,
          .rank = kGroup == 2 ? ptx::cluster_ctarank() : 0};

  if (threadIdx.x == 0) initialize_barriers(cta);
  // A paired allocation waits for the other CTA, which must have started; nothing else is asked of this barrier.
  if constexpr (kGroup == 2) {
    ptx::barrier_cluster_arrive_relaxed_aligned();
    ptx::barrier_cluster_wait_acquire_aligned();
  }
  if (warp == 1) {
    ptx::tcgen05_alloc<kGroup>(cta.shared + kTensorAddressAt, kColumns);
    // These are all columns, so that nobody can allocate before they are given back; the permit is given back
    // as every kernel does that is known to run.
    ptx::tcgen05_relinquish_alloc_permit<kGroup>();
    // 9.7.16.6.4: the leader's MMAs write what the other CTA has allocated. By itself, the warp that allocates
    // multiplies, and loads follow its products.
    if constexpr (kGroup == 2) ptx::tcgen05_fence_before_thread_sync();
  }
  synchronize();
  cta.tensor = ptx::ld_shared_b32(cta.shared + kTensorAddressAt);
  // Until here nothing of global memory was touched.
  ptx::griddepcontrol_wait();

  if (warp == 0) {
    if (ptx::elect_sync()) produce(p, cta);
  } else if (warp == 1) {
    if (cta.rank == 0 && ptx::elect_sync()) multiply(p, cta);
  } else {
    drain(p, cta);
  }

  __syncwarp();
  // The last loads precede the deallocation; and no CTA of a pair ends before the other.
  synchronize();
  if (warp == 1) {
    ptx::tcgen05_fence_after_thread_sync();
    ptx::tcgen05_dealloc<kGroup>(cta.tensor, kColumns);
  }
}
#undef JAX_FP4_CLUSTER

}  // namespace jax_fp4

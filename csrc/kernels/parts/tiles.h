// Which tiles a CTA (or a pair) computes: that of its own number, and then those of clusters that it
// takes over before they are launched (PTX ISA 9.7.13.17, cluster launch control).
//
// The producer asks for the next tile when it starts one; the answer comes to the shared memory of
// every CTA of the cluster, where all roles read it when they are through with theirs. Answers have a ring
// of slots, so that the producer may be that many tiles ahead.
#pragma once

#include "kernels/parts/pipeline.h"
#include "ptx/cluster.h"
#include "ptx/clusterlaunchcontrol.h"

namespace jax_fp4 {

inline constexpr u32 kTileSlots = 4;

// One arrival at a barrier of the leader, CTA 0 of a pair.
template <u32 kCtas>
__device__ inline void arrive_at_leader(u32 barrier) {
  if constexpr (kCtas == 2)
    ptx::mbarrier_arrive_cluster(ptx::mapa_shared_cluster(barrier, 0));
  else
    ptx::mbarrier_arrive(barrier);
}

// In shared memory, at a multiple of 16: kTileSlots barriers `next`, as many `taken`, the answers.
template <u32 kCtas>
class Tiles {
 public:
  static constexpr u32 kBytes = kTileSlots * (8 + 8 + 16);

  // `readers`: of an answer, in all CTAs of the cluster.
  __device__ static void initialize(u32 at, u32 readers) {
    for (u32 slot = 0; slot < kTileSlots; ++slot) {
      ptx::mbarrier_init(at + 8 * slot, 1);
      ptx::mbarrier_init(at + 8 * (kTileSlots + slot), readers);
    }
  }

  __device__ Tiles(u32 at, u32 rank) : at_(at), rank_(rank), index_(blockIdx.x / kCtas) {}
  __device__ bool more() const { return index_ != ptx::kNoCluster; }
  __device__ u32 index() const { return index_; }

  // For the producer of each CTA, once before advance(): asks which tile is next.
  __device__ void request() const {
    // All have read the answer that was here.
    if (rank_ == 0) wait<kCtas == 2>(taken(), place_.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(next(), 16);
    if (rank_ != 0) return;
    if constexpr (kCtas == 2)
      ptx::clusterlaunchcontrol_try_cancel_multicast(answer(), next());
    else
      ptx::clusterlaunchcontrol_try_cancel(answer(), next());
  }

  // kWarp: all lanes of a warp do this together, as one reader.
  template <bool kWarp = false>
  __device__ void advance() {
    wait<kCtas == 2>(next(), place_.parity);
    const u32 first = ptx::clusterlaunchcontrol_query_cancel(answer());
    index_ = first == ptx::kNoCluster ? first : first / kCtas;
    // 9.7.13.4: this read precedes the next answer, which is written in the asynchronous proxy.
    ptx::fence_proxy_async_shared_cta();
    if constexpr (kWarp) __syncwarp();
    if (!kWarp || threadIdx.x % 32 == 0) arrive_at_leader<kCtas>(taken());
    place_.advance();
  }

 private:
  __device__ u32 next() const { return at_ + 8 * place_.slot; }
  __device__ u32 taken() const { return at_ + 8 * (kTileSlots + place_.slot); }
  __device__ u32 answer() const { return at_ + 16 * (kTileSlots + place_.slot); }

  u32 at_, rank_, index_;
  RingPlace<kTileSlots> place_;
};

}  // namespace jax_fp4

// Rings of slots in shared or tensor memory that one role fills and another empties.
//
// Each slot has two mbarriers: `full` and `empty`. A role walks the ring with a place of its own; the
// filling role waits for `empty` with the opposite parity, so that its first round passes.
#pragma once

#include "ptx/mbarrier.h"

namespace jax_fp4 {

// Where a role is in a ring of kSlots.
template <u32 kSlots>
struct RingPlace {
  u32 slot = 0;
  u32 parity = 0;  // of the phase that completes when the other role has done this round

  __device__ void advance() {
    if (++slot < kSlots) return;
    slot = 0;
    parity ^= 1;
  }
};

// Returns when the phase of this parity has completed. kCluster: the arrivals may come from another
// CTA of the cluster.
template <bool kCluster = false>
__device__ inline void wait(u32 barrier, u32 parity) {
  if constexpr (kCluster) {
    while (!ptx::mbarrier_try_wait_parity_cluster(barrier, parity)) {
    }
  } else {
    while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
    }
  }
}

}  // namespace jax_fp4

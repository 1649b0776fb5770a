// Barriers in shared memory that count arrivals and bytes (PTX ISA 9.7.13.15). One function an
// instruction, named as it.
//
// A barrier is 8 bytes, aligned to 8. A phase completes when all arrivals and all expected bytes
// have come; phases have the parities 0, 1, 0, ... Addresses are 32-bit shared ones: of the CTA, or
// of the cluster (mapa) where a comment says so. Any single thread may execute any of these.
#pragma once

#include "numerics/base.h"

namespace jax_fp4::ptx {

// Phase 0, `count` arrivals a phase (9.7.13.15.9). Others see it after fence_mbarrier_init or a barrier
// of the CTA.
__device__ inline void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes this thread's mbarrier_init visible to the cluster and to asynchronous copies (9.7.13.4).
__device__ inline void fence_mbarrier_init_release_cluster() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival; what this thread did before is visible to those who see the phase complete
// (9.7.13.15.13).
__device__ inline void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same at an address of the cluster, for a waiter in another CTA.
__device__ inline void mbarrier_arrive_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}

// Expects `bytes` more in this phase, then arrives once.
__device__ inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

// Whether the phase of this parity has completed; waits a while for it, and may give up early, so
// it is called in a loop (9.7.13.15.16). True at once for parity 1 of a fresh barrier. Acquires
// what the arriving threads released: in the CTA, or in the cluster.
__device__ inline bool mbarrier_try_wait_parity(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ inline bool mbarrier_try_wait_parity_cluster(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

}  // namespace jax_fp4::ptx

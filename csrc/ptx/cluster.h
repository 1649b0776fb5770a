// Threads among others: the elected lane, barriers, addresses and fences of CTA and cluster,
// dependent grids. One function an instruction, named as it.
#pragma once

#include "numerics/base.h"

namespace jax_fp4::ptx {

// True in one lane of the warp, the same each time; all 32 lanes execute it (PTX ISA 9.7.13.14).
__device__ inline bool elect_sync() {
  u32 elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xFFFFFFFF;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// This CTA's number in its cluster.
__device__ inline u32 cluster_ctarank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The cluster's address of what has the given shared address in CTA `rank` (9.7.9.23).
__device__ inline u32 mapa_shared_cluster(u32 address, u32 rank) {
  u32 d;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(address), "r"(rank));
  return d;
}

// A barrier of all threads of the cluster, in two parts; whole warps execute it (9.7.13.3).
__device__ inline void barrier_cluster_arrive_release_aligned() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Orders no accesses.
__device__ inline void barrier_cluster_arrive_relaxed_aligned() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void barrier_cluster_wait_acquire_aligned() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Makes this thread's accesses to shared memory visible to asynchronous copies and tensor cores
// that are started afterwards (9.7.13.4).
__device__ inline void fence_proxy_async_shared_cta() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Waits until the grids that this one depends on have ended and their memory is visible; at once
// where there are none (9.7.13.13). Chips before sm_90 start no grid before those that it depends on have
// ended: nothing to do.
__device__ inline void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets dependent grids start when all CTAs have said so or ended. Promises nothing about memory.
__device__ inline void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace jax_fp4::ptx

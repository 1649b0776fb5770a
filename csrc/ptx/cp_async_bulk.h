// Copies by the TMA unit (PTX ISA 9.7.9.25). One function an instruction, named as it. One thread
// executes each; the copy runs in the asynchronous proxy.
//
// `map`: a CUtensorMap in parameter, constant or global memory. Coordinates are elements, the
// innermost dimension first. What lies outside the tensor arrives as zeros, counted as bytes, and
// is not stored.
#pragma once

#include "numerics/base.h"

namespace jax_fp4::ptx {

// Global to shared memory of this CTA; `barrier`, of this CTA too, gets the bytes (9.7.9.25.5.2).
__device__ inline void cp_async_bulk_tensor_3d_shared_global(u32 to, const void* map, i32 c0,
                                                             i32 c1, i32 c2, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier)
      : "memory");
}
__device__ inline void cp_async_bulk_tensor_4d_shared_global(u32 to, const void* map, i32 c0,
                                                             i32 c1, i32 c2, i32 c3, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
      : "memory");
}

// The same for a pair of CTAs: `barrier` is an address of the cluster, in either CTA of the pair.
__device__ inline void cp_async_bulk_tensor_3d_shared_global_cta_group_2(u32 to, const void* map,
                                                                         i32 c0, i32 c1, i32 c2,
                                                                         u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".cta_group::2 [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier)
      : "memory");
}
__device__ inline void cp_async_bulk_tensor_4d_shared_global_cta_group_2(u32 to, const void* map,
                                                                         i32 c0, i32 c1, i32 c2,
                                                                         i32 c3, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".cta_group::2 [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
      : "memory");
}

// The same to the address `to` of each CTA that has its bit in `ctas`. The bytes of each count at the barrier of its
// pair that lies as `barrier` does: in the CTA of the same parity, at the same offset (9.7.9.25.5.2).
__device__ inline void cp_async_bulk_tensor_4d_shared_global_multicast_cta_group_2(
    u32 to, const void* map, i32 c0, i32 c1, i32 c2, i32 c3, u32 barrier, u16 ctas) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.cta_group::2 [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "h"(ctas)
      : "memory");
}

// Shared to global memory, in the bulk group that this thread commits next.
__device__ inline void cp_async_bulk_tensor_3d_global_shared(const void* map, i32 c0, i32 c1,
                                                             i32 c2, u32 from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(
          map),
      "r"(c0), "r"(c1), "r"(c2), "r"(from)
      : "memory");
}

__device__ inline void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's groups have not yet read their sources.
template <int kPending>
__device__ inline void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace jax_fp4::ptx

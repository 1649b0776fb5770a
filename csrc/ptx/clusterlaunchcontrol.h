// Taking over the work of clusters that have not been launched yet (PTX ISA 9.7.13.17 and 18).
#pragma once

#include "numerics/base.h"

namespace jax_fp4::ptx {

// Asks for a cluster of this grid; the answer, 16 bytes, comes to `response` through the asynchronous
// proxy and counts at `barrier`. One thread; not again after an answer that there is none.
__device__ inline void clusterlaunchcontrol_try_cancel(u32 response, u32 barrier) {
  asm volatile(
      "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 "
      "[%0], [%1];" ::"r"(response),
      "r"(barrier)
      : "memory");
}
// The same; the answer comes to the same addresses in each CTA of the cluster.
__device__ inline void clusterlaunchcontrol_try_cancel_multicast(u32 response, u32 barrier) {
  asm volatile(
      "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
      ".multicast::cluster::all.b128 [%0], [%1];" ::"r"(response),
      "r"(barrier)
      : "memory");
}

// What an answer says: blockIdx.x of the cluster's first CTA, or kNoCluster. Only a register of 128
// bits can be asked, so the load is here too.
inline constexpr u32 kNoCluster = ~0u;
__device__ inline u32 clusterlaunchcontrol_query_cancel(u32 response) {
  u32 first;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b128 r;\n"
      "ld.shared.b128 r, [%1];\n"
      "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, r;\n"
      "mov.u32 %0, 0xFFFFFFFF;\n"
      "@p clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %0, r;\n"
      "}"
      : "=r"(first)
      : "r"(response)
      : "memory");
  return first;
}

}  // namespace jax_fp4::ptx

// Fifth-generation tensor cores and tensor memory (PTX ISA 9.7.16). One function an instruction,
// named as it. kGroup: how many CTAs take part, 1 or 2; a kernel uses one value for everything.
//
// Tensor memory has 128 lanes of 512 columns of 32 bits; an address is lane << 16 | column. `whole
// warp`: all 32 lanes execute it together. `one thread`: one of all CTAs of the group.
#pragma once

#include "numerics/base.h"

namespace jax_fp4::ptx {

// ---- Allocation (9.7.16.7). Whole warp, one of each CTA of the group. ---------------------------

// `columns`: a power of two from 32 to 512. Waits for them; writes the address to shared memory.
template <int kGroup>
__device__ inline void tcgen05_alloc(u32 to, u32 columns) {
  asm volatile("tcgen05.alloc.cta_group::%2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(to),
               "r"(columns), "n"(kGroup)
               : "memory");
}

// All that was allocated must be given back before the CTA ends.
template <int kGroup>
__device__ inline void tcgen05_dealloc(u32 address, u32 columns) {
  asm volatile("tcgen05.dealloc.cta_group::%2.sync.aligned.b32 %0, %1;" ::"r"(address),
               "r"(columns), "n"(kGroup)
               : "memory");
}

// This CTA will not allocate again, so that the next one on the SM may.
template <int kGroup>
__device__ inline void tcgen05_relinquish_alloc_permit() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::%0.sync.aligned;" ::"n"(kGroup)
               : "memory");
}

// ---- Loads (9.7.16.8). Whole warp; warp w of a CTA reaches lanes 32 (w % 4) to +31. -------------

// 32 columns of lane T into the registers of thread T. They must not be used, nor may the columns be
// overwritten, before tcgen05_wait_ld.
__device__ inline void tcgen05_ld_32x32b_x32(u32 (&r)[32], u32 address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]),
        "=r"(r[7]), "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]),
        "=r"(r[14]), "=r"(r[15]), "=r"(r[16]), "=r"(r[17]), "=r"(r[18]), "=r"(r[19]), "=r"(r[20]),
        "=r"(r[21]), "=r"(r[22]), "=r"(r[23]), "=r"(r[24]), "=r"(r[25]), "=r"(r[26]), "=r"(r[27]),
        "=r"(r[28]), "=r"(r[29]), "=r"(r[30]), "=r"(r[31])
      : "r"(address)
      : "memory");
}

// Waits for all loads of this thread. The registers pass through, so that the compiler keeps their
// uses behind it.
__device__ inline void tcgen05_wait_ld(u32 (&r)[32]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;"
               : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3]), "+r"(r[4]), "+r"(r[5]), "+r"(r[6]),
                 "+r"(r[7]), "+r"(r[8]), "+r"(r[9]), "+r"(r[10]), "+r"(r[11]), "+r"(r[12]),
                 "+r"(r[13]), "+r"(r[14]), "+r"(r[15]), "+r"(r[16]), "+r"(r[17]), "+r"(r[18]),
                 "+r"(r[19]), "+r"(r[20]), "+r"(r[21]), "+r"(r[22]), "+r"(r[23]), "+r"(r[24]),
                 "+r"(r[25]), "+r"(r[26]), "+r"(r[27]), "+r"(r[28]), "+r"(r[29]), "+r"(r[30]),
                 "+r"(r[31])
               :
               : "memory");
}

// ---- Order between threads (9.7.16.6). ----------------------------------------------------------

// Before a barrier: this thread's earlier operations precede what others do after it.
__device__ inline void tcgen05_fence_before_thread_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
// After a barrier: this thread's later operations follow what others did before it.
__device__ inline void tcgen05_fence_after_thread_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// ---- Copy and product. One thread; asynchronous. ------------------------------------------------

// 32 rows of 16 bytes of shared memory to 32 lanes x 4 columns, and again to each of the other three
// quarters of the lanes; in each CTA of the group, at the same addresses (9.7.16.9).
template <int kGroup>
__device__ inline void tcgen05_cp_32x128b_warpx4(u32 to, u64 descriptor) {
  asm volatile("tcgen05.cp.cta_group::%2.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(descriptor),
               "n"(kGroup)
               : "memory");
}

enum class MmaKind { mxf4nvf4_block16, mxf4_block32, mxf8f6f4_block32 };

// d = a * b, plus d where `accumulate`; a and b in shared memory, times the block scales at sfa and
// sfb in tensor memory (9.7.16.10).
template <MmaKind kKind, int kGroup>
__device__ inline void tcgen05_mma_block_scale(u32 d, u64 a, u64 b, u32 instruction, u32 sfa,
                                               u32 sfb, bool accumulate) {
  if constexpr (kKind == MmaKind::mxf4nvf4_block16)
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %6, 0;\n"
        "tcgen05.mma.cta_group::%7.kind::mxf4nvf4.block_scale.block16 "
        "[%0], %1, %2, %3, [%4], [%5], p;\n"
        "}" ::"r"(d),
        "l"(a), "l"(b), "r"(instruction), "r"(sfa), "r"(sfb), "r"(static_cast<u32>(accumulate)),
        "n"(kGroup)
        : "memory");
  else if constexpr (kKind == MmaKind::mxf4_block32)
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %6, 0;\n"
        "tcgen05.mma.cta_group::%7.kind::mxf4.block_scale.block32 "
        "[%0], %1, %2, %3, [%4], [%5], p;\n"
        "}" ::"r"(d),
        "l"(a), "l"(b), "r"(instruction), "r"(sfa), "r"(sfb), "r"(static_cast<u32>(accumulate)),
        "n"(kGroup)
        : "memory");
  else
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %6, 0;\n"
        "tcgen05.mma.cta_group::%7.kind::mxf8f6f4.block_scale.block32 "
        "[%0], %1, %2, %3, [%4], [%5], p;\n"
        "}" ::"r"(d),
        "l"(a), "l"(b), "r"(instruction), "r"(sfa), "r"(sfb), "r"(static_cast<u32>(accumulate)),
        "n"(kGroup)
        : "memory");
}

// One arrival at a barrier of this CTA when all this thread's earlier copies and products are done.
// Implies tcgen05_fence_before_thread_sync (9.7.16.12).
template <int kGroup>
__device__ inline void tcgen05_commit(u32 barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::%1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier),
      "n"(kGroup)
      : "memory");
}
// The same at the barrier of this address in each CTA of the cluster whose bit is set.
template <int kGroup>
__device__ inline void tcgen05_commit_multicast(u32 barrier, u16 ctas) {
  asm volatile(
      "tcgen05.commit.cta_group::%2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
      "[%0], %1;" ::"r"(barrier),
      "h"(ctas), "n"(kGroup)
      : "memory");
}

}  // namespace jax_fp4::ptx

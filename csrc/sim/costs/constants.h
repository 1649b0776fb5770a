// Every figure of the cycle model, each with its source. The model's rules: timing.h; docs/simulator.md, "Costs".
//
//   [spec]   NVIDIA's data sheets and CUDA programming guide
//   [ubench] a published microbenchmark: Luo et al., "Dissecting the NVIDIA Hopper Architecture through
//            Microbenchmarking", 2025 (arXiv 2501.12084); Jarmusch et al. on B200 (arXiv 2512.02189) and on
//            GB203 (arXiv 2507.10789); SemiAnalysis, "Dissecting Nvidia Blackwell", 2026
//   [recall] as [ubench] or [spec], quoted from memory and not looked up again: to be checked first
//   [assume] no public figure was found. These are round numbers of the right order; a result that hangs
//            on one of them is not to be relied upon
//
// None of them was fitted to the speed of a kernel. Cycles are those of the SM clock.
#pragma once

#include "numerics/base.h"

namespace jax_fp4::sim::costs {

// ---- A chip

struct ChipConstants {
  int chip;  // compute capability times ten
  u32 sms;
  double clock_hz;  // boost clock; what power allows under load is not modelled
  double dram_bytes_per_second;
  u64 l2_bytes;
  u32 threads_per_sm;
  u32 dies;
  // Dense multiply-adds of the tensor cores of an SM, in FLOP per cycle (two for each multiply-add), by
  // bits of an element: 32 (TF32), 16, 8 and 6, 4.
  double tensor_32, tensor_16, tensor_8, tensor_4;
  // The same through mma.sync.
  double warp_mma_16, warp_mma_8, warp_mma_4;
};

inline constexpr ChipConstants kChips[] = {
    // B200: 148 SMs, 1.965 GHz, 126 MB, 8 TB/s [spec]. Tensor cores: 2.25 and 9 PFLOP/s dense for 16 and 4
    // bits [spec] are 8192 and 32768 a cycle and SM at 1.85 GHz; FlashAttention-4 counts with 8192 as well.
    // mma.sync: the rate of A100's tensor cores, 2048 for 16 bits [assume].
    {100, 148, 1.965e9, 8e12, u64{126} << 20, 2048, 2, 4096, 8192, 16384, 32768, 2048, 4096, 4096},
    // B300, K = 64 instructions: as B200 (Triton's K96_EXPLORATION.md).
    {103, 148, 1.92e9, 8e12, u64{126} << 20, 2048, 2, 4096, 8192, 16384, 32768, 2048, 4096, 4096},
    // RTX 5090: 170 SMs, 2.41 GHz boost, 1.79 TB/s, 96 MB [spec]; 4096, 1024 and 512 FLOP a cycle and SM for
    // 4, 8 and 16 bits with f32 sums, measured by the projects ninfer and imp [ubench]. No tcgen05.
    {120, 170, 2.41e9, 1.79e12, u64{96} << 20, 1536, 1, 0, 0, 0, 0, 512, 1024, 4096},
    // GB10: 48 SMs, 273 GB/s, 24 MB [spec]; 511 TFLOP/s dense for 4 bits (project nvfp4bench) [ubench].
    {121, 48, 2.5e9, 2.73e11, u64{24} << 20, 1536, 1, 0, 0, 0, 0, 512, 1024, 4096},
};

inline const ChipConstants* constants_of(int chip) {
  for (const ChipConstants& c : kChips)
    if (c.chip == chip) return &c;
  return nullptr;
}

// ---- Issue. An SM has four sub-partitions; each issues one warp instruction a cycle [spec].

inline constexpr u32 kSubPartitions = 4;

// Cycles for which a warp instruction occupies its unit in a sub-partition: 128 / (results a cycle and SM), of
// the table of the programming guide ("Throughput of native arithmetic instructions", compute capability 9.0)
// [recall].
inline constexpr u32 kFloatCycles = 1;    // f32, f16x2 and bf16x2 add, multiply, fma: 128
inline constexpr u32 kIntegerCycles = 2;  // add, logic, shifts, comparisons, min and max: 64
inline constexpr u32 kConvertCycles = 2;  // conversions: 64
inline constexpr u32 kSpecialCycles = 8;  // reciprocal, ex2, popc, clz and the like: 16
inline constexpr u32 kShuffleCycles = 4;  // shfl, vote, redux: 32
inline constexpr u32 kDoubleCycles = 2;   // f64: 64

// Instructions that a PTX instruction becomes where it is a sequence: order of ptxas's output [assume].
inline constexpr u32 kDivideSlots = 10;  // div, rcp, sqrt with IEEE rounding
inline constexpr u32 kIntegerDivideSlots = 20;
inline constexpr u32 kWideSlots = 2;  // 64-bit integer arithmetic and logic

// Cycles until a dependent instruction may issue.
inline constexpr u32 kArithmeticLatency = 4;  // f32 and int32 [recall: 2507.10789]
inline constexpr u32 kConvertLatency = 8;     // [assume]
inline constexpr u32 kSpecialLatency = 18;    // [assume]
inline constexpr u32 kShuffleLatency = 24;    // [assume]
inline constexpr u32 kDoubleLatency = 8;      // [assume]
inline constexpr u32 kWarpMmaLatency = 33;    // mma.sync [recall: 2501.12084]
inline constexpr u32 kBranchLatency =
    8;  // until the warp's next instruction, taken or not [assume]
inline constexpr u32 kBarrierLatency =
    20;  // from the last arrival until a waiting warp goes on [assume]

// After which an mbarrier.try_wait without a hint gives up ("system-dependent time limit", PTX ISA). Nothing public
// says how long that is; CUTLASS uses the instruction to look ahead while there is work to be issued, so it is
// short beside a stage of a product [assume].
inline constexpr u32 kTryWaitCycles = 20;
// A warp that tries again within so many cycles is in a loop that waits: it then waits until the phase completes.
inline constexpr u32 kTryAgainCycles = 100;

// ---- Shared memory: 32 banks of 4 bytes, one wavefront a cycle [spec].

inline constexpr u32 kBanks = 32;
inline constexpr u32 kBankBytes = 4;
inline constexpr double kSharedBytesPerCycle = 128;
inline constexpr u32 kSharedLatency = 29;  // [recall: 2501.12084]

// ---- L2 and DRAM

inline constexpr u32 kSectorBytes = 32;  // [spec]
inline constexpr u32 kLineBytes = 128;   // [spec]
// Between an SM and L2, in each direction; of A100's white paper, and nothing says that it has changed [spec].
inline constexpr double kPortBytesPerCycle = 64;
inline constexpr double kL2Latency = 273;  // [recall: 2501.12084]
inline constexpr double kDramLatency =
    659;  // of all: through L2 [recall: order of 2501.12084, 2512.02189]

// From a die of a B200 to the L2 and the memory of the other one, on top [ubench: SemiAnalysis]. Which die holds an
// address: the parity of its 4 KiB page's number [assume].
inline constexpr double kFarLatency = 300;
inline constexpr u64 kPageBytes = 4096;

// ---- Asynchronous engines

// From the instruction to the first request, and from the last byte to the mbarrier, together: a tensor copy takes
// about this much longer than a load of the same data [recall: 2501.12084].
inline constexpr double kBulkLatency = 170;
inline constexpr double kBulkIssueCycles = 4;  // between two copies of one SM [assume]
// tcgen05.mma reads both operands from shared memory at 128 bytes a cycle and is bound by that for N < 128
// [ubench: SemiAnalysis]; the formula is FlashAttention-4's. What follows is [assume]:
inline constexpr double kTensorIssueLatency = 16;  // until an idle pipe starts
inline constexpr double kTensorLatency = 32;  // from the last product until a commit can see it
inline constexpr double kTensorMemoryBytesPerCycle =
    512;                                            // 128 lanes of 4 bytes; a quarter for each warp
inline constexpr double kTensorMemoryLatency = 32;  // tcgen05.ld, on top of its words
inline constexpr double kSignalLatency = 20;  // of commit, st.async and the like to an mbarrier
inline constexpr double kLaunchControlLatency = 400;  // try_cancel

// ---- CTAs

inline constexpr u32 kCtasPerSm = 32;  // at most [spec]
inline constexpr double kCtaLaunchCycles =
    500;  // from a free place to a CTA's first instruction [assume]

}  // namespace jax_fp4::sim::costs

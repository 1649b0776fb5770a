// Rows of packed codes to rows of a larger pitch, zeros behind them.
//
// For 4-bit codes beside 6- or 8-bit ones, where K is no multiple of 128: the tensor map that expands
// them to bytes wants whole spans of 128 elements (PTX ISA 5.5.8, .b4x16_p64), and rows are packed to
// 32. A thread moves 16 bytes.
#include "kernels/relayout_params.h"

namespace jax_fp4 {

extern "C" __global__ void __launch_bounds__(kRelayoutThreads)
    JAX_FP4_KERNEL(const __grid_constant__ PadRowsParams p) {
  const u32 per_row = p.to_bytes / 16, given = p.from_bytes / 16;
  const u64 items = pad_rows_items(p);
  for (u64 item = static_cast<u64>(blockIdx.x) * kRelayoutThreads + threadIdx.x; item < items;
       item += static_cast<u64>(gridDim.x) * kRelayoutThreads) {
    const u64 row = item / per_row;
    const u32 i = static_cast<u32>(item - row * per_row);
    reinterpret_cast<uint4*>(p.to)[item] =
        i < given ? reinterpret_cast<const uint4*>(p.from)[row * given + i] : uint4{0, 0, 0, 0};
  }
}

}  // namespace jax_fp4

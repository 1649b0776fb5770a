// GEMM kernels in plain C++, written so that compilers vectorize them for any machine.
//
//   panel group   f32 [k][16 rows], both sides
//   multiply      4 x 16 sums in registers, k innermost
#include <algorithm>

#include "cpu/gemm_kernels.h"

namespace jax_fp4::cpu {
namespace {

void pack(const Rows& x, const i32* base, i64 group, i64 k0, i64 steps, void* panel) {
  float* out = static_cast<float*>(panel);
  std::fill(out, out + steps * kStep * kGroup, 0.0f);
  const i64 end = std::min(x.k, k0 + steps * kStep);
  const i64 rows = std::min(kGroup, x.rows - group * kGroup);
  with_element(x.format.element, [&]<Element element>() {
    for (i64 r = 0; r < rows; ++r) {
      const i64 row = group * kGroup + r;
      const u8* codes = x.codes(row);
      const ScaleRow bytes = scale_row(x, row);
      for (i64 k = k0; k < end;) {
        const float scale = panel_scale(x.format.scale, bytes[k / x.format.block], base[row]);
        const i64 block_end = std::min(end, k / x.format.block * x.format.block + x.format.block);
        for (; k < block_end; ++k)
          out[(k - k0) * kGroup + r] = kValues<element>[load_code(element, codes, k)] * scale;
      }
    }
  });
}

constexpr int kTileRows = 4;

void multiply_tile(const float* left, const float* right, i64 depth, bool first, float* sums) {
  float acc[kTileRows][kGroup] = {};
  if (!first)
    for (int i = 0; i < kTileRows; ++i)
      for (int j = 0; j < kGroup; ++j) acc[i][j] = sums[i * kGroup + j];
  for (i64 k = 0; k < depth; ++k) {
    // Unrolled here, `acc` stays in registers; GCC left to itself keeps it in memory (7x slower).
#pragma GCC unroll 4
    for (int i = 0; i < kTileRows; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < kGroup; ++j) acc[i][j] += left[k * kGroup + i] * right[k * kGroup + j];
  }
  for (int i = 0; i < kTileRows; ++i)
    for (int j = 0; j < kGroup; ++j) sums[i * kGroup + j] = acc[i][j];
}

void multiply(const PanelBlock& block) {
  const i64 depth = block.steps * kStep;
  for (i64 l = 0; l < block.left_groups; ++l)
    for (i64 r = 0; r < block.right_groups; ++r)
      for (int i = 0; i < kGroup; i += kTileRows)
        multiply_tile(static_cast<const float*>(block.left) + l * depth * kGroup + i,
                      static_cast<const float*>(block.right) + r * depth * kGroup, depth,
                      block.first,
                      block.sums + (l * block.right_groups + r) * kGroup * kGroup + i * kGroup);
}

void finish(const Epilogue& epilogue, i64 row, i64 col, i64 count, const float* sums, i64 pitch) {
  for (i64 j = 0; j < count; ++j) {
    const float sum = sums[j / kGroup * pitch + j % kGroup];
    finish_one(epilogue, row, col + j, apply_powers(epilogue, row, col + j, sum));
  }
}

}  // namespace

const PanelKernels& portable_panel_kernels() {
  static const PanelKernels kernels = {sizeof(float), pack, pack, multiply, finish};
  return kernels;
}

}  // namespace jax_fp4::cpu

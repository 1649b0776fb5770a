// GEMM kernels for the AMX tile unit (bf16 products, f32 sums).
//
// The panels are those of gemm_avx512_bf16.cc: one step of a group is one tile, 16 rows of 64 bytes.
//
//   tmm0-3  sums of 2 x 2 groups     tmm4-5  left     tmm6-7  right
//
// TDPBF16PS adds the 16 even and the 16 odd products of a step apart, each in order, then both
// sums, then that to the accumulator. It ignores MXCSR, rounds to nearest and flushes subnormals,
// which do not occur (kTopExponent).
#if defined(__x86_64__)

#include <immintrin.h>

#include "cpu/gemm_kernels.h"

#if defined(__clang__)
#pragma clang attribute push(                                                                  \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,fma,f16c," \
                          "amx-tile,amx-bf16"))),                                              \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,fma,f16c,amx-tile,amx-bf16")
#endif

namespace jax_fp4::cpu {
namespace {

constexpr i64 kTileBytes = 1024;
constexpr i64 kTileRowBytes = 64;

struct alignas(64) TileConfig {
  u8 palette = 1;
  u8 start_row = 0;
  u8 reserved[14] = {};
  u16 row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  u8 rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);
constexpr TileConfig kConfig;

// kLeft x kRight groups.
template <int kLeft, int kRight>
void multiply_tile(const u8* left, const u8* right, i64 pitch, i64 steps, bool first, float* sums,
                   i64 sums_pitch) {
  constexpr int kTile = kGroup * kGroup;
  float* upper = sums;
  float* lower = sums + sums_pitch;
  if (first) {
    _tile_zero(0);
    if constexpr (kRight == 2) _tile_zero(1);
    if constexpr (kLeft == 2) _tile_zero(2);
    if constexpr (kLeft == 2 && kRight == 2) _tile_zero(3);
  } else {
    _tile_loadd(0, upper, kTileRowBytes);
    if constexpr (kRight == 2) _tile_loadd(1, upper + kTile, kTileRowBytes);
    if constexpr (kLeft == 2) _tile_loadd(2, lower, kTileRowBytes);
    if constexpr (kLeft == 2 && kRight == 2) _tile_loadd(3, lower + kTile, kTileRowBytes);
  }
  for (i64 s = 0; s < steps; ++s) {
    _tile_loadd(4, left, kTileRowBytes);
    _tile_loadd(6, right, kTileRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kRight == 2) {
      _tile_loadd(7, right + pitch, kTileRowBytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kLeft == 2) {
      _tile_loadd(5, left + pitch, kTileRowBytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kRight == 2) _tile_dpbf16ps(3, 5, 7);
    }
    left += kTileBytes;
    right += kTileBytes;
  }
  _tile_stored(0, upper, kTileRowBytes);
  if constexpr (kRight == 2) _tile_stored(1, upper + kTile, kTileRowBytes);
  if constexpr (kLeft == 2) _tile_stored(2, lower, kTileRowBytes);
  if constexpr (kLeft == 2 && kRight == 2) _tile_stored(3, lower + kTile, kTileRowBytes);
}

void multiply(const PanelBlock& block) {
  const i64 pitch = block.steps * kTileBytes;
  const i64 sums_pitch = block.right_groups * kGroup * kGroup;
  _tile_loadconfig(&kConfig);
  for (i64 l = 0; l < block.left_groups; l += 2) {
    const bool two_left = l + 1 < block.left_groups;
    const u8* left = static_cast<const u8*>(block.left) + l * pitch;
    for (i64 r = 0; r < block.right_groups; r += 2) {
      const bool two_right = r + 1 < block.right_groups;
      const auto tile = two_left ? (two_right ? multiply_tile<2, 2> : multiply_tile<2, 1>)
                                 : (two_right ? multiply_tile<1, 2> : multiply_tile<1, 1>);
      tile(left, static_cast<const u8*>(block.right) + r * pitch, pitch, block.steps, block.first,
           block.sums + l * sums_pitch + r * kGroup * kGroup, sums_pitch);
    }
  }
  _tile_release();
}

}  // namespace

const PanelKernels& amx_panel_kernels() {
  static const PanelKernels kernels = [] {
    PanelKernels same_panels = avx512_bf16_panel_kernels();
    same_panels.multiply = multiply;
    return same_panels;
  }();
  return kernels;
}

}  // namespace jax_fp4::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__

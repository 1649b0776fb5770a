// GEMM kernels for the AMX tile unit (bf16 products, f32 sums).
//
// Every code times its block scale has at most 8 significant bits and is a bf16; a product of two
// is exact in f32, so only additions round. One tile is 16 rows of 64 bytes:
//
//   left panel    per step of 32 k: [16 rows][32 k], as stored
//   right panel   per step of 32 k: [16 pairs of k][16 rows][2], the transpose
//   sums          [16][16] f32
//
//   tmm0-3  sums of 2 x 2 groups     tmm4-5  left     tmm6-7  right
//
// TDPBF16PS adds the 16 even and the 16 odd products of a step apart, each in order, then both
// sums, then that to the accumulator. It ignores MXCSR, rounds to nearest and flushes subnormals,
// which do not occur (kTopExponent).
#if defined(__x86_64__)

#include "cpu/gemm_avx512_decode.h"

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

template <Element element>
void pack_left_of(const Rows& x, const i32* base, i64 group, i64 k0, i64 steps, u8* out) {
  GroupScales scales;
  StepBuffer buffer;
  const int shift = block_shift(x.format);
  group_scales(x, base, group, k0 >> shift, (steps * kStep) >> shift, scales);
  const __m512i odd_words =
      _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                       25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  for (i64 s = 0; s < steps; ++s) {
    const Step step = stage_step<element>(x, group, k0 + s * kStep, buffer);
    const float* low = scales.value[(s * kStep) >> shift];
    const float* high = scales.value[(s * kStep + 16) >> shift];
    for (int r = 0; r < kGroup; ++r) {
      const u8* codes = step.bytes + r * step.pitch;
      __m512i row;
      if constexpr (element == Element::e2m1) {
        // Lane t holds codes 2t and 2t + 1.
        const __m512 scale =
            _mm512_mask_mov_ps(_mm512_set1_ps(low[r]), 0xFF00, _mm512_set1_ps(high[r]));
        const __m512i pairs =
            _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
        row = bf16_pairs(_mm512_mul_ps(e2m1_values(pairs), scale),
                         _mm512_mul_ps(e2m1_values(_mm512_srli_epi32(pairs, 4)), scale));
      } else {
        const __m512i bits = half_bits<element>(
            _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes))));
        const __m512 first = _mm512_mul_ps(low_half(bits), _mm512_set1_ps(low[r]));
        const __m512 second = _mm512_mul_ps(high_half(bits), _mm512_set1_ps(high[r]));
        row = _mm512_permutex2var_epi16(_mm512_castps_si512(first), odd_words,
                                        _mm512_castps_si512(second));
      }
      _mm512_storeu_si512(out + s * kTileBytes + r * kTileRowBytes, row);
    }
  }
}

void pack_left(const Rows& x, const i32* base, i64 group, i64 k0, i64 steps, void* panel) {
  with_element(x.format.element, [&]<Element element>() {
    pack_left_of<element>(x, base, group, k0, steps, static_cast<u8*>(panel));
  });
}

void pack_right(const Rows& x, const i32* base, i64 group, i64 k0, i64 steps, void* panel) {
  u8* out = static_cast<u8*>(panel);
  decode_group(x, base, group, k0, steps, [&](i64 step, int j, __m512 even, __m512 odd) {
    _mm512_storeu_si512(out + step * kTileBytes + j * kTileRowBytes, bf16_pairs(even, odd));
  });
}

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
  static const PanelKernels kernels = {2, pack_left, pack_right, multiply,
                                       avx512_panel_kernels().finish};
  return kernels;
}

}  // namespace jax_fp4::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__

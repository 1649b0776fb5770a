// GEMM kernels for AVX512_BF16 (bf16 products, f32 sums), and the bf16 panels that gemm_amx.cc shares.
//
// Every code times its block scale has at most 8 significant bits and is a bf16; a product of two
// is exact in f32, so only additions round.
//
//   left panel    per step of 32 k: [16 rows][32 k], as stored
//   right panel   per step of 32 k: [16 pairs of k][16 rows][2], the transpose
//   multiply      8 x 32 sums in registers: per pair of k, two loads and eight broadcasts feed 16
//                 VDPBF16PS
//
// VDPBF16PS adds the odd and then the even product of a pair to the accumulator. It ignores MXCSR,
// rounds to nearest and flushes subnormals, which do not occur (kTopExponent).
#if defined(__x86_64__)

#include <cstring>

#include "cpu/gemm_avx512_decode.h"

#if defined(__clang__)
#pragma clang attribute push(                                                                  \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,fma,f16c," \
                          "avx512bf16"))),                                                     \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,fma,f16c,avx512bf16")
#endif

namespace jax_fp4::cpu {
namespace {

constexpr i64 kStepBytes = 1024;  // of one group
constexpr i64 kLineBytes = 64;

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
      _mm512_storeu_si512(out + s * kStepBytes + r * kLineBytes, row);
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
    _mm512_storeu_si512(out + step * kStepBytes + j * kLineBytes, bf16_pairs(even, odd));
  });
}

constexpr int kTileRows = 8;

// kTileRows rows of a left group times kRight right groups.
template <int kRight>
void multiply_tile(const u8* left, const u8* right, i64 pitch, i64 steps, bool first, float* sums) {
  __m512 acc[kTileRows][kRight];
  for (int i = 0; i < kTileRows; ++i)
    for (int r = 0; r < kRight; ++r)
      acc[i][r] =
          first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * kGroup * kGroup + i * kGroup);
  for (i64 s = 0; s < steps; ++s, left += kStepBytes, right += kStepBytes) {
    for (int pair = 0; pair < kStep / 2; ++pair) {
      __m512i b[kRight];
      for (int r = 0; r < kRight; ++r)
        b[r] = _mm512_loadu_si512(right + r * pitch + pair * kLineBytes);
      for (int i = 0; i < kTileRows; ++i) {
        i32 both;
        std::memcpy(&both, left + i * kLineBytes + pair * 4, sizeof both);
        const __m512bh a = (__m512bh)_mm512_set1_epi32(both);
        for (int r = 0; r < kRight; ++r) acc[i][r] = _mm512_dpbf16_ps(acc[i][r], a, (__m512bh)b[r]);
      }
    }
  }
  for (int i = 0; i < kTileRows; ++i)
    for (int r = 0; r < kRight; ++r)
      _mm512_storeu_ps(sums + r * kGroup * kGroup + i * kGroup, acc[i][r]);
}

void multiply(const PanelBlock& block) {
  const i64 pitch = block.steps * kStepBytes;  // from group to group
  for (i64 r = 0; r < block.right_groups; r += 2) {
    const u8* right = static_cast<const u8*>(block.right) + r * pitch;
    const auto tile = r + 1 < block.right_groups ? multiply_tile<2> : multiply_tile<1>;
    for (i64 l = 0; l < block.left_groups; ++l)
      for (int i = 0; i < kGroup; i += kTileRows)
        tile(static_cast<const u8*>(block.left) + l * pitch + i * kLineBytes, right, pitch,
             block.steps, block.first,
             block.sums + (l * block.right_groups + r) * kGroup * kGroup + i * kGroup);
  }
}

}  // namespace

const PanelKernels& avx512_bf16_panel_kernels() {
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

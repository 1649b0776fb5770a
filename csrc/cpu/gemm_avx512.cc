// GEMM kernels for AVX-512.
//
//   panel group   f32 [k][16 rows], both sides
//   multiply      8 x 32 sums in registers: per k, two loads and eight broadcasts feed 16 FMAs
//   finish        16 outputs at a time (also used by gemm_amx.cc)
#if defined(__x86_64__)

#include "cpu/gemm_avx512_decode.h"

#if defined(__clang__)
#pragma clang attribute push(                                                                     \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,fma,f16c")
#endif

namespace jax_fp4::cpu {
namespace {

void pack(const Rows& x, const i32* base, i64 group, i64 k0, i64 steps, void* panel) {
  float* out = static_cast<float*>(panel);
  decode_group(x, base, group, k0, steps, [&](i64 step, int j, __m512 even, __m512 odd) {
    float* pair = out + (step * kStep + 2 * j) * kGroup;
    _mm512_storeu_ps(pair, even);
    _mm512_storeu_ps(pair + kGroup, odd);
  });
}

constexpr int kTileRows = 8;

// kTileRows rows of a left group times kRight right groups.
template <int kRight>
void multiply_tile(const float* left, const float* right, i64 right_pitch, i64 depth, bool first,
                   float* sums) {
  __m512 acc[kTileRows][kRight];
  for (int i = 0; i < kTileRows; ++i)
    for (int r = 0; r < kRight; ++r)
      acc[i][r] =
          first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * kGroup * kGroup + i * kGroup);
  for (i64 k = 0; k < depth; ++k) {
    __m512 b[kRight];
    for (int r = 0; r < kRight; ++r) b[r] = _mm512_loadu_ps(right + r * right_pitch + k * kGroup);
    for (int i = 0; i < kTileRows; ++i) {
      const __m512 a = _mm512_set1_ps(left[k * kGroup + i]);
      for (int r = 0; r < kRight; ++r) acc[i][r] = _mm512_fmadd_ps(a, b[r], acc[i][r]);
    }
  }
  for (int i = 0; i < kTileRows; ++i)
    for (int r = 0; r < kRight; ++r)
      _mm512_storeu_ps(sums + r * kGroup * kGroup + i * kGroup, acc[i][r]);
}

void multiply(const PanelBlock& block) {
  const i64 depth = block.steps * kStep;
  const i64 pitch = depth * kGroup;  // from group to group
  for (i64 r = 0; r < block.right_groups; r += 2) {
    const float* right = static_cast<const float*>(block.right) + r * pitch;
    const auto tile = r + 1 < block.right_groups ? multiply_tile<2> : multiply_tile<1>;
    for (i64 l = 0; l < block.left_groups; ++l)
      for (int i = 0; i < kGroup; i += kTileRows)
        tile(static_cast<const float*>(block.left) + l * pitch + i, right, pitch, depth,
             block.first, block.sums + (l * block.right_groups + r) * kGroup * kGroup + i * kGroup);
  }
}

__m512 load16(Dtype dtype, const void* array, i64 index, __mmask16 mask) {
  if (dtype == Dtype::f32)
    return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(array) + index);
  const __m256i bits = _mm256_maskz_loadu_epi16(mask, static_cast<const u16*>(array) + index);
  if (dtype == Dtype::f16) return _mm512_cvtph_ps(bits);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// encode_bf16 of numerics/minifloat.h.
__m256i bf16_nearest(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  rounded = _mm512_srli_epi32(rounded, 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(rounded);
}

void store16(Dtype dtype, void* array, i64 index, __mmask16 mask, __m512 value) {
  if (dtype == Dtype::f32) {
    _mm512_mask_storeu_ps(static_cast<float*>(array) + index, mask, value);
    return;
  }
  const __m256i bits = dtype == Dtype::bf16 ? bf16_nearest(value)
                                            : _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
  _mm256_mask_storeu_epi16(static_cast<u16*>(array) + index, mask, bits);
}

// sums * row * columns in double, rounded once.
__m512 apply_powers(__m512 sums, double row, const double* columns, __mmask16 mask) {
  const __m512d rows = _mm512_set1_pd(row);
  const auto half = [&](__m256 part, const double* column, __mmask8 mask8) {
    const __m512d power = _mm512_mul_pd(rows, _mm512_maskz_loadu_pd(mask8, column));
    return _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_cvtps_pd(part), power));
  };
  const __m256 low =
      half(_mm512_castps512_ps256(sums), columns, static_cast<__mmask8>(mask & 0xFF));
  const __m256 high =
      half(_mm512_extractf32x8_ps(sums, 1), columns + 8, static_cast<__mmask8>(mask >> 8));
  return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

void finish(const Epilogue& epilogue, i64 row, i64 col, i64 count, const float* sums, i64 pitch) {
  const __m512 alpha = _mm512_set1_ps(epilogue.alpha);
  for (i64 j = 0; j < count; j += kGroup, sums += pitch) {
    const i64 index = row * epilogue.n + col + j;
    const __mmask16 mask = static_cast<__mmask16>((1u << std::min(kGroup, count - j)) - 1);
    __m512 value = _mm512_maskz_loadu_ps(mask, sums);
    if (epilogue.power_a != nullptr)
      value = apply_powers(value, epilogue.power_a[row], epilogue.power_b + col + j, mask);
    value = _mm512_mul_ps(alpha, value);
    if (epilogue.bias != nullptr)
      value = _mm512_add_ps(value, load16(epilogue.bias_dtype, epilogue.bias, col + j, mask));
    if (epilogue.accumulate != nullptr)
      value =
          _mm512_add_ps(value, load16(epilogue.accumulate_dtype, epilogue.accumulate, index, mask));
    store16(epilogue.out_dtype, epilogue.out, index, mask, value);
  }
}

}  // namespace

const PanelKernels& avx512_panel_kernels() {
  static const PanelKernels kernels = {sizeof(float), pack, pack, multiply, finish};
  return kernels;
}

}  // namespace jax_fp4::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__

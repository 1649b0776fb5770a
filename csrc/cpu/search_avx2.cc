// The search for NVFP4 scales with AVX2, 8 blocks at a time.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "cpu/quantize_kernels.h"
#include "cpu/search.h"

#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

// In this order: each uses what the ones before it define.
// clang-format off
#include "cpu/quantize_avx2_unit.h"
#include "cpu/quantize_avx2_scale.h"
// clang-format on

namespace jax_fp4::cpu {
namespace {

// Of bytes below the NaN's.
inline V decoded(I bytes) {
  constexpr uint32_t kBias = static_cast<uint32_t>(127 - kE4M3.bias) << 23;
  const I normal = _mm256_add_epi32(_mm256_slli_epi32(bytes, 20), set1(kBias));
  const V subnormal = _mm256_mul_ps(_mm256_cvtepi32_ps(bytes), _mm256_set1_ps(0x1p-9f));
  return select(as_float(normal), subnormal, _mm256_cmpgt_epi32(set1(8), bytes));
}
// Magnitudes to the nearest E2M1 values, as Rounding does it: step by step for four vectors, since
// the processor looks ahead by a few instructions only.
inline void round_to_e2m1(V (&y)[4]) {
  V magic[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) y[i] = _mm256_min_ps(y[i], _mm256_set1_ps(kE2M1.max));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) magic[i] = _mm256_max_ps(y[i], _mm256_set1_ps(1.0f));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) magic[i] = _mm256_and_ps(magic[i], as_float(set1(kF32InfBits)));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) magic[i] = _mm256_mul_ps(magic[i], _mm256_set1_ps(0x1p22f));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) y[i] = _mm256_add_ps(y[i], magic[i]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) y[i] = _mm256_sub_ps(y[i], magic[i]);
}
inline V multipliers_of(V scale, float tensor_decode) {
  const V product = _mm256_mul_ps(scale, _mm256_set1_ps(tensor_decode));
  return minimum(_mm256_div_ps(_mm256_set1_ps(1.0f), product), kF32Max);
}

void search_unit(Dtype dtype, const uint8_t* x, float tensor_decode, uint8_t* scales,
                 float* multipliers) {
  Unit unit;
  load_blocks(dtype, unit, x, 16);
  const I base = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales)));
  const I fixed = _mm256_or_si256(_mm256_cmpeq_epi32(base, _mm256_setzero_si256()),
                                  _mm256_cmpgt_epi32(base, set1(kUE4M3NaN - 1)));
  // A scale that is fixed gets no candidate: its errors are NaN, which is not less.
  const V first = select(decoded(base), _mm256_set1_ps(kF32NaN), fixed);
  const V multiplier = multipliers_of(first, tensor_decode);
  for (int j = 0; j < 16; ++j) {
    const V magnitude = as_float(abs_bits(unit.x[j]));
    unit.x[j] = _mm256_mul_ps(magnitude, multiplier);
  }
  // All candidates first: one would wait for the divisions of another.
  constexpr int kCandidates = std::size(kSearchSteps);
  I byte[kCandidates];
  V ratio[kCandidates], inverse[kCandidates];
  for (int c = 0; c < kCandidates; ++c) {
    const I moved = _mm256_add_epi32(base, _mm256_set1_epi32(kSearchSteps[c]));
    byte[c] = _mm256_min_epi32(_mm256_max_epi32(moved, set1(1)), set1(kE4M3.max_code));
    ratio[c] = _mm256_div_ps(decoded(byte[c]), first);
    inverse[c] = _mm256_div_ps(_mm256_set1_ps(1.0f), ratio[c]);
  }
  I best = base;
  V least = as_float(set1(kF32InfBits));
  for (int c = 0; c < kCandidates; ++c) {
    V error = _mm256_setzero_ps();
    for (int j = 0; j < 16; j += 4) {
      V value[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) value[i] = _mm256_mul_ps(unit.x[j + i], inverse[c]);
      round_to_e2m1(value);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) value[i] = _mm256_mul_ps(value[i], ratio[c]);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) value[i] = _mm256_sub_ps(value[i], unit.x[j + i]);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) value[i] = _mm256_mul_ps(value[i], value[i]);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) error = _mm256_add_ps(error, value[i]);
    }
    const I better = as_int(_mm256_cmp_ps(error, least, _CMP_LT_OQ));
    best = select(best, byte[c], better);
    least = select(least, error, better);
  }
  store_bytes(scales, best);
  _mm256_storeu_ps(multipliers, multipliers_of(decoded(best), tensor_decode));
}

void search(Dtype dtype, const void* x, int64_t n, float tensor_decode, uint8_t* scales,
            float* multipliers) {
  int64_t b = 0;
  for (; n - b >= kLanes; b += kLanes)
    search_unit(dtype, at(dtype, x, 16 * b), tensor_decode, scales + b, multipliers + b);
  if (b == n) return;
  const auto count = static_cast<std::size_t>(n - b);
  const LastBlocks last(dtype, at(dtype, x, 16 * b), 16 * (n - b), 16);
  uint8_t last_scales[kLanes] = {};
  float last_multipliers[kLanes];
  std::memcpy(last_scales, scales + b, count);
  search_unit(dtype, last.data(), tensor_decode, last_scales, last_multipliers);
  std::memcpy(scales + b, last_scales, count);
  std::memcpy(multipliers + b, last_multipliers, count * sizeof(float));
}

}  // namespace

SearchKernel avx2_search() { return search; }

}  // namespace jax_fp4::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace jax_fp4::cpu {
SearchKernel avx2_search() { return portable_search(); }
}  // namespace jax_fp4::cpu

#endif

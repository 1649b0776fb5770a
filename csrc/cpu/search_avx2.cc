// The search for NVFP4 scales with AVX2, 8 blocks at a time.
#include <algorithm>
#include <array>
#include <cstring>

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

constexpr auto kUE4M3Values = [] {
  std::array<float, 256> values{};
  for (u32 i = 0; i < 256; ++i) values[i] = decode_ue4m3(i);
  return values;
}();

inline V decoded(I bytes) { return _mm256_i32gather_ps(kUE4M3Values.data(), bytes, 4); }
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
  I best = base;
  V least = as_float(set1(kF32InfBits));
  for (const int step : kSearchSteps) {
    const I moved = _mm256_add_epi32(base, _mm256_set1_epi32(step));
    const I byte = _mm256_min_epi32(_mm256_max_epi32(moved, set1(1)), set1(kE4M3.max_code));
    const V ratio = _mm256_div_ps(decoded(byte), first);
    const V inverse = _mm256_div_ps(_mm256_set1_ps(1.0f), ratio);
    V error = _mm256_setzero_ps();
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      const V y = _mm256_mul_ps(unit.x[j], inverse);
      const V value = Rounding<Element::e2m1>::nearest(y).value;
      const V difference = _mm256_sub_ps(_mm256_mul_ps(value, ratio), unit.x[j]);
      error = _mm256_add_ps(error, _mm256_mul_ps(difference, difference));
    }
    const I better = as_int(_mm256_cmp_ps(error, least, _CMP_LT_OQ));
    best = select(best, byte, better);
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

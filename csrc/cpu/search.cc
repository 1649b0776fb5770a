#include "cpu/search.h"

#include <algorithm>
#include <vector>

#include "cpu/quantize_kernels.h"

namespace jax_fp4::cpu {
namespace {

using std::int64_t, std::uint32_t, std::uint8_t;

uint8_t best_scale(const float* x, uint8_t base, float tensor_decode) {
  if (base == 0 || base >= kUE4M3NaN) return base;
  const float unit = decode_ue4m3(base);
  const float multiplier = minimum(1.0f / (unit * tensor_decode), kF32Max);
  uint8_t best = base;
  float least = f32_of(kF32InfBits);
  for (const int step : kSearchSteps) {
    const int byte = std::clamp(base + step, 1, static_cast<int>(kE4M3.max_code));
    const float ratio = decode_ue4m3(static_cast<uint32_t>(byte)) / unit;
    const float inverse = 1.0f / ratio;
    float error = 0.0f;
    for (int i = 0; i < 16; ++i) {
      const float relative = absolute(x[i]) * multiplier;
      const float value = decode(kE2M1, encode_nearest(kE2M1, relative * inverse));
      const float difference = value * ratio - relative;
      error += difference * difference;
    }
    if (!(error < least)) continue;
    best = static_cast<uint8_t>(byte);
    least = error;
  }
  return best;
}

void search(Dtype dtype, const void* x, int64_t n, float tensor_decode, uint8_t* scales,
            float* multipliers) {
  for (int64_t b = 0; b < n; ++b) {
    float block[16];
    for (int i = 0; i < 16; ++i) block[i] = load(dtype, x, 16 * b + i);
    scales[b] = best_scale(block, scales[b], tensor_decode);
    multipliers[b] = minimum(1.0f / (decode_ue4m3(scales[b]) * tensor_decode), kF32Max);
  }
}

}  // namespace

SearchKernel portable_search() { return search; }

void search_nvfp4(Dtype dtype, const void* x, int64_t rows, int64_t length, float amax,
                  uint8_t* scales, uint8_t* values) {
  const IeeeEnvironment ieee;
  const SearchKernel kernel = level() >= Level::avx2 ? avx2_search() : portable_search();
  const Encoding e{
      dtype, kNVFP4, {}, false, false, false, 0, 0, 0, amax, tensor_scale(kNVFP4, amax).encode};
  const int64_t blocks = length / 16;
  const int64_t row_values = row_bytes(kNVFP4.element, length);
  std::vector<uint8_t> best(static_cast<std::size_t>(blocks));
  std::vector<float> multipliers(static_cast<std::size_t>(blocks));
  for (int64_t r = 0; r < rows; ++r) {
    const auto* row = static_cast<const uint8_t*>(x) + r * length * dtype_bytes(dtype);
    std::copy_n(scales + r * blocks, blocks, best.begin());
    kernel(dtype, row, blocks, 1.0f / e.encode, best.data(), multipliers.data());
    quantize_kernels().encode_run(e, row, length, 0, {best.data(), multipliers.data(), 0},
                                  values + r * row_values, scales + r * blocks);
  }
}

}  // namespace jax_fp4::cpu

#include "cpu/squares.h"

#include <algorithm>

#include "cpu/quantize_kernels.h"

namespace jax_fp4::cpu {
namespace {

using std::int64_t, std::uint8_t;

constexpr int64_t kPiece = 2048;  // elements, a multiple of every block: 8 KiB of f32
constexpr int kParts = 8;         // independent sums, for the compiler to make vectors of

template <Dtype kDtype>
void add_piece(const void* x, int64_t first, const float* value, int64_t n, Squares& sums) {
  float error[kParts] = {}, norm[kParts] = {};
  for (int64_t i = 0; i < n; i += kParts)
    for (int part = 0; part < kParts; ++part) {
      const float element = load(kDtype, x, first + i + part);
      const float difference = value[i + part] - element;
      error[part] += difference * difference;
      norm[part] += element * element;
    }
  for (int part = 0; part < kParts; ++part) {
    sums.error += static_cast<double>(error[part]);
    sums.norm += static_cast<double>(norm[part]);
  }
}

}  // namespace

Squares squares(Dtype dtype, const void* x, int64_t rows, int64_t length, const Format& format,
                const uint8_t* values, const uint8_t* scales, float global) {
  const IeeeEnvironment ieee;
  const QuantizeKernels& k = quantize_kernels();
  const int64_t row_values = length * minifloat(format.element).bits() / 8;
  alignas(64) float decoded[kPiece];
  Squares sums;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < length; c += kPiece) {
      const int64_t n = std::min(kPiece, length - c), first = r * length + c;
      k.decode_run(format, values + r * row_values + c * row_values / length,
                   scales + first / format.block, global, n, Dtype::f32, decoded);
      switch (dtype) {
        case Dtype::f32: add_piece<Dtype::f32>(x, first, decoded, n, sums); break;
        case Dtype::bf16: add_piece<Dtype::bf16>(x, first, decoded, n, sums); break;
        case Dtype::f16: add_piece<Dtype::f16>(x, first, decoded, n, sums); break;
      }
    }
  return sums;
}

}  // namespace jax_fp4::cpu

#include "plan/quantize.h"

namespace jax_fp4::plan {
namespace {

// CTAs that keep an SM of a bandwidth-bound kernel busy: 2048 threads of 256.
constexpr u32 kCtasPerMultiprocessor = 8;

void clear(Steps& steps, u32* words, i64 count) {
  if (words != nullptr && count != 0)
    steps.emplace_back(Clear{words, static_cast<std::size_t>(count) * sizeof(u32)});
}

}  // namespace

Steps amax(const AmaxParams& p, bool rotate_rows, const Chip& chip) {
  Steps steps;
  if (p.leads == 0) return steps;
  clear(steps, p.amax, p.matrices);
  clear(steps, p.rotated, p.matrices);
  clear(steps, p.fingerprint, p.matrices / p.leads);
  if (p.matrices == 0 || p.rows == 0 || p.cols == 0) return steps;
  const bool wide = p.input == InputType::f32;
  std::string kernel = wide ? "amax_32" : "amax_16";
  if (p.rotated != nullptr) {
    if (rotate_rows)
      kernel = wide ? "amax_rotated_rows_32" : "amax_rotated_rows_16";
    else
      kernel = wide ? "amax_rotated_cols_32" : "amax_rotated_cols_16";
  }
  const Grid grid = amax_grid(p, kCtasPerMultiprocessor * chip.multiprocessors);
  steps.emplace_back(make_launch(kernel, grid, kAmaxThreads, p));
  return steps;
}

Steps quantize(const QuantizeParams& p) {
  Steps steps;
  if (p.matrices == 0) return steps;
  const bool wide = p.input == InputType::f32;
  std::string kernel;
  switch (minifloat(p.format.element).bits()) {
    case 4:
      if (p.format.scale != BlockScale::ue4m3)
        kernel = wide ? "quantize_mx4_32" : "quantize_mx4_16";
      else if (p.row.four_over_six || p.col.four_over_six)
        kernel = wide ? "quantize_nvfp4_four_over_six_32" : "quantize_nvfp4_four_over_six_16";
      else
        kernel = wide ? "quantize_nvfp4_32" : "quantize_nvfp4_16";
      break;
    case 6: kernel = wide ? "quantize_mx6_32" : "quantize_mx6_16"; break;
    default: kernel = wide ? "quantize_mx8_32" : "quantize_mx8_16";
  }
  steps.emplace_back(make_launch(kernel, quantize_grid(p), kQuantizeThreads, p));
  return steps;
}

Steps dequantize(const DequantizeParams& p) {
  Steps steps;
  if (p.matrices == 0 || p.rows == 0 || p.k == 0) return steps;
  const int bits = minifloat(p.format.element).bits();
  steps.emplace_back(make_launch(bits == 4   ? "dequantize_4"
                                 : bits == 6 ? "dequantize_6"
                                             : "dequantize_8",
                                 dequantize_grid(p), kDequantizeThreads, p));
  return steps;
}

}  // namespace jax_fp4::plan

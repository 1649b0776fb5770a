// Rows and dot products by plain code: what every level falls back to for rows that no panel can
// hold, and the level `model`.
//
//   scan_row     the power of two to take out of a row, and whether that suffices
//   decode_row, wide_dot     double arithmetic
//   model_dot    the tensor-core model
//   finish_one   one output from its sum
#include <algorithm>

#include "cpu/gemm_kernels.h"
#include "numerics/mma_accumulate.h"

namespace jax_fp4::cpu {
namespace {

double exact_power_of_two(int exponent) {
  return __builtin_bit_cast(double, static_cast<u64>(exponent + 1023) << 52);
}

template <Element element>
bool block_is_zero(const Rows& x, const u8* codes, i64 block) {
  constexpr u32 kMagnitude = minifloat(element).sign_code() - 1;
  const i64 end = std::min(x.k, (block + 1) * x.format.block);
  for (i64 k = block * x.format.block; k < end; ++k)
    if ((load_code(element, codes, k) & kMagnitude) != 0) return false;
  return true;
}

}  // namespace

void scan_row(const Rows& x, i64 row, RowScales& scales) {
  if (x.format.scale == BlockScale::ue4m3) return;
  const ScaleRow bytes = scale_row(x, row);
  const i64 blocks = x.blocks();
  // In bytes and in runs as long as the layout has them, so that it becomes vector code: this is
  // done for every row, and usually all there is to do.
  u8 low_byte = 255, high_byte = 0;
  const i64 run = x.layout == ScaleLayout::linear ? blocks : kScaleTileBlocks;
  for (i64 block = 0; block < blocks; block += run) {
    const u8* first = bytes.at(block);
    for (i64 i = 0; i < std::min(run, blocks - block); ++i) {
      low_byte = std::min(low_byte, first[i]);
      high_byte = std::max(high_byte, first[i]);
    }
  }
  u32 low = low_byte, high = high_byte;
  if (high == kUE8M0NaN || high > low + kMaxSpan) {
    low = 255, high = 0;
    with_element(x.format.element, [&]<Element element>() {
      for (i64 block = 0; block < blocks; ++block) {
        const u32 byte = bytes[block];
        if (byte == kUE8M0NaN || block_is_zero<element>(x, x.codes(row), block)) continue;
        low = std::min(low, byte);
        high = std::max(high, byte);
      }
    });
  }
  if (high < low) high = low = kUE8M0One;  // nothing but zeros and NaN
  scales.wide[row] = high - low > kMaxSpan;
  scales.base[row] = static_cast<int>(high) - static_cast<int>(kUE8M0One) - kTopExponent;
  scales.power[row] = exact_power_of_two(scales.base[row]);
}

void decode_row(const Rows& x, i64 row, double* values) {
  const u8* codes = x.codes(row);
  const ScaleRow bytes = scale_row(x, row);
  with_element(x.format.element, [&]<Element element>() {
    for (i64 block = 0; block < x.blocks(); ++block) {
      const double scale = decode_scale(x.format.scale, bytes[block]);
      const i64 end = std::min(x.k, (block + 1) * x.format.block);
      for (i64 k = block * x.format.block; k < end; ++k)
        values[k] = kValues<element>[load_code(element, codes, k)] * scale;
    }
  });
}

float wide_dot(const double* a, const double* b, i64 k) {
  double sum = 0.0;
  for (i64 i = 0; i < k; ++i) sum += a[i] * b[i];
  return static_cast<float>(sum);
}

float model_dot(const Rows& a, i64 row_a, const Rows& b, i64 row_b) {
  const Element element_a = a.format.element;
  const Element element_b = b.format.element;
  const bool fp4 = element_a == Element::e2m1 && element_b == Element::e2m1;
  const i64 step = fp4 ? kFp4StepK : kFp8StepK;
  const u8* codes_a = a.codes(row_a);
  const u8* codes_b = b.codes(row_b);
  const ScaleRow bytes_a = scale_row(a, row_a);
  const ScaleRow bytes_b = scale_row(b, row_b);
  u32 sum = 0;
  for (i64 k0 = 0; k0 < a.k; k0 += step) {
    // Zero codes and zero scale bytes beyond k (assumption M8).
    u8 step_a[kFp4StepK] = {}, step_b[kFp4StepK] = {};
    for (i64 k = k0; k < std::min(a.k, k0 + step); ++k) {
      step_a[k - k0] = static_cast<u8>(load_code(element_a, codes_a, k));
      step_b[k - k0] = static_cast<u8>(load_code(element_b, codes_b, k));
    }
    constexpr int kGroups = kFp4StepK / kFp4Group;
    u8 scale_a[kGroups] = {}, scale_b[kGroups] = {};
    for (int group = 0; group < kGroups && k0 + group * kFp4Group < a.k; ++group) {
      scale_a[group] = static_cast<u8>(bytes_a[(k0 + group * kFp4Group) / a.format.block]);
      scale_b[group] = static_cast<u8>(bytes_b[(k0 + group * kFp4Group) / b.format.block]);
    }
    sum = fp4 ? mma_fp4_step(step_a, step_b, a.format.scale, scale_a, scale_b, sum)
              : mma_fp8_step(element_a, step_a, scale_a[0], element_b, step_b, scale_b[0], sum);
  }
  return f32_of(sum);
}

void finish_one(const Epilogue& epilogue, i64 row, i64 col, float sum) {
  float value = epilogue.alpha * sum;
  if (epilogue.bias != nullptr) value = value + load(epilogue.bias_dtype, epilogue.bias, col);
  const i64 index = row * epilogue.n + col;
  if (epilogue.accumulate != nullptr)
    value = value + load(epilogue.accumulate_dtype, epilogue.accumulate, index);
  store(epilogue.out_dtype, epilogue.out, index, value);
}

}  // namespace jax_fp4::cpu

// Block-scaled GEMM on the CPU.
//
//   D[b, m, n] = cvt(fl(fl(alpha_b * sum) + bias[n]) + C[b, m, n])
//   sum        = sum over k of A[b, m, k] * B[b, n, k], codes times block scales, in f32
//   alpha_b    = fl(A.global_scale[b] * B.global_scale[b])
//
// Accuracy. A code has at most 4 significant bits and a scale 4 (UE4M3) or 1 (UE8M0), so every
// term, a product of two codes and two scales, is exact in f32: only additions round, and a term
// passes fewer than k of them, in whatever order. Each multiplies a partial sum by 1 + d,
// |d| <= u = 2^-24, so
//
//   |sum - exact| <= ((1 + u)^k - 1) * sum(|terms|) + 2^-150,
//
// the last term for a result that is subnormal. Where sum(|terms|) < 2^24 * quantum (the largest
// power of two that all terms are multiples of) every partial sum is an f32, and `sum` is exact.
//
// `sum` depends on the two rows, on k, and on whether m or n is at most 8 (such products take
// another path); not on the number of threads, nor on where in D the element lies.
#pragma once

#include <cstdint>

#include "cpu/cpu.h"
#include "numerics/formats.h"
#include "numerics/scale_layout.h"

namespace jax_fp4::cpu {

struct Operand {
  Format format;
  ScaleLayout layout;
  std::int64_t batch;          // 1 (shared by the whole batch) or GemmProblem::batch
  const std::uint8_t* values;  // [batch, rows, row_bytes(k)]
  const std::uint8_t* scales;  // [batch, scale_bytes(layout, rows, ceil(k / block))]
  const float* global_scale;   // [batch]
};

struct GemmProblem {
  std::int64_t batch, m, n, k;
  Operand a;                   // rows = m
  Operand b;                   // rows = n; same block size as a
  const void* bias = nullptr;  // [n], or nullptr
  Dtype bias_dtype = Dtype::f32;
  const void* accumulate = nullptr;  // C [batch, m, n], or nullptr; may not alias out
  Dtype accumulate_dtype = Dtype::f32;
  void* out = nullptr;  // [batch, m, n]; fully written, also where k = 0
  Dtype out_dtype = Dtype::f32;
};

void gemm(const GemmProblem& problem, Parallel& parallel);

}  // namespace jax_fp4::cpu

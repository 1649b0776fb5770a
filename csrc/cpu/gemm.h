// Block-scaled GEMM on the CPU.
//
//   D[b, m, n] = cvt(fl(fl(alpha_b * sum) + bias[n]) + C[b, m, n])
//   sum        = sum over k of A[b, m, k] * B[b, n, k], codes times block scales, in f32
//   alpha_b    = fl(A.global_scale[b] * B.global_scale[b])
//
// Accuracy: docs/numerics.md section 8 has the contract and its derivation. In short, every term is
// exact in f32, a term passes at most k additions, and where all partial sums are multiples of a
// common quantum with at most 24 significant bits, `sum` is exact.
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

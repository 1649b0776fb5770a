// Products of groups whose sizes are data (mixture of experts), on the CPU.
//
//   groups of rows   D [m, n]         = A [m, k] . B [groups, n, k]^T   each unit of rows with its group's B
//   groups of K      D [groups, m, n] = A [m, k] . B [n, k]^T           each group over its part of K
//
// Each group is a product of cpu/gemm.h, scaled by alpha_g = fl(A.global_scale[g] * B.global_scale[g]).
// Groups start at multiples of kGroupUnit, so that no block and no tile of scales holds two of them.
// `where` may hold anything: what lies outside is as if it were not there.
#pragma once

#include <cstdint>

#include "cpu/gemm.h"

namespace jax_fp4::cpu {

inline constexpr std::int64_t kGroupUnit = 128;

struct GroupedProblem {
  bool of_rows;  // or of K
  std::int64_t groups, m, n, k;
  Operand a, b;  // global scales [groups]
  // Groups of rows: the group of each unit of rows, [m / kGroupUnit]; `groups` or more: of none, and D is
  // not written there. Groups of K: where each starts, and the end of the last, [groups + 1].
  const std::uint32_t* where;
  void* out;
  Dtype out_dtype;
};

void grouped_gemm(const GroupedProblem& problem, Parallel& parallel);

}  // namespace jax_fp4::cpu

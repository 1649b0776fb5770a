// Plans for block-scaled products: shape and chip -> variant, splits, raster, workspace; then the
// launches for given arrays.
//
//   const GemmPlan plan = plan_gemm(shape, chip, workspace_bytes);
//   for (const Step& step : gemm_steps(plan, shape, arrays)) ...
//
// A plan depends on nothing but its arguments, so that the same problem on the same chip gives the
// same bits. It is chosen by predicted time (`predicted_cycles`, a model with the constants of
// gemm.cc, not a measurement) among all variants that can run the problem, exchanged operands and
// splits of K included. Every problem has a plan, also an empty one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernels/gemm_params.h"
#include "plan/steps.h"

namespace jax_fp4::plan {

struct GemmOperand {
  Format format = kNVFP4;
  ScaleLayout layout = ScaleLayout::tiled;
  bool batched = false;  // or shared by the whole batch
};

// D [batch, m, n] = A [batch or 1, m, k] . B [batch or 1, n, k]^T
struct GemmShape {
  i64 batch = 1, m = 0, n = 0, k = 0;
  GemmOperand a, b;  // of equal block sizes
  Dtype out = Dtype::f32;
};

struct GemmPlan {
  std::string_view kernel;  // of variants.def; empty where D is empty or K is 0
  GemmVariant variant{};
  bool exchanged = false;  // the kernel's A is the problem's B: D is written transposed
  u32 tiles_m = 0, tiles_n = 0;
  u32 steps = 0, splits = 1, split_steps = 0;
  u32 strip = 1;
  // Bytes of workspace, parts at multiples of 256: A's and B's rows with another pitch, their tiled
  // scales, the parts of a split sum.
  u64 padded_a = 0, padded_b = 0, tiled_a = 0, tiled_b = 0, parts = 0;
  double predicted_cycles = 0;

  u64 workspace_bytes() const;
};

// Throws std::invalid_argument, which names what is wrong: formats that do not go together, a problem
// whose sizes no grid or tensor map can hold, a chip without such kernels, too little workspace.
GemmPlan plan_gemm(const GemmShape& shape, const Chip& chip, u64 workspace_bytes);

// The workspace with which a plan for any chip is at its best. Depends on the shape only, since a
// program is lowered, or exported, before its device is known.
u64 gemm_workspace(const GemmShape& shape);

// One line for each property.
std::string describe(const GemmPlan& plan, const GemmShape& shape);

struct GemmArrays {
  struct Quantized {
    const u8* values;  // [batch or 1, rows, row_bytes(k)], aligned to 16 bytes
    const u8* scales;  // [batch or 1, scale_bytes(layout, rows, blocks)], likewise if tiled
    const float* global_scale;  // [batch or 1]
  } a, b;
  const void* bias = nullptr;  // [batch or 1, n], or nullptr
  bool bias_batched = false;
  Dtype bias_type = Dtype::f32;
  const void* c = nullptr;  // [batch, m, n], or nullptr
  Dtype c_type = Dtype::f32;
  void* out = nullptr;      // [batch, m, n], aligned to 16 bytes
  u8* workspace = nullptr;  // aligned to 256 bytes
};

Steps gemm_steps(const GemmPlan& plan, const GemmShape& shape, const GemmArrays& arrays);

}  // namespace jax_fp4::plan

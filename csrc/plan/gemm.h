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
#include <vector>

#include "kernels/gemm_params.h"
#include "plan/steps.h"

namespace jax_fp4::plan {

struct GemmOperand {
  Format format = kNVFP4;
  ScaleLayout layout = ScaleLayout::tiled;
  bool batched = false;  // or shared by the whole batch
};

// What the entries of a batch are, if they are not products of one size: groups, whose sizes only the
// device knows. They start at multiples of kGroupUnit, and there may be rows or K behind the last one.
enum class Grouping : u8 { none, rows, k };

// D [batch, m, n] = A [batch or 1, m, k] . B [batch or 1, n, k]^T
// Groups of rows:  D [m, n]        = A [m, k] . B [batch, n, k]^T     each tile of rows with its group's B
// Groups of K:     D [batch, m, n] = A [m, k] . B [n, k]^T            each entry over its part of K
struct GemmShape {
  i64 batch = 1, m = 0, n = 0, k = 0;
  GemmOperand a, b;  // of equal block sizes
  Dtype out = Dtype::f32;
  Grouping grouping = Grouping::none;

  // Matrices that D consists of.
  i64 results() const { return grouping == Grouping::rows ? 1 : batch; }
};

// What multiplies, by chip: gemm_sm100.cu, gemm_sm120.cu, or gemm_bf16.cu on all others.
enum class GemmCode : u8 { sm100, sm120, bf16 };

// A kernel of csrc/kernels, as far as plans and launches look at it.
struct GemmTile {
  GemmCode code = GemmCode::sm100;
  GemmKind kind = GemmKind::nvfp4;
  u32 ctas = 1;  // that share a tile
  u32 n = 0;     // columns of a tile

  std::string kernel() const;  // its name in variants.def
  u32 m() const { return kGemmRows * ctas; }
  u32 step_k() const { return variant().step_k(); }
  u32 threads() const { return decodes() ? bf16().threads() : variant().threads(); }
  u32 stages() const { return decodes() ? bf16().stages() : variant().stages(); }
  u32 stage_k() const { return decodes() ? bf16().stage_k() : variant().stage_k(); }
  u32 shared_bytes() const { return decodes() ? bf16().shared_bytes() : variant().shared_bytes(); }

  bool decodes() const { return code == GemmCode::bf16; }
  GemmBf16Variant bf16() const { return {kind, n}; }
  GemmVariant variant() const {
    return {kind, ctas, n, code == GemmCode::sm100 ? GemmCore::tcgen05 : GemmCore::mma_sync};
  }
};

struct GemmPlan {
  std::string kernel;  // of variants.def; empty where D is empty or K is 0
  GemmTile tile;
  bool exchanged = false;  // the kernel's A is the problem's B: D is written transposed
  u32 tiles_m = 0, tiles_n = 0;
  u32 steps = 0, splits = 1, split_steps = 0;
  u32 strip = 1;
  // Bytes of workspace, parts at multiples of 256: A's and B's rows with another pitch, their tiled
  // scales, the parts of a split sum.
  u64 padded_a = 0, padded_b = 0, tiled_a = 0, tiled_b = 0, parts = 0;
  i64 pitch_a = 0, pitch_b = 0;  // of the rows with another pitch, in bytes
  double predicted_cycles = 0;

  u64 workspace_bytes() const;
};

// Throws std::invalid_argument, which names what is wrong: formats that do not go together, a problem
// whose sizes no grid or tensor map can hold, a chip without such kernels, too little workspace.
GemmPlan plan_gemm(const GemmShape& shape, const Chip& chip, u64 workspace_bytes);

// Beginnings of the names of all kernels that plans for a chip launch: what is loaded before a capture.
std::vector<std::string> gemm_kernels(const Chip& chip);

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
  void* out = nullptr;  // [batch, m, n], aligned to 16 bytes
  // Groups of rows: that of each kGroupUnit rows; `batch` or more: none, D is not written there. Groups of
  // K: where each starts, and the end of the last. Then global scales are [batch] for both operands.
  const u32* groups = nullptr;
  u8* workspace = nullptr;  // aligned to 256 bytes
};

Steps gemm_steps(const GemmPlan& plan, const GemmShape& shape, const GemmArrays& arrays);

}  // namespace jax_fp4::plan

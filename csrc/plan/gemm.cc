#include "plan/gemm.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <span>
#include <stdexcept>

namespace jax_fp4::plan {
namespace {

struct TileShape {
  u32 ctas, n;
};
constexpr TileShape kSm100[] = {{1, 32}, {1, 64}, {1, 128}, {2, 128}, {2, 256}};
constexpr TileShape kSm120[] = {{1, 32}, {1, 64}, {1, 128}};
constexpr TileShape kBf16[] = {{1, 32}, {1, 128}};

constexpr const char* kCodes[] = {"sm100", "sm120", "bf16"};

GemmCode code_of(const Chip& chip) {
  return chip.datacenter() ? GemmCode::sm100 : chip.consumer() ? GemmCode::sm120 : GemmCode::bf16;
}

std::span<const TileShape> shapes_of(GemmCode code) {
  switch (code) {
    case GemmCode::sm100: return kSm100;
    case GemmCode::sm120: return kSm120;
    default: return kBf16;
  }
}

// ---- The model of time --------------------------------------------------------------------------
// Cycles of an SM; only their order matters. Multiply-adds a cycle and SM from NVIDIA's data sheets: B200
// has 9 PFLOP/s of dense NVFP4 over 148 SMs at 1.85 GHz, RTX 5090 1.68 over 170 at 2.41; 8-bit kinds
// have half of it. bf16 by mma.sync: A100's 312 TFLOP/s over 108 SMs at 1.41 GHz.
double macs_of(const GemmTile& tile) {
  if (tile.decodes()) return 1024;
  const double macs = tile.code == GemmCode::sm100 ? 16384 : 2048;
  return tile.kind == GemmKind::mxf8f6f4 ? macs / 2 : macs;
}
// Shared memory gives an SM 128 bytes a cycle: the MMA reads A's and B's rows from it.
constexpr double kSharedBytes = 128;
// From L2 to an SM, the figure that is usually assumed; not published.
constexpr double kL2Bytes = 64;
// Of the whole chip: 8 TB/s at 1.85 GHz. Parts of a split sum are written and read once.
constexpr double kMemoryBytes = 4324;
// From the start of a tile to its first MMA, and a second launch: a few round trips to memory.
constexpr double kTileCycles = 1500, kLaunchCycles = 4000;
// With mma.sync, of a warp and step: the wait for a stage and its first ldmatrix, a few dozen cycles that
// nothing hides where an SM has one warp for each tensor core.
constexpr double kWarpCycles = 30;
// An epilogue that stores a transposed tile itself, as against one that uses a tensor map.
constexpr double kDirectStoreFactor = 2;

constexpr u32 kMostSplits = 16;
// A split has at least this many stages, so that the pipeline is worth filling.
constexpr u32 kLeastSplitStages = 4;
constexpr u64 kMostPartsBytes = u64{32} << 20;
constexpr u64 kAlignment = 256;

u64 aligned(u64 bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

[[noreturn]] void refuse(const std::string& why) {
  throw std::invalid_argument("jax_fp4: scaled_matmul: " + why);
}

std::string shape_text(const GemmShape& s) {
  return std::string(s.grouping == Grouping::none ? "batch " : "groups ") +
         std::to_string(s.batch) + ", M " + std::to_string(s.m) + ", N " + std::to_string(s.n) +
         ", K " + std::to_string(s.k);
}

GemmKind kind_of(const GemmShape& s) {
  const auto four_bit = [](const Format& f) { return f.element == Element::e2m1; };
  if (s.a.format.block != s.b.format.block)
    refuse("a and b have blocks of different sizes; quantize both in NVFP4, or both in MX formats");
  if (s.a.format.scale == BlockScale::ue4m3) return GemmKind::nvfp4;
  return four_bit(s.a.format) && four_bit(s.b.format) ? GemmKind::mxfp4 : GemmKind::mxf8f6f4;
}

// ---- Workspace ----------------------------------------------------------------------------------

u64 tiled_bytes(const GemmOperand& o, i64 rows, const GemmShape& s) {
  if (o.layout == ScaleLayout::tiled) return 0;
  const i64 bytes = scale_bytes(ScaleLayout::tiled, rows, ceil_div(s.k, o.format.block));
  return aligned(static_cast<u64>((o.batched ? s.batch : 1) * bytes));
}

// Bytes of a row whose codes a tensor map expands (all kernels but gemm_bf16); 0 where rows can stay as
// they are.
i64 padded_row_bytes(const GemmOperand& o, const GemmShape& s) {
  const bool expanded = kind_of(s) == GemmKind::mxf8f6f4 && o.format.element == Element::e2m1;
  return expanded && s.k % 128 != 0 ? round_up(s.k, 128) / 2 : 0;
}

u64 padded_bytes(const GemmOperand& o, i64 rows, const GemmShape& s) {
  return aligned(static_cast<u64>((o.batched ? s.batch : 1) * rows * padded_row_bytes(o, s)));
}

u64 parts_bytes(const GemmShape& s, u32 splits) {
  return splits == 1 ? 0
                     : aligned(static_cast<u64>(s.results() * s.m * s.n) * splits * sizeof(float));
}

void check_sizes(const GemmShape& s) {
  constexpr i64 kMost = (i64{1} << 31) - 1;
  if (s.batch < 0 || s.m < 0 || s.n < 0 || s.k < 0 || s.batch > kMost || s.m > kMost ||
      s.n > kMost || s.k > kMost)
    refuse("every size has to be below 2^31; got " + shape_text(s));
  // So that no size in bytes below can overflow: more than any memory holds.
  const auto elements = [&](i64 rows, i64 cols) {
    return static_cast<double>(s.batch) * static_cast<double>(rows) * static_cast<double>(cols);
  };
  if (std::max({elements(s.m, s.n), elements(s.m, s.k), elements(s.n, s.k)}) > 0x1p48)
    refuse("an array would have more than 2^48 elements: " + shape_text(s));
}

// ---- Choice -------------------------------------------------------------------------------------

double predict(const GemmPlan& p, const GemmShape& s, const Chip& chip) {
  const GemmTile& t = p.tile;
  // Of an MMA, per CTA: a pair computes 256 rows with two tensor cores. Expanded codes take a byte.
  const double row_step = t.kind == GemmKind::mxf8f6f4 ? t.step_k() : t.step_k() / 2.0;
  const double rows = kGemmRows + static_cast<double>(t.n) / t.ctas;
  const double compute = static_cast<double>(kGemmRows) * t.n * t.step_k() / macs_of(t);
  const double read = rows * row_step / kSharedBytes;
  const double scales = (kGemmRows + std::max<double>(t.n, kScaleTileRows)) * t.step_k() /
                        (t.kind == GemmKind::nvfp4 ? 16 : 32);
  const double load = (rows * row_step + scales) / kL2Bytes;
  const double step = std::max({compute, read, load});
  const double tiles =
      static_cast<double>(p.tiles_m) * p.tiles_n * static_cast<double>(s.results());
  const double at_once =
      std::max(1.0, std::floor(static_cast<double>(chip.multiprocessors) / t.ctas));
  const double waves = std::ceil(tiles * p.splits / at_once);
  const double bytes = p.splits > 1 ? 4 : dtype_bytes(s.out);
  double epilogue = static_cast<double>(kGemmRows) * t.n * bytes / kL2Bytes;
  if (p.exchanged) epilogue *= kDirectStoreFactor;
  const double warp = t.code == GemmCode::sm100 ? 0 : kWarpCycles;
  // Groups of K share all steps.
  const double steps =
      s.grouping == Grouping::k ? 1.0 * p.steps / static_cast<double>(s.batch) : p.split_steps;
  const double tile = steps * (step + warp);
  // With tensor memory the epilogue of a tile runs beside the next tile's MMAs.
  double cycles = t.code == GemmCode::sm100 ? waves * std::max(tile, epilogue) + epilogue
                                            : waves * (tile + epilogue);
  cycles += kTileCycles;
  if (p.splits > 1) {
    cycles += 2 * 4.0 * static_cast<double>(s.results() * s.m * s.n) * p.splits / kMemoryBytes;
    cycles += kLaunchCycles;
  }
  return cycles;
}

// Rows of tiles that are walked together: tiles in flight make about a square of D.
u32 strip_of(const GemmPlan& p, const Chip& chip) {
  const double at_once = std::max(1u, chip.multiprocessors / p.tile.ctas);
  const double square = std::sqrt(at_once * p.tile.n / p.tile.m());
  return std::clamp(static_cast<u32>(std::lround(square)), 1u, std::max(1u, p.tiles_m));
}

bool runs(const GemmPlan& p, const GemmShape& s) {
  // Groups of rows start at tiles of A's rows, and a group's sum is not split.
  if (s.grouping == Grouping::rows && (p.exchanged || p.tile.m() != kGroupUnit)) return false;
  if (s.grouping != Grouping::none && p.splits > 1) return false;
  // The scales of 32 columns are one column of tensor memory, so the second tile's would begin at an
  // odd one, which hardware is said not to take (docs/simulator.md, assumption S75).
  if (p.tile.n < 64 && p.tiles_n > 1) return false;
  const double ctas = static_cast<double>(p.tiles_m) * p.tiles_n * p.tile.ctas *
                      static_cast<double>(s.results()) * p.splits;
  return ctas < 2147483648.0;  // CUDA C++ Programming Guide: grid x
}

}  // namespace

std::vector<std::string> gemm_kernels(const Chip& chip) {
  return {std::string("gemm_") + kCodes[static_cast<int>(code_of(chip))], "gemm_reduce",
          "tile_scales", "pad_rows"};
}

std::string GemmTile::kernel() const {
  const char* kinds[] = {"nvfp4", "mxfp4", "mxf8f6f4"};
  return std::string("gemm_") + kCodes[static_cast<int>(code)] + "_" +
         kinds[static_cast<int>(kind)] + "_" + std::to_string(m()) + "x" + std::to_string(n);
}

u64 GemmPlan::workspace_bytes() const { return padded_a + padded_b + tiled_a + tiled_b + parts; }

u64 gemm_workspace(const GemmShape& s) {
  check_sizes(s);
  if (s.batch * s.m * s.n == 0 || s.k == 0) return 0;
  const u64 relayout = padded_bytes(s.a, s.m, s) + padded_bytes(s.b, s.n, s) +
                       tiled_bytes(s.a, s.m, s) + tiled_bytes(s.b, s.n, s);
  const i64 unit = kGemmStageSteps * GemmTile{GemmCode::sm100, kind_of(s), 1, 32}.step_k();
  const i64 most = std::min<i64>(kMostSplits, s.k / (unit * kLeastSplitStages));
  u64 parts = 0;
  if (s.grouping != Grouping::none) return relayout;
  for (u32 splits = 2; splits <= most; ++splits)
    if (const u64 bytes = parts_bytes(s, splits); bytes <= kMostPartsBytes) parts = bytes;
  return relayout + parts;
}

GemmPlan plan_gemm(const GemmShape& s, const Chip& chip, u64 workspace) {
  check_sizes(s);
  const GemmKind kind = kind_of(s);
  if (chip.number < kLeastChip)
    refuse("there is no kernel for compute capability " + std::to_string(chip.number / 10) + "." +
           std::to_string(chip.number % 10) + ", which is below 8.0; run it on the CPU");
  const GemmCode code = code_of(chip);
  GemmPlan best;
  if (s.batch * s.m * s.n == 0) return best;
  if (s.k == 0) return best;
  if (s.grouping != Grouping::none && (s.grouping == Grouping::rows ? s.m : s.k) % kGroupUnit != 0)
    refuse("groups have whole tiles of " + std::to_string(kGroupUnit) + "; got " + shape_text(s));
  best.predicted_cycles = std::numeric_limits<double>::infinity();
  GemmPlan plan;
  if (code != GemmCode::bf16) {
    plan.padded_a = padded_bytes(s.a, s.m, s);
    plan.padded_b = padded_bytes(s.b, s.n, s);
    plan.pitch_a = padded_row_bytes(s.a, s);
    plan.pitch_b = padded_row_bytes(s.b, s);
  }
  plan.tiled_a = tiled_bytes(s.a, s.m, s);
  plan.tiled_b = tiled_bytes(s.b, s.n, s);
  if (plan.workspace_bytes() > workspace)
    refuse("the workspace has " + std::to_string(workspace) +
           " bytes, and the operands alone need " + std::to_string(plan.workspace_bytes()) +
           "; lower the program again with this jax_fp4");
  for (const TileShape& shape : shapes_of(code)) {
    const GemmTile tile{code, kind, shape.ctas, shape.n};
    plan.tile = tile;
    plan.kernel = tile.kernel();
    plan.steps = static_cast<u32>(ceil_div(s.k, tile.step_k()));
    const u32 stages = static_cast<u32>(ceil_div(plan.steps, kGemmStageSteps));
    for (const bool exchanged : {false, true}) {
      plan.exchanged = exchanged;
      plan.tiles_m = static_cast<u32>(ceil_div(exchanged ? s.n : s.m, tile.m()));
      plan.tiles_n = static_cast<u32>(ceil_div(exchanged ? s.m : s.n, tile.n));
      for (u32 wanted = 1; wanted <= kMostSplits; ++wanted) {
        const u32 split_stages = (stages + wanted - 1) / wanted;
        if (wanted > 1 && split_stages < kLeastSplitStages) break;
        plan.splits = (stages + split_stages - 1) / split_stages;
        if (plan.splits != wanted) continue;
        plan.split_steps = split_stages * kGemmStageSteps;
        plan.parts = parts_bytes(s, plan.splits);
        if (plan.parts > kMostPartsBytes || plan.workspace_bytes() > workspace) break;
        if (!runs(plan, s)) continue;
        plan.strip = strip_of(plan, chip);
        plan.predicted_cycles = predict(plan, s, chip);
        if (plan.predicted_cycles < best.predicted_cycles) best = plan;
      }
    }
  }
  if (best.kernel.empty())
    refuse("D has more tiles than a grid can hold: " + shape_text(s) + "; use a smaller batch");
  return best;
}

std::string describe(const GemmPlan& p, const GemmShape& s) {
  std::string text = shape_text(s) + "\n";
  const auto line = [&](const char* name, const std::string& value) {
    text += std::string(name) + ": " + value + "\n";
  };
  if (p.kernel.empty()) {
    line("kernel", s.batch * s.m * s.n == 0 ? "none, D is empty" : "gemm_reduce, K is 0");
    return text;
  }
  const GemmTile& t = p.tile;
  const u64 tiles = u64{p.tiles_m} * p.tiles_n;
  line("kernel", p.kernel);
  line("tile", std::to_string(t.m()) + " x " + std::to_string(t.n) +
                   (p.exchanged ? ", operands exchanged" : ""));
  line("tiles", std::to_string(p.tiles_m) + " x " + std::to_string(p.tiles_n) + ", " +
                    std::to_string(tiles * static_cast<u64>(s.results()) * p.splits) + " in all");
  if (s.grouping != Grouping::none)
    line("groups", std::to_string(s.batch) + (s.grouping == Grouping::rows ? " of rows" : " of K") +
                       ", their sizes known to the device only");
  line("CTAs a tile", std::to_string(t.ctas));
  line("stages", std::to_string(t.stages()) + " of " + std::to_string(t.stage_k()) + " elements");
  line("shared memory", std::to_string(t.shared_bytes()) + " bytes a CTA");
  line("splits of K", std::to_string(p.splits) + ", " + std::to_string(p.split_steps * t.step_k()) +
                          " elements each");
  line("strip", std::to_string(p.strip) + " rows of tiles");
  line("workspace", std::to_string(p.workspace_bytes()) + " bytes");
  char cycles[64];
  std::snprintf(cycles, sizeof cycles, "%.0f cycles (modelled)", p.predicted_cycles);
  line("predicted time", cycles);
  return text;
}

}  // namespace jax_fp4::plan

#include "plan/gemm.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <stdexcept>

#include "kernels/relayout_params.h"

namespace jax_fp4::plan {
namespace {

struct Candidate {
  std::string_view kernel;
  GemmVariant variant;
};

constexpr Candidate kDatacenter[] = {
    {"gemm_sm100_nvfp4_128x32", {GemmKind::nvfp4, 1, 32}},
    {"gemm_sm100_nvfp4_128x64", {GemmKind::nvfp4, 1, 64}},
    {"gemm_sm100_nvfp4_128x128", {GemmKind::nvfp4, 1, 128}},
    {"gemm_sm100_nvfp4_256x128", {GemmKind::nvfp4, 2, 128}},
    {"gemm_sm100_nvfp4_256x256", {GemmKind::nvfp4, 2, 256}},
    {"gemm_sm100_mxfp4_128x32", {GemmKind::mxfp4, 1, 32}},
    {"gemm_sm100_mxfp4_128x64", {GemmKind::mxfp4, 1, 64}},
    {"gemm_sm100_mxfp4_128x128", {GemmKind::mxfp4, 1, 128}},
    {"gemm_sm100_mxfp4_256x128", {GemmKind::mxfp4, 2, 128}},
    {"gemm_sm100_mxfp4_256x256", {GemmKind::mxfp4, 2, 256}},
    {"gemm_sm100_mxf8f6f4_128x32", {GemmKind::mxf8f6f4, 1, 32}},
    {"gemm_sm100_mxf8f6f4_128x64", {GemmKind::mxf8f6f4, 1, 64}},
    {"gemm_sm100_mxf8f6f4_128x128", {GemmKind::mxf8f6f4, 1, 128}},
    {"gemm_sm100_mxf8f6f4_256x128", {GemmKind::mxf8f6f4, 2, 128}},
    {"gemm_sm100_mxf8f6f4_256x256", {GemmKind::mxf8f6f4, 2, 256}},
};

// ---- The model of time --------------------------------------------------------------------------
// Cycles of an SM; only their order matters. Dense NVFP4 peak of B200: 9 PFLOP/s over 148 SMs at 1.85
// GHz is 16384 multiply-adds a cycle and SM; the 8-bit kinds have half of it (NVIDIA's data sheet).
constexpr double kMacs4Bit = 16384, kMacs8Bit = 8192;
// Shared memory gives an SM 128 bytes a cycle: the MMA reads A's and B's rows from it.
constexpr double kSharedBytes = 128;
// From L2 to an SM, the figure that is usually assumed; not published.
constexpr double kL2Bytes = 64;
// Of the whole chip: 8 TB/s at 1.85 GHz. Parts of a split sum are written and read once.
constexpr double kMemoryBytes = 4324;
// From the start of a tile to its first MMA, and a second launch: a few round trips to memory.
constexpr double kTileCycles = 1500, kLaunchCycles = 4000;
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
  return "batch " + std::to_string(s.batch) + ", M " + std::to_string(s.m) + ", N " +
         std::to_string(s.n) + ", K " + std::to_string(s.k);
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

// Bytes of a row whose codes a tensor map expands; 0 where rows can stay as they are.
i64 padded_row_bytes(const GemmOperand& o, const GemmShape& s) {
  const bool expanded = kind_of(s) == GemmKind::mxf8f6f4 && o.format.element == Element::e2m1;
  return expanded && s.k % 128 != 0 ? round_up(s.k, 128) / 2 : 0;
}

u64 padded_bytes(const GemmOperand& o, i64 rows, const GemmShape& s) {
  return aligned(static_cast<u64>((o.batched ? s.batch : 1) * rows * padded_row_bytes(o, s)));
}

u64 parts_bytes(const GemmShape& s, u32 splits) {
  return splits == 1 ? 0 : aligned(static_cast<u64>(s.batch * s.m * s.n) * splits * sizeof(float));
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
  const GemmVariant& v = p.variant;
  const double macs = v.kind == GemmKind::mxf8f6f4 ? kMacs8Bit : kMacs4Bit;
  const double row_step = static_cast<double>(kGemmRowBytes) / kGemmStageSteps;
  const double rows = kGemmRows + v.rows_b();
  // Of an MMA, per CTA: a pair computes 256 rows with two tensor cores.
  const double compute = static_cast<double>(kGemmRows) * v.tile_n * v.step_k() / macs;
  const double read = rows * row_step / kSharedBytes;
  const double load = (rows * row_step + v.scale_bytes() / 4.0) / kL2Bytes;
  const double step = std::max({compute, read, load});
  const double tiles = static_cast<double>(p.tiles_m) * p.tiles_n * static_cast<double>(s.batch);
  const double at_once =
      std::max(1.0, std::floor(static_cast<double>(chip.multiprocessors) / v.ctas));
  const double waves = std::ceil(tiles * p.splits / at_once);
  const double bytes = p.splits > 1 ? 4 : dtype_bytes(s.out);
  double epilogue = static_cast<double>(kGemmRows) * v.tile_n * bytes / kL2Bytes;
  if (p.exchanged) epilogue *= kDirectStoreFactor;
  // The epilogue of a tile runs beside the next tile's MMAs.
  const double tile = p.split_steps * step;
  double cycles = waves * std::max(tile, epilogue) + kTileCycles + epilogue;
  if (p.splits > 1) {
    cycles += 2 * 4.0 * static_cast<double>(s.batch * s.m * s.n) * p.splits / kMemoryBytes;
    cycles += kLaunchCycles;
  }
  return cycles;
}

// Rows of tiles that are walked together: tiles in flight make about a square of D.
u32 strip_of(const GemmPlan& p, const Chip& chip) {
  const double at_once = std::max(1u, chip.multiprocessors / p.variant.ctas);
  const double square = std::sqrt(at_once * p.variant.tile_n / p.variant.tile_m());
  return std::clamp(static_cast<u32>(std::lround(square)), 1u, std::max(1u, p.tiles_m));
}

bool runs(const GemmPlan& p, const GemmShape& s) {
  // The scales of 32 columns are one column of tensor memory, so the second tile's would begin at an
  // odd one, which hardware is said not to take (docs/simulator.md, assumption S75).
  if (p.variant.tile_n < 64 && p.tiles_n > 1) return false;
  const double ctas = static_cast<double>(p.tiles_m) * p.tiles_n * p.variant.ctas *
                      static_cast<double>(s.batch) * p.splits;
  return ctas < 2147483648.0;  // CUDA C++ Programming Guide: grid x
}

}  // namespace

u64 GemmPlan::workspace_bytes() const { return padded_a + padded_b + tiled_a + tiled_b + parts; }

u64 gemm_workspace(const GemmShape& s) {
  check_sizes(s);
  if (s.batch * s.m * s.n == 0 || s.k == 0) return 0;
  const u64 relayout = padded_bytes(s.a, s.m, s) + padded_bytes(s.b, s.n, s) +
                       tiled_bytes(s.a, s.m, s) + tiled_bytes(s.b, s.n, s);
  const i64 stage = GemmVariant{kind_of(s), 1, 32}.stage_k();
  const i64 most = std::min<i64>(kMostSplits, s.k / (stage * kLeastSplitStages));
  u64 parts = 0;
  for (u32 splits = 2; splits <= most; ++splits)
    if (const u64 bytes = parts_bytes(s, splits); bytes <= kMostPartsBytes) parts = bytes;
  return relayout + parts;
}

GemmPlan plan_gemm(const GemmShape& s, const Chip& chip, u64 workspace) {
  check_sizes(s);
  const GemmKind kind = kind_of(s);
  if (!chip.datacenter())
    refuse("there is no kernel for compute capability " + std::to_string(chip.number / 10) + "." +
           std::to_string(chip.number % 10) + "; run it on a B200 or B300, or on the CPU");
  GemmPlan best;
  if (s.batch * s.m * s.n == 0) return best;
  if (s.k == 0) return best;
  best.predicted_cycles = std::numeric_limits<double>::infinity();
  GemmPlan plan;
  plan.padded_a = padded_bytes(s.a, s.m, s);
  plan.padded_b = padded_bytes(s.b, s.n, s);
  plan.tiled_a = tiled_bytes(s.a, s.m, s);
  plan.tiled_b = tiled_bytes(s.b, s.n, s);
  if (plan.workspace_bytes() > workspace)
    refuse("the workspace has " + std::to_string(workspace) +
           " bytes, and the operands alone need " + std::to_string(plan.workspace_bytes()) +
           "; lower the program again with this jax_fp4");
  for (const Candidate& candidate : kDatacenter) {
    const GemmVariant& v = candidate.variant;
    if (v.kind != kind) continue;
    plan.kernel = candidate.kernel;
    plan.variant = v;
    plan.steps = static_cast<u32>(ceil_div(s.k, v.step_k()));
    const u32 stages = static_cast<u32>(ceil_div(plan.steps, kGemmStageSteps));
    for (const bool exchanged : {false, true}) {
      plan.exchanged = exchanged;
      plan.tiles_m = static_cast<u32>(ceil_div(exchanged ? s.n : s.m, v.tile_m()));
      plan.tiles_n = static_cast<u32>(ceil_div(exchanged ? s.m : s.n, v.tile_n));
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
  const GemmVariant& v = p.variant;
  const u64 tiles = u64{p.tiles_m} * p.tiles_n;
  line("kernel", std::string(p.kernel));
  line("tile", std::to_string(v.tile_m()) + " x " + std::to_string(v.tile_n) +
                   (p.exchanged ? ", operands exchanged" : ""));
  line("tiles", std::to_string(p.tiles_m) + " x " + std::to_string(p.tiles_n) + ", " +
                    std::to_string(tiles * static_cast<u64>(s.batch) * p.splits) + " in all");
  line("CTAs a tile", std::to_string(v.ctas));
  line("stages", std::to_string(v.stages()) + " of " + std::to_string(v.stage_k()) + " elements");
  line("shared memory", std::to_string(v.shared_bytes()) + " bytes a CTA");
  line("splits of K", std::to_string(p.splits) + ", " + std::to_string(p.split_steps * v.step_k()) +
                          " elements each");
  line("strip", std::to_string(p.strip) + " rows of tiles");
  line("workspace", std::to_string(p.workspace_bytes()) + " bytes");
  char cycles[64];
  std::snprintf(cycles, sizeof cycles, "%.0f cycles (modelled)", p.predicted_cycles);
  line("predicted time", cycles);
  return text;
}

// ---- Launches -----------------------------------------------------------------------------------

namespace {

struct Workspace {
  u8* next;
  u8* take(u64 bytes) {
    u8* taken = next;
    next += bytes;
    return taken;
  }
};

// An operand as the kernel reads it.
struct Ready {
  GemmOperand operand;
  i64 rows;
  const u8* values;
  i64 row_bytes;
  const u8* scales;
};

Ready make_ready(Steps& steps, const GemmShape& s, const GemmOperand& o, i64 rows,
                 const GemmArrays::Quantized& q, u64 padded, u64 tiled, Workspace& workspace) {
  const i64 matrices = o.batched ? s.batch : 1;
  Ready ready{o, rows, q.values, row_bytes(o.format.element, s.k), q.scales};
  if (padded != 0) {
    const i64 to_bytes = padded_row_bytes(o, s);
    const PadRowsParams p{q.values, workspace.take(padded), static_cast<u64>(matrices * rows),
                          static_cast<u32>(ready.row_bytes), static_cast<u32>(to_bytes)};
    steps.emplace_back(
        make_launch("pad_rows", relayout_grid(pad_rows_items(p)), kRelayoutThreads, p));
    ready.values = p.to;
    ready.row_bytes = to_bytes;
  }
  if (tiled != 0) {
    const TileScalesParams p{q.scales, workspace.take(tiled), static_cast<u32>(matrices),
                             static_cast<u32>(rows),
                             static_cast<u32>(ceil_div(s.k, o.format.block))};
    steps.emplace_back(
        make_launch("tile_scales", relayout_grid(tile_scales_items(p)), kRelayoutThreads, p));
    ready.scales = p.tiled;
  }
  return ready;
}

using Wide = unsigned long long;

MapRequest codes_map(const Ready& r, const GemmPlan& plan, const GemmShape& s, u32 box_rows,
                     u32 offset) {
  const int bits = minifloat(r.operand.format.element).bits();
  const bool expanded = plan.variant.kind == GemmKind::mxf8f6f4 && bits < 8;
  MapRequest map;
  map.offset = offset;
  map.type = !expanded ? MapType::uint8 : bits == 4 ? MapType::u4_align16 : MapType::u6_align16;
  map.rank = 3;
  map.address = r.values;
  map.dims[0] = static_cast<Wide>(expanded ? round_up(s.k, 128) : r.row_bytes);
  map.dims[1] = static_cast<Wide>(r.rows);
  map.dims[2] = static_cast<Wide>(r.operand.batched ? s.batch : 1);
  map.strides[0] = static_cast<Wide>(r.row_bytes);
  map.strides[1] = static_cast<Wide>(r.rows * r.row_bytes);
  map.box[0] = kGemmRowBytes;
  map.box[1] = box_rows;
  map.box[2] = 1;
  map.swizzle_128b = true;
  return map;
}

MapRequest scales_map(const Ready& r, const GemmPlan& plan, const GemmShape& s, u32 box_tiles,
                      u32 offset) {
  const i64 groups = ceil_div(ceil_div(s.k, r.operand.format.block), kScaleTileBlocks);
  const i64 row_tiles = ceil_div(r.rows, kScaleTileRows);
  MapRequest map;
  map.offset = offset;
  map.type = MapType::uint16;
  map.rank = 4;
  map.address = r.scales;
  map.dims[0] = kScaleTileBytes / 2;
  map.dims[1] = static_cast<Wide>(groups);
  map.dims[2] = static_cast<Wide>(row_tiles);
  map.dims[3] = static_cast<Wide>(r.operand.batched ? s.batch : 1);
  map.strides[0] = kScaleTileBytes;
  map.strides[1] = static_cast<Wide>(groups * kScaleTileBytes);
  map.strides[2] = static_cast<Wide>(row_tiles * groups * kScaleTileBytes);
  map.box[0] = kScaleTileBytes / 2;
  map.box[1] = plan.variant.scale_groups();
  map.box[2] = box_tiles;
  map.box[3] = 1;
  return map;
}

MapRequest out_map(const GemmParams& p, u64 matrices, u32 offset) {
  const u32 size = dtype_bytes(p.out_type);
  MapRequest map;
  map.offset = offset;
  map.type = p.out_type == Dtype::f32    ? MapType::f32
             : p.out_type == Dtype::bf16 ? MapType::bf16
                                         : MapType::f16;
  map.rank = 3;
  map.address = p.out;
  map.dims[0] = p.n;
  map.dims[1] = p.m;
  map.dims[2] = matrices;
  map.strides[0] = Wide{p.n} * size;
  map.strides[1] = Wide{p.n} * size * p.m;
  map.box[0] = kGemmRowBytes / size;
  map.box[1] = kGemmStoreRows;
  map.box[2] = 1;
  map.swizzle_128b = true;
  return map;
}

Launch reduce(const GemmPlan& plan, const GemmShape& s, const GemmArrays& arrays,
              const float* parts) {
  GemmReduceParams p{};
  p.parts = parts;
  p.global_scale_a = arrays.a.global_scale;
  p.global_scale_b = arrays.b.global_scale;
  p.bias = arrays.bias;
  p.c = arrays.c;
  p.out = arrays.out;
  p.elements = s.m * s.n;
  p.batch = static_cast<u32>(s.batch);
  p.columns = static_cast<u32>(s.n);
  p.splits = parts == nullptr ? 0 : plan.splits;
  p.batch_scale_a = s.a.batched;
  p.batch_scale_b = s.b.batched;
  p.batch_bias = arrays.bias_batched;
  p.out_type = s.out;
  p.c_type = arrays.c_type;
  p.bias_type = arrays.bias_type;
  const i64 ctas = ceil_div(p.elements, kGemmReduceThreads);
  const Grid grid{static_cast<u32>(std::min<i64>(ctas, 65535)), std::min(p.batch, kMaxGridYZ), 1};
  return make_launch("gemm_reduce", grid, kGemmReduceThreads, p);
}

}  // namespace

Steps gemm_steps(const GemmPlan& plan, const GemmShape& s, const GemmArrays& arrays) {
  Steps steps;
  if (s.batch * s.m * s.n == 0) return steps;
  if (s.k == 0) {
    steps.emplace_back(reduce(plan, s, arrays, nullptr));
    return steps;
  }
  Workspace workspace{arrays.workspace};
  const Ready a = make_ready(steps, s, s.a, s.m, arrays.a, plan.padded_a, plan.tiled_a, workspace);
  const Ready b = make_ready(steps, s, s.b, s.n, arrays.b, plan.padded_b, plan.tiled_b, workspace);
  auto* parts = reinterpret_cast<float*>(workspace.take(plan.parts));
  const bool whole = plan.splits == 1;

  GemmParams p{};
  p.m = static_cast<u32>(plan.exchanged ? s.n : s.m);
  p.n = static_cast<u32>(plan.exchanged ? s.m : s.n);
  p.steps = plan.steps;
  p.splits = plan.splits;
  p.split_steps = plan.split_steps;
  p.tiles_m = plan.tiles_m;
  p.tiles_n = plan.tiles_n;
  p.strip = plan.strip;
  p.transposed = plan.exchanged;
  p.out = whole ? arrays.out : parts;
  p.out_type = whole ? s.out : Dtype::f32;
  const Ready &first = plan.exchanged ? b : a, &second = plan.exchanged ? a : b;
  p.batch_a = first.operand.batched;
  p.batch_b = second.operand.batched;
  p.element_a = first.operand.format.element;
  p.element_b = second.operand.format.element;
  if (whole) {  // else gemm_reduce applies them, once
    p.global_scale_a = plan.exchanged ? arrays.b.global_scale : arrays.a.global_scale;
    p.global_scale_b = plan.exchanged ? arrays.a.global_scale : arrays.b.global_scale;
    p.batch_scale_a = p.batch_a;
    p.batch_scale_b = p.batch_b;
    p.bias = arrays.bias;
    p.bias_type = arrays.bias_type;
    p.batch_bias = arrays.bias_batched;
    p.c = arrays.c;
    p.c_type = arrays.c_type;
    p.c_by_vector =
        s.n * dtype_bytes(arrays.c_type) % 16 == 0 && reinterpret_cast<u64>(arrays.c) % 16 == 0;
  }
  p.d_by_map = !plan.exchanged && i64{p.n} * dtype_bytes(p.out_type) % 16 == 0;

  const GemmVariant& v = plan.variant;
  const u32 ctas =
      static_cast<u32>(static_cast<u64>(s.batch) * p.tiles_m * p.tiles_n * v.ctas * plan.splits);
  Launch launch = make_launch(plan.kernel, {ctas, 1, 1}, kGemmThreads, p);
  launch.cluster = v.ctas;
  launch.shared_bytes = v.shared_bytes();
  launch.overlaps = !steps.empty();
  launch.maps = {
      codes_map(first, plan, s, kGemmRows, offsetof(GemmParams, a)),
      codes_map(second, plan, s, v.rows_b(), offsetof(GemmParams, b)),
      scales_map(first, plan, s, 1, offsetof(GemmParams, scales_a)),
      scales_map(second, plan, s, v.scale_tiles_b(), offsetof(GemmParams, scales_b)),
  };
  if (p.d_by_map)
    launch.maps.push_back(
        out_map(p, static_cast<u64>(s.batch) * plan.splits, offsetof(GemmParams, d)));
  steps.emplace_back(std::move(launch));
  if (!whole) {
    steps.emplace_back(reduce(plan, s, arrays, parts));
    std::get<Launch>(steps.back()).overlaps = true;
  }
  return steps;
}

}  // namespace jax_fp4::plan

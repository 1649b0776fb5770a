// The launches of a plan: operands brought into the layout that the kernel reads, the product, the sum of
// its parts.
#include <algorithm>

#include "kernels/relayout_params.h"
#include "plan/gemm.h"

namespace jax_fp4::plan {
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
                 const GemmArrays::Quantized& q, u64 padded, i64 pitch, u64 tiled,
                 Workspace& workspace) {
  const i64 matrices = o.batched ? s.batch : 1;
  Ready ready{o, rows, q.values, row_bytes(o.format.element, s.k), q.scales};
  if (padded != 0) {
    const PadRowsParams p{q.values, workspace.take(padded), static_cast<u64>(matrices * rows),
                          static_cast<u32>(ready.row_bytes), static_cast<u32>(pitch)};
    steps.emplace_back(
        make_launch("pad_rows", relayout_grid(pad_rows_items(p)), kRelayoutThreads, p));
    ready.values = p.to;
    ready.row_bytes = pitch;
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
  const GemmVariant v = plan.tile.variant();
  const bool expanded = v.kind == GemmKind::mxf8f6f4 && bits < 8;
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
  map.box[0] = v.row_bytes();
  map.box[1] = box_rows;
  map.box[2] = 1;
  map.swizzle = v.row_bytes();
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
  map.box[1] = plan.tile.variant().scale_groups();
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
  map.swizzle = kGemmRowBytes;
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
  p.batch = static_cast<u32>(s.results());
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

Grid gemm_grid(const GemmPlan& plan, const GemmShape& s) {
  const u64 tiles = static_cast<u64>(s.results()) * plan.tiles_m * plan.tiles_n * plan.splits;
  return {static_cast<u32>(tiles * plan.tile.ctas), 1, 1};
}

// gemm_sm100 and gemm_sm120: operands come through tensor maps.
Launch launch_blocks(const GemmPlan& plan, const GemmShape& s, const Ready& first,
                     const Ready& second, GemmParams& p) {
  p.d_by_map = !plan.exchanged && i64{p.n} * dtype_bytes(p.out_type) % 16 == 0;
  Launch launch = make_launch(plan.kernel, gemm_grid(plan, s), plan.tile.threads(), p);
  const GemmVariant v = plan.tile.variant();
  launch.cluster = v.ctas;
  launch.maps = {
      codes_map(first, plan, s, kGemmRows, offsetof(GemmParams, a)),
      codes_map(second, plan, s, v.rows_b(), offsetof(GemmParams, b)),
      scales_map(first, plan, s, 1, offsetof(GemmParams, scales_a)),
      scales_map(second, plan, s, v.scale_tiles_b(), offsetof(GemmParams, scales_b)),
  };
  if (p.d_by_map)
    launch.maps.push_back(
        out_map(p, static_cast<u64>(s.results()) * plan.splits, offsetof(GemmParams, d)));
  return launch;
}

// gemm_bf16: operands are given by where they lie.
Launch launch_bf16(const GemmPlan& plan, const GemmShape& s, const Ready& first,
                   const Ready& second, const GemmParams& gemm) {
  GemmBf16Params p{};
  p.gemm = gemm;
  p.values_a = first.values;
  p.values_b = second.values;
  p.scales_a = first.scales;
  p.scales_b = second.scales;
  p.pitch_a = static_cast<u32>(first.row_bytes);
  p.pitch_b = static_cast<u32>(second.row_bytes);
  const i64 blocks = ceil_div(s.k, first.operand.format.block);
  p.scale_groups = static_cast<u32>(ceil_div(blocks, kScaleTileBlocks));
  return make_launch(plan.kernel, gemm_grid(plan, s), plan.tile.threads(), p);
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
  const Ready a = make_ready(steps, s, s.a, s.m, arrays.a, plan.padded_a, plan.pitch_a,
                             plan.tiled_a, workspace);
  const Ready b = make_ready(steps, s, s.b, s.n, arrays.b, plan.padded_b, plan.pitch_b,
                             plan.tiled_b, workspace);
  auto* parts = reinterpret_cast<float*>(workspace.take(plan.parts));
  const bool whole = plan.splits == 1;

  GemmParams p{};
  p.m = static_cast<u32>(plan.exchanged ? s.n : s.m);
  p.n = static_cast<u32>(plan.exchanged ? s.m : s.n);
  p.steps = plan.steps;
  p.split_steps = plan.split_steps;
  p.raster = gemm_raster(plan.tiles_m, plan.tiles_n, plan.strip, plan.splits);
  p.transposed = plan.exchanged;
  p.groups = static_cast<u32>(s.batch);
  (s.grouping == Grouping::rows ? p.row_groups : p.k_groups) = arrays.groups;
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
    const bool grouped = s.grouping != Grouping::none;
    p.batch_scale_a = grouped || p.batch_a;
    p.batch_scale_b = grouped || p.batch_b;
    p.bias = arrays.bias;
    p.bias_type = arrays.bias_type;
    p.batch_bias = arrays.bias_batched;
    p.c = arrays.c;
    p.c_type = arrays.c_type;
    p.c_by_vector =
        s.n * dtype_bytes(arrays.c_type) % 16 == 0 && reinterpret_cast<u64>(arrays.c) % 16 == 0;
  }
  steps.emplace_back(plan.tile.decodes() ? launch_bf16(plan, s, first, second, p)
                                         : launch_blocks(plan, s, first, second, p));
  Launch& launch = std::get<Launch>(steps.back());
  launch.shared_bytes = plan.tile.shared_bytes();
  launch.overlaps = steps.size() > 1;
  if (!whole) {
    steps.emplace_back(reduce(plan, s, arrays, parts));
    std::get<Launch>(steps.back()).overlaps = true;
  }
  return steps;
}

}  // namespace jax_fp4::plan

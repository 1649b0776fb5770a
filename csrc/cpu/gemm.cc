// The GEMM driver.
//
// One batch entry at a time (or, where entries are small and many, one entry per thread):
//
//   1. decode both operands into panels, each once               run over groups of 16 rows
//   2. multiply: a task owns a tile of D and its sums in f32,    run over tiles
//      adds k block by k block, and finishes the tile
//   3. outputs of `wide` rows (gemm_kernels.h) are replaced      in the same task
//
// Where one operand has few enough rows for a single tile, no task needs what another one decodes
// of the other operand: it is then decoded in step 2, k block by k block, and stays in the cache.
// Operands larger than kSlabBytes of panel are cut into slabs of rows. Products with at most
// kFewRows rows on one side go without panels where the level has kernels for that.
#include "cpu/gemm.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "cpu/gemm_kernels.h"

namespace jax_fp4::cpu {
namespace {

// Panels up to this size are kept whole; above, rows are decoded again for each slab of the other
// operand, which costs little: a slab still has thousands of rows at usual k.
constexpr i64 kSlabBytes = i64{64} << 20;
// A tile of D has 256 x 512 sums, which with their two panel blocks (128 and 256 KiB in bf16) leave
// half of a 2 MiB L2 cache to what comes next. On an Emerald Rapids core, panels streamed from L3:
// 1.3 to 1.5 TFLOP/s, against 1.1 to 1.2 with 256 x 256 and k blocks of 512.
constexpr i64 kTileLeft = 16, kTileRight = 32;  // groups
// Below this many products the threads cost more than they save.
constexpr double kSerialProducts = 1 << 21;

// Memory that a thread keeps from call to call. Page faults of fresh memory would cost as much as
// decoding into it; huge pages because panels are read faster than a TLB of 4 KiB pages reaches.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }

  void* at_least(i64 bytes) {
    if (bytes <= bytes_) return memory_;
    std::free(memory_);
    bytes_ = round_up(bytes, kPage);
    memory_ = std::aligned_alloc(kPage, static_cast<std::size_t>(bytes_));
    if (memory_ == nullptr) {
      bytes_ = 0;
      throw std::bad_alloc();
    }
#if defined(__linux__)
    madvise(memory_, static_cast<std::size_t>(bytes_), MADV_HUGEPAGE);
#endif
    return memory_;
  }

 private:
  static constexpr i64 kPage = i64{2} << 20;
  void* memory_ = nullptr;
  i64 bytes_ = 0;
};

thread_local Scratch left_panel, right_panel, task_panel, tile_sums;

const PanelKernels& kernels_of(Level level) {
#if defined(__x86_64__)
  if (level == Level::amx) return amx_panel_kernels();
  if (level == Level::avx2) return avx2_panel_kernels();
  if (level == Level::avx512_bf16) return avx512_bf16_panel_kernels();
  if (level == Level::avx512) return avx512_panel_kernels();
#endif
  (void)level;
  return portable_panel_kernels();
}

const StreamKernels* stream_of(Level level) {
#if defined(__x86_64__)
  if (level == Level::avx2) return &avx2_stream_kernels();
  if (level >= Level::avx512) return &avx512_stream_kernels();
#endif
  (void)level;
  return nullptr;
}

Rows rows_of(const Operand& x, i64 entry, i64 rows, i64 k) {
  const i64 index = x.batch == 1 ? 0 : entry;
  const i64 blocks = ceil_div(k, x.format.block);
  return {x.format,
          x.layout,
          rows,
          k,
          x.values + index * rows * row_bytes(x.format.element, k),
          x.scales + index * scale_bytes(x.layout, rows, blocks)};
}

Epilogue epilogue_of(const GemmProblem& p, i64 entry) {
  const i64 offset = entry * p.m * p.n;
  const auto at = [&](const void* array, Dtype dtype) -> const void* {
    if (array == nullptr) return nullptr;
    return static_cast<const u8*>(array) + offset * dtype_bytes(dtype);
  };
  return {
      p.a.global_scale[p.a.batch == 1 ? 0 : entry] * p.b.global_scale[p.b.batch == 1 ? 0 : entry],
      nullptr,
      nullptr,
      p.bias,
      p.bias_dtype,
      at(p.accumulate, p.accumulate_dtype),
      p.accumulate_dtype,
      static_cast<u8*>(p.out) + offset * dtype_bytes(p.out_dtype),
      p.out_dtype,
      p.n};
}

// A range of groups of one operand, and their panel.
struct Slab {
  const Rows& x;
  RowScales& scales;
  void (*pack)(const Rows&, const i32*, i64, i64, i64, void*);
  i64 element_bytes;
  i64 first = 0, count = 0;  // groups
  bool direct = false;       // decoded by the task that needs it, never kept
  u8* panel = nullptr;

  i64 padded_k() const { return round_up(x.k, kStep); }
  i64 group_bytes() const { return padded_k() * kGroup * element_bytes; }
  i64 groups() const { return ceil_div(x.rows, kGroup); }

  // Panel blocks lie one after the other, each with all groups of the slab: a tile of D reads
  // neighbouring groups of one block, whose distance is then never a large power of two.
  i64 steps(i64 block) const { return std::min(kDepth, padded_k() - block * kDepth) / kStep; }
  u8* at(i64 group, i64 block) const {
    return panel + (block * count * kDepth + group * steps(block) * kStep) * kGroup * element_bytes;
  }

  void scan(i64 group) const {
    const i64 begin = (first + group) * kGroup;
    for (i64 row = begin; row < std::min(begin + kGroup, x.rows); ++row) scan_row(x, row, scales);
  }

  void decode_block(i64 group, i64 block, u8* to) const {
    pack(x, scales.base.data(), first + group, block * kDepth, steps(block), to);
  }

  void decode(i64 group) const {
    scan(group);
    for (i64 block = 0; block * kDepth < x.k; ++block) decode_block(group, block, at(group, block));
  }

  // One block of groups [group, end), from the panel or decoded now.
  const u8* block_of(i64 group, i64 end, i64 block) const {
    if (!direct) return at(group, block);
    const i64 bytes = steps(block) * kStep * kGroup * element_bytes;
    u8* to = static_cast<u8*>(task_panel.at_least((end - group) * bytes));
    for (i64 g = group; g < end; ++g) decode_block(g, block, to + (g - group) * bytes);
    return to;
  }
};

// One operand with what was found out about its rows.
struct Scanned {
  const Rows& x;
  const RowScales& scales;
};

// Replaces the outputs of wide rows in a part of D.
void finish_wide(const Epilogue& epilogue, const Scanned& left, const Scanned& right, i64 row0,
                 i64 row1, i64 col0, i64 col1) {
  const i64 k = left.x.k;
  std::vector<double> a, b;
  for (i64 row = row0; row < row1; ++row) {
    bool decoded = false;
    for (i64 col = col0; col < col1; ++col) {
      if (!left.scales.wide[row] && !right.scales.wide[col]) continue;
      a.resize(k), b.resize(k);
      if (!decoded) decode_row(left.x, row, a.data());
      decoded = true;
      decode_row(right.x, col, b.data());
      finish_one(epilogue, row, col, wide_dot(a.data(), b.data(), k));
    }
  }
}

bool any_wide(const RowScales& scales, i64 begin, i64 end) {
  const auto first = scales.wide.begin();
  return std::find(first + begin, first + end, 1) != first + end;
}

// The size of parts of `count` groups, about equal and at most `limit`; even, since kernels take
// two groups at a time.
i64 even_part(i64 count, i64 limit) { return round_up(ceil_div(count, ceil_div(count, limit)), 2); }

// All tiles of D between two decoded slabs.
void multiply_slabs(const PanelKernels& kernels, const Slab& left, const Slab& right,
                    const Epilogue& epilogue, Parallel& parallel) {
  i64 tile_left = even_part(left.count, kTileLeft);
  i64 tile_right = even_part(right.count, kTileRight);
  // Tiles enough to keep all threads busy to the end.
  const auto tiles = [&] {
    return ceil_div(left.count, tile_left) * ceil_div(right.count, tile_right);
  };
  while (parallel.threads() > 1 && tiles() < 3 * parallel.threads()) {
    // Only a tile as long as the kept operand decodes nothing of the direct one twice.
    i64& longer = left.direct || (!right.direct && tile_left > tile_right) ? tile_left : tile_right;
    if (longer <= 2) break;
    longer = round_up(longer / 2, 2);
  }
  const i64 tiles_left = ceil_div(left.count, tile_left);

  parallel.run(tiles(), [&](i64 tile) {
    const i64 l0 = tile % tiles_left * tile_left;
    const i64 r0 = tile / tiles_left * tile_right;
    const i64 l1 = std::min(l0 + tile_left, left.count);
    const i64 r1 = std::min(r0 + tile_right, right.count);
    PanelBlock block = {};
    block.left_groups = l1 - l0;
    block.right_groups = r1 - r0;
    for (i64 group = l0; left.direct && group < l1; ++group) left.scan(group);
    for (i64 group = r0; right.direct && group < r1; ++group) right.scan(group);
    const i64 tile_floats = kGroup * kGroup;
    block.sums = static_cast<float*>(
        tile_sums.at_least(tile_left * tile_right * tile_floats * static_cast<i64>(sizeof(float))));
    if (left.x.k == 0)
      std::fill(block.sums, block.sums + block.left_groups * block.right_groups * tile_floats,
                0.0f);
    for (i64 depth = 0; depth * kDepth < left.x.k; ++depth) {
      block.left = left.block_of(l0, l1, depth);
      block.right = right.block_of(r0, r1, depth);
      block.steps = left.steps(depth);
      block.first = depth == 0;
      kernels.multiply(block);
    }
    const i64 row0 = (left.first + l0) * kGroup;
    const i64 row1 = std::min(row0 + block.left_groups * kGroup, left.x.rows);
    const i64 col0 = (right.first + r0) * kGroup;
    const i64 col1 = std::min(col0 + block.right_groups * kGroup, right.x.rows);
    for (i64 row = row0; row < row1; ++row) {
      const i64 group = (row - row0) / kGroup;
      kernels.finish(
          epilogue, row, col0, col1 - col0,
          block.sums + group * block.right_groups * tile_floats + (row - row0) % kGroup * kGroup,
          tile_floats);
    }
    if (any_wide(left.scales, row0, row1) || any_wide(right.scales, col0, col1))
      finish_wide(epilogue, {left.x, left.scales}, {right.x, right.scales}, row0, row1, col0, col1);
  });
}

// Powers are needed as soon as one operand has power-of-two scales.
void set_powers(const Scanned& a, const Scanned& b, Epilogue& epilogue) {
  if (a.x.format.scale == BlockScale::ue4m3 && b.x.format.scale == BlockScale::ue4m3) return;
  epilogue.power_a = a.scales.power.data();
  epilogue.power_b = b.scales.power.data();
}

void gemm_panels(const PanelKernels& kernels, const Rows& a, const Rows& b, Epilogue epilogue,
                 Parallel& parallel) {
  RowScales scales_a(a.rows), scales_b(b.rows);
  set_powers({a, scales_a}, {b, scales_b}, epilogue);
  Slab left{a, scales_a, kernels.pack_left, kernels.element_bytes};
  Slab right{b, scales_b, kernels.pack_right, kernels.element_bytes};
  right.direct = left.groups() <= kTileLeft;
  left.direct = !right.direct && right.groups() <= kTileRight;
  const i64 slab_groups = std::max(kTileRight, kSlabBytes / std::max<i64>(left.group_bytes(), 1));
  // Takes the slab that starts at x.first; a direct operand is one slab.
  const auto take = [&](Slab& x, Scratch& panel) {
    x.count = x.direct ? x.groups() : std::min(slab_groups, x.groups() - x.first);
    if (!x.direct) x.panel = static_cast<u8*>(panel.at_least(x.count * x.group_bytes()));
    return x.direct ? 0 : x.count;  // groups to decode
  };
  for (right.first = 0; right.first < right.groups(); right.first += right.count) {
    i64 right_pending = take(right, right_panel);
    for (left.first = 0; left.first < left.groups(); left.first += left.count) {
      i64 left_pending = take(left, left_panel);
      const bool left_kept = right.first > 0 && left.count == left.groups();
      if (left_kept) left_pending = 0;
      parallel.run(left_pending + right_pending, [&](i64 i) {
        i < left_pending ? left.decode(i) : right.decode(i - left_pending);
      });
      right_pending = 0;
      multiply_slabs(kernels, left, right, epilogue, parallel);
    }
  }
}

// At most kFewRows rows on one side.
void gemm_stream(const PanelKernels& kernels, const StreamKernels& stream, const Rows& a,
                 const Rows& b, Epilogue epilogue, Parallel& parallel) {
  RowScales scales_a(a.rows), scales_b(b.rows);
  set_powers({a, scales_a}, {b, scales_b}, epilogue);
  const bool few_a = a.rows <= kFewRows;
  const Rows& few = few_a ? a : b;
  const Rows& many = few_a ? b : a;
  RowScales& few_scales = few_a ? scales_a : scales_b;
  RowScales& many_scales = few_a ? scales_b : scales_a;
  for (i64 row = 0; row < few.rows; ++row) scan_row(few, row, few_scales);
  u8* prepared = static_cast<u8*>(left_panel.at_least(stream.prepared_bytes(few, many.format)));
  stream.prepare(few, few_scales, many.format, prepared);
  constexpr i64 kPart = 64;  // of the many rows, per task
  parallel.run(ceil_div(many.rows, kPart), [&](i64 part) {
    const i64 begin = part * kPart;
    const i64 end = std::min(begin + kPart, many.rows);
    for (i64 row = begin; row < end; ++row) scan_row(many, row, many_scales);
    float sums[kFewRows * kPart];
    stream.dot(prepared, few, many, many_scales, begin, end, sums, kPart);
    for (i64 f = 0; f < few.rows; ++f) {
      const float* row_sums = sums + f * kPart;
      if (few_a) {
        kernels.finish(epilogue, f, begin, end - begin, row_sums, kGroup);
      } else {
        for (i64 row = begin; row < end; ++row)
          finish_one(epilogue, row, f, apply_powers(epilogue, row, f, row_sums[row - begin]));
      }
    }
    const Scanned left{a, scales_a}, right{b, scales_b};
    if (few_a)
      finish_wide(epilogue, left, right, 0, few.rows, begin, end);
    else
      finish_wide(epilogue, left, right, begin, end, 0, few.rows);
  });
}

void gemm_model(const Rows& a, const Rows& b, const Epilogue& epilogue, Parallel& parallel) {
  parallel.run(a.rows, [&](i64 row) {
    for (i64 col = 0; col < b.rows; ++col)
      finish_one(epilogue, row, col, model_dot(a, row, b, col));
  });
}

void gemm_entry(const GemmProblem& p, i64 entry, Parallel& parallel) {
  const Rows a = rows_of(p.a, entry, p.m, p.k);
  const Rows b = rows_of(p.b, entry, p.n, p.k);
  const Epilogue epilogue = epilogue_of(p, entry);
  const Level now = level();
  if (now == Level::model) return gemm_model(a, b, epilogue, parallel);
  const PanelKernels& kernels = kernels_of(now);
  const StreamKernels* stream = stream_of(now);
  if (stream != nullptr && std::min(p.m, p.n) <= kFewRows)
    return gemm_stream(kernels, *stream, a, b, epilogue, parallel);
  gemm_panels(kernels, a, b, epilogue, parallel);
}

}  // namespace

void gemm(const GemmProblem& problem, Parallel& parallel) {
  if (problem.batch == 0 || problem.m == 0 || problem.n == 0) return;
  const IeeeEnvironment ieee;
  Serial serial;
  const double products = static_cast<double>(problem.m) * static_cast<double>(problem.n) *
                          static_cast<double>(std::max<i64>(problem.k, 1));
  const bool small = products < kSerialProducts;
  if (problem.batch > 1 && products * static_cast<double>(problem.batch) >= kSerialProducts &&
      problem.batch >= 2 * parallel.threads()) {
    parallel.run(problem.batch, [&](i64 entry) {
      Serial inner;
      gemm_entry(problem, entry, inner);
    });
    return;
  }
  for (i64 entry = 0; entry < problem.batch; ++entry)
    gemm_entry(problem, entry, small ? static_cast<Parallel&>(serial) : parallel);
}

}  // namespace jax_fp4::cpu

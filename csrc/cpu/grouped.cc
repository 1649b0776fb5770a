// Groups of rows are rows of A that lie together: a product reads them where they are. Groups of K are
// columns of both operands, which are brought together first, codes and scales.
#include "cpu/grouped.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace jax_fp4::cpu {
namespace {

// Entry `index` of an operand [count, rows, k].
Operand entry(const Operand& x, i64 index, i64 rows, i64 k, i64 group) {
  const i64 blocks = ceil_div(k, x.format.block);
  return {x.format,
          x.layout,
          1,
          x.values + index * rows * row_bytes(x.format.element, k),
          x.scales + index * scale_bytes(x.layout, rows, blocks),
          x.global_scale + group};
}

void multiply_rows(const GroupedProblem& p, Parallel& parallel) {
  const i64 units = p.m / kGroupUnit;
  const i64 unit_bytes = kGroupUnit * p.n * dtype_bytes(p.out_dtype);
  for (i64 unit = 0, end; unit < units; unit = end) {
    const u32 group = p.where[unit];
    for (end = unit + 1; end < units && p.where[end] == group;) ++end;
    if (group >= p.groups) continue;
    GemmProblem product{1,
                        (end - unit) * kGroupUnit,
                        p.n,
                        p.k,
                        entry(p.a, unit, kGroupUnit, p.k, group),
                        entry(p.b, group, p.n, p.k, group)};
    product.out = static_cast<char*>(p.out) + unit * unit_bytes;
    product.out_dtype = p.out_dtype;
    gemm(product, parallel);
  }
}

// Columns [first, first + k) of an operand of one matrix.
struct Columns {
  std::vector<u8> values, scales;
  Operand operand;

  Columns(const Operand& x, i64 rows, i64 all, i64 first, i64 k, i64 group) : operand(x) {
    const i64 block = x.format.block;
    const auto bytes = [&](i64 length) { return row_bytes(x.format.element, length); };
    copy(values, x.values, rows, bytes(all), bytes(first), bytes(k));
    const i64 blocks = ceil_div(all, block);
    if (x.layout == ScaleLayout::linear) {
      copy(scales, x.scales, rows, blocks, first / block, k / block);
    } else {
      const i64 span = kScaleTileBlocks * block;  // that a tile of scales has of a row
      copy(scales, x.scales, ceil_div(rows, kScaleTileRows),
           ceil_div(blocks, kScaleTileBlocks) * kScaleTileBytes, first / span * kScaleTileBytes,
           k / span * kScaleTileBytes);
    }
    operand.batch = 1;
    operand.values = values.data();
    operand.scales = scales.data();
    operand.global_scale = x.global_scale + group;
  }

 private:
  static void copy(std::vector<u8>& to, const u8* from, i64 rows, i64 pitch, i64 first, i64 bytes) {
    to.resize(static_cast<std::size_t>(rows * bytes));
    for (i64 row = 0; row < rows && bytes != 0; ++row)
      std::memcpy(to.data() + row * bytes, from + row * pitch + first,
                  static_cast<std::size_t>(bytes));
  }
};

void multiply_columns(const GroupedProblem& p, Parallel& parallel) {
  const auto boundary = [&](i64 i) {
    return std::min<i64>(p.where[i] / kGroupUnit * kGroupUnit, p.k);
  };
  for (i64 group = 0; group < p.groups; ++group) {
    const i64 first = boundary(group);
    const i64 k = std::max<i64>(boundary(group + 1) - first, 0);
    const Columns a(p.a, p.m, p.k, first, k, group), b(p.b, p.n, p.k, first, k, group);
    GemmProblem product{1, p.m, p.n, k, a.operand, b.operand};
    product.out = static_cast<char*>(p.out) + group * p.m * p.n * dtype_bytes(p.out_dtype);
    product.out_dtype = p.out_dtype;
    gemm(product, parallel);
  }
}

}  // namespace

void grouped_gemm(const GroupedProblem& problem, Parallel& parallel) {
  problem.of_rows ? multiply_rows(problem, parallel) : multiply_columns(problem, parallel);
}

}  // namespace jax_fp4::cpu

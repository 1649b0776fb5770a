// csrc/sim/ops/mma_tile.h for ctypes, and the single outputs that it must equal.
#include <cstring>

#include "numerics/mma_accumulate.h"
#include "sim/ops/mma_tile.h"

using namespace jax_fp4;
using namespace jax_fp4::sim;

namespace {

// Formats by number: the elements in the order of Element, then f16, bf16, TF32.
Minifloat format(int number) {
  if (number < 5) return minifloat(static_cast<Element>(number));
  return number == 5 ? kMmaF16 : number == 6 ? kMmaBF16 : kMmaTF32;
}

struct Problem {
  int terms;  // 0 groups, 1 products, 2 integers (then a_format, b_format: signed)
  int k, a_format, b_format, scale, scales, negate_a, negate_b, half, saturates;
  int rows, columns;
};

MmaKind kind_of(const Problem& p) {
  MmaKind kind;
  kind.terms = static_cast<MmaKind::Terms>(p.terms);
  kind.k = p.k;
  kind.scale = static_cast<BlockScale>(p.scale);
  kind.scales = p.scales;
  kind.negate_a = p.negate_a;
  kind.negate_b = p.negate_b;
  if (kind.terms == MmaKind::Terms::integers) {
    kind.signed_a = p.a_format;
    kind.signed_b = p.b_format;
    kind.saturates = p.saturates;
    return kind;
  }
  kind.a = format(p.a_format);
  kind.b = format(p.b_format);
  kind.core = mma_core(100, 256 / p.k, p.half);
  return kind;
}

MmaOperand operand(int rows, int k, int scales, const u32* codes, const u8* scale_bytes) {
  return {rows, {codes, codes + rows * k}, {scale_bytes, scale_bytes + rows * scales}};
}

}  // namespace

extern "C" {

int c_best_level() { return static_cast<int>(best_vector_level()); }

// d [rows, columns] += A * B at a level.
void c_tile(const Problem* p, const u32* a, const u32* b, const u8* sa, const u8* sb, int sum,
            int level, u32* d) {
  const MmaTile tile(kind_of(*p), operand(p->rows, p->k, p->scales, a, sa),
                     operand(p->columns, p->k, p->scales, b, sb), static_cast<MmaSum>(sum),
                     static_cast<VectorLevel>(level));
  u32 row[kMmaMostColumns];
  for (int m = 0; m < p->rows; ++m) {
    std::memset(row, 0xFF, sizeof row);  // columns beyond those of B must not matter
    std::memcpy(row, d + m * p->columns, sizeof(u32) * p->columns);
    tile.row(m, row);
    std::memcpy(d + m * p->columns, row, sizeof(u32) * p->columns);
  }
}

// The same, output by output, from csrc/numerics alone.
void c_single(const Problem* p, const u32* a, const u32* b, const u8* sa, const u8* sb, int sum,
              u32* d) {
  const MmaKind kind = kind_of(*p);
  for (int m = 0; m < p->rows; ++m) {
    for (int n = 0; n < p->columns; ++n) {
      u32& out = d[m * p->columns + n];
      const u32 *row = a + m * p->k, *column = b + n * p->k;
      if (kind.terms == MmaKind::Terms::products && p->scales == 0) {
        MmaNumber left[kMmaMostProducts], right[kMmaMostProducts];
        for (int k = 0; k < p->k; ++k) {
          left[k] = mma_number(kind.a, row[k] ^ (p->negate_a ? kind.a.sign_code() : 0));
          right[k] = mma_number(kind.b, column[k] ^ (p->negate_b ? kind.b.sign_code() : 0));
        }
        out = mma_plain(left, right, p->k, out, kind.core, static_cast<MmaSum>(sum));
        continue;
      }
      u8 left[kFp4StepK], right[kFp4StepK], left_scale[4], right_scale[4];
      for (int k = 0; k < p->k; ++k) {
        left[k] = static_cast<u8>(row[k] ^ (p->negate_a ? kind.a.sign_code() : 0));
        right[k] = static_cast<u8>(column[k] ^ (p->negate_b ? kind.b.sign_code() : 0));
      }
      if (kind.terms == MmaKind::Terms::groups) {
        for (int g = 0; g < 4; ++g) {
          left_scale[g] = sa[m * p->scales + g * p->scales / 4];
          right_scale[g] = sb[n * p->scales + g * p->scales / 4];
        }
        out = mma_fp4_step(left, right, kind.scale, left_scale, right_scale, out,
                           static_cast<MmaSum>(sum));
      } else {
        out = mma_fp8_step(static_cast<Element>(p->a_format), left, sa[m],
                           static_cast<Element>(p->b_format), right, sb[n], out,
                           static_cast<MmaSum>(sum));
      }
    }
  }
}
}

// MMA tiles: operands taken apart once, then row by row; what the inner loops do not handle (infinities and
// NaN among elements and scales, sums other than the model's) goes output by output.
#include "sim/ops/mma_tile.h"

#include <algorithm>
#include <cstring>

#include "sim/ops/mma_tile_rows.h"

namespace jax_fp4::sim {
namespace {

constexpr int kStrip = 32;  // columns that the inner loops take at a time

// ---- The inner loops at each level

struct Loops {
  void (*groups)(const GroupRow&, const GroupStrip<kStrip>*, int, u32*);
  void (*f32)(const ProductRow&, const ProductStrip<kStrip>*, int, const ProductParameters&, u32*);
  void (*f16)(const ProductRow&, const ProductStrip<kStrip>*, int, const ProductParameters&, u32*);
  void (*integers)(const ProductRow&, const ProductStrip<kStrip>*, int, bool, u32*);
};

#define JAX_FP4_LEVEL(name, ...)                                                                   \
  __VA_ARGS__ void groups_##name(const GroupRow& a, const GroupStrip<kStrip>* b, int strips,       \
                                 u32* d) {                                                         \
    for (int s = 0; s < strips; ++s) group_row(a, b[s], d + s * kStrip);                           \
  }                                                                                                \
  __VA_ARGS__ void f32_##name(const ProductRow& a, const ProductStrip<kStrip>* b, int strips,      \
                              const ProductParameters& p, u32* d) {                                \
    for (int s = 0; s < strips; ++s) product_row_f32(a, b[s], p, d + s * kStrip);                  \
  }                                                                                                \
  __VA_ARGS__ void f16_##name(const ProductRow& a, const ProductStrip<kStrip>* b, int strips,      \
                              const ProductParameters& p, u32* d) {                                \
    for (int s = 0; s < strips; ++s) product_row_f16(a, b[s], p, d + s * kStrip);                  \
  }                                                                                                \
  __VA_ARGS__ void integers_##name(const ProductRow& a, const ProductStrip<kStrip>* b, int strips, \
                                   bool saturates, u32* d) {                                       \
    for (int s = 0; s < strips; ++s) integer_row(a, b[s], saturates, d + s * kStrip);              \
  }                                                                                                \
  constexpr Loops kLoops_##name{groups_##name, f32_##name, f16_##name, integers_##name};

JAX_FP4_LEVEL(portable, )
#if defined(__x86_64__)
JAX_FP4_LEVEL(avx2, [[gnu::target("avx2")]])
JAX_FP4_LEVEL(avx512, [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]])
#endif
#undef JAX_FP4_LEVEL

const Loops& loops_of(VectorLevel level) {
#if defined(__x86_64__)
  if (level == VectorLevel::avx512) return kLoops_avx512;
  if (level == VectorLevel::avx2) return kLoops_avx2;
#endif
  (void)level;
  return kLoops_portable;
}

constexpr i16 kDoubled[8] = {0, 1, 2, 3, 4, 6, 8, 12};  // E2M1 magnitudes times two

}  // namespace

VectorLevel best_vector_level() {
#if defined(__x86_64__)
  static const VectorLevel best = [] {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      return VectorLevel::avx512;
    return __builtin_cpu_supports("avx2") ? VectorLevel::avx2 : VectorLevel::portable;
  }();
  return best;
#else
  return VectorLevel::portable;
#endif
}

struct MmaTile::Parts {
  // For the inner loops; rows and strips.
  std::vector<GroupRow> group_rows;
  std::vector<GroupStrip<kStrip>> group_strips;
  std::vector<ProductRow> product_rows;
  std::vector<ProductStrip<kStrip>> product_strips;
  ProductParameters parameters{};
  // For single outputs.
  std::vector<u8> codes_a, codes_b, scales_a, scales_b;  // groups: [rows, 64] and [rows, 4]
  std::vector<MmaNumber> numbers_a, numbers_b;           // products: [rows, k]
  std::vector<u8> special_a, special_b;                  // rows with an infinity or a NaN
  bool any_special_b = false;

  void take_groups(const MmaKind& kind, const MmaOperand& x, bool negate, std::vector<u8>& codes,
                   std::vector<u8>& scales);
  void take_numbers(const MmaKind& kind, const MmaOperand& x, const Minifloat& format, bool negate,
                    std::vector<MmaNumber>& numbers, std::vector<u8>& special);
  void make_group_rows(const MmaKind& kind, const MmaOperand& a, const MmaOperand& b);
  void make_product_rows(const MmaKind& kind, const MmaOperand& a, const MmaOperand& b);
  void make_integer_rows(const MmaKind& kind, const MmaOperand& a, const MmaOperand& b);
};

// Four scales for the four groups, also where 32 elements share one.
void MmaTile::Parts::take_groups(const MmaKind& kind, const MmaOperand& x, bool negate,
                                 std::vector<u8>& codes, std::vector<u8>& scales) {
  codes.resize(x.codes.size());
  for (std::size_t i = 0; i < codes.size(); ++i)
    codes[i] = static_cast<u8>(negate ? x.codes[i] ^ kE2M1.sign_code() : x.codes[i]);
  scales.resize(static_cast<std::size_t>(x.rows) * kGroups);
  for (int r = 0; r < x.rows; ++r)
    for (int g = 0; g < kGroups; ++g)
      scales[r * kGroups + g] = x.scales[r * kind.scales + g * kind.scales / kGroups];
}

void MmaTile::Parts::make_group_rows(const MmaKind& kind, const MmaOperand& a,
                                     const MmaOperand& b) {
  take_groups(kind, a, kind.negate_a, codes_a, scales_a);
  take_groups(kind, b, kind.negate_b, codes_b, scales_b);
  const auto take_row = [&](const u8* codes, const u8* scales) {
    GroupRow row{};
    for (int k = 0; k < kFp4StepK; ++k) {
      const i16 magnitude = kDoubled[codes[k] & 7];
      row.value[k] = static_cast<i16>((codes[k] & 8) ? -magnitude : magnitude);
      row.nonzero[k / kFp4Group] =
          static_cast<u16>(row.nonzero[k / kFp4Group] | (magnitude != 0) << (k % kFp4Group));
    }
    for (int g = 0; g < kGroups; ++g) {
      const MmaFactor factor = mma_scale(kind.scale, scales[g]);
      row.nan = row.nan || factor.nan;
      row.weight[g] = static_cast<i16>(factor.weight);
      // UE8M0 has a significand of one, UE4M3 of eighths.
      row.scale[g] =
          static_cast<i16>(factor.significand << (3 - (factor.weight - factor.exponent)));
      if (factor.significand == 0) row.nonzero[g] = 0;
    }
    return row;
  };
  group_rows.resize(static_cast<std::size_t>(a.rows));
  for (int m = 0; m < a.rows; ++m)
    group_rows[m] = take_row(&codes_a[m * kFp4StepK], &scales_a[m * kGroups]);
  group_strips.assign(static_cast<std::size_t>(ceil_div(b.rows, kStrip)), GroupStrip<kStrip>{});
  for (int n = 0; n < b.rows; ++n) {
    const GroupRow row = take_row(&codes_b[n * kFp4StepK], &scales_b[n * kGroups]);
    GroupStrip<kStrip>& strip = group_strips[n / kStrip];
    const int at = n % kStrip;
    for (int k = 0; k < kFp4StepK; ++k) strip.value[k][at] = row.value[k];
    for (int g = 0; g < kGroups; ++g) {
      strip.nonzero[g][at] = row.nonzero[g];
      strip.scale[g][at] = row.scale[g];
      strip.weight[g][at] = row.weight[g];
    }
    strip.nan[at] = row.nan ? ~0u : 0;
  }
}

void MmaTile::Parts::take_numbers(const MmaKind& kind, const MmaOperand& x, const Minifloat& format,
                                  bool negate, std::vector<MmaNumber>& numbers,
                                  std::vector<u8>& special) {
  numbers.resize(x.codes.size());
  special.assign(static_cast<std::size_t>(x.rows), 0);
  for (int r = 0; r < x.rows; ++r) {
    MmaFactor scale{1, 0, 0, false};
    if (kind.scales != 0) scale = mma_scale(kind.scale, x.scales[r]);
    for (int k = 0; k < kind.k; ++k) {
      MmaNumber number = mma_number(format, x.codes[r * kind.k + k]);
      if (negate) number.significand = -number.significand;
      number.exponent += scale.exponent;
      number.weight += scale.weight;
      number.nan = number.nan || scale.nan;
      if (number.nan || number.inf) special[r] = 1;
      numbers[r * kind.k + k] = number;
    }
  }
}

void MmaTile::Parts::make_product_rows(const MmaKind& kind, const MmaOperand& a,
                                       const MmaOperand& b) {
  take_numbers(kind, a, kind.a, kind.negate_a, numbers_a, special_a);
  take_numbers(kind, b, kind.b, kind.negate_b, numbers_b, special_b);
  any_special_b = std::find(special_b.begin(), special_b.end(), 1) != special_b.end();
  parameters = {kind.k, kind.core.guard_bits - kind.a.mantissa_bits - kind.b.mantissa_bits,
                kind.core};
  const auto significand = [](const MmaNumber& x) {
    return static_cast<i16>(x.inf || x.nan ? 0 : x.significand);
  };
  const auto weight = [&](const MmaNumber& x) {
    return significand(x) == 0 ? kNoWeight : static_cast<i16>(x.weight);
  };
  product_rows.assign(static_cast<std::size_t>(a.rows), ProductRow{});
  for (int m = 0; m < a.rows; ++m) {
    for (int k = 0; k < kind.k; ++k) {
      product_rows[m].significand[k] = significand(numbers_a[m * kind.k + k]);
      product_rows[m].weight[k] = weight(numbers_a[m * kind.k + k]);
    }
  }
  product_strips.assign(static_cast<std::size_t>(ceil_div(b.rows, kStrip)), ProductStrip<kStrip>{});
  for (int n = 0; n < b.rows; ++n) {
    for (int k = 0; k < kind.k; ++k) {
      product_strips[n / kStrip].significand[k][n % kStrip] =
          significand(numbers_b[n * kind.k + k]);
      product_strips[n / kStrip].weight[k][n % kStrip] = weight(numbers_b[n * kind.k + k]);
    }
  }
}

void MmaTile::Parts::make_integer_rows(const MmaKind& kind, const MmaOperand& a,
                                       const MmaOperand& b) {
  const auto value = [](u32 code, bool is_signed) {
    return static_cast<i16>(is_signed ? static_cast<i16>(static_cast<signed char>(code))
                                      : static_cast<i16>(code & 0xFF));
  };
  product_rows.assign(static_cast<std::size_t>(a.rows), ProductRow{});
  for (int m = 0; m < a.rows; ++m)
    for (int k = 0; k < kind.k; ++k)
      product_rows[m].significand[k] = value(a.codes[m * kind.k + k], kind.signed_a);
  product_strips.assign(static_cast<std::size_t>(ceil_div(b.rows, kStrip)), ProductStrip<kStrip>{});
  for (int n = 0; n < b.rows; ++n)
    for (int k = 0; k < kind.k; ++k)
      product_strips[n / kStrip].significand[k][n % kStrip] =
          value(b.codes[n * kind.k + k], kind.signed_b);
}

MmaTile::MmaTile(const MmaKind& kind, const MmaOperand& a, const MmaOperand& b, MmaSum sum,
                 VectorLevel level)
    : kind_(kind),
      sum_(kind.terms == MmaKind::Terms::integers ? MmaSum::model : sum),
      level_(level),
      columns_(b.rows),
      parts_(std::make_unique<Parts>()) {
  switch (kind.terms) {
    case MmaKind::Terms::groups: parts_->make_group_rows(kind, a, b); break;
    case MmaKind::Terms::products: parts_->make_product_rows(kind, a, b); break;
    case MmaKind::Terms::integers: parts_->make_integer_rows(kind, a, b); break;
  }
}

MmaTile::~MmaTile() = default;

u32 MmaTile::single(int m, int n, u32 c) const {
  const Parts& p = *parts_;
  if (kind_.terms == MmaKind::Terms::groups) {
    return mma_fp4_step(&p.codes_a[m * kFp4StepK], &p.codes_b[n * kFp4StepK], kind_.scale,
                        &p.scales_a[m * kGroups], &p.scales_b[n * kGroups], c, sum_);
  }
  return mma_plain_step(&p.numbers_a[m * kind_.k], &p.numbers_b[n * kind_.k], kind_.k, c,
                        kind_.core, sum_);
}

void MmaTile::row(int m, u32* d) const {
  const Parts& p = *parts_;
  const bool all = sum_ != MmaSum::model || (!p.special_a.empty() && p.special_a[m]);
  if (all) {
    for (int n = 0; n < columns_; ++n) d[n] = single(m, n, d[n]);
    return;
  }
  u32 c[kMmaMostColumns];
  if (p.any_special_b) std::memcpy(c, d, sizeof c);
  const Loops& loops = loops_of(level_);
  const int strips = static_cast<int>(ceil_div(columns_, kStrip));
  switch (kind_.terms) {
    case MmaKind::Terms::groups:
      loops.groups(p.group_rows[m], p.group_strips.data(), strips, d);
      break;
    case MmaKind::Terms::products:
      (kind_.core.half ? loops.f16 : loops.f32)(p.product_rows[m], p.product_strips.data(), strips,
                                                p.parameters, d);
      break;
    case MmaKind::Terms::integers:
      loops.integers(p.product_rows[m], p.product_strips.data(), strips, kind_.saturates, d);
      break;
  }
  if (!p.any_special_b) return;
  for (int n = 0; n < columns_; ++n)
    if (p.special_b[n]) d[n] = single(m, n, c[n]);
}

}  // namespace jax_fp4::sim

// mma.sync without block scales (PTX ISA 9.7.14.5.14): D = A * B + C, one warp, 16x8 outputs, of
// f16, bf16, TF32, 8-bit floating point and 8-bit integers. Fragments: mma_fragments.h; sum:
// numerics/mma_plain.h.
#include "numerics/mma_plain.h"

#include <algorithm>
#include <limits>

#include "sim/ops/mma_warp.h"

namespace jax_fp4::sim {
namespace {

// Code::variant.
constexpr u16 kHalf = 1;        // f16 accumulators
constexpr u16 kContainers = 2;  // kind::f8f6f4: 8-bit containers
constexpr u16 kSaturates = 4;
constexpr int kLargestK = kMmaMostProducts;
constexpr int kFewestInStep = 4;  // TF32 on 8.x: 16 bytes

Minifloat format_of(Type type) {
  switch (type) {
    case Type::f16: return kMmaF16;
    case Type::bf16: return kMmaBF16;
    case Type::tf32: return kMmaTF32;
    default: return minifloat(element_of(type));
  }
}
int container_bits(Type type) { return std::max(bits_of_type(type), 8); }

// C of an element of D, and D's place.
struct Accumulators {
  u32 value[kMmaRows][kMmaColumns];
};

Accumulators load_accumulators(const Warp& w, const u32* slots, bool half) {
  Accumulators c;
  for (int q = 0; q < (half ? 2 : 4); ++q) {
    const Lane32* lanes = w.in(slots[q]);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int g = lane / 4, column = 2 * (lane % 4);
      if (half) {
        c.value[g + 8 * q][column] = lanes[lane] & 0xFFFF;
        c.value[g + 8 * q][column + 1] = lanes[lane] >> 16;
      } else {
        c.value[g + 8 * (q >> 1)][column + (q & 1)] = lanes[lane];
      }
    }
  }
  return c;
}

void store_accumulators(Warp& w, const u32* slots, bool half, const Accumulators& d) {
  for (int q = 0; q < (half ? 2 : 4); ++q) {
    const Out<u32> out(w, slots[q]);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int g = lane / 4, column = 2 * (lane % 4);
      out.set(lane, half ? d.value[g + 8 * q][column] | d.value[g + 8 * q][column + 1] << 16
                         : d.value[g + 8 * (q >> 1)][column + (q & 1)]);
    }
  }
}

struct Operands {
  MmaNumber a[kMmaRows][kLargestK];
  MmaNumber b[kMmaColumns][kLargestK];
};

// d plus the products of step after step, at the speed of vector units. False, and d as it was, where there are
// infinities or NaN.
bool add_steps(const Operands& o, const MmaCore& core, int k, int fraction_bits, Accumulators& d) {
  const int step = std::min(k, core.step);
  WarpProducts steps[kLargestK / kFewestInStep];
  bool special = false;
  for (int at = 0; at < k; ++at) {
    WarpProducts& x = steps[at / step];
    for (int row = 0; row < kMmaRows; ++row) {
      const ProductFactor f = product_factor(o.a[row][at]);
      special |= f.special;
      x.a.significand[at % step][row] = f.significand;
      x.a.weight[at % step][row] = f.weight;
    }
    for (int n = 0; n < kMmaColumns; ++n) {
      const ProductFactor f = product_factor(o.b[n][at]);
      special |= f.special;
      x.b[n].significand[at % step] = f.significand;
      x.b[n].weight[at % step] = f.weight;
    }
  }
  if (special) return false;
  MmaColumns columns;
  for (int row = 0; row < kMmaRows; ++row)
    for (int n = 0; n < kMmaColumns; ++n) columns[n][row] = d.value[row][n];
  for (int i = 0; i < k / step; ++i)
    add_products(steps[i], {step, core.guard_bits - fraction_bits, core}, columns);
  for (int row = 0; row < kMmaRows; ++row)
    for (int n = 0; n < kMmaColumns; ++n) d.value[row][n] = columns[n][row];
  return true;
}

void multiply_floats(Warp& w, const Code& c, u32 mask) {
  if (!w.converged(c, mask) || !w.launch->spec.costs.data) return;
  const Program& program = *w.launch->program;
  const Form& form = program.forms[c.form];
  const u32* slots = program.slots.data();
  const LaunchSpec& spec = w.launch->spec;
  const bool half = c.variant & kHalf;
  const int bits = container_bits(form.type(1));
  const int k = 4 * (32 / bits) * c.counts[2];
  // Compute capability 9.x to 11.x has no FP8 mma.sync of its own (assumption M15).
  const bool by_f16 = bits == 8 && spec.chip >= 90 && spec.chip < 120;
  const auto number = [&](Type type, int lane, u32 element) {
    if (c.variant & kContainers) element = from_container(w, c, lane, element_of(type), element);
    if (type == Type::tf32) element >>= 13;
    const Minifloat format = format_of(type);
    return by_f16 ? mma_number(kMmaF16, encode_f16(decode(format, element)))
                  : mma_number(format, element);
  };
  Operands o;
  each_a_element(w, slots + c.vectors[1], c.counts[1], bits,
                 [&](int lane, int row, int at, u32 element) {
                   o.a[row][at] = number(form.type(1), lane, element);
                 });
  each_b_element(w, slots + c.vectors[2], c.counts[2], bits,
                 [&](int lane, int column, int at, u32 element) {
                   o.b[column][at] = number(form.type(2), lane, element);
                 });
  const MmaCore core = mma_core(static_cast<int>(spec.chip), by_f16 ? 16 : bits, half);
  const auto dot = by_f16 ? mma_fp8_by_f16 : mma_plain;
  Accumulators d = load_accumulators(w, slots + c.vectors[3], half);
  const int fraction_bits =
      format_of(form.type(1)).mantissa_bits + format_of(form.type(2)).mantissa_bits;
  const bool by_steps = spec.mma == MmaSum::model && !half && !by_f16 && core.kept == ~0u;
  if (!by_steps || !add_steps(o, core, k, fraction_bits, d)) {
    for (int row = 0; row < kMmaRows; ++row)
      for (int column = 0; column < kMmaColumns; ++column)
        d.value[row][column] = dot(o.a[row], o.b[column], k, d.value[row][column], core, spec.mma);
  }
  store_accumulators(w, slots + c.vectors[0], half, d);
}

void multiply_integers(Warp& w, const Code& c, u32 mask) {
  if (!w.converged(c, mask) || !w.launch->spec.costs.data) return;
  const Program& program = *w.launch->program;
  const Form& form = program.forms[c.form];
  const u32* slots = program.slots.data();
  const int k = 16 * c.counts[2];
  i32 a[kMmaRows][kLargestK], b[kMmaColumns][kLargestK];
  const auto number = [](Type type, u32 element) -> i32 {
    return type == Type::s8 ? static_cast<i8>(element) : static_cast<i32>(element);
  };
  each_a_element(w, slots + c.vectors[1], c.counts[1], 8, [&](int, int row, int at, u32 element) {
    a[row][at] = number(form.type(1), element);
  });
  each_b_element(
      w, slots + c.vectors[2], c.counts[2], 8,
      [&](int, int column, int at, u32 element) { b[column][at] = number(form.type(2), element); });
  Accumulators d = load_accumulators(w, slots + c.vectors[3], false);
  for (int row = 0; row < kMmaRows; ++row) {
    for (int column = 0; column < kMmaColumns; ++column) {
      i64 sum = static_cast<i32>(d.value[row][column]);
      for (int at = 0; at < k; ++at) sum += i64{a[row][at]} * b[column][at];
      if (c.variant & kSaturates)
        sum =
            std::clamp<i64>(sum, std::numeric_limits<i32>::min(), std::numeric_limits<i32>::max());
      d.value[row][column] = static_cast<u32>(sum);
    }
  }
  store_accumulators(w, slots + c.vectors[0], false, d);
}

}  // namespace

Exec mma_sync(const Form& form, Code& code) {
  const bool half = form.type(0) == Type::f16, integer = form.type(0) == Type::s32;
  code.variant =
      static_cast<u16>((half ? kHalf : 0) | (form.has("kind::f8f6f4") ? kContainers : 0) |
                       (form.has("satfinite") ? kSaturates : 0));
  // K follows from the shape; A has twice B's registers.
  const int k = form.has("m16n8k4") ? 4 : form.has("m16n8k8") ? 8 : form.has("m16n8k16") ? 16 : 32;
  const int b = k * container_bits(form.type(1)) / 128, accumulators = half ? 2 : 4;
  if (code.counts[0] != accumulators || code.counts[1] != 2 * b || code.counts[2] != b ||
      code.counts[3] != accumulators)
    return nullptr;
  return integer ? multiply_integers : multiply_floats;
}

}  // namespace jax_fp4::sim

// mma.sync of kinds mxf4nvf4, mxf4 and mxf8f6f4 (PTX ISA 9.7.14.5.14): D = A * B + C, one warp,
// 16x8 outputs, 64 (4-bit kinds) or 32 elements of K. Fragments: mma_fragments.h; sum:
// numerics/mma_accumulate.h.
//
// Scales of row g come from the lane with t = 2 thread_id_a, of row g + 8 from t = 2 thread_id_a +
// 1; of column g from the lane with t = thread_id_b. byte_id names the first byte that is used.
#include <array>

#include "numerics/mma_accumulate.h"
#include "sim/ops/mma_warp.h"

namespace jax_fp4::sim {
namespace {

constexpr int kLargestK = 64;

struct Operands {
  u8 a[kMmaRows][kLargestK];
  u8 b[kMmaColumns][kLargestK];
  u32 scale_a[kMmaRows];  // word of the row, shifted down to its first byte
  u32 scale_b[kMmaColumns];
};

// Code::variant: scales in a word of a row that are used, and two flags.
constexpr u16 kScalesMask = 7, kFourBit = 8, kUe4m3 = 16;

void gather_elements(Warp& w, const Code& c, Operands& o, Element element_a, Element element_b) {
  const u32* slots = w.launch->program->slots.data();
  const bool packed = c.variant & kFourBit;
  const int bits = packed ? 4 : 8;
  const auto code = [&](Element element, int lane, u32 value) {
    return packed ? static_cast<u8>(value) : from_container(w, c, lane, element, value);
  };
  each_a_element(w, slots + c.vectors[1], 4, bits, [&](int lane, int row, int k, u32 value) {
    o.a[row][k] = code(element_a, lane, value);
  });
  each_b_element(w, slots + c.vectors[2], 2, bits, [&](int lane, int column, int k, u32 value) {
    o.b[column][k] = code(element_b, lane, value);
  });
}

void gather_scales(Warp& w, const Code& c, Operands& o) {
  const u32* slots = w.launch->program->slots.data();
  const int used = c.variant & kScalesMask;
  const auto selector = [&](int vector, int n) { return w.in(slots[c.vectors[vector] + n])[0]; };
  const auto check = [&](u32 byte, u32 thread, u32 threads) {
    if (byte % static_cast<u32>(used) != 0 || byte + static_cast<u32>(used) > 4 ||
        thread >= threads)
      w.fault(c, 0, FaultKind::argument,
              "scale selector {" + std::to_string(byte) + ", " + std::to_string(thread) +
                  "} does not exist for " + std::to_string(used) + " scales a word");
  };
  const u32 byte_a = selector(4, 0), thread_a = selector(4, 1);
  const u32 byte_b = selector(5, 0), thread_b = selector(5, 1);
  check(byte_a, thread_a, 2);
  check(byte_b, thread_b, 4);
  for (int g = 0; g < 8; ++g) {
    for (int half = 0; half < 2; ++half)
      o.scale_a[g + 8 * half] =
          w.in(c.src[0])[4 * g + 2 * static_cast<int>(thread_a) + half] >> (8 * byte_a);
    o.scale_b[g] = w.in(c.src[1])[4 * g + static_cast<int>(thread_b)] >> (8 * byte_b);
  }
}

// The four scales of groups of 16 that mma_fp4_step takes.
void spread(u32 word, int used, u8 (&out)[4]) {
  for (int group = 0; group < 4; ++group)
    out[group] = static_cast<u8>(word >> (8 * (used == 4 ? group : group / 2)));
}

// ---- The model's sums, at the speed of vector units ---------------------------------------------

const GroupScale& scale_of(BlockScale kind, u32 byte) {
  static const auto table = [] {
    std::array<std::array<GroupScale, 256>, 2> scales;
    for (u32 i = 0; i < 256; ++i) {
      scales[0][i] = group_scale(BlockScale::ue4m3, i);
      scales[1][i] = group_scale(BlockScale::ue8m0, i);
    }
    return scales;
  }();
  return table[kind == BlockScale::ue4m3 ? 0 : 1][byte];
}

void add_fp4(const Operands& o, BlockScale kind, int used, MmaColumns& d) {
  constexpr i16 kTwice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  WarpGroups x;
  for (int k = 0; k < kFp4StepK; ++k)
    for (int row = 0; row < kMmaRows; ++row) x.a.value[k][row] = kTwice[o.a[row][k]];
  for (int n = 0; n < kMmaColumns; ++n)
    for (int k = 0; k < kFp4StepK; ++k) x.b[n].value[k] = kTwice[o.b[n][k]];
  // Bits of the elements of a group that are not zero.
  const auto nonzero = [](const u8* codes) {
    u32 bits = 0;
    for (int k = 0; k < kFp4Group; ++k) bits |= static_cast<u32>((codes[k] & 7) != 0) << k;
    return static_cast<u16>(bits);
  };
  for (int row = 0; row < kMmaRows; ++row) {
    u8 bytes[kGroups];
    spread(o.scale_a[row], used, bytes);
    x.a.nan[row] = 0;
    for (int g = 0; g < kGroups; ++g) {
      const GroupScale& scale = scale_of(kind, bytes[g]);
      x.a.scale[g][row] = scale.significand;
      x.a.weight[g][row] = scale.weight;
      x.a.nonzero[g][row] = scale.significand == 0 ? u16{0} : nonzero(o.a[row] + kFp4Group * g);
      if (scale.nan) x.a.nan[row] = ~0u;
    }
  }
  for (int n = 0; n < kMmaColumns; ++n) {
    u8 bytes[kGroups];
    spread(o.scale_b[n], used, bytes);
    x.b[n].nan = false;
    for (int g = 0; g < kGroups; ++g) {
      const GroupScale& scale = scale_of(kind, bytes[g]);
      x.b[n].scale[g] = scale.significand;
      x.b[n].weight[g] = scale.weight;
      x.b[n].nonzero[g] = scale.significand == 0 ? u16{0} : nonzero(o.b[n] + kFp4Group * g);
      x.b[n].nan = x.b[n].nan || scale.nan;
    }
  }
  add_groups(x, d);
}

const std::array<ProductFactor, 256>& factors_of(Element element) {
  static const auto table = [] {
    std::array<std::array<ProductFactor, 256>, 5> factors;
    for (u32 e = 0; e < 5; ++e)
      for (u32 code = 0; code < 256; ++code)
        factors[e][code] = product_factor(mma_number(minifloat(static_cast<Element>(e)), code));
    return factors;
  }();
  return table[static_cast<u32>(element)];
}

// False, and d as it was, where there are infinities or NaN.
bool add_fp8(const Operands& o, Element element_a, Element element_b, MmaColumns& d) {
  const auto& factors_a = factors_of(element_a);
  const auto& factors_b = factors_of(element_b);
  WarpProducts x;
  bool special = false;
  for (int row = 0; row < kMmaRows; ++row) {
    const MmaFactor scale = mma_scale(BlockScale::ue8m0, o.scale_a[row] & 0xFF);
    special = special || scale.nan;
    for (int k = 0; k < kFp8StepK; ++k) {
      const ProductFactor f = factors_a[o.a[row][k]];
      special |= f.special;
      x.a.significand[k][row] = f.significand;
      x.a.weight[k][row] =
          f.significand == 0 ? kNoWeight : static_cast<i16>(f.weight + scale.weight);
    }
  }
  for (int n = 0; n < kMmaColumns; ++n) {
    const MmaFactor scale = mma_scale(BlockScale::ue8m0, o.scale_b[n] & 0xFF);
    special = special || scale.nan;
    for (int k = 0; k < kFp8StepK; ++k) {
      const ProductFactor f = factors_b[o.b[n][k]];
      special |= f.special;
      x.b[n].significand[k] = f.significand;
      x.b[n].weight[k] = f.significand == 0 ? kNoWeight : static_cast<i16>(f.weight + scale.weight);
    }
  }
  if (special) return false;
  const int left =
      kFp8GuardBits - minifloat(element_a).mantissa_bits - minifloat(element_b).mantissa_bits;
  add_products(x, {kFp8StepK, left, {false, kFp8StepK, kFp8GuardBits, kFp8ZeroExponent}}, d);
  return true;
}

// Output by output, also where the sum is not the model's.
void add_singly(const Operands& o, BlockScale kind, int used, Element element_a, Element element_b,
                bool four_bit, MmaSum sum, MmaColumns& d) {
  for (int row = 0; row < kMmaRows; ++row) {
    for (int n = 0; n < kMmaColumns; ++n) {
      if (four_bit) {
        u8 scale_a[4], scale_b[4];
        spread(o.scale_a[row], used, scale_a);
        spread(o.scale_b[n], used, scale_b);
        d[n][row] = mma_fp4_step(o.a[row], o.b[n], kind, scale_a, scale_b, d[n][row], sum);
      } else {
        d[n][row] = mma_fp8_step(element_a, o.a[row], o.scale_a[row] & 0xFF, element_b, o.b[n],
                                 o.scale_b[n] & 0xFF, d[n][row], sum);
      }
    }
  }
}

void mma_lanes(Warp& w, const Code& c, u32 mask) {
  if (!w.converged(c, mask) || !w.launch->spec.costs.data) return;
  const Program& program = *w.launch->program;
  const Form& form = program.forms[c.form];
  const Element element_a = element_of(form.type(1)), element_b = element_of(form.type(2));
  const int used = c.variant & kScalesMask;
  const bool four_bit = c.variant & kFourBit;
  const BlockScale kind = (c.variant & kUe4m3) ? BlockScale::ue4m3 : BlockScale::ue8m0;
  Operands o;
  gather_elements(w, c, o, element_a, element_b);
  gather_scales(w, c, o);
  MmaColumns d;
  load_columns(w, program.slots.data() + c.vectors[3], d);
  const MmaSum sum = w.launch->spec.mma;
  if (sum == MmaSum::model && four_bit)
    add_fp4(o, kind, used, d);
  else if (sum != MmaSum::model || four_bit || !add_fp8(o, element_a, element_b, d))
    add_singly(o, kind, used, element_a, element_b, four_bit, sum, d);
  store_columns(w, program.slots.data() + c.vectors[0], d);
}

}  // namespace

Exec mma_block_scale(const Form& form, Code& code) {
  code.variant = form.has("scale_vec::4X") ? 4 : form.has("scale_vec::2X") ? 2 : 0;
  if (form.has("kind::mxf8f6f4")) code.variant = 1;
  if (form.has("m16n8k64")) {
    code.variant |= kFourBit;
    if (!(code.variant & kScalesMask)) code.variant |= 2;  // kind mxf4 has 2X only
  }
  if (form.type(4) == Type::ue4m3) code.variant |= kUe4m3;
  constexpr u16 kRegisters[] = {4, 4, 2, 4, 2, 2};
  for (int n = 0; n < 6; ++n)
    if (code.counts[n] != kRegisters[n]) return nullptr;
  return mma_lanes;
}

}  // namespace jax_fp4::sim

// mma.sync of kinds mxf4nvf4, mxf4 and mxf8f6f4 (PTX ISA 9.7.14.5.14): D = A * B + C, one warp,
// 16x8 outputs, 64 (4-bit kinds) or 32 elements of K. Fragments: mma_fragments.h; sum:
// numerics/mma_accumulate.h.
//
// Scales of row g come from the lane with t = 2 thread_id_a, of row g + 8 from t = 2 thread_id_a +
// 1; of column g from the lane with t = thread_id_b. byte_id names the first byte that is used.
#include "numerics/mma_accumulate.h"
#include "sim/ops/mma_fragments.h"

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

void mma_lanes(Warp& w, const Code& c, u32 mask) {
  if (!w.converged(c, mask)) return;
  const Program& program = *w.launch->program;
  const Form& form = program.forms[c.form];
  const Element element_a = element_of(form.type(1)), element_b = element_of(form.type(2));
  const int used = c.variant & kScalesMask;
  Operands o;
  gather_elements(w, c, o, element_a, element_b);
  gather_scales(w, c, o);
  const MmaSum sum = w.launch->spec.mma;
  u32 result[4][kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int q = 0; q < 4; ++q) {
      const int row = lane / 4 + 8 * (q >> 1), column = 2 * (lane % 4) + (q & 1);
      const u32 accumulator = w.in(program.slots[c.vectors[3] + static_cast<u32>(q)])[lane];
      if (c.variant & kFourBit) {
        u8 scale_a[4], scale_b[4];
        spread(o.scale_a[row], used, scale_a);
        spread(o.scale_b[column], used, scale_b);
        const BlockScale kind = (c.variant & kUe4m3) ? BlockScale::ue4m3 : BlockScale::ue8m0;
        result[q][lane] =
            mma_fp4_step(o.a[row], o.b[column], kind, scale_a, scale_b, accumulator, sum);
      } else {
        result[q][lane] = mma_fp8_step(element_a, o.a[row], o.scale_a[row] & 0xFF, element_b,
                                       o.b[column], o.scale_b[column] & 0xFF, accumulator, sum);
      }
    }
  }
  for (u32 q = 0; q < 4; ++q) {
    const Out<u32> d(w, program.slots[c.vectors[0] + q]);
    each_lane(mask, [&](int lane) { d.set(lane, result[q][lane]); });
  }
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

// Instruction descriptors: every field against the kind, and the shapes that exist (PTX ISA 9.7.16.2.1).
#include "sim/ops/instruction_descriptor.h"

#include <algorithm>

namespace jax_fp4::sim {
namespace {

using Kind = MmaForm::Kind;

constexpr std::string_view kNames[] = {"f16",      "tf32", "f8f6f4",  "i8",
                                       "mxf8f6f4", "mxf4", "mxf4nvf4"};

class Fields {
 public:
  Fields(const MmaForm& form, u32 bits) : form_(form), bits_(bits) {}

  // The value of a field, which must be one of these; `note`: what it would mean otherwise.
  u32 take(const char* name, int low, int count, std::initializer_list<u32> allowed,
           const char* note = "") const {
    const u32 value = bits_ >> low & ((1u << count) - 1);
    if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return value;
    std::string wanted;
    for (u32 v : allowed) wanted += (wanted.empty() ? "" : ", ") + std::to_string(v);
    const std::string place =
        count == 1 ? "bit " + std::to_string(low)
                   : "bits " + std::to_string(low + count - 1) + ":" + std::to_string(low);
    throw InstructionDescriptorError(place + " (" + name + ") of the instruction descriptor: got " +
                                     std::to_string(value) + ", expected " + wanted + " for " +
                                     kind_text() + note);
  }
  bool flag(const char* name, int bit) const { return take(name, bit, 1, {0, 1}) != 0; }
  void zero(const char* name, int low, int count, const char* note = "") const {
    take(name, low, count, {0}, note);
  }

  // M and N, which have no short list of values.
  void shape(MmaInstruction& out, int m_low, int m_count, int m_unit) const {
    out.m = static_cast<int>(bits_ >> m_low & ((1u << m_count) - 1)) * m_unit;
    out.n = static_cast<int>(bits_ >> 17 & 63) * 8;
    const bool scaled = form_.kind >= Kind::mxf8f6f4;
    const auto m_is = [&](int a, int b) { return out.m == a || out.m == b; };
    if (form_.pair ? !m_is(128, 256) : !m_is(scaled ? 128 : 64, 128))
      refuse_shape("M", out.m, form_.pair ? "128 or 256" : scaled ? "128" : "64 or 128");
    // Integers take 8 and 24 besides the multiples of 16; with pairs multiples of 32.
    const bool integers = form_.kind == Kind::i8;
    const int step = form_.pair ? (integers ? 32 : 16) : (integers && out.n > 32 ? 16 : 8);
    if (out.n < 8 || out.n > 256 || out.n % step != 0) {
      refuse_shape("N", out.n,
                   integers && !form_.pair ? "8, 16, 24, 32 and multiples of 16 to 256"
                                           : "a multiple of " + std::to_string(step) + " to 256");
    }
  }

 private:
  std::string kind_text() const {
    return ".kind::" + std::string(kNames[static_cast<int>(form_.kind)]);
  }
  [[noreturn]] void refuse_shape(const char* name, int value, const std::string& wanted) const {
    throw InstructionDescriptorError(std::string(name) + " of the instruction descriptor: got " +
                                     std::to_string(value) + ", expected " + wanted + " for " +
                                     kind_text() + ".cta_group::" + (form_.pair ? "2" : "1"));
  }

  const MmaForm& form_;
  u32 bits_;
};

constexpr const char* kSparse = "; sparse MMA is not modelled";

Element eight_bit_element(u32 code) {
  switch (code) {
    case 0: return Element::e4m3;
    case 1: return Element::e5m2;
    case 3: return Element::e2m3;
    case 4: return Element::e3m2;
    default: return Element::e2m1;
  }
}

// In kinds whose elements have containers of 8 bits, 16 elements lie together before their padding.
ElementPacking container_packing(Element element) {
  const int bits = minifloat(element).bits();
  return {bits, 2 * bits, 16};
}

void take_eight_bit_types(const Fields& f, MmaInstruction& out) {
  const Element a = eight_bit_element(f.take("type of A", 7, 3, {0, 1, 3, 4, 5}));
  const Element b = eight_bit_element(f.take("type of B", 10, 3, {0, 1, 3, 4, 5}));
  out.kind.a = minifloat(a);
  out.kind.b = minifloat(b);
  out.a = container_packing(a);
  out.b = container_packing(b);
}

void take_plain(const MmaForm& form, const Fields& f, MmaInstruction& out) {
  MmaKind& kind = out.kind;
  int element_bits = 8;
  bool half = false;
  switch (form.kind) {
    case Kind::f16: {
      half = f.take("type of D", 4, 2, {0, 1}) == 0;
      const u32 a = f.take("type of A", 7, 3, {0, 1}), b = f.take("type of B", 10, 3, {0, 1});
      if (a != b) f.take("type of B", 10, 3, {a}, " where A has this type");
      if (half) f.take("type of A", 7, 3, {0}, " where D is f16");
      kind.a = kind.b = a == 0 ? kMmaF16 : kMmaBF16;
      element_bits = 16;
      break;
    }
    case Kind::tf32:
      f.take("type of D", 4, 2, {1});
      f.take("type of A", 7, 3, {2});
      f.take("type of B", 10, 3, {2});
      kind.a = kind.b = kMmaTF32;
      element_bits = 32;
      break;
    case Kind::f8f6f4:
      half = f.take("type of D", 4, 2, {0, 1}) == 0;
      take_eight_bit_types(f, out);
      break;
    default:
      f.take("type of D", 4, 2, {2});
      kind.terms = MmaKind::Terms::integers;
      kind.signed_a = f.take("type of A", 7, 3, {0, 1}) != 0;
      kind.signed_b = f.take("type of B", 10, 3, {0, 1}) != 0;
      f.zero("negate A", 13, 1);
      f.zero("negate B", 14, 1);
      break;
  }
  if (form.kind == Kind::i8) {
    kind.saturates = f.flag("saturate", 3);
  } else {
    f.zero("saturate", 3, 1);
  }
  if (form.kind != Kind::f8f6f4) out.a = out.b = {element_bits, 16, 128 / element_bits};
  kind.k = 256 / element_bits;
  kind.core = mma_core(100, element_bits, half);
  f.zero("reserved", 23, 1);
  f.zero("reserved", 29, 1);
  f.zero("maximum shift", 30, 2, "; only .ws has it");
  f.shape(out, 24, 5, 16);
}

void take_scaled(const MmaForm& form, const Fields& f, MmaInstruction& out) {
  MmaKind& kind = out.kind;
  f.zero("reserved", 3, 1);
  const bool eight_bit = form.kind == Kind::mxf8f6f4;
  if (eight_bit) {
    take_eight_bit_types(f, out);
    f.take("scale type", 23, 1, {1});
    kind.k = kFp8StepK;
    kind.scales = 1;
    kind.scale = BlockScale::ue8m0;
    kind.core = mma_core(100, 8, false);
    f.zero("reserved", 31, 1);
  } else {
    f.take("type of A", 7, 3, {1});
    f.take("type of B", 10, 2, {1});
    f.zero("reserved", 12, 1);
    f.zero("transpose A", 15, 1, "; 4-bit matrices are K-major");
    f.zero("transpose B", 16, 1, "; 4-bit matrices are K-major");
    f.zero("K size", 31, 1, "; K = 96 is not modelled");
    kind.terms = MmaKind::Terms::groups;
    kind.k = kFp4StepK;
    kind.scales = form.block16 ? 4 : 2;
    const bool ue8m0 =
        (form.block16 ? f.take("scale type", 23, 1, {0, 1})
                      : f.take("scale type", 23, 1, {1}, " with 32 elements a scale")) != 0;
    kind.scale = ue8m0 ? BlockScale::ue8m0 : BlockScale::ue4m3;
    out.a = out.b = {4, 16, 32};
  }
  const auto id = [&](const char* name, int low) {
    if (eight_bit) return f.take(name, low, 2, {0, 1, 2, 3});
    return form.block16 ? f.take(name, low, 2, {0}, " with 16 elements a scale")
                        : f.take(name, low, 2, {0, 2}, " with 32 elements a scale");
  };
  out.sfb_id = static_cast<int>(id("SFB id", 4));
  out.sfa_id = static_cast<int>(id("SFA id", 29));
  f.zero("reserved", 24, 3);
  f.shape(out, 27, 2, 128);
}

}  // namespace

MmaInstruction decode_instruction_descriptor(const MmaForm& form, u32 bits) {
  const Fields f(form, bits);
  MmaInstruction out;
  f.zero("sparsity selector", 0, 2, kSparse);
  f.zero("sparsity", 2, 1, kSparse);
  f.zero("reserved", 6, 1);
  if (form.kind >= Kind::mxf8f6f4) {
    take_scaled(form, f, out);
  } else {
    take_plain(form, f, out);
  }
  out.kind.negate_a = f.flag("negate A", 13);
  out.kind.negate_b = f.flag("negate B", 14);
  out.transpose_a = f.flag("transpose A", 15);
  out.transpose_b = f.flag("transpose B", 16);
  return out;
}

}  // namespace jax_fp4::sim

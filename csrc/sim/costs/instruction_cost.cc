// Costs of instructions by opcode and type.
#include "sim/costs/instruction_cost.h"

#include <algorithm>

#include "sim/costs/constants.h"

namespace jax_fp4::sim::costs {
namespace {

template <class... Names>
bool one_of(std::string_view opcode, Names... names) {
  return ((opcode == names) || ...);
}

// "m16n8k64": 2 * 16 * 8 * 64.
double flop_of_shape(const Form& form) {
  for (std::size_t t = 0; t < form.choices.size(); ++t) {
    const std::string_view shape = form.modifier(t);
    if (!shape.starts_with("m16n8k")) continue;
    double k = 0;
    for (const char digit : shape.substr(6)) k = 10 * k + (digit - '0');
    return 2 * 16 * 8 * k;
  }
  return 0;
}

int mma_bits(const Form& form) {
  if (form.has("kind::mxf4") || form.has("kind::mxf4nvf4")) return 4;
  if (form.has("kind::f8f6f4") || form.has("kind::mxf8f6f4")) return 8;
  if (form.has("f16") || form.has("bf16")) return form.has("e4m3") || form.has("e5m2") ? 8 : 16;
  return form.has("tf32") ? 32 : 8;
}

InstructionCost matrix_cost(const Form& form, const Code&) {
  InstructionCost cost{Unit::memory, 1, 1, 0};
  if (form.row->opcode == "movmatrix") return {Unit::warp, 1, kShuffleCycles, kShuffleLatency};
  if (form.row->opcode != "mma") return cost;
  cost.unit = Unit::tensor;
  cost.latency = kWarpMmaLatency;
  cost.warp_mma_flop = flop_of_shape(form);
  cost.warp_mma_bits = mma_bits(form);
  return cost;
}

InstructionCost tensor_memory_cost(const Form& form, const Code& code) {
  using Wait = InstructionCost::Wait;
  using Tensor = InstructionCost::Tensor;
  InstructionCost cost{Unit::control, 1, 1, 1};
  if (form.has("wait::ld")) cost.wait = Wait::tensor_loads;
  if (form.has("wait::st")) cost.wait = Wait::tensor_stores;
  const bool loads = form.has("ld"), stores = form.has("st");
  if (!loads && !stores) return cost;
  cost.unit = Unit::memory;
  cost.tensor = loads ? Tensor::load : Tensor::store;
  const u32 words = form.has("pack::16b") || form.has("unpack::16b") ? 2 : 1;
  cost.tensor_bytes = code.counts[0] * words * kLanes * 4;
  return cost;
}

InstructionCost arithmetic_cost(const Form& form) {
  const std::string_view opcode = form.row->opcode;
  int bits = 0;
  bool floats = false;
  for (const Type type : form.types) {
    bits = std::max(bits, bits_of_type(type));
    floats |= kind_of_type(type) == TypeKind::floating;
  }
  const bool f64 = form.has("f64");
  if (form.row->op_class == OpClass::convert)
    return {f64 ? Unit::special : Unit::convert, 1, kConvertCycles, kConvertLatency};
  if (form.row->op_class == OpClass::floating) {
    const bool exact = form.has("rn") || form.has("rz") || form.has("rm") || form.has("rp");
    if (one_of(opcode, "div", "rcp", "sqrt") && exact)
      return {Unit::floating, kDivideSlots, kDivideSlots * kFloatCycles,
              kDivideSlots * kArithmeticLatency};
    if (one_of(opcode, "div", "rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh"))
      return {Unit::special, 1, kSpecialCycles, kSpecialLatency};
    if (f64) return {Unit::special, 1, kDoubleCycles, kDoubleLatency};
    if (one_of(opcode, "add", "sub", "mul", "fma", "mad")) {
      // Two f32 in one register pair are one instruction of two cycles.
      return {Unit::floating, 1, form.has("f32x2") ? 2 * kFloatCycles : kFloatCycles,
              kArithmeticLatency};
    }
    return {Unit::integer, 1, kIntegerCycles, kArithmeticLatency};
  }
  if (one_of(opcode, "popc", "clz", "bfind", "brev", "fns"))
    return {Unit::special, 1, kSpecialCycles, kSpecialLatency};
  if (one_of(opcode, "div", "rem"))
    return {Unit::integer, kIntegerDivideSlots, kIntegerDivideSlots * kIntegerCycles,
            kIntegerDivideSlots * kArithmeticLatency};
  const u32 slots = bits == 64 && !floats && !form.has("wide") ? kWideSlots : 1;
  return {Unit::integer, slots, slots * kIntegerCycles, slots * kArithmeticLatency};
}

}  // namespace

InstructionCost cost_of(const Form& form, const Code& code) {
  using Wait = InstructionCost::Wait;
  const std::string_view opcode = form.row->opcode;
  constexpr InstructionCost kFree{Unit::none, 0, 0, 0};
  if (one_of(opcode, "mov", "cvta", "tensor_loads_over", "prefetch", "prefetchu", "applypriority",
             "discard", "createpolicy", "mapa", "getctarank") ||
      opcode.starts_with("%"))
    return kFree;
  if (opcode == "ld" && (code.space == Space::param || code.space == Space::constant)) return kFree;
  if (opcode == "tcgen05") return tensor_memory_cost(form, code);
  if (opcode == "cp") {
    InstructionCost cost{Unit::memory, 1, 1, 1};
    if (form.has("wait_group") && !form.has("bulk")) cost.wait = Wait::copy_groups;
    if (form.has("wait_all") || form.has("mbarrier")) cost.wait = Wait::copies;
    cost.commits_copies = form.has("commit_group") && !form.has("bulk");
    return cost;
  }
  switch (form.row->op_class) {
    case OpClass::matrix: return matrix_cost(form, code);
    case OpClass::memory: return {Unit::memory, 1, 1, 1};
    case OpClass::warp:
      return one_of(opcode, "elect", "activemask")
                 ? InstructionCost{Unit::integer, 1, kIntegerCycles, kArithmeticLatency}
             : opcode == "bar" ? InstructionCost{Unit::control, 1, 1, 1}
                               : InstructionCost{Unit::warp, 1, kShuffleCycles, kShuffleLatency};
    case OpClass::control: {
      InstructionCost cost{Unit::control, 1, 1, opcode == "mbarrier" ? kSharedLatency : 1};
      cost.barrier = one_of(opcode, "bar", "barrier") && !form.has("arrive");
      return cost;
    }
    default: return arithmetic_cost(form);
  }
}

}  // namespace jax_fp4::sim::costs

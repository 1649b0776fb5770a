// Operands of an instruction: names become slots, numbers become constants.
#include <algorithm>

#include "sim/machine/lower.h"
#include "sim/machine/memory.h"

namespace jax_fp4::sim {
namespace {

struct SpecialName {
  std::string_view name;
  Special special;
  int bits;
};

// clang-format off
constexpr SpecialName kSpecials[] = {
    {"tid.x", Special::tid_x, 32}, {"tid.y", Special::tid_y, 32}, {"tid.z", Special::tid_z, 32},
    {"ntid.x", Special::ntid_x, 32}, {"ntid.y", Special::ntid_y, 32}, {"ntid.z", Special::ntid_z, 32},
    {"ctaid.x", Special::ctaid_x, 32}, {"ctaid.y", Special::ctaid_y, 32}, {"ctaid.z", Special::ctaid_z, 32},
    {"nctaid.x", Special::nctaid_x, 32}, {"nctaid.y", Special::nctaid_y, 32}, {"nctaid.z", Special::nctaid_z, 32},
    {"laneid", Special::laneid, 32}, {"warpid", Special::warpid, 32}, {"nwarpid", Special::nwarpid, 32},
    {"smid", Special::smid, 32}, {"nsmid", Special::nsmid, 32}, {"gridid", Special::gridid, 64},
    {"clusterid.x", Special::clusterid_x, 32}, {"clusterid.y", Special::clusterid_y, 32},
    {"clusterid.z", Special::clusterid_z, 32}, {"nclusterid.x", Special::nclusterid_x, 32},
    {"nclusterid.y", Special::nclusterid_y, 32}, {"nclusterid.z", Special::nclusterid_z, 32},
    {"cluster_ctaid.x", Special::cluster_ctaid_x, 32}, {"cluster_ctaid.y", Special::cluster_ctaid_y, 32},
    {"cluster_ctaid.z", Special::cluster_ctaid_z, 32}, {"cluster_nctaid.x", Special::cluster_nctaid_x, 32},
    {"cluster_nctaid.y", Special::cluster_nctaid_y, 32}, {"cluster_nctaid.z", Special::cluster_nctaid_z, 32},
    {"cluster_ctarank", Special::cluster_ctarank, 32}, {"cluster_nctarank", Special::cluster_nctarank, 32},
    {"lanemask_eq", Special::lanemask_eq, 32}, {"lanemask_le", Special::lanemask_le, 32},
    {"lanemask_lt", Special::lanemask_lt, 32}, {"lanemask_ge", Special::lanemask_ge, 32},
    {"lanemask_gt", Special::lanemask_gt, 32}, {"dynamic_smem_size", Special::dynamic_smem_size, 32},
    {"total_smem_size", Special::total_smem_size, 32}, {"aggr_smem_size", Special::aggr_smem_size, 32},
    {"is_explicit_cluster", Special::is_explicit_cluster, 1},
    {"clock", Special::clock, 32}, {"clock_hi", Special::clock_hi, 32}, {"clock64", Special::clock64, 64},
    {"globaltimer", Special::globaltimer, 64}, {"globaltimer_lo", Special::globaltimer_lo, 32},
    {"globaltimer_hi", Special::globaltimer_hi, 32},
};
// clang-format on

}  // namespace

u32 Lowerer::constant(u64 bits, int width) {
  const auto [it, fresh] = constants_.try_emplace({bits, width}, 0u);
  if (fresh) {
    it->second = static_cast<u32>(program_->constants.size() / kLanes) | kConstant;
    for (int block = 0; block < std::max(1, width / 32); ++block) {
      for (int lane = 0; lane < kLanes; ++lane) {
        // 64-bit lanes lie whole, one after the other, over two blocks.
        const u64 half = width <= 32                          ? bits
                         : ((block * kLanes + lane) & 1) != 0 ? bits >> 32
                                                              : bits;
        program_->constants.push_back(static_cast<u32>(half));
      }
    }
  }
  return it->second;
}

u32 Lowerer::special(const Operand& operand, u32 line, int width) {
  for (const SpecialName& known : kSpecials) {
    if (known.name != operand.name) continue;
    if (std::max(known.bits, 16) > std::max(width, 16) && !(known.bits == 32 && width == 16))
      fail(line, "%" + operand.name + " has " + std::to_string(known.bits) + " bits");
    if (known.special >= Special::clock && known.special <= Special::globaltimer_hi) {
      // Not a constant of the warp: read afresh by an instruction of its own.
      const u32 slot = add_blocks(2, "%" + operand.name);
      Instruction read;
      read.line = line;
      read.opcode = "read_special";
      Code code;
      code.form = static_cast<u32>(program_->forms.size());
      program_->forms.push_back(match_form(module_, read));
      code.exec = read_special(program_->forms.back(), code);
      code.dst[0] = slot;
      code.variant = static_cast<u16>(known.special);
      code.width = static_cast<u8>(known.bits);
      code.line = line;
      code.marks_begin = static_cast<u32>(program_->checks.size());
      program_->checks.push_back(slot);
      code.marks_end = code.marks_begin + 1;
      program_->code.push_back(code);
      return slot;
    }
    return special_register(known.special, known.bits == 64 || width == 64, 0, "%" + operand.name);
  }
  fail(line, "special register '%" + operand.name +
                 "' is not modelled (or this register is not "
                 "declared)");
}

u32 Lowerer::special_register(Special which, bool wide, u64 value, const std::string& name) {
  for (const SpecialUse& use : program_->specials)
    if (use.special == which && use.wide == wide && use.value == value) return use.slot;
  const u32 slot = add_blocks(wide ? 2 : 1, name);
  program_->specials.push_back({which, slot, wide, value});
  return slot;
}

u32 Lowerer::address_value(u32 index, i64 offset, int width, u32 line) {
  const Variable& v = module_.variables[index];
  if (width < 32) fail(line, "the address of '" + v.name + "' does not fit into 16 bits");
  if (v.space == Space::shared) {
    return special_register(Special::shared_address, width == 64,
                            addresses_.at(index) + static_cast<u64>(offset), v.name);
  }
  return constant(address_of_variable(index) + static_cast<u64>(offset), width);
}

u64 Lowerer::address_of_variable(u32 index) const {
  const auto found = addresses_.find(index);
  if (found != addresses_.end()) return found->second;
  return placements_[index].address;
}

Type Lowerer::resolve(const OperandSpec& spec, const Form& form) const {
  return spec.form_type >= 0 ? form.type(static_cast<std::size_t>(spec.form_type)) : spec.type;
}

u32 Lowerer::register_slot(const Operand& operand, int width, bool relaxed, u32 line) {
  const Register& r = function_->registers[operand.index];
  const int have = bits_of_type(r.type);
  const bool fits = r.type != Type::pred && (relaxed ? have >= width : have == width);
  if (!fits) {
    fail(line, "register " + r.name + " is ." + std::string(name_of_type(r.type)) +
                   ", and the instruction takes " + std::to_string(width) + " bits" +
                   (relaxed ? " or more" : ""));
  }
  return functions_[function_].slots[operand.index];
}

u32 Lowerer::predicate_slot(const Operand& operand, u32 line) {
  if (operand.kind == OperandKind::sink) return scratch_predicate_;
  if (operand.kind != OperandKind::reg || function_->registers[operand.index].type != Type::pred)
    fail(line, "expected a predicate register");
  return functions_[function_].slots[operand.index] | (operand.negated ? kNegated : 0);
}

u32 Lowerer::value_slot(const Operand& operand, Type type, int width, bool relaxed,
                        bool destination, u32 line) {
  const bool floating = kind_of_type(type) == TypeKind::floating && bits_of_type(type) == width;
  switch (operand.kind) {
    case OperandKind::reg: return register_slot(operand, width, relaxed, line);
    case OperandKind::sink:
      if (destination) return scratch_;
      fail(line, "'_' can only be a destination");
    default: break;
  }
  if (destination) fail(line, "a destination is a register");
  const u64 mask = width >= 64 ? ~u64{0} : (u64{1} << width) - 1;
  switch (operand.kind) {
    case OperandKind::integer:
      if (floating && type != Type::f16x2 && type != Type::bf16x2 && type != Type::f32x2)
        fail(line, "a floating-point literal is written 0f3F800000, 0d... or 1.0");
      return constant(operand.bits & mask, width);
    case OperandKind::f32:
      if (width == 32) return constant(operand.bits, 32);
      fail(line, "a 0f literal has 32 bits");
    case OperandKind::f64:
      if (width == 64) return constant(operand.bits, 64);
      if (type == Type::f32) {
        return constant(
            __builtin_bit_cast(u32, static_cast<float>(__builtin_bit_cast(double, operand.bits))),
            32);
      }
      fail(line, "a double literal where no floating-point number is expected");
    case OperandKind::variable: return address_value(operand.index, operand.offset, width, line);
    case OperandKind::special: return special(operand, line, width);
    case OperandKind::label:
      fail(line, "'" + function_->label_names[operand.index] + "' is not declared");
    default: fail(line, "expected a register or a constant");
  }
}

void Lowerer::lower_address(const Operand& operand, bool tensor, Code& code, u32& next_source,
                            int& next_address, u32& next_vector, u32 line) {
  if (operand.kind != OperandKind::address) fail(line, "expected an address in brackets");
  if (!tensor && !operand.elements.empty()) fail(line, "tensor coordinates in an address");
  if (tensor) lower_coordinates(operand, code, next_vector, line);
  const u32 source = next_source++;
  const int number = next_address++;
  code.offset[number] = operand.offset;
  if (operand.base_kind == OperandKind::reg) {
    const int width = bits_of_type(function_->registers[operand.index].type);
    if (width != 32 && width != 64) fail(line, "an address register has 32 or 64 bits");
    code.src[source] = functions_[function_].slots[operand.index];
    if (width == 64) code.address_bits |= static_cast<u8>(1 << number);
    check(code.src[source]);
  } else if (operand.base_kind == OperandKind::variable) {
    const Variable& v = module_.variables[operand.index];
    address_variable_ = operand.index;
    if (v.space == Space::shared) {
      code.src[source] = address_value(operand.index, 0, 32, line);
    } else {
      code.offset[number] += static_cast<i64>(address_of_variable(operand.index));
      // The address of a tensor map is generic.
      if (tensor && v.space == Space::param) code.offset[number] += static_cast<i64>(kParamWindow);
      if (tensor && v.space == Space::constant)
        code.offset[number] += static_cast<i64>(kConstantWindow);
    }
  }
}

void Lowerer::lower_coordinates(const Operand& operand, Code& code, u32& next_vector, u32 line) {
  const bool one_list =
      operand.elements.size() == 1 && operand.elements[0].kind == OperandKind::vector;
  if (!one_list || operand.elements[0].elements.empty() || operand.elements[0].elements.size() > 5)
    fail(line, "expected [tensor map, {1 to 5 coordinates}]");
  const std::vector<Operand>& coordinates = operand.elements[0].elements;
  code.vectors[next_vector] = static_cast<u32>(program_->slots.size());
  code.counts[next_vector++] = static_cast<u16>(coordinates.size());
  for (const Operand& element : coordinates) {
    program_->slots.push_back(value_slot(element, Type::s32, 32, false, false, line));
    check(program_->slots.back());
  }
}

void Lowerer::check(u32 slot) {
  if ((slot & kConstant) == 0 && slot != kNoSlot) checks_.push_back(slot & ~kNegated);
}

void Lowerer::mark(u32 slot) {
  if (slot != scratch_) marks_.push_back(slot);
}

void Lowerer::lower_vector(const Operand& operand, const OperandSpec& spec, const Form& form,
                           Code& code, u32& next_vector, u32 line) {
  const Type type = resolve(spec, form);
  const bool packs = form.row->opcode == "mov";
  std::vector<const Operand*> elements;
  if (operand.kind == OperandKind::vector) {
    for (const Operand& element : operand.elements) elements.push_back(&element);
  } else {
    elements.push_back(&operand);
  }
  if (elements.empty() || elements.size() > 128) fail(line, "a vector of 1 to 128 elements");
  int width = bits_of_type(type);
  if (packs) width /= static_cast<int>(elements.size());
  code.vectors[next_vector] = static_cast<u32>(program_->slots.size());
  code.counts[next_vector] = static_cast<u16>(elements.size());
  ++next_vector;
  for (const Operand* element : elements) {
    const u32 slot = value_slot(*element, type, width, spec.relaxed, spec.destination, line);
    program_->slots.push_back(slot);
    spec.destination ? mark(slot) : check(slot);
    if (element->kind == OperandKind::reg)
      code.width = static_cast<u8>(bits_of_type(function_->registers[element->index].type));
  }
}

void Lowerer::lower_operands(const Instruction& i, const Form& form, Code& code) {
  u32 next_source = 0, next_destination = 0, next_vector = 0;
  int next_address = 0;
  bool immediate = false;
  for (std::size_t n = 0; n < i.operands.size(); ++n) {
    const OperandSpec& spec = form.row->specs[n];
    const Operand& operand = i.operands[n];
    if (operand.negated && spec.kind != OperandSpec::predicate)
      fail(i.line, "'!' stands before a predicate only");
    switch (spec.kind) {
      case OperandSpec::label: lower_label(operand, code, i.line); continue;
      case OperandSpec::address:
        lower_address(operand, spec.tensor, code, next_source, next_address, next_vector, i.line);
        continue;
      case OperandSpec::call: continue;
      default: break;
    }
    if (spec.vector) {
      lower_vector(operand, spec, form, code, next_vector, i.line);
      continue;
    }
    const Operand* first = &operand;
    if (operand.kind == OperandKind::pair) {
      if (!spec.second_predicate) fail(i.line, "only one destination is possible here");
      first = &operand.elements[0];
      code.dst[1] = predicate_slot(operand.elements[1], i.line);
      marks_.push_back(code.dst[1] | kPredicate);
    } else if (i.opcode == "mma" && operand.kind == OperandKind::vector &&
               operand.elements.size() == 1) {
      first = &operand.elements[0];  // CUTLASS writes a scale word as {%r1}, and ptxas takes it
    }
    u32 slot;
    u32 flag = 0;
    // An integer is a predicate too: false where it is 0 (PTX ISA 4.5.3).
    if (spec.kind == OperandSpec::predicate && !spec.destination &&
        first->kind == OperandKind::integer) {
      code.src[next_source++] = kConstant | (first->bits == 0 ? kNegated : 0);
      continue;
    }
    if (spec.kind == OperandSpec::predicate) {
      // `mov.pred p, 0` and `-1`: the only constants that PTX has for predicates.
      slot = first->kind == OperandKind::integer && !spec.destination && i.opcode == "mov"
                 ? program_->true_predicate | (first->bits == 0 ? kNegated : 0)
                 : predicate_slot(*first, i.line);
      flag = kPredicate;
    } else {
      const Type type = resolve(spec, form);
      const int width = bits_of_type(type) * (spec.wide ? 2 : 1);
      slot = value_slot(*first, type, width, spec.relaxed, spec.destination, i.line);
      if (spec.destination && first->kind == OperandKind::reg)
        code.width = static_cast<u8>(bits_of_type(function_->registers[first->index].type));
    }
    if (spec.destination) {
      code.dst[next_destination++] = slot;
      mark(slot | flag);
    } else {
      if (first->kind == OperandKind::integer && !immediate) {
        code.immediate = first->bits;
        immediate = true;
      }
      if (next_source == 0 && first->kind == OperandKind::reg)
        code.source_width = static_cast<u8>(bits_of_type(function_->registers[first->index].type));
      code.src[next_source++] = slot;
      if (flag) {
        checks_.push_back((slot & ~kNegated) | flag);
      } else {
        check(slot);
      }
    }
  }
}

void Lowerer::lower_label(const Operand& operand, Code& code, u32 line) {
  if (operand.kind == OperandKind::label) {
    code.flow = Flow::branch;
  } else if (operand.kind == OperandKind::branch_list) {
    code.flow = Flow::branch_list;
  } else {
    fail(line, "expected a label");
  }
  code.target = operand.index;
}

}  // namespace jax_fp4::sim

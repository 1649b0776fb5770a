// Lowering: a parsed function and what it calls become a Program.
//
//   gather   the functions that the entry reaches, their variables; recursion is refused
//   lay out  parameters, static and dynamic shared memory, the local frame, registers
//   lower    every instruction: its form, its operands as slots, its handler
//   finish   branch and call targets, running order, checks that cannot fail
//   share    all of it once more, with registers in blocks that they share (machine/register_sharing.h)
#include <algorithm>
#include <map>

#include "sim/machine/load_uses.h"
#include "sim/machine/memory.h"
#include "sim/machine/register_sharing.h"
#include "sim/ops/ops.h"
#include "sim/ptx/lexer.h"

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

int blocks_of(Type type) { return std::max(1, bits_of_type(type) / 32); }

// What is known of a function while its callers are lowered.
struct FunctionState {
  u32 begin = 0;
  std::vector<u32> slots;  // by register: block or predicate
};

class Lowerer {
 public:
  // Without a plan every register has blocks of its own.
  Lowerer(const Module& module, const Function& entry, const Placements& placements,
          const RegisterPlan* plan = nullptr)
      : module_(module),
        entry_(entry),
        placements_(placements),
        plan_(plan),
        program_(std::make_unique<Program>()) {
    program_->module = &module;
    program_->entry = entry.name;
  }

  std::unique_ptr<Program> run() {
    gather(entry_);
    lay_out();
    for (const Function* f : order_) lower_function(*f);
    for (const auto& [code, callee] : call_targets_)
      program_->code[code].target = functions_[callee].begin;
    // What follows drops from `checks` what need not be checked; timing wants all of it.
    program_->operand_slots = program_->checks;
    for (const Code& c : program_->code)
      program_->operands.push_back({c.checks_begin, c.checks_end, c.marks_begin, c.marks_end});
    program_->order.assign(program_->code.size(), 0);
    for (std::size_t i = 0; i < order_.size(); ++i) {
      const u32 begin = functions_[order_[i]].begin;
      const u32 end = i + 1 < order_.size() ? functions_[order_[i + 1]].begin
                                            : static_cast<u32>(program_->code.size());
      order_blocks(*program_, begin, end);
      drop_needless_checks(*program_, begin, end);
    }
    drop_needless_marks(*program_);
    return std::move(program_);
  }

  // How the entry's registers can share blocks; after run(), which had no plan.
  RegisterPlan plan(const Program& program) const {
    const FunctionState& state = functions_.at(&entry_);
    const u32 end =
        order_.size() > 1 ? functions_.at(order_[1]).begin : static_cast<u32>(program.code.size());
    std::vector<RegisterBlocks> registers;
    for (std::size_t r = 0; r < state.slots.size(); ++r) {
      const Type type = entry_.registers[r].type;
      registers.push_back(
          {state.slots[r], type == Type::pred ? 0 : static_cast<u32>(blocks_of(type))});
    }
    return share_registers(program, state.begin, end, registers);
  }

 private:
  [[noreturn]] void fail(u32 line, const std::string& message) const {
    throw PtxError(module_.source, line, message);
  }

  // ---- Gather

  void gather(const Function& f) {
    if (std::find(path_.begin(), path_.end(), &f) != path_.end()) {
      fail(f.line, "'" + f.name +
                       "' calls itself; registers are static here, so recursion is not "
                       "modelled");
    }
    if (std::find(order_.begin(), order_.end(), &f) != order_.end()) return;
    if (!f.defined) fail(f.line, "'" + f.name + "' is called but not defined in this module");
    order_.push_back(&f);
    path_.push_back(&f);
    for (const Instruction& i : f.body) {
      for (const Operand& operand : i.operands) use_variables(operand);
      if (i.opcode == "call") gather(callee_of(i));
    }
    path_.pop_back();
  }

  void use_variables(const Operand& operand) {
    const bool variable =
        operand.kind == OperandKind::variable ||
        (operand.kind == OperandKind::address && operand.base_kind == OperandKind::variable);
    if (variable) used_.insert({operand.index, true});
    for (const Operand& element : operand.elements) use_variables(element);
  }

  const Function& callee_of(const Instruction& i) const {
    for (const Operand& operand : i.operands) {
      if (operand.kind != OperandKind::function) continue;
      for (const Function& f : module_.functions)
        if (f.name == operand.name) return f;
    }
    fail(i.line, "only calls of functions of this module, by name, are modelled");
  }

  // ---- Lay out

  void lay_out() {
    u32 offset = 0;
    for (std::size_t i = 0; i < entry_.parameters.size(); ++i) {
      if (entry_.parameter_is_register[i]) fail(entry_.line, "an entry's parameters are in .param");
      const Variable& v = module_.variables[entry_.parameters[i]];
      offset = static_cast<u32>(round_up(offset, v.align));
      const u32 bytes = static_cast<u32>(v.bytes);
      addresses_[entry_.parameters[i]] = offset;
      const bool array = bytes != static_cast<u32>(bits_of_type(v.element) + 7) / 8;
      program_->parameters.push_back({v.name, v.element, offset, bytes, v.align, array});
      offset += bytes;
    }
    program_->parameter_bytes = offset;

    for (const auto& [index, used] : used_) {
      const Variable& v = module_.variables[index];
      if (v.space != Space::shared) continue;
      if (v.external) {
        program_->dynamic_shared_align = std::max(program_->dynamic_shared_align, v.align);
      } else {
        const u32 at =
            static_cast<u32>(round_up(kSharedReserved + program_->static_shared_bytes, v.align));
        addresses_[index] = at;
        program_->static_shared_bytes = at + static_cast<u32>(v.bytes) - kSharedReserved;
      }
    }
    // The reserved KiB keeps every alignment up to 1024.
    const u64 dynamic = static_cast<u64>(
        round_up(kSharedReserved + program_->static_shared_bytes, program_->dynamic_shared_align));
    for (const auto& [index, used] : used_)
      if (module_.variables[index].external) addresses_[index] = dynamic;

    u64 local = 0;
    for (const Function* f : order_) {
      std::vector<u32> variables = f->variables;
      if (f == &entry_) std::erase_if(variables, [&](u32 v) { return addresses_.count(v) != 0; });
      for (u32 index : variables) {
        const Variable& v = module_.variables[index];
        if (v.space != Space::local && v.space != Space::param) continue;
        local = static_cast<u64>(round_up(static_cast<i64>(local), std::max(v.align, 8u)));
        addresses_[index] = kLocalBase + local;
        frame_.insert({index, true});
        local += v.bytes;
      }
    }
    program_->local_bytes = static_cast<u32>(round_up(static_cast<i64>(local), 16));

    scratch_ = add_blocks(4, "_");
    scratch_predicate_ = add_predicate("_");
    program_->true_predicate = add_predicate("true");
    for (const Function* f : order_) {
      std::vector<u32>& slots = functions_[f].slots;
      const bool planned = plan_ && f == &entry_;
      const u32 first = planned ? add_blocks(static_cast<int>(plan_->blocks), "") : 0;
      for (const Register& r : f->registers) {
        const auto shared = [&] {
          const u32 block = plan_->block[slots.size()];
          if (block == kNoSlot) return scratch_;
          program_->register_names[first + block] = r.name;
          return first + block;
        };
        slots.push_back(r.type == Type::pred ? add_predicate(r.name)
                        : planned            ? shared()
                                             : add_blocks(blocks_of(r.type), r.name));
      }
    }
    directive("reqntid", program_->required_block);
    directive("maxntid", program_->max_block);
    directive("maxnreg", program_->max_registers);
    directive("reqnctapercluster", program_->required_cluster);
  }

  void directive(std::string_view name, u32 (&values)[3]) const {
    const auto found = entry_.directives.find(name);
    if (found == entry_.directives.end()) return;
    for (std::size_t d = 0; d < 3; ++d)
      values[d] = d < found->second.size() ? static_cast<u32>(found->second[d]) : 1;
  }

  u32 add_blocks(int count, const std::string& name) {
    const u32 slot = program_->blocks;
    program_->blocks += static_cast<u32>(count);
    program_->register_names.resize(program_->blocks, name);
    return slot;
  }
  u32 add_predicate(const std::string& name) {
    program_->predicate_names.push_back(name);
    return program_->predicates++;
  }

  // ---- Operands

  u32 constant(u64 bits, int width) {
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

  u32 special(const Operand& operand, u32 line, int width) {
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
      return special_register(known.special, known.bits == 64 || width == 64, 0,
                              "%" + operand.name);
    }
    fail(line, "special register '%" + operand.name +
                   "' is not modelled (or this register is not "
                   "declared)");
  }

  u32 special_register(Special which, bool wide, u64 value, const std::string& name) {
    for (const SpecialUse& use : program_->specials)
      if (use.special == which && use.wide == wide && use.value == value) return use.slot;
    const u32 slot = add_blocks(wide ? 2 : 1, name);
    program_->specials.push_back({which, slot, wide, value});
    return slot;
  }

  // The address of a variable as a value of `width` bits.
  u32 address_value(u32 index, i64 offset, int width, u32 line) {
    const Variable& v = module_.variables[index];
    if (width < 32) fail(line, "the address of '" + v.name + "' does not fit into 16 bits");
    if (v.space == Space::shared) {
      return special_register(Special::shared_address, width == 64,
                              addresses_.at(index) + static_cast<u64>(offset), v.name);
    }
    return constant(address_of_variable(index) + static_cast<u64>(offset), width);
  }

  u64 address_of_variable(u32 index) const {
    const auto found = addresses_.find(index);
    if (found != addresses_.end()) return found->second;
    return placements_[index].address;
  }

  Type resolve(const OperandSpec& spec, const Form& form) const {
    return spec.form_type >= 0 ? form.type(static_cast<std::size_t>(spec.form_type)) : spec.type;
  }

  // Checks a register against what the instruction wants, and gives its slot.
  u32 register_slot(const Operand& operand, int width, bool relaxed, u32 line) {
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

  u32 predicate_slot(const Operand& operand, u32 line) {
    if (operand.kind == OperandKind::sink) return scratch_predicate_;
    if (operand.kind != OperandKind::reg || function_->registers[operand.index].type != Type::pred)
      fail(line, "expected a predicate register");
    return functions_[function_].slots[operand.index] | (operand.negated ? kNegated : 0);
  }

  u32 value_slot(const Operand& operand, Type type, int width, bool relaxed, bool destination,
                 u32 line) {
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

  void lower_address(const Operand& operand, bool tensor, Code& code, u32& next_source,
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
        if (tensor && v.space == Space::param)
          code.offset[number] += static_cast<i64>(kParamWindow);
        if (tensor && v.space == Space::constant)
          code.offset[number] += static_cast<i64>(kConstantWindow);
      }
    }
  }

  void lower_coordinates(const Operand& operand, Code& code, u32& next_vector, u32 line) {
    const bool one_list =
        operand.elements.size() == 1 && operand.elements[0].kind == OperandKind::vector;
    if (!one_list || operand.elements[0].elements.empty() ||
        operand.elements[0].elements.size() > 5)
      fail(line, "expected [tensor map, {1 to 5 coordinates}]");
    const std::vector<Operand>& coordinates = operand.elements[0].elements;
    code.vectors[next_vector] = static_cast<u32>(program_->slots.size());
    code.counts[next_vector++] = static_cast<u16>(coordinates.size());
    for (const Operand& element : coordinates) {
      program_->slots.push_back(value_slot(element, Type::s32, 32, false, false, line));
      check(program_->slots.back());
    }
  }

  void check(u32 slot) {
    if ((slot & kConstant) == 0 && slot != kNoSlot) checks_.push_back(slot & ~kNegated);
  }
  void mark(u32 slot) {
    if (slot != scratch_) marks_.push_back(slot);
  }

  void lower_vector(const Operand& operand, const OperandSpec& spec, const Form& form, Code& code,
                    u32& next_vector, u32 line) {
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

  // ---- Instructions

  void lower_function(const Function& f) {
    function_ = &f;
    const u32 begin = static_cast<u32>(program_->code.size());
    functions_[&f].begin = begin;
    const u32 first_list = static_cast<u32>(program_->branch_lists.size());
    std::vector<u32> starts;
    const std::set<u32> labels(f.labels.begin(), f.labels.end());
    load_uses_.start_block();
    for (const Instruction& i : f.body) {
      if (labels.count(static_cast<u32>(starts.size()))) load_uses_.start_block();
      starts.push_back(static_cast<u32>(program_->code.size()));
      lower_instruction(i);
    }
    starts.push_back(static_cast<u32>(program_->code.size()));
    // The end of the body is a return.
    Instruction end;
    end.line = f.body.empty() ? f.line : f.body.back().line;
    end.opcode = "ret";
    lower_instruction(end);
    for (const std::vector<u32>& list : f.branch_lists) {
      program_->branch_lists.emplace_back();
      for (u32 label : list) program_->branch_lists.back().push_back(starts[f.labels[label]]);
    }
    for (u32 pc = begin; pc < program_->code.size(); ++pc) {
      Code& code = program_->code[pc];
      if (code.flow == Flow::branch) code.target = starts[f.labels[code.target]];
      if (code.flow == Flow::branch_list) code.target += first_list;
    }
  }

  void lower_instruction(const Instruction& i) {
    Form form = match_form(module_, i);
    Code code;
    code.line = i.line;
    checks_.clear();
    marks_.clear();
    address_variable_ = kNoIndex;
    if (i.guard != kNoIndex) {
      code.guard = functions_[function_].slots[i.guard];
      code.guard_negated = i.guard_negated;
    }
    if (i.opcode == "call") {
      lower_call(i, code);
    } else {
      lower_operands(i, form, code);
    }
    code.exec = form.row->builder(form, code);
    if (!code.exec) fail(i.line, "this combination of modifiers does not exist or is not modelled");
    program_->asynchronous |= form.row->asynchronous;
    if (i.opcode == "tcgen05") check_cta_group(i, form);
    // Parameters of calls are variables of the frame.
    if (address_variable_ != kNoIndex && code.space == Space::param &&
        frame_.count(address_variable_))
      code.space = Space::local;
    const bool convergent = std::any_of(i.modifiers.begin(), i.modifiers.end(),
                                        [](auto m) { return m == "sync" || m == "aligned"; });
    code.leader = convergent || i.opcode == "bar" || i.opcode == "barrier";
    if (i.opcode == "ret" || i.opcode == "exit" || i.opcode == "trap") code.flow = Flow::end;
    const OpClass op_class = form.row->op_class;
    code.computes = op_class == OpClass::integer || op_class == OpClass::floating ||
                    op_class == OpClass::convert || i.opcode == "mov";
    const auto append = [&](const std::vector<u32>& list, u32& begin, u32& end) {
      begin = static_cast<u32>(program_->checks.size());
      program_->checks.insert(program_->checks.end(), list.begin(), list.end());
      end = static_cast<u32>(program_->checks.size());
    };
    append(checks_, code.checks_begin, code.checks_end);
    append(marks_, code.marks_begin, code.marks_end);
    code.form = static_cast<u32>(program_->forms.size());
    program_->forms.push_back(std::move(form));
    program_->code.push_back(code);
    follow_loads(i, code);
  }

  // Behind a store by which tcgen05.ld are known to be over, an instruction that says so.
  void follow_loads(const Instruction& i, const Code& code) {
    const auto has = [&](std::string_view m) {
      return std::find(i.modifiers.begin(), i.modifiers.end(), m) != i.modifiers.end();
    };
    const bool loads = i.opcode == "tcgen05" && has("ld");
    const bool perhaps = loads && i.guard != kNoIndex;
    if (code.flow != Flow::next || i.opcode == "call" || has("wait::ld") || perhaps) {
      load_uses_.start_block();
    } else if (loads) {
      load_uses_.load(marks_, marks_.size() == code.counts[0]);
    } else {
      const bool stores =
          i.opcode == "stmatrix" || (i.opcode == "st" && code.space != Space::local);
      const u32 over = load_uses_.instruction(checks_, marks_, stores, i.guard != kNoIndex);
      if (over == 0) return;
      Instruction note;
      note.line = i.line;
      note.opcode = "tensor_loads_over";
      Code noted;
      noted.line = i.line;
      noted.form = static_cast<u32>(program_->forms.size());
      program_->forms.push_back(match_form(module_, note));
      noted.exec = tensor_loads_over(program_->forms.back(), noted);
      noted.counts[0] = static_cast<u16>(over);
      noted.counts[1] = static_cast<u16>(load_uses_.open());
      noted.checks_begin = noted.checks_end = static_cast<u32>(program_->checks.size());
      noted.marks_begin = noted.marks_end = noted.checks_begin;
      program_->code.push_back(noted);
    }
  }

  // One kernel uses one CTA group (PTX ISA 9.7.16).
  void check_cta_group(const Instruction& i, const Form& form) {
    program_->tensor_memory = true;
    const u32 group = form.has("cta_group::1") ? 1 : form.has("cta_group::2") ? 2 : 0;
    if (group == 0) return;
    if (program_->cta_group != 0 && group != program_->cta_group) {
      fail(i.line, "the tcgen05 instructions of a kernel have one .cta_group; it is " +
                       std::to_string(program_->cta_group) + " at line " +
                       std::to_string(cta_group_line_) + ": " +
                       std::string(line_text(module_.source, cta_group_line_)));
    }
    if (program_->cta_group == 0) cta_group_line_ = i.line;
    program_->cta_group = group;
  }

  void lower_operands(const Instruction& i, const Form& form, Code& code) {
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
          code.source_width =
              static_cast<u8>(bits_of_type(function_->registers[first->index].type));
        code.src[next_source++] = slot;
        if (flag) {
          checks_.push_back((slot & ~kNegated) | flag);
        } else {
          check(slot);
        }
      }
    }
  }

  void lower_label(const Operand& operand, Code& code, u32 line) {
    if (operand.kind == OperandKind::label) {
      code.flow = Flow::branch;
    } else if (operand.kind == OperandKind::branch_list) {
      code.flow = Flow::branch_list;
    } else {
      fail(line, "expected a label");
    }
    code.target = operand.index;
  }

  // One actual parameter or result: bytes of the frame, a register, or a constant.
  void copy_end(const Operand& operand, int width, u32& slot, u32& at, u32 line) {
    if (operand.kind == OperandKind::variable && frame_.count(operand.index)) {
      at = static_cast<u32>(addresses_.at(operand.index) - kLocalBase);
    } else {
      slot = value_slot(operand, Type::none, width, false, false, line);
      check(slot);
    }
  }

  void lower_call(const Instruction& i, Code& code) {
    const Function& callee = callee_of(i);
    std::vector<const std::vector<Operand>*> lists;
    bool results_first = false;
    for (const Operand& operand : i.operands) {
      if (operand.kind == OperandKind::list) lists.push_back(&operand.elements);
      if (operand.kind == OperandKind::function && lists.size() == 1) results_first = true;
    }
    static const std::vector<Operand> kNone;
    const std::vector<Operand>& results = results_first ? *lists[0] : kNone;
    const std::vector<Operand>& arguments =
        lists.size() > (results_first ? 1u : 0u) ? *lists[results_first ? 1 : 0] : kNone;
    if (results.size() != callee.results.size() || arguments.size() != callee.parameters.size()) {
      fail(i.line, "'" + callee.name + "' takes " + std::to_string(callee.parameters.size()) +
                       " parameters and returns " + std::to_string(callee.results.size()));
    }
    CallSite site;
    const auto formal = [&](u32 index, bool is_register, u32& slot, u32& at, u32& bytes) {
      if (is_register) {
        slot = functions_[&callee].slots[index];
        bytes = static_cast<u32>(bits_of_type(callee.registers[index].type)) / 8;
      } else {
        at = static_cast<u32>(addresses_.at(index) - kLocalBase);
        bytes = static_cast<u32>(module_.variables[index].bytes);
      }
    };
    for (std::size_t n = 0; n < arguments.size(); ++n) {
      CallCopy copy;
      formal(callee.parameters[n], callee.parameter_is_register[n], copy.to_slot, copy.to,
             copy.bytes);
      copy_end(arguments[n], static_cast<int>(copy.bytes * 8), copy.from_slot, copy.from, i.line);
      site.before.push_back(copy);
    }
    for (std::size_t n = 0; n < results.size(); ++n) {
      CallCopy copy;
      formal(callee.results[n], callee.result_is_register[n], copy.from_slot, copy.from,
             copy.bytes);
      copy_end(results[n], static_cast<int>(copy.bytes * 8), copy.to_slot, copy.to, i.line);
      if (copy.to_slot != kNoSlot) {
        checks_.pop_back();
        mark(copy.to_slot);
      }
      site.after.push_back(copy);
    }
    site.reports_assertion = callee.reports_assertion;
    code.src[0] = static_cast<u32>(program_->calls.size());
    program_->calls.push_back(std::move(site));
    call_targets_.push_back({static_cast<u32>(program_->code.size()), &callee});
  }

  const Module& module_;
  const Function& entry_;
  const Placements& placements_;
  const RegisterPlan* const plan_;
  std::unique_ptr<Program> program_;
  std::vector<const Function*> order_, path_;
  std::map<const Function*, FunctionState> functions_;
  std::map<u32, bool> used_, frame_;  // variables by index
  std::map<u32, u64> addresses_;      // of parameters, shared and local variables
  std::map<std::pair<u64, int>, u32> constants_;
  std::vector<std::pair<u32, const Function*>> call_targets_;
  const Function* function_ = nullptr;
  std::vector<u32> checks_, marks_;
  LoadUses load_uses_;
  u32 address_variable_ = kNoIndex;
  u32 cta_group_line_ = 0;
  u32 scratch_ = 0, scratch_predicate_ = 0;
};

}  // namespace

std::unique_ptr<Program> lower(const Module& module, const Function& entry,
                               const Placements& placements) {
  Lowerer apart(module, entry, placements);
  const RegisterPlan plan = apart.plan(*apart.run());
  return Lowerer(module, entry, placements, &plan).run();
}

}  // namespace jax_fp4::sim

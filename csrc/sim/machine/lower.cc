// Lowering: a parsed function and what it calls become a Program.
//
//   gather   the functions that the entry reaches, their variables; recursion is refused
//   lay out  parameters, static and dynamic shared memory, the local frame, registers
//   lower    every instruction: its form, its operands as slots, its handler
//   finish   branch and call targets, running order, checks that cannot fail
//   share    all of it once more, with registers in blocks that they share (machine/register_sharing.h)
#include "sim/machine/lower.h"

#include <algorithm>
#include <set>

#include "sim/machine/memory.h"
#include "sim/ptx/lexer.h"

namespace jax_fp4::sim {

std::unique_ptr<Program> Lowerer::run() {
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

RegisterPlan Lowerer::plan(const Program& program) const {
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

void Lowerer::fail(u32 line, const std::string& message) const {
  throw PtxError(module_.source, line, message);
}

void Lowerer::gather(const Function& f) {
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

void Lowerer::use_variables(const Operand& operand) {
  const bool variable =
      operand.kind == OperandKind::variable ||
      (operand.kind == OperandKind::address && operand.base_kind == OperandKind::variable);
  if (variable) used_.insert({operand.index, true});
  for (const Operand& element : operand.elements) use_variables(element);
}

void Lowerer::lay_out() {
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

void Lowerer::directive(std::string_view name, u32 (&values)[3]) const {
  const auto found = entry_.directives.find(name);
  if (found == entry_.directives.end()) return;
  for (std::size_t d = 0; d < 3; ++d)
    values[d] = d < found->second.size() ? static_cast<u32>(found->second[d]) : 1;
}

u32 Lowerer::add_blocks(int count, const std::string& name) {
  const u32 slot = program_->blocks;
  program_->blocks += static_cast<u32>(count);
  program_->register_names.resize(program_->blocks, name);
  return slot;
}

u32 Lowerer::add_predicate(const std::string& name) {
  program_->predicate_names.push_back(name);
  return program_->predicates++;
}

void Lowerer::lower_function(const Function& f) {
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

void Lowerer::lower_instruction(const Instruction& i) {
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

void Lowerer::follow_loads(const Instruction& i, const Code& code) {
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
    const bool stores = i.opcode == "stmatrix" || (i.opcode == "st" && code.space != Space::local);
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

void Lowerer::check_cta_group(const Instruction& i, const Form& form) {
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

std::unique_ptr<Program> lower(const Module& module, const Function& entry,
                               const Placements& placements) {
  Lowerer apart(module, entry, placements);
  const RegisterPlan plan = apart.plan(*apart.run());
  return Lowerer(module, entry, placements, &plan).run();
}

}  // namespace jax_fp4::sim

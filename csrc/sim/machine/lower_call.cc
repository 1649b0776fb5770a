// Calls: which function, and how arguments and results get to where they belong.
#include <algorithm>

#include "sim/machine/lower.h"
#include "sim/machine/memory.h"

namespace jax_fp4::sim {

const Function& Lowerer::callee_of(const Instruction& i) const {
  for (const Operand& operand : i.operands) {
    if (operand.kind != OperandKind::function) continue;
    for (const Function& f : module_.functions)
      if (f.name == operand.name) return f;
  }
  fail(i.line, "only calls of functions of this module, by name, are modelled");
}

void Lowerer::copy_end(const Operand& operand, int width, u32& slot, u32& at, u32 line) {
  if (operand.kind == OperandKind::variable && frame_.count(operand.index)) {
    at = static_cast<u32>(addresses_.at(operand.index) - kLocalBase);
  } else {
    slot = value_slot(operand, Type::none, width, false, false, line);
    check(slot);
  }
}

void Lowerer::lower_call(const Instruction& i, Code& code) {
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
    formal(callee.results[n], callee.result_is_register[n], copy.from_slot, copy.from, copy.bytes);
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

}  // namespace jax_fp4::sim

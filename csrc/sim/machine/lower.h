// What lowering knows while it goes over a function's instructions. The steps: lower.cc. Operands: lower_operands.cc.
// Calls: lower_call.cc.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sim/machine/load_uses.h"
#include "sim/machine/program.h"
#include "sim/machine/register_sharing.h"
#include "sim/ops/ops.h"

namespace jax_fp4::sim {

inline int blocks_of(Type type) { return std::max(1, bits_of_type(type) / 32); }

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

  std::unique_ptr<Program> run();
  // How the entry's registers can share blocks; after run(), which had no plan.
  RegisterPlan plan(const Program& program) const;

 private:
  [[noreturn]] void fail(u32 line, const std::string& message) const;

  // ---- Gather
  void gather(const Function& f);
  void use_variables(const Operand& operand);
  const Function& callee_of(const Instruction& i) const;

  // ---- Lay out
  void lay_out();
  void directive(std::string_view name, u32 (&values)[3]) const;
  u32 add_blocks(int count, const std::string& name);
  u32 add_predicate(const std::string& name);

  // ---- Operands
  u32 constant(u64 bits, int width);
  u32 special(const Operand& operand, u32 line, int width);
  u32 special_register(Special which, bool wide, u64 value, const std::string& name);
  // The address of a variable as a value of `width` bits.
  u32 address_value(u32 index, i64 offset, int width, u32 line);
  u64 address_of_variable(u32 index) const;
  Type resolve(const OperandSpec& spec, const Form& form) const;
  // Checks a register against what the instruction wants, and gives its slot.
  u32 register_slot(const Operand& operand, int width, bool relaxed, u32 line);
  u32 predicate_slot(const Operand& operand, u32 line);
  u32 value_slot(const Operand& operand, Type type, int width, bool relaxed, bool destination,
                 u32 line);
  void lower_address(const Operand& operand, bool tensor, Code& code, u32& next_source,
                     int& next_address, u32& next_vector, u32 line);
  void lower_coordinates(const Operand& operand, Code& code, u32& next_vector, u32 line);
  void check(u32 slot);
  void mark(u32 slot);
  void lower_vector(const Operand& operand, const OperandSpec& spec, const Form& form, Code& code,
                    u32& next_vector, u32 line);

  // ---- Instructions
  void lower_function(const Function& f);
  void lower_instruction(const Instruction& i);
  // Behind a store by which tcgen05.ld are known to be over, an instruction that says so.
  void follow_loads(const Instruction& i, const Code& code);
  // One kernel uses one CTA group (PTX ISA 9.7.16).
  void check_cta_group(const Instruction& i, const Form& form);
  void lower_operands(const Instruction& i, const Form& form, Code& code);
  void lower_label(const Operand& operand, Code& code, u32 line);
  // One actual parameter or result: bytes of the frame, a register, or a constant.
  void copy_end(const Operand& operand, int width, u32& slot, u32& at, u32 line);
  void lower_call(const Instruction& i, Code& code);

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
  u32 scratch_ = 0, scratch_predicate_ = 0;  // where sinks go
};

}  // namespace jax_fp4::sim

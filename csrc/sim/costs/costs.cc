// Around instructions and operations.
#include "sim/costs/costs.h"

namespace jax_fp4::sim::costs {

Costs::Costs(Launch& launch) : counters_(*launch.program) {
  const Program& program = *launch.program;
  for (std::size_t pc = 0; pc < program.code.size(); ++pc) {
    const Form& form = program.forms[program.code[pc].form];
    instructions_.push_back({cost_of(form, program.code[pc]), access_form(form, program.code[pc])});
  }
  if (launch.spec.costs.time) timing_ = std::make_unique<Timing>(launch);
}

bool Costs::begin(Warp& warp, const Code& code, u32 pc, u32 mask) {
  const Instruction& instruction = instructions_[pc];
  if (timing_) {
    const double earliest = timing_->earliest(warp, code, pc, instruction.cost);
    if (earliest > timing_->now()) {
      timing_->postpone(warp, earliest);
      return false;
    }
  }
  ++executed_;
  // Before it executes: a load may overwrite its address.
  find_access(warp, code, instruction.access, mask, access_);
  return true;
}

void Costs::end(Warp& warp, const Code& code, u32 pc, u32 mask) {
  // An instruction that waits and is tried again has left its fragment where it was.
  const Fragment& f = warp.fragment();
  const bool retried = f.pc == pc && f.state != FragmentState::ready;
  const InstructionCost& cost = instructions_[pc].cost;
  if (!retried) counters_.instruction(pc, mask, cost, access_);
  if (timing_) timing_->issued(warp, code, pc, mask, cost, access_, retried);
}

void Costs::operation(AsyncOperation& operation) {
  AsyncWork work = operation.work();
  bool again = false;
  if (work.engine == AsyncWork::Engine::copy_out) {
    again = copied_by_ == executed_ && copied_ == work.global;
    copied_by_ = executed_;
    copied_ = work.global;
  }
  if (!again) counters_.operation(work);
  if (timing_) timing_->operation(operation, std::move(work), again);
}

}  // namespace jax_fp4::sim::costs

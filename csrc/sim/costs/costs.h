// What a launch costs: counters always, cycles where they are asked for.
#pragma once

#include <memory>

#include "sim/costs/counters.h"
#include "sim/costs/timing.h"

namespace jax_fp4::sim::costs {

class Costs {
 public:
  explicit Costs(Launch& launch);

  // Around each instruction of a warp. begin: false if it is not yet its time.
  bool begin(Warp& warp, const Code& code, u32 pc, u32 mask);
  void end(Warp& warp, const Code& code, u32 pc, u32 mask);
  // When an asynchronous operation is issued.
  void operation(AsyncOperation& operation);

  const Counters& counters() const { return counters_; }
  Timing* timing() const { return timing_.get(); }

 private:
  struct Instruction {
    InstructionCost cost;
    AccessForm access;
  };
  std::vector<Instruction> instructions_;  // of the program
  Counters counters_;
  std::unique_ptr<Timing> timing_;
  MemoryAccess access_;  // of the instruction that executes
  u64 executed_ = 0;     // instructions
  // The latest copy out of shared memory: lanes of one instruction that ask for the same one count once, as
  // the machine instruction is one for the warp.
  u64 copied_by_ = 0;
  std::vector<AsyncWork::Range> copied_;
};

}  // namespace jax_fp4::sim::costs

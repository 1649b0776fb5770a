// Which registers of an entry share blocks.
#pragma once

#include <vector>

#include "sim/machine/program.h"

namespace jax_fp4::sim {

// Blocks of a register; count 0: a predicate, which has none.
struct RegisterBlocks {
  u32 block, count;
};

struct RegisterPlan {
  std::vector<u32> block;  // by register; kNoSlot: nothing uses it
  u32 blocks = 0;          // of all together
};

// For the registers of an entry whose code is program.code[begin, end), lowered with blocks for each register.
RegisterPlan share_registers(const Program& program, u32 begin, u32 end,
                             const std::vector<RegisterBlocks>& registers);

}  // namespace jax_fp4::sim

// What a launch did: instructions by class and opcode, traffic by memory, work of the matrix units.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "sim/costs/instruction_cost.h"
#include "sim/costs/memory_access.h"
#include "sim/machine/async.h"

namespace jax_fp4::sim::costs {

// Accesses of warps to one memory.
struct AccessCounts {
  u64 instructions = 0;
  u64 bytes = 0;  // that lanes asked for
  u64 units = 0;  // sectors or wavefronts
  u64 least = 0;  // wavefronts without conflicts
};

struct Counters {
  explicit Counters(const Program& program);

  void instruction(u32 pc, u32 mask, const InstructionCost& cost, const MemoryAccess& access);
  void operation(const AsyncWork& work);

  // Groups of named counts, for reports.
  std::map<std::string, std::map<std::string, u64>> table() const;

  const Program& program;
  std::vector<u64> counts,
      lanes;  // by instruction of the program: as Launch::counts, without retries
  AccessCounts global[3], shared[3];  // loads, stores, atomics
  u64 bulk_operations = 0;
  u64 bulk_read = 0, bulk_read_sectors = 0, bulk_written = 0, bulk_written_sectors = 0;
  u64 bulk_shared = 0;
  u64 tensor_loads = 0, tensor_stores = 0, tensor_copies = 0;  // bytes
  std::map<std::string, u64> mma_instructions, mma_flop;       // by kind
};

}  // namespace jax_fp4::sim::costs

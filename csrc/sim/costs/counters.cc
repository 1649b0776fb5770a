// Counting.
#include "sim/costs/counters.h"

#include <bit>

#include "sim/costs/constants.h"

namespace jax_fp4::sim::costs {
namespace {

u64 sectors_of(const AsyncWork& work) {
  u64 sectors = 0;
  for (const AsyncWork::Range& range : work.global) {
    if (range.bytes == 0) continue;
    sectors += (range.address + range.bytes - 1) / kSectorBytes - range.address / kSectorBytes + 1;
  }
  return sectors;
}

}  // namespace

Counters::Counters(const Program& program)
    : program(program), counts(program.code.size(), 0), lanes(program.code.size(), 0) {}

void Counters::instruction(u32 pc, u32 mask, const InstructionCost& cost,
                           const MemoryAccess& access) {
  using Kind = MemoryAccess::Kind;
  ++counts[pc];
  lanes[pc] += static_cast<u64>(std::popcount(mask));
  if (mask == 0) return;
  if (access.kind != Kind::none) {
    const u64 bytes = u64{access.bytes} * access.lanes;
    const bool copies = access.kind == Kind::copy;
    const auto add = [&](AccessCounts& to, u64 units, u64 least) {
      ++to.instructions;
      to.bytes += bytes;
      to.units += units;
      to.least += least;
    };
    const int kind = access.kind == Kind::store ? 1 : access.kind == Kind::atomic ? 2 : 0;
    if (access.space == Space::global) add(global[kind], access.sectors.size(), 0);
    if (copies || access.wavefronts.all != 0)
      add(shared[copies ? 1 : kind], access.wavefronts.all, access.wavefronts.least);
  }
  if (cost.tensor == InstructionCost::Tensor::load) tensor_loads += cost.tensor_bytes;
  if (cost.tensor == InstructionCost::Tensor::store) tensor_stores += cost.tensor_bytes;
  if (cost.warp_mma_flop > 0) {
    const Form& form = program.forms[pc];
    std::string kind = "mma.sync " + std::to_string(cost.warp_mma_bits) + "-bit";
    for (std::size_t t = 0; t < form.choices.size(); ++t)
      if (form.modifier(t).starts_with("kind::"))
        kind = "mma.sync " + std::string(form.modifier(t));
    ++mma_instructions[kind];
    mma_flop[kind] += static_cast<u64>(cost.warp_mma_flop);
  }
}

void Counters::operation(const AsyncWork& work) {
  using Engine = AsyncWork::Engine;
  const u64 ctas = static_cast<u64>(std::popcount(work.ctas));
  switch (work.engine) {
    case Engine::copy_in:
    case Engine::copy_out: {
      ++bulk_operations;
      bulk_shared += work.shared_bytes * ctas;
      if (work.repeated) break;
      u64 bytes = 0;
      for (const AsyncWork::Range& range : work.global) bytes += range.bytes;
      const bool in = work.engine == Engine::copy_in;
      (in ? bulk_read : bulk_written) += bytes;
      (in ? bulk_read_sectors : bulk_written_sectors) += sectors_of(work);
      break;
    }
    case Engine::tensor_copy: tensor_copies += work.tensor_bytes * ctas; break;
    case Engine::tensor_mma: {
      const std::string kind = "tcgen05.mma " + std::string(work.kind);
      ++mma_instructions[kind];
      mma_flop[kind] += static_cast<u64>(work.flop) * ctas;
      break;
    }
    default: break;
  }
}

std::map<std::string, std::map<std::string, u64>> Counters::table() const {
  std::map<std::string, std::map<std::string, u64>> result;
  for (std::size_t pc = 0; pc < counts.size(); ++pc) {
    const Row& row = *program.forms[pc].row;
    if (counts[pc] == 0 || row.opcode == "tensor_loads_over") continue;
    result["instructions"][std::string(name_of_class(row.op_class))] += counts[pc];
    result["lane_instructions"][std::string(name_of_class(row.op_class))] += lanes[pc];
    result["opcodes"][std::string(row.opcode)] += counts[pc];
  }
  constexpr const char* kKinds[] = {"load", "store", "atomic"};
  for (int kind = 0; kind < 3; ++kind) {
    const std::string name = kKinds[kind];
    if (const AccessCounts& g = global[kind]; g.instructions != 0) {
      auto& table = result["global"];
      table[name + "_instructions"] = g.instructions;
      table[name + "_bytes"] = g.bytes;
      table[name + "_sectors"] = g.units;
    }
    if (const AccessCounts& s = shared[kind]; s.instructions != 0) {
      auto& table = result["shared"];
      table[name + "_instructions"] = s.instructions;
      table[name + "_bytes"] = s.bytes;
      table[name + "_wavefronts"] = s.units;
      table[name + "_conflicts"] = s.units - s.least;
    }
  }
  if (bulk_operations != 0) {
    result["bulk"] = {{"operations", bulk_operations},           {"read_bytes", bulk_read},
                      {"read_sectors", bulk_read_sectors},       {"written_bytes", bulk_written},
                      {"written_sectors", bulk_written_sectors}, {"shared_bytes", bulk_shared}};
  }
  if (tensor_loads + tensor_stores + tensor_copies != 0) {
    result["tensor_memory"] = {{"load_bytes", tensor_loads},
                               {"store_bytes", tensor_stores},
                               {"copy_bytes", tensor_copies}};
  }
  for (const auto& [kind, count] : mma_instructions) result["mma_instructions"][kind] = count;
  for (const auto& [kind, count] : mma_flop) result["mma_flop"][kind] = count;
  return result;
}

}  // namespace jax_fp4::sim::costs

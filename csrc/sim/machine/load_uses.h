// Which tcgen05.ld of a basic block must have been performed, because what they loaded has been stored.
//
// A value cannot be stored before it has been read: once a store in straight line behind a load has written a value
// that depends on a register, the load of that register is over, also without tcgen05.wait::ld (PTX ISA 9.7.16.6.4.5:
// dependencies through registers need no wait). Arithmetic alone proves nothing, since a compiler may move it
// behind the barrier that follows.
#pragma once

#include <map>
#include <set>
#include <vector>

#include "sim/machine/program.h"

namespace jax_fp4::sim {

class LoadUses {
 public:
  // Of loads in other blocks, or before a wait, nothing is known.
  void start_block() { loads_.clear(), origins_.clear(); }

  // A tcgen05.ld into `registers`; with `complete`, no part of it is thrown away.
  void load(const std::vector<u32>& registers, bool complete) {
    loads_.push_back({registers.begin(), registers.end()});
    if (!complete) loads_.back().insert(kNoSlot);
    for (u32 slot : registers) origins_[slot] = {slot};
    for (std::size_t i = 0; i + 1 < loads_.size(); ++i)
      for (u32 slot : registers)  // the earlier load's value is gone
        if (loads_[i].count(slot)) loads_[i].insert(kNoSlot);
  }

  // An instruction that all lanes execute, or, with `guarded`, perhaps not all. Returns how many loads, the oldest ones,
  // are known to be over by it and were not before.
  u32 instruction(const std::vector<u32>& reads, const std::vector<u32>& writes, bool stores,
                  bool guarded) {
    if (loads_.empty()) return 0;
    std::set<u32> from;
    if (!guarded) {
      for (u32 slot : reads) {
        const auto found = origins_.find(slot);
        if (found != origins_.end()) from.insert(found->second.begin(), found->second.end());
      }
    }
    for (u32 slot : writes) {
      origins_.erase(slot);
      if (!from.empty()) origins_[slot] = from;
    }
    if (!stores) return 0;
    for (std::set<u32>& load : loads_)
      for (u32 slot : from) load.erase(slot);
    u32 over = 0;
    while (over < loads_.size() && loads_[over].empty()) ++over;
    loads_.erase(loads_.begin(), loads_.begin() + over);
    return over;
  }

  // Loads of the block that are not known to be over.
  u32 open() const { return static_cast<u32>(loads_.size()); }

 private:
  std::vector<std::set<u32>> loads_;      // in order: registers whose value has not been stored
  std::map<u32, std::set<u32>> origins_;  // of a register's value: loaded registers
};

}  // namespace jax_fp4::sim

// Overlapping grids: who may start, whose turn it is, and what they do to global memory.
#include "sim/machine/chain.h"

#include <algorithm>

namespace jax_fp4::sim {
namespace {

constexpr u32 kGranuleShift = 4;

// A later grid that can run gets this many turns of four: it overtakes whatever it may overtake.
constexpr u64 kTurnsOfLaterGrid = 3;

}  // namespace

void GlobalOrder::access(const Actor& actor, u64 address, u32 bytes, bool writes) {
  const Launch& launch = *actor.warp.launch;
  const Accessor by = actor.accessor(false);
  const bool early = launch.before && by.clocks.seen[launch.prerequisite_agent()] == 0;
  for (u64 granule = address >> kGranuleShift; granule <= (address + bytes - 1) >> kGranuleShift;
       ++granule) {
    std::vector<Use>& uses = granules_[granule];
    bool known = false;
    for (const Use& use : uses) {
      if (use.launch == &launch) {
        known |= use.writes == writes && use.early == early;
        continue;
      }
      if (!writes && !use.writes) continue;
      const bool later = use.launch->number < launch.number;  // this access is of the later grid
      if (!(later ? early : use.early)) continue;
      const std::string here = std::string(writes ? "writes" : "reads"),
                        there = std::string(use.writes ? "write" : "read");
      actor.fault(FaultKind::race,
                  here + " global memory at " + std::to_string(address) + ", ordered by no " +
                      "griddepcontrol.wait with a " + there + " by grid " +
                      std::to_string(use.launch->number) + " of the stream, kernel '" +
                      use.launch->program->entry + "', " +
                      use.launch->kernel_line(use.launch->program->code[use.pc].line));
    }
    if (!known) uses.push_back({&launch, by.pc, writes, early});
  }
}

Chain::Chain(const std::vector<Launch*>& grids) : grids_(grids) {
  for (std::size_t i = 0; i < grids_.size(); ++i) {
    grids_[i]->number = static_cast<u32>(i);
    grids_[i]->before = i == 0 ? nullptr : grids_[i - 1];
    grids_[i]->order = grids_.size() > 1 ? &order_ : nullptr;
  }
}

bool Chain::may_start(std::size_t index) const {
  if (index == 0) return true;
  const Launch& before = *grids_[index - 1];
  return before.started && (before.finished() || before.all_triggered());
}

// Wakes those who wait for the grids up to this one.
void Chain::finish(std::size_t index) {
  for (std::size_t later = index + 1; later < grids_.size(); ++later)
    for (const auto& cluster : grids_[later]->resident) cluster->wake(kWaitsForGrids);
}

void Chain::run() {
  std::size_t first = 0;  // that is not finished
  while (true) {
    while (first < grids_.size() && grids_[first]->started && grids_[first]->finished()) ++first;
    if (first == grids_.size()) return;
    std::vector<std::size_t> able;
    for (std::size_t i = first; i < grids_.size(); ++i) {
      if (!grids_[i]->started && may_start(i)) grids_[i]->start();
      if (!grids_[i]->started) break;
      if (!grids_[i]->finished() && grids_[i]->can_step()) able.push_back(i);
    }
    if (able.empty()) grids_[first]->report_deadlock();
    std::size_t pick = able.back();
    if (able.size() > 1 && grids_[0]->random() % 4 >= kTurnsOfLaterGrid)
      pick = able[grids_[0]->random() % (able.size() - 1)];
    // Alone, it runs until something may change for the others.
    do grids_[pick]->step();
    while (grids_.size() == 1 && !grids_[pick]->finished() && grids_[pick]->can_step());
    if (grids_[pick]->finished()) finish(pick);
  }
}

}  // namespace jax_fp4::sim

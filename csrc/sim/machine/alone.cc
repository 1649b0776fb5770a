// A lane that acts alone, with Checks::strict.
//
// PTX orders the accesses of different lanes of a warp by barriers only, bar.warp.sync among them. A clock for each
// lane would cost thirty times as much, and programs mostly have two kinds of lanes: all, and one that copies,
// arrives or waits for the others. So an instruction that a single lane executes is that lane's alone, and all
// others belong to the warp:
//
//   the warp   does not know what the lane alone has done and seen
//   the lane   knows what the warp has seen, but what the warp has done only until the lanes met last
//
// At a barrier the lanes meet, and know the same. The first lane that acts alone after that is the one; what
// another lane does alone counts as the warp's, and so does the part of the one in what all do.
#include <algorithm>
#include <bit>

#include "sim/machine/core.h"

namespace jax_fp4::sim {

// Takes out what lanes of the warp have done since they met.
void Warp::forget_unmet(Clocks& known) const {
  const bool tensor = launch->program->tensor_memory;
  const u32 own[3] = {place, place + launch->first_tensor_load(),
                      place + launch->first_tensor_store()};
  for (VectorClock* clock : {&known.seen, &known.fenced, &known.inits, &known.tensor})
    for (int i = 0; i < (tensor ? 3 : 1); ++i)
      (*clock)[own[i]] = std::min((*clock)[own[i]], met[i]);
}

void Warp::change_view() {
  if (!alone_acts) {
    Clocks known = clocks;
    forget_unmet(known);
    join(other_clocks, known);
  }
  std::swap(clocks, other_clocks);
  std::swap(agent, other_agent);
  alone_acts = !alone_acts;
}

void Warp::act(u32 mask) {
  const bool single = std::has_single_bit(mask);
  if (single && alone_lane < 0) {
    alone_lane = std::countr_zero(mask);
    ++other_clocks.seen[other_agent];
  }
  if ((single && std::countr_zero(mask) == alone_lane) != alone_acts) change_view();
}

LaneAccess Warp::lane_access(const Code& c) const { return {place, met[0], launch->pc_of(c)}; }

void Warp::meet() {
  if (!launch->spec.checks.strict) return;
  act(kAllLanes);
  if (alone_lane >= 0) join(clocks, other_clocks);
  alone_lane = -1;
  met[0] = clocks.seen[agent];
  if (launch->program->tensor_memory) {
    met[1] = clocks.seen[place + launch->first_tensor_load()];
    met[2] = clocks.seen[place + launch->first_tensor_store()];
  }
  advance_clock();
}

}  // namespace jax_fp4::sim

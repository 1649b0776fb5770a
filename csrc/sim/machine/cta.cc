// Named barriers of a CTA and the barrier of a cluster.
#include <algorithm>

#include "sim/machine/core.h"

namespace jax_fp4::sim {

void Cta::trigger() {
  if (!triggered) ++launch->triggered_ctas;
  triggered = true;
}

// Completes the barrier if everybody it waits for has arrived. Lanes that have exited count as
// arrived where the barrier is for the whole CTA.
bool Cta::complete(NamedBarrier& barrier) {
  if (barrier.arrived == 0) return false;
  const bool whole = barrier.expected == 0;
  if (whole ? barrier.arrived + exited < threads : barrier.arrived < barrier.expected) return false;
  std::vector<BarrierWaiter> waiters = std::move(barrier.waiters);
  const u32 number = static_cast<u32>(&barrier - barriers);
  for (const BarrierWaiter& waiter : waiters) {
    Warp& warp = *waiter.warp;
    join(warp.clocks, barrier.clocks);
    warp.advance_clock();
    if (waiter.code) {
      const Code& c = *waiter.code;
      const int reduction = c.variant & 3;  // as in ops/control.cc
      if (reduction == 0) {
        Lane32* d = warp.out(c.dst[0]);
        for (int lane = 0; lane < kLanes; ++lane)
          if (waiter.mask >> lane & 1) d[lane] = barrier.count;
      } else {
        warp.set_predicate(c.dst[0], waiter.mask,
                           (reduction == 1 ? barrier.all : barrier.any) ? kAllLanes : 0);
      }
    }
    for (Fragment& f : warp.fragments)
      if (f.state == FragmentState::blocked && f.needed == number && (f.mask & waiter.mask) != 0 &&
          f.waits_for == "a named barrier")
        warp.wake(f);
  }
  barrier = NamedBarrier{};
  return true;
}

void Cta::complete_barriers() {
  for (NamedBarrier& barrier : barriers) complete(barrier);
}

void Cluster::wake(std::string_view what) {
  for (const auto& cta : ctas)
    for (const auto& warp : cta->warps) warp->wake_all(what);
}

void Cluster::complete_barrier() {
  if (barrier.arrived == 0 || barrier.arrived + exited < threads) return;
  barrier.arrived = 0;
  ++barrier.phase;
  for (Warp* warp : barrier.waiters) {
    join(warp->clocks, barrier.clocks);
    warp->advance_clock();
    for (Fragment& f : warp->fragments)
      if (f.state == FragmentState::blocked && f.waits_for == "the cluster barrier") warp->wake(f);
  }
  barrier.waiters.clear();
}

}  // namespace jax_fp4::sim

// Asynchronous operations: their clocks, and when they are performed.
#include "sim/machine/async.h"

#include <algorithm>

#include "sim/costs/costs.h"

namespace jax_fp4::sim {

AsyncOperation::AsyncOperation(Warp& issuer, const Code& c, int issuing_lane, Clock clock)
    : warp(&issuer), code(&c), lane(issuing_lane), piped(clock == Clock::pipe) {
  Cluster& cluster = *issuer.cta->cluster;
  const u32 warps = issuer.launch->warps_of_cluster();
  if (piped) {
    agent = warps + issuer.place;
  } else {
    const u32 slot = static_cast<u32>(issuer.launch->random() % kAsyncSlots);
    agent = 2 * warps + slot;
    time_ = ++cluster.slot_times[slot];
  }
  clocks_ = issuer.clocks;
  if (piped && issuer.launch->spec.checks.strict) {
    tensor_ready_ = issuer.tensor_ready;
    for (const u32 own : {issuer.place, issuer.agent})
      tensor_ready_[own] = std::max(tensor_ready_[own], issuer.clocks.seen[own]);
  }
  issuer.advance_clock();
}

void AsyncOperation::begin() {
  if (!piped) return;
  join(warp->pipe, clocks_);
  join(warp->pipe_ready, tensor_ready_);
}

Accessor AsyncOperation::accessor(bool atomic) const {
  const Clocks& clocks = piped ? warp->pipe : clocks_;
  const u32 time = piped ? warp->pipe.seen[agent] : time_;
  return {
      agent,       make_epoch(agent, time), clocks, warp->launch->pc_of(*code), atomic, !generic,
      fences_reads};
}

Clocks AsyncOperation::released() const {
  Clocks clocks = piped ? warp->pipe : clocks_;
  const u32 time = piped ? clocks.seen[agent] : time_;
  clocks.seen[agent] = time;
  if (!generic) clocks.fenced[agent] = time;
  // tcgen05.commit is a tcgen05.fence::before_thread_sync as well (PTX ISA 9.7.16.12).
  if (piped) join(clocks.tensor, clocks.seen);
  return clocks;
}

void AsyncOperation::leave_pipe() {
  clocks_ = released();
  time_ = clocks_.seen[agent];
  ++warp->pipe.seen[agent];
  piped = false;
}

void AsyncOperation::signal(u64 address, u32 arrivals, u32 bytes) {
  Mbarrier barrier(actor(), Space::shared_cluster, address);
  barrier.release(released());
  if (piped) ++warp->pipe.seen[agent];
  if (bytes != 0) barrier.add_transactions(-i64{bytes});
  if (arrivals != 0) barrier.arrive(arrivals);
  barrier.settle();
}

void Launch::issue(std::unique_ptr<AsyncOperation> operation) {
  ++operation->warp->cta->cluster->pending;
  if (costs) costs->operation(*operation);
  pending.push_back(std::move(operation));
}

// One operation, drawn at random; of a pipe the one issued first.
void Launch::perform_one() {
  std::size_t index = random() % pending.size();
  if (pending[index]->late) {
    const auto other = std::find_if(pending.begin(), pending.end(),
                                    [](const auto& operation) { return !operation->late; });
    if (other != pending.end()) index = static_cast<std::size_t>(other - pending.begin());
  }
  if (pending[index]->piped) {
    const Warp* pipe = pending[index]->warp;
    index = static_cast<std::size_t>(
        std::find_if(pending.begin(), pending.end(),
                     [&](const auto& p) { return p->piped && p->warp == pipe; }) -
        pending.begin());
  }
  perform(index);
}

void Launch::perform(std::size_t index) {
  std::unique_ptr<AsyncOperation> operation = std::move(pending[index]);
  pending.erase(pending.begin() + static_cast<std::ptrdiff_t>(index));
  Cluster& cluster = *operation->warp->cta->cluster;
  operation->begin();
  operation->again = false;
  operation->perform();
  trace = (trace ^ (u64{operation->warp->number} << 32 | pc_of(*operation->code))) * kTracePrime;
  if (operation->again) {
    pending.push_back(std::move(operation));
  } else {
    --cluster.pending;
  }
}

void Launch::check_exit(const Cta& cta) {
  check_tensor_exit(cta);
  for (const auto& warp : cta.warps) {
    // Strict only (assumption S52).
    if (!spec.checks.strict || warp->copies.empty()) continue;
    const AsyncCopy& copy = warp->copies.front();
    warp->fault(program->code[copy.pc], copy.lane, FaultKind::exit,
                "CTA rank " + std::to_string(cta.rank) +
                    " exits without having waited for this copy into its shared memory");
  }
  for (const auto& operation : pending) {
    if (!operation->uses(cta)) continue;
    operation->actor().fault(FaultKind::exit,
                             "CTA rank " + std::to_string(cta.rank) +
                                 " exits before this asynchronous operation, which uses its "
                                 "memory, has completed");
  }
}

}  // namespace jax_fp4::sim

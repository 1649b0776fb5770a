// tcgen05.commit (PTX ISA 9.7.16.12): one arrival at an mbarrier, or at those of several CTAs, when all that the
// warp's pipe has been given before is done.
#include <bit>

#include "sim/machine/async.h"
#include "sim/ops/tcgen05.h"

namespace jax_fp4::sim {
namespace {

class CommitOperation : public AsyncOperation {
 public:
  CommitOperation(Warp& issuer, const Code& c, int issuing_lane, u64 address, u32 ranks)
      : AsyncOperation(issuer, c, issuing_lane, Clock::pipe), address_(address), ranks_(ranks) {}

  // A CTA may exit before a commit of its own has arrived in it, as nobody waits for that any more, but
  // not with Checks::strict.
  bool uses(const Cta& cta) const override {
    return (&cta != warp->cta || warp->launch->spec.checks.strict) &&
           cta.cluster == warp->cta->cluster && (ranks_ >> cta.rank & 1);
  }

  AsyncWork work() const override {
    AsyncWork work;
    work.engine = AsyncWork::Engine::commit;
    return work;
  }

  void perform() override {
    // Nothing orders the arrivals of several commits, or of one in several CTAs. (A cycle model has its own
    // times.)
    const LaunchSpec& spec = warp->launch->spec;
    const bool apart = spec.checks.strict && !spec.costs.time;
    if (piped && apart) {
      leave_pipe();
      again = true;
      // Some seeds let the arrivals at an mbarrier wait as long as can be.
      constexpr u64 kMbarrierBytes = 8, kPromptSeeds = 7;
      late = (address_ / kMbarrierBytes + spec.seed) % (kPromptSeeds + 1) == 0;
      return;
    }
    const Cta& own = *warp->cta;
    const u32 now = apart ? any_of(ranks_) : ranks_;
    ranks_ &= ~now;
    again = ranks_ != 0;
    for (u32 rest = now; rest != 0; rest &= rest - 1) {
      const u32 rank = static_cast<u32>(std::countr_zero(rest));
      if (rank == own.rank && own.exited == own.threads) {
        warp->launch->warn(code->line, 0, [&] {
          return "the CTA has exited before this commit arrives at its mbarrier\n  " +
                 warp->where(*code, lane);
        });
        continue;
      }
      signal(u64{rank} << kRankShift | address_, 1, 0);
    }
  }

 private:
  // One of the bits, drawn at random.
  u32 any_of(u32 bits) const {
    const int count = std::popcount(bits);
    if (count > 1)
      for (u64 n = warp->launch->random() % static_cast<u32>(count); n > 0; --n) bits &= bits - 1;
    return bits & ~(bits - 1);
  }

  u64 address_;  // relative to a CTA
  u32 ranks_;    // of the CTAs in which it has not arrived, a bit each
};

void commit_lanes(Warp& w, const Code& c, u32 mask) {
  warn_of_lanes(w, c, mask);
  const u32 ctas = static_cast<u32>(w.cta->cluster->ctas.size());
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    u64 address = address_of(w, c, lane, c.src[0], 0);
    if (c.space == Space::generic && resolve_generic(address) != Space::shared_cluster)
      w.fault(c, lane, FaultKind::mbarrier, "an mbarrier lies in shared memory");
    const u64 rank = address >> kRankShift;
    if (rank >= ctas) {
      w.fault(c, lane, FaultKind::out_of_bounds,
              "the address names rank " + std::to_string(rank) + " of a cluster of " +
                  std::to_string(ctas));
    }
    const u32 ranks = c.src[1] == kNoSlot ? 1u << rank : w.in(c.src[1])[lane];
    if (ranks == 0 || ranks >> ctas != 0) {
      w.fault(c, lane, FaultKind::argument,
              "the mask " + std::to_string(ranks) + " names no CTA, or one that a cluster of " +
                  std::to_string(ctas) + " does not have");
    }
    w.launch->issue(
        std::make_unique<CommitOperation>(w, c, lane, address & kSharedOffsetMask, ranks));
  }
}

}  // namespace

Exec tcgen05_commit(const Form& form, Code& code) {
  code.space = form.has("shared::cluster") ? Space::shared_cluster : Space::generic;
  return commit_lanes;
}

}  // namespace jax_fp4::sim

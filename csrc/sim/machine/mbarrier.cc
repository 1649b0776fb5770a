// mbarriers: counts, phases, the clocks that travel through them.
#include <cstring>

#include "sim/machine/async.h"

namespace jax_fp4::sim {
namespace {

constexpr u32 kMaxCount = (1u << 20) - 1;
constexpr i32 kMaxTransactions = (1 << 20) - 1;

}  // namespace

u64 Mbarrier::bits() const {
  return static_cast<u64>(phase) << 63 | static_cast<u64>(expected) << 43 |
         static_cast<u64>(pending) << 23 | static_cast<u64>(live) << 22 |
         (static_cast<u32>(transactions) & 0x3F'FFFFu);
}

u32 Mbarrier::pending_of(u64 bits) { return static_cast<u32>(bits >> 23) & kMaxCount; }

void Mbarrier::unpack(u64 bits) {
  phase = phase_of(bits);
  expected = static_cast<u32>(bits >> 43) & kMaxCount;
  pending = pending_of(bits);
  live = bits >> 22 & 1;
  transactions = static_cast<i32>(static_cast<u32>(bits) << 10) >> 10;
}

Mbarrier::Mbarrier(const Actor& actor, Space space, u64 address, bool creates)
    : actor_(actor), address_(address) {
  if (space == Space::generic) space = resolve_generic(address_);
  if (space != Space::shared && space != Space::shared_cluster)
    actor_.fault(FaultKind::mbarrier, "an mbarrier lies in shared memory");
  if (address_ % 8 != 0) actor_.fault(FaultKind::misaligned, "an mbarrier is aligned to 8 bytes");
  data_ =
      access(actor_, space, address_, 8, creates ? AccessKind::strong_write : AccessKind::atomic);
  u64 bits = 0;
  std::memcpy(&bits, data_, 8);
  unpack(bits);
  if (creates) return;
  if (!live)
    actor_.fault(FaultKind::mbarrier, "the mbarrier was not initialised, or was overwritten");
  check_visible();
}

// The initialisation must have happened before. For an asynchronous signal from another CTA
// it must have been fenced as well: mbarrier.init is a generic write.
void Mbarrier::check_visible() const {
  Warp& warp = actor_.warp;
  if (!warp.launch->spec.checks.races) return;
  const Cluster& cluster = *warp.cta->cluster;
  const auto found = cluster.mbarriers.find(address_);
  if (found == cluster.mbarriers.end()) return;
  const MbarrierRecord& record = found->second;
  const Accessor by = actor_.accessor(true);
  const bool ordered = happened_before(record.init, by.clocks.seen);
  const bool fenced = happened_before(record.init, by.clocks.inits);
  const bool remote = address_ >> kRankShift != warp.cta->rank;
  if (fenced || (ordered && !(by.async && remote))) return;
  const std::string line =
      warp.launch->kernel_line(warp.launch->program->code[record.init_pc].line);
  actor_.fault(FaultKind::race,
               ordered ? "signals an mbarrier of another CTA that was initialised at " + line +
                             " with no fence.mbarrier_init or fence.proxy.async after it"
                       : "uses an mbarrier whose initialisation at " + line +
                             " no barrier orders before this");
}

void Mbarrier::store() const {
  const u64 value = bits();
  std::memcpy(data_, &value, 8);
}

void Mbarrier::init(u32 count) {
  if (count == 0 || count > kMaxCount) {
    actor_.fault(FaultKind::mbarrier,
                 "a count of " + std::to_string(count) + "; it is 1 to 1048575");
  }
  Warp& warp = actor_.warp;
  MbarrierRecord& record = warp.cta->cluster->mbarriers[address_];
  if (record.valid) {
    actor_.fault(FaultKind::mbarrier,
                 "initialises again an mbarrier that no mbarrier.inval has ended since " +
                     warp.launch->kernel_line(warp.launch->program->code[record.init_pc].line));
  }
  live = true;
  phase = 0;
  expected = pending = count;
  transactions = 0;
  record = {};
  record.valid = true;
  record.init = make_epoch(warp.agent, warp.clocks.seen[warp.agent]);
  record.init_pc = warp.launch->pc_of(actor_.code);
  store();
}

void Mbarrier::invalidate() {
  actor_.warp.cta->cluster->mbarriers[address_].valid = false;
  live = false;
  phase = expected = pending = 0;
  transactions = 0;
  store();
}

void Mbarrier::arrive(u32 count, bool drop) {
  if (count == 0 || count > pending) {
    actor_.fault(FaultKind::mbarrier, std::to_string(count) + " arrivals, but only " +
                                          std::to_string(pending) + " of " +
                                          std::to_string(expected) + " are missing in this phase");
  }
  pending -= count;
  if (drop) expected -= count;
}

void Mbarrier::add_transactions(i64 bytes) {
  const i64 sum = transactions + bytes;
  if (sum > kMaxTransactions || sum < -kMaxTransactions)
    actor_.fault(FaultKind::mbarrier, "the transaction count leaves its 20 bits");
  transactions = static_cast<i32>(sum);
}

void Mbarrier::settle() {
  if (pending == 0 && transactions == 0) {
    phase ^= 1;
    pending = expected;
    Cluster& cluster = *actor_.warp.cta->cluster;
    const auto found = cluster.mbarriers.find(address_);
    if (found != cluster.mbarriers.end()) {
      // Arrivals of later phases are not for those who wait for this one.
      join(found->second.completed, found->second.arriving);
      found->second.arriving = {};
    }
    cluster.wake(kWaitsForMbarrier);
  }
  store();
}

void Mbarrier::release(const Clocks& clocks) {
  if (!actor_.warp.launch->spec.checks.races) return;
  join(actor_.warp.cta->cluster->mbarriers[address_].arriving, clocks);
}

void Mbarrier::acquire(Warp& warp) {
  if (!warp.launch->spec.checks.races) return;
  join(warp.clocks, warp.cta->cluster->mbarriers[address_].completed);
}

}  // namespace jax_fp4::sim

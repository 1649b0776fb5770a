// What bulk copies have in common, and the groups that a thread waits for (PTX ISA 9.7.9.25.6).
#include "sim/ops/bulk.h"

#include <algorithm>

#include "sim/ops/lanes.h"

namespace jax_fp4::sim {

void require_aligned(const Actor& actor, std::string_view what, u64 address, u32 bytes) {
  if (address % bytes == 0) return;
  actor.fault(FaultKind::misaligned, std::string(what) + " is at address " +
                                         std::to_string(address) + "; it is aligned to " +
                                         std::to_string(bytes) + " bytes");
}

void forget(const Warp& warp, Space space, u64 address, u64 bytes) {
  if (space == Space::global) {
    Buffer* buffer = warp.launch->global->find(address);
    if (!buffer || buffer->written.empty()) return;
    const u64 at = address - buffer->base;
    if (at + bytes <= buffer->bytes) std::memset(buffer->written.data() + at, 0, bytes);
    return;
  }
  const Cluster& cluster = *warp.cta->cluster;
  if (rank_of(address) >= cluster.ctas.size()) return;
  std::vector<u8>& written = cluster.ctas[rank_of(address)]->shared_written;
  const u64 at = (address & kSharedOffsetMask) - kSharedReserved;
  if (at < written.size() && at + bytes <= written.size())
    std::memset(written.data() + at, 0, bytes);
}

u32 check_cta_mask(const Actor& actor, u32 mask) {
  const std::size_t ctas = actor.warp.cta->cluster->ctas.size();
  if (mask == 0 || mask >> ctas != 0) {
    actor.fault(FaultKind::argument, "the CTA mask " + std::to_string(mask) +
                                         " does not name CTAs of a cluster of " +
                                         std::to_string(ctas));
  }
  return mask;
}

BulkLoad::BulkLoad(const Actor& actor, u64 destination, u64 barrier, u32 bytes)
    : AsyncOperation(actor.warp, actor.code, actor.lane, Clock::slot),
      destination_(destination),
      barrier_(barrier),
      bytes_(bytes) {}

void BulkLoad::perform() {
  if (moves_data()) copy();
  signal(barrier_, 0, bytes_);
}

bool BulkLoad::uses(const Cta& cta) const {
  return warp->cta->cluster == cta.cluster &&
         (rank_of(destination_) == cta.rank || rank_of(barrier_) == cta.rank);
}

AsyncWork BulkLoad::work() const {
  AsyncWork work;
  work.engine = AsyncWork::Engine::copy_in;
  work.ctas = 1u << rank_of(destination_);
  work.shared_bytes = bytes_;
  work.global = ranges();
  work.repeated = repeated;
  return work;
}

BulkStore::BulkStore(const Actor& actor, u64 source)
    : AsyncOperation(actor.warp, actor.code, actor.lane, Clock::slot),
      source_(source),
      progress_(std::make_shared<BulkProgress>()) {
  progress_->lane = lane;
  progress_->group = warp->bulk_groups[static_cast<std::size_t>(lane)];
  warp->bulk_copies.push_back(progress_);
}

void BulkStore::perform() {
  if (!progress_->read) {
    if (moves_data()) read();
    progress_->read = again = true;
  } else {
    if (moves_data()) write();
    progress_->written = true;
  }
  progress_->clocks = released();
  warp->wake_all(kWaitsForBulkGroup);
}

// Strict only: CUTLASS leaves without a wait (assumption S51).
bool BulkStore::uses(const Cta& cta) const {
  return warp->launch->spec.checks.strict && warp->cta == &cta && !progress_->read;
}

AsyncWork BulkStore::work() const {
  AsyncWork work;
  work.engine = AsyncWork::Engine::copy_out;
  work.ctas = 1u << warp->cta->rank;
  work.global = ranges();
  for (const AsyncWork::Range& range : work.global) work.shared_bytes += range.bytes;
  return work;
}

namespace {

// Code::variant of wait_group: only the reads of the sources.
constexpr u16 kReads = 1;

void commit(Warp& w, const Code&, u32 mask) {
  for (u32 rest = mask; rest != 0; rest &= rest - 1) ++w.bulk_groups[std::countr_zero(rest)];
}

// Waits until at most the N groups committed last are not complete.
void wait(Warp& w, const Code& c, u32 mask) {
  const bool reads = c.variant & kReads;
  const auto awaited = [&](const BulkProgress& copy) {
    return (mask >> copy.lane & 1) && copy.group + c.immediate < w.bulk_groups[copy.lane];
  };
  for (const auto& copy : w.bulk_copies) {
    if (awaited(*copy) && !(reads ? copy->read : copy->written)) {
      w.block_and_retry(c, kWaitsForBulkGroup);
      return;
    }
  }
  for (const auto& copy : w.bulk_copies)
    if (awaited(*copy)) join(w.clocks, copy->clocks);
  std::erase_if(w.bulk_copies, [&](const auto& copy) { return copy->written && awaited(*copy); });
}

}  // namespace

Exec cp_bulk_commit(const Form&, Code&) { return commit; }
Exec cp_bulk_wait(const Form& form, Code& code) {
  code.variant = form.has("read") ? kReads : 0;
  return code.src[0] & kConstant ? wait : nullptr;
}

}  // namespace jax_fp4::sim

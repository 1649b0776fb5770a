// cp.async (PTX ISA 9.7.9.25.3): copies of 4, 8 or 16 bytes from global to shared memory that happen at any
// time until the thread waits for them.
//
// The source is read at the issue or when the lanes wait (wait_all, wait_group), as the schedule's seed says for
// each lane. The destination is written at the wait, and until then counts as not written. For the race checker
// an instruction's copies are a write by a slot of the asynchronous operations (machine/async.h) that happens
// when it is issued and that the warp knows of once it has waited: whoever touches the bytes before, and be it
// the warp itself, races with it.
#include <algorithm>

#include "sim/machine/async.h"
#include "sim/ops/bulk.h"
#include "sim/ops/lanes.h"

namespace jax_fp4::sim {
namespace {

// Code::variant: bytes in the low byte; then
constexpr u16 kAll = 1 << 8;

void read_source(Warp& w, AsyncCopy& copy) {
  if (copy.source_bytes > 0) {
    // The access is as wide as the copy, so that it must be aligned; what is not read is zero.
    const u8* from = access(w, w.launch->program->code[copy.pc], copy.lane, Space::global,
                            copy.source, copy.bytes, AccessKind::read);
    std::memcpy(copy.data, from, copy.source_bytes);
  }
  copy.read = true;
}

void finish(Warp& w, AsyncCopy& copy) {
  if (!copy.read) read_source(w, copy);
  u32& known = w.clocks.seen[copy.agent];
  known = std::max(known, copy.time);
  u8* to = access(w, w.launch->program->code[copy.pc], copy.lane, Space::shared, copy.destination,
                  copy.bytes, AccessKind::write, copy.data);
  std::memcpy(to, copy.data, copy.bytes);
}

// Ends the copies of these lanes: all but those of the `keep_groups` groups committed last (kNoIndex: all,
// also uncommitted ones).
void drain(Warp& w, u32 mask, u32 keep_groups) {
  std::vector<AsyncCopy> left;
  std::vector<AsyncCopy> pending = std::move(w.copies);
  w.copies.clear();
  for (AsyncCopy& copy : pending) {
    const u32 committed = w.copy_groups[copy.lane];
    // Groups older than the most recent `keep_groups` committed ones are complete after the wait.
    const bool due = copy.group < committed && committed - copy.group > keep_groups;
    if ((mask >> copy.lane & 1) && (due || keep_groups == kNoIndex)) {
      finish(w, copy);
    } else {
      left.push_back(copy);
    }
  }
  w.copies = std::move(left);
}

// The destinations of one instruction from its issue on. Where they are out of bounds, finish() says so.
void claim(Warp& w, const Code& c, const AsyncCopy* copies, std::size_t count, const Accessor& by) {
  Cta& cta = *w.cta;
  const u32 bytes = copies->bytes;
  std::array<u32, kLanes> offsets{};
  u32 inside = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const AsyncCopy& copy = copies[i];
    forget(w, Space::shared, copy.destination, bytes);
    const u64 offset = (copy.destination & kSharedOffsetMask) - kSharedReserved;
    if (rank_of(copy.destination) != cta.rank || offset % bytes != 0 ||
        offset > cta.shared.size() || offset + bytes > cta.shared.size())
      continue;
    offsets[copy.lane] = static_cast<u32>(offset);
    inside |= 1u << copy.lane;
  }
  if (!cta.races || cta.races->write_lanes(offsets.data(), inside, bytes, by)) return;
  for (; inside != 0; inside &= inside - 1) {
    const int lane = std::countr_zero(inside);
    const RaceConflict conflict = cta.races->write(offsets[lane], bytes, by);
    if (!conflict.found) continue;
    report_conflict({w, c, lane}, conflict, false,
                    "copy of " + std::to_string(bytes) + " bytes to byte " +
                        std::to_string(offsets[lane]) + " of the CTA's shared memory");
  }
}

void copy_lanes(Warp& w, const Code& c, u32 mask) {
  const u32 bytes = c.variant & 0xFF;
  const u32 pc = w.launch->pc_of(c);
  const u32 slot = static_cast<u32>(w.launch->random() % kAsyncSlots);
  const u32 agent = 2 * w.launch->warps_of_cluster() + slot;
  const u32 time = ++w.cta->cluster->slot_times[slot];
  const u32 early = static_cast<u32>(w.launch->random());  // lanes that read now
  Clocks known = w.clocks;
  known.seen[agent] = time;
  const Accessor by{agent, make_epoch(agent, time), known, pc};
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    u32 source_bytes = bytes;
    if (c.src[3] != kNoSlot) source_bytes = w.in(c.src[3])[lane];
    if (source_bytes > bytes) {
      w.fault(c, lane, FaultKind::argument,
              "reads " + std::to_string(source_bytes) + " bytes for a copy of " +
                  std::to_string(bytes));
    }
    AsyncCopy copy{pc, lane, bytes, source_bytes};
    copy.source = address_of(w, c, lane, c.src[1], 1);
    copy.destination = address_of(w, c, lane, c.src[0], 0);
    copy.group = w.copy_groups[lane];
    copy.agent = agent;
    copy.time = time;
    if (early >> lane & 1) read_source(w, copy);
    w.copies.push_back(copy);
  }
  const std::size_t count = static_cast<std::size_t>(std::popcount(mask));
  if (count != 0) claim(w, c, &w.copies[w.copies.size() - count], count, by);
}

void commit_group(Warp& w, const Code&, u32 mask) {
  for (u32 rest = mask; rest != 0; rest &= rest - 1) ++w.copy_groups[std::countr_zero(rest)];
}

void wait_group(Warp& w, const Code& c, u32 mask) {
  if (c.variant & kAll) {
    drain(w, mask, kNoIndex);
  } else {
    drain(w, mask, w.in(c.src[0])[std::countr_zero(mask)]);
  }
}

// The arrival at an mbarrier that follows the thread's copies.
class CopiesArrival : public AsyncOperation {
 public:
  CopiesArrival(const Actor& actor, u64 barrier)
      : AsyncOperation(actor.warp, actor.code, actor.lane, Clock::slot), barrier_(barrier) {
    generic = true;
  }
  void perform() override { signal(barrier_, 1, 0); }
  bool uses(const Cta& cta) const override { return warp->cta == &cta; }

 private:
  u64 barrier_;
};

// cp.async.mbarrier.arrive (9.7.13.15.15): the copies are done now, which they may be, and the arrival
// comes some time later. Without .noinc it is one more that the phase waits for.
void arrive_after_copies(Warp& w, const Code& c, u32 mask) {
  drain(w, mask, kNoIndex);
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const Actor actor{w, c, lane};
    u64 address = address_of(w, c, lane, c.src[0], 0);
    if (c.space == Space::generic) resolve_generic(address);
    Mbarrier object(actor, Space::shared, address);
    if (c.variant != 0) {
      ++object.pending;
      object.settle();
    }
    w.launch->issue(std::make_unique<CopiesArrival>(actor, address));
  }
  w.advance_clock();
}

}  // namespace

Exec cp_async_arrive(const Form& form, Code& code) {
  code.space = form.has("shared") || form.has("shared::cta") ? Space::shared : Space::generic;
  code.variant = !form.has("noinc");
  return arrive_after_copies;
}
Exec cp_async(const Form& form, Code& code) {
  code.space = Space::shared;
  // The size is an operand: a constant 4, 8 or 16; the lowering has put it into `immediate`.
  const u64 bytes = code.immediate;
  if (bytes != 4 && bytes != 8 && bytes != 16) return nullptr;
  if (form.has("cg") && bytes != 16) return nullptr;
  code.variant = static_cast<u16>(bytes);
  return copy_lanes;
}
Exec cp_async_commit(const Form&, Code&) { return commit_group; }
Exec cp_async_wait(const Form& form, Code& code) {
  code.variant = form.has("wait_all") ? kAll : 0;
  return wait_group;
}

}  // namespace jax_fp4::sim

// cp.async (PTX ISA 9.7.9.25.3): copies of 4, 8 or 16 bytes from global to shared memory that happen at any
// time until the thread waits for them.
//
// A copy belongs to the warp and is done when its lanes wait (wait_all, wait_group) or when chance, drawn from
// the schedule's seed at every later cp.async instruction of the warp, says so. Until then the destination
// holds what it held before; as its bytes are written only when the copy is done, reading it too early is
// reported as uninitialised, or as a race where another warp looks.
#include <algorithm>

#include "sim/machine/async.h"
#include "sim/ops/lanes.h"

namespace jax_fp4::sim {
namespace {

// Code::variant: bytes in the low byte; then
constexpr u16 kAll = 1 << 8;

void perform(Warp& w, const AsyncCopy& copy) {
  const Code& c = w.launch->program->code[copy.pc];
  u8 data[16] = {};
  if (copy.source_bytes > 0) {
    // The access is as wide as the copy, so that it must be aligned; what is not read is zero.
    const u8* from =
        access(w, c, copy.lane, Space::global, copy.source, copy.bytes, AccessKind::read);
    std::memcpy(data, from, copy.source_bytes);
  }
  u8* to =
      access(w, c, copy.lane, Space::shared, copy.destination, copy.bytes, AccessKind::write, data);
  std::memcpy(to, data, copy.bytes);
}

// Performs the copies of these lanes: all but those of the `keep_groups` groups committed last (kNoIndex: all,
// also uncommitted ones), or each with probability 1/4.
void drain(Warp& w, u32 mask, u32 keep_groups, bool by_chance) {
  std::vector<AsyncCopy> left;
  std::vector<AsyncCopy> pending = std::move(w.copies);
  w.copies.clear();
  for (const AsyncCopy& copy : pending) {
    const bool mine = mask >> copy.lane & 1;
    const u32 committed = w.copy_groups[copy.lane];
    // Groups older than the most recent `keep_groups` committed ones are complete after the wait.
    const bool due = copy.group < committed && committed - copy.group > keep_groups;
    if (mine && (by_chance ? w.launch->random() % 4 == 0 : due || keep_groups == kNoIndex)) {
      perform(w, copy);
    } else {
      left.push_back(copy);
    }
  }
  w.copies = std::move(left);
}

void copy_lanes(Warp& w, const Code& c, u32 mask) {
  const u32 bytes = c.variant & 0xFF;
  const u32 pc = static_cast<u32>(&c - w.launch->program->code.data());
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    u32 source_bytes = bytes;
    if (c.src[3] != kNoSlot) source_bytes = w.in(c.src[3])[lane];
    if (source_bytes > bytes) {
      w.fault(c, lane, FaultKind::argument,
              "reads " + std::to_string(source_bytes) + " bytes for a copy of " +
                  std::to_string(bytes));
    }
    u64 source = address_of(w, c, lane, c.src[1], 1);
    u64 destination = address_of(w, c, lane, c.src[0], 0);
    w.copies.push_back({pc, lane, bytes, source_bytes, source, destination, w.copy_groups[lane]});
  }
  drain(w, mask, 0, true);
}

void commit_group(Warp& w, const Code&, u32 mask) {
  for (u32 rest = mask; rest != 0; rest &= rest - 1) ++w.copy_groups[std::countr_zero(rest)];
  drain(w, mask, 0, true);
}

void wait_group(Warp& w, const Code& c, u32 mask) {
  if (c.variant & kAll) {
    drain(w, mask, kNoIndex, false);
  } else {
    drain(w, mask, w.in(c.src[0])[std::countr_zero(mask)], false);
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
  drain(w, mask, kNoIndex, false);
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

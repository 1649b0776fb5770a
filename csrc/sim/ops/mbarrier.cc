// mbarrier (PTX ISA 9.7.13.15): phase barriers in shared memory, with arrivals and transaction bytes.
//
// The object: machine/async.h.
//
// The race checker sees every operation as an atomic access that acquires or releases the barrier's clock.
#include <utility>

#include "sim/machine/async.h"
#include "sim/ops/lanes.h"

namespace jax_fp4::sim {
namespace {

enum class Operation : u8 { init, inval, arrive, arrive_expect, expect, complete, test, parity };
// Code::variant: operation in the low byte, then these.
constexpr u16 kNoComplete = 1 << 8, kDrop = 1 << 9, kRelaxed = 1 << 10, kBlocks = 1 << 11;

u32 number(const Warp& w, u32 slot, int lane, u32 fallback) {
  return slot == kNoSlot ? fallback : w.in(slot)[lane];
}

Mbarrier object_of(Warp& w, const Code& c, int lane) {
  const bool creates = static_cast<Operation>(c.variant & 0xFF) == Operation::init;
  return Mbarrier(Actor{w, c, lane}, c.space, address_of(w, c, lane, c.src[0], 0), creates);
}

void change(Warp& w, const Code& c, u32 mask) {
  const Operation operation = static_cast<Operation>(c.variant & 0xFF);
  const bool drop = c.variant & kDrop;
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    Mbarrier object = object_of(w, c, lane);
    const u64 before = object.bits();
    const u32 count = number(w, c.src[1], lane, 1);
    const bool relaxed = c.variant & kRelaxed;
    switch (operation) {
      case Operation::init: object.init(count); break;
      case Operation::inval: object.invalidate(); break;
      case Operation::expect: object.add_transactions(count); break;
      case Operation::complete:
        // It is relaxed and gives nothing, but CUTLASS takes it to follow its stores (assumption S35).
        if (!w.launch->spec.checks.strict) object.release(w.clocks);
        object.add_transactions(-i64{count});
        break;
      case Operation::arrive_expect:
        object.add_transactions(count);
        if (!relaxed) object.release(w.clocks);
        object.arrive(1, drop);
        break;
      default:
        if ((c.variant & kNoComplete) && count >= object.pending)
          w.fault(c, lane, FaultKind::mbarrier, "a .noComplete arrival would complete the phase");
        if (!relaxed) object.release(w.clocks);
        object.arrive(count, drop);
    }
    if (operation != Operation::init && operation != Operation::inval) object.settle();
    // The state that arrive returns is the object as it was, with its phase.
    if (c.dst[0] != kNoSlot) w.out64(c.dst[0])[lane] = before;
  }
  w.advance_clock();
}

// test_wait and try_wait: true once the phase has completed. try_wait may give other warps their turn
// before it says no; a waiting fragment is woken when a phase completes, and with the cycle model when its
// time is up.
void wait(Warp& w, const Code& c, u32 mask) {
  const bool by_parity = static_cast<Operation>(c.variant & 0xFF) == Operation::parity;
  u32 done = 0;
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    Mbarrier object = object_of(w, c, lane);
    const u32 phase =
        by_parity ? number(w, c.src[1], lane, 0) & 1 : Mbarrier::phase_of(w.in64(c.src[1])[lane]);
    if (object.phase == phase) continue;
    done |= 1u << lane;
    if (!(c.variant & kRelaxed)) object.acquire(w);
  }
  w.set_predicate(c.dst[0], mask, done);
  const bool expired = std::exchange(w.fragment().expired, false);
  if (done == 0 && (c.variant & kBlocks) && mask == w.fragment().mask && !expired) {
    w.block_and_retry(c, kWaitsForMbarrier);
  } else if (done != mask) {
    w.end_turn = true;
  }
}

void pending_count(Warp& w, const Code& c, u32 mask) {
  const In<u64> state(w, c.src[0]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) { d.set(i, Mbarrier::pending_of(state[i])); });
}

Exec with_space(const Form& form, Code& code, Operation operation, Exec handler) {
  code.space = form.has("shared::cluster")                     ? Space::shared_cluster
               : form.has("shared") || form.has("shared::cta") ? Space::shared
                                                               : Space::generic;
  code.variant = static_cast<u16>(
      static_cast<u16>(operation) | (form.has("relaxed") ? kRelaxed : 0) |
      (form.has("noComplete") ? kNoComplete : 0) | (form.has("arrive_drop") ? kDrop : 0) |
      (form.has("try_wait") ? kBlocks : 0));
  return handler;
}

}  // namespace

Exec mbarrier_init(const Form& f, Code& c) { return with_space(f, c, Operation::init, change); }
Exec mbarrier_inval(const Form& f, Code& c) { return with_space(f, c, Operation::inval, change); }
Exec mbarrier_arrive(const Form& f, Code& c) { return with_space(f, c, Operation::arrive, change); }
Exec mbarrier_arrive_expect(const Form& f, Code& c) {
  return with_space(f, c, Operation::arrive_expect, change);
}
Exec mbarrier_expect(const Form& f, Code& c) { return with_space(f, c, Operation::expect, change); }
Exec mbarrier_complete(const Form& f, Code& c) {
  return with_space(f, c, Operation::complete, change);
}
Exec mbarrier_wait(const Form& f, Code& c) { return with_space(f, c, Operation::test, wait); }
Exec mbarrier_wait_parity(const Form& f, Code& c) {
  return with_space(f, c, Operation::parity, wait);
}
Exec mbarrier_pending(const Form&, Code&) { return pending_count; }

}  // namespace jax_fp4::sim

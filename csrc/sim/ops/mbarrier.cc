// mbarrier (PTX ISA 9.7.13.15): phase barriers in shared memory, with arrivals and transaction bytes.
//
// The object is 8 bytes of shared memory, read and written there, so that a program that overwrites it
// breaks it as on hardware. The bits are ours (the PTX ISA calls them opaque):
//   phase 63, expected 62:43, pending 42:23, transactions 21:0 (two's complement), bit 22 set: initialised
// A phase completes when pending and transactions are both 0; then pending = expected, phase flips.
//
// The race checker sees every operation as an atomic access that acquires or releases the barrier's clock.
#include <algorithm>

#include "sim/ops/lanes.h"

namespace jax_fp4::sim {
namespace {

constexpr u32 kMaxCount = (1u << 20) - 1;
constexpr i32 kMaxTransactions = (1 << 20) - 1;

struct Barrier {
  bool live = false;
  u32 phase = 0, expected = 0, pending = 0;
  i32 transactions = 0;
};

Barrier unpack(u64 bits) {
  Barrier b;
  b.phase = static_cast<u32>(bits >> 63);
  b.expected = static_cast<u32>(bits >> 43) & kMaxCount;
  b.pending = static_cast<u32>(bits >> 23) & kMaxCount;
  b.live = bits >> 22 & 1;
  b.transactions = static_cast<i32>(static_cast<u32>(bits) << 10) >> 10;
  return b;
}
u64 pack(const Barrier& b) {
  return static_cast<u64>(b.phase) << 63 | static_cast<u64>(b.expected) << 43 |
         static_cast<u64>(b.pending) << 23 | static_cast<u64>(b.live) << 22 |
         (static_cast<u32>(b.transactions) & 0x3F'FFFFu);
}

enum class Operation : u8 { init, inval, arrive, arrive_expect, expect, complete, test, parity };
// Code::variant: operation in the low byte, then these.
constexpr u16 kNoComplete = 1 << 8, kDrop = 1 << 9, kRelaxed = 1 << 10, kBlocks = 1 << 11;

// One lane's access to the object: loads it, stores it back when it goes out of scope.
class Object {
 public:
  Object(Warp& w, const Code& c, int lane)
      : w_(w), c_(c), lane_(lane), address_(address_of(w, c, lane, c.src[0], 0)) {
    Space space = c.space == Space::generic ? resolve_generic(address_) : c.space;
    if (space != Space::shared && space != Space::shared_cluster)
      w.fault(c, lane, FaultKind::mbarrier, "an mbarrier lies in shared memory");
    const bool creates = static_cast<Operation>(c.variant & 0xFF) == Operation::init;
    data_ = access(w, c, lane, space, address_, 8,
                   creates ? AccessKind::strong_write : AccessKind::atomic);
    u64 bits = 0;
    std::memcpy(&bits, data_, 8);
    barrier = unpack(bits);
    if (!creates && !barrier.live)
      w.fault(c, lane, FaultKind::mbarrier, "the mbarrier was not initialised, or was overwritten");
  }
  void store() const {
    const u64 bits = pack(barrier);
    std::memcpy(data_, &bits, 8);
  }
  // Completes the phase if nothing is missing; wakes who waits.
  void settle() {
    if (barrier.pending == 0 && barrier.transactions == 0) {
      barrier.phase ^= 1;
      barrier.pending = barrier.expected;
      wake_waiters(*w_.cta->cluster);
    }
    store();
  }
  void arrive(u32 count) {
    if (count == 0 || count > barrier.pending) {
      w_.fault(c_, lane_, FaultKind::mbarrier,
               std::to_string(count) + " arrivals, but only " + std::to_string(barrier.pending) +
                   " of " + std::to_string(barrier.expected) + " are missing in this phase");
    }
    barrier.pending -= count;
  }
  void add_transactions(i64 bytes) {
    const i64 sum = barrier.transactions + bytes;
    if (sum > kMaxTransactions || sum < -kMaxTransactions)
      w_.fault(c_, lane_, FaultKind::mbarrier, "the transaction count leaves its 20 bits");
    barrier.transactions = static_cast<i32>(sum);
  }
  u64 address() const { return address_; }

  Barrier barrier;

 private:
  static void wake_waiters(Cluster& cluster) {
    for (const auto& cta : cluster.ctas)
      for (const auto& warp : cta->warps)
        for (Fragment& f : warp->fragments)
          if (f.state == FragmentState::blocked && f.waits_for == "an mbarrier") warp->wake(f);
  }

  Warp& w_;
  const Code& c_;
  int lane_;
  u64 address_;
  u8* data_ = nullptr;
};

u32 number(const Warp& w, u32 slot, int lane, u32 fallback) {
  return slot == kNoSlot ? fallback : w.in(slot)[lane];
}

void change(Warp& w, const Code& c, u32 mask) {
  const Operation operation = static_cast<Operation>(c.variant & 0xFF);
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    Object object(w, c, lane);
    Barrier& b = object.barrier;
    const u64 before = pack(b);
    const bool ordered = !(c.variant & kRelaxed);
    switch (operation) {
      case Operation::init: {
        const u32 count = number(w, c.src[1], lane, 0);
        if (count == 0 || count > kMaxCount)
          w.fault(c, lane, FaultKind::mbarrier,
                  "a count of " + std::to_string(count) + "; it is 1 to 1048575");
        b = {true, 0, count, count, 0};
        break;
      }
      case Operation::inval: b = {}; break;
      case Operation::expect: object.add_transactions(number(w, c.src[1], lane, 0)); break;
      case Operation::complete: object.add_transactions(-i64{number(w, c.src[1], lane, 0)}); break;
      case Operation::arrive_expect:
        object.add_transactions(number(w, c.src[1], lane, 0));
        object.arrive(1);
        if (c.variant & kDrop) --b.expected;
        break;
      default: {
        const u32 count = number(w, c.src[1], lane, 1);
        if ((c.variant & kNoComplete) && count >= b.pending)
          w.fault(c, lane, FaultKind::mbarrier, "a .noComplete arrival would complete the phase");
        object.arrive(count);
        if (c.variant & kDrop) b.expected -= count;
      }
    }
    if (ordered) synchronize_through(w, object.address(), false, true);
    if (operation == Operation::init || operation == Operation::inval) {
      object.store();
    } else {
      object.settle();
    }
    // The state that arrive returns is the object as it was, with its phase.
    if (c.dst[0] != kNoSlot) w.out64(c.dst[0])[lane] = before;
  }
}

// test_wait and try_wait: true once the phase has completed. try_wait may give other warps their turn
// before it says no; a waiting fragment is woken when a phase completes.
void wait(Warp& w, const Code& c, u32 mask) {
  const bool by_parity = static_cast<Operation>(c.variant & 0xFF) == Operation::parity;
  u32 done = 0;
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    Object object(w, c, lane);
    const u32 phase = by_parity ? number(w, c.src[1], lane, 0) & 1
                                : static_cast<u32>(w.in64(c.src[1])[lane] >> 63);
    if (object.barrier.phase == phase) continue;
    done |= 1u << lane;
    if (!(c.variant & kRelaxed)) synchronize_through(w, object.address(), true, false);
  }
  w.set_predicate(c.dst[0], mask, done);
  if (done == 0 && (c.variant & kBlocks) && mask == w.fragment().mask) {
    // Sleep until some phase completes, then ask again.
    w.fragment().pc = static_cast<u32>(&c - w.launch->program->code.data());
    w.block("an mbarrier");
  } else if (done != mask) {
    w.end_turn = true;
  }
}

void pending_count(Warp& w, const Code& c, u32 mask) {
  const In<u64> state(w, c.src[0]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) { d.set(i, unpack(state[i]).pending); });
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

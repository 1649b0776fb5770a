// Asynchronous engines: bulk copies, tensor cores and cluster launch control do their work some time
// after the instruction that asked for it.
//
// An operation is performed at a moment that the schedule's seed draws: between its issue and the moment
// when nothing else can go on. Most are performed whole; stores read and write in two steps. Operations of
// one queue are performed in the order of their issue; all others in any order. Bytes are read and
// written when the operation is performed, through the
// asynchronous proxy (PTX ISA 8.3), with a clock of its own:
//
//   a slot   of the cluster, drawn at the issue, for operations that are ordered with nothing
//   a pipe   of the issuing warp, for operations of one queue: what a pipe does is ordered with itself
//
// An operation knows what its issuer had seen. Who waits for its signal to an mbarrier knows what the
// operation did; the completion is a proxy fence for that.
#pragma once

#include "sim/machine/core.h"

namespace jax_fp4::sim {

// Slots of a cluster. Two operations with one slot at a time hide races from each other: with
// this many and a seeded choice another seed shows them.
inline constexpr u32 kAsyncSlots = 64;

// What an operation asks of the machine, for its costs (costs/).
struct AsyncWork {
  enum class Engine : u8 {
    signal,
    launch_control,
    copy_in,
    copy_out,
    tensor_copy,
    tensor_mma,
    commit
  };
  struct Range {
    u64 address;
    u32 bytes;
    bool operator==(const Range&) const = default;
  };
  Engine engine = Engine::signal;
  u32 ctas = 0;               // whose shared or tensor memory it uses: a bit for each rank
  u64 shared_bytes = 0;       // of each of them
  u64 tensor_bytes = 0;       // of each of them, but for accumulators
  std::vector<Range> global;  // that it reads or writes
  bool repeated = false;      // another operation reads the same for another CTA (multicast)
  std::string_view kind;      // of an MMA
  int element_bits = 0;
  double flop = 0;           // of each CTA; two for a multiply-add
  double occupied_flop = 0;  // the same with all 128 rows, which take as long
};

class AsyncOperation {
 public:
  // Takes a slot, or the pipe of the warp, and what the warp has seen until now.
  enum class Clock : u8 { slot, pipe };
  AsyncOperation(Warp& warp, const Code& code, int lane, Clock clock);
  virtual ~AsyncOperation() = default;
  AsyncOperation(const AsyncOperation&) = delete;
  AsyncOperation& operator=(const AsyncOperation&) = delete;

  // One step of it; sets `again` where another one follows, at a later moment.
  virtual void perform() = 0;
  // Whether it reads or writes memory of the CTA, which must then not exit.
  virtual bool uses(const Cta& cta) const = 0;
  virtual AsyncWork work() const { return {}; }
  // Whether bytes move and sums are made. Without, control flow must not depend on them.
  bool moves_data() const { return warp->launch->spec.costs.data; }

  Actor actor() { return {*warp, *code, lane, this}; }
  Accessor accessor(bool atomic) const;
  // Bytes of a space, with the checks of access() but that of alignment.
  u8* access(Space space, u64 address, u32 bytes, AccessKind kind) {
    return sim::access(actor(), space, address, bytes, kind);
  }
  // Arrivals and complete_tx bytes at the mbarrier at a shared address of the cluster; releases.
  void signal(u64 address, u32 arrivals, u32 bytes);
  // Takes along what its pipe has done, and goes on apart from it.
  void leave_pipe();
  // Clocks that somebody who waits for the operation acquires.
  Clocks released() const;

  Warp* warp;
  const Code* code;
  int lane;
  bool piped;
  bool generic = false;        // its accesses go through the generic proxy all the same
  bool fences_reads = false;   // generic reads before its writes need a proxy fence
  bool follows_waits = false;  // it is ordered after what its pipe has done by waiting only
  bool again = false;
  bool late = false;  // performed when nothing else can go on
  u32 agent;

 private:
  friend struct Launch;
  void begin();  // called when it is performed

  u32 time_ = 0;   // of a slot's clock
  Clocks clocks_;  // of the issuer at the issue
  VectorClock tensor_ready_;
};

// An mbarrier (PTX ISA 9.7.13.15): 8 bytes of shared memory, read and written there, so that a program
// that overwrites it breaks it as on hardware. The bits are ours (the PTX ISA calls them opaque):
//   phase 63, expected 62:43, pending 42:23, transactions 21:0 (two's complement), bit 22 set: initialised
// A phase completes when pending and transactions are both 0; then pending = expected, phase flips.
class Mbarrier {
 public:
  // Finds it; unless it is to be created, it must be live and its initialisation visible to the actor.
  Mbarrier(const Actor& actor, Space space, u64 address, bool creates = false);

  void init(u32 count);
  void invalidate();
  void arrive(u32 count, bool drop = false);
  void add_transactions(i64 bytes);
  // Completes the phase if nothing is missing, wakes who waits, and writes the object back.
  void settle();

  // What an arrival releases goes to those who see the phase complete.
  void release(const Clocks& clocks);
  void acquire(Warp& warp);

  bool live = false;
  u32 phase = 0, expected = 0, pending = 0;
  i32 transactions = 0;
  u64 bits() const;
  static u32 phase_of(u64 bits) { return static_cast<u32>(bits >> 63); }
  static u32 pending_of(u64 bits);

 private:
  void unpack(u64 bits);
  void check_visible() const;
  void store() const;

  Actor actor_;
  u64 address_;
  u8* data_ = nullptr;
};

}  // namespace jax_fp4::sim

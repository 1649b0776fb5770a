// The running machine: launch, clusters, CTAs, warps and the groups of lanes that share a PC.
//
//   Launch    one grid: its program, memories, scheduler, counters
//   Cluster   CTAs that are resident together and see each other's shared memory
//   Cta       shared arena, named barriers, warps
//   Warp      32 lanes: registers (structure of arrays), local memory, fragments
//   Fragment  lanes at one PC with one call stack; a warp that has not diverged has one
//   Actor     who makes an access: a lane, or an asynchronous operation (machine/async.h)
//
// Divergence: a branch splits a fragment. The fragment whose PC comes first in Program::order runs; in
// that order a block's immediate post-dominator comes after everything that leads to it, so diverged
// lanes meet there and are merged (thread frontiers: Diamos et al., MICRO 2011). That is a preference
// and no promise: a fragment that has run long while others wait must let them run, so that lanes may
// spin on each other.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "numerics/mma_sum.h"
#include "sim/checks/lane_order.h"
#include "sim/checks/race.h"
#include "sim/machine/memory.h"
#include "sim/machine/tensor_memory.h"

namespace jax_fp4::sim {

// Lanes of registers; the compiler must not assume that differently typed lanes are apart.
using Lane32 [[gnu::may_alias]] = u32;
using Lane64 [[gnu::may_alias]] = u64;

enum class FaultKind : u8 {
  uninitialized_register,
  uninitialized_memory,
  out_of_bounds,
  misaligned,
  read_only,
  divergence,
  deadlock,
  timeout,
  race,
  barrier,
  trap,
  call,
  argument,
  mbarrier,
  proxy,
  exit,
  tensor_memory,
};
std::string_view name_of_fault(FaultKind kind);

struct Launch;

// Ends a launch; `what()` is the whole report.
class Fault : public std::runtime_error {
 public:
  Fault(const Launch* launch, FaultKind kind, u32 line, const std::string& text)
      : std::runtime_error(text), launch(launch), kind(kind), line(line) {}
  const Launch* launch;
  FaultKind kind;
  u32 line;
};

enum class FragmentState : u8 {
  ready,
  converging,  // at a convergent instruction, until the other lanes it names arrive
  blocked,     // until a barrier completes
};

struct Fragment {
  u32 pc = 0;
  u32 mask = 0;
  FragmentState state = FragmentState::ready;
  bool again = false;    // blocked: the instruction is tried anew when it wakes
  bool expired = false;  // it was blocked for as long as the instruction waits
  u32 needed = 0;        // converging: the lanes that must come together
  std::string_view waits_for;
  std::vector<u32> stack;  // call sites, outermost first
};

struct Cta;
struct Cluster;
struct Launch;
class AsyncOperation;
class GlobalOrder;

// A cp.async that has been issued and not done.
struct AsyncCopy {
  u32 pc;
  int lane;
  u32 bytes, source_bytes;
  u64 source = 0, destination = 0;
  u32 group = 0;            // groups that the lane had committed before
  u32 agent = 0, time = 0;  // whose write it is, for races
  bool read = false;
  u8 data[16] = {};
};

// How far a thread's bulk copy from shared memory is (PTX ISA 9.7.9.25.6).
struct BulkProgress {
  int lane;
  u32 group;  // groups that the lane had committed before
  bool read = false, written = false;
  Clocks clocks;  // that who waits for it acquires
};

struct Warp {
  Launch* launch = nullptr;
  Cta* cta = nullptr;
  u32 id = 0;               // in the CTA
  u32 place = 0;            // in the cluster
  u32 agent = 0;            // of a cluster, for races: its place, or that of a lane alone
  u32 number = 0;           // in the launch, for the trace
  u32 live = 0;             // lanes that have not exited
  u32 carry = 0;            // the condition code of add.cc and its like
  u32 cluster_arrived = 0;  // lanes between barrier.cluster.arrive and .wait
  u32 cluster_phase = 0;    // of the barrier when they arrived
  u32 register_count = 0;   // of a thread, since setmaxnreg; 0: as launched
  u32* registers = nullptr;
  const u32* constants = nullptr;
  u32* written = nullptr;  // by block: lanes that hold a value
  std::vector<u32> predicates, predicates_written;
  // Slot that holds no value because it was computed from one that was never written -> that one.
  std::map<u32, u32> unwritten_origins;
  std::vector<u32> storage;
  std::vector<u8> local;  // lane after lane, Program::local_bytes each
  std::vector<u8> local_written;
  Clocks clocks;
  int alone_lane = -1;  // that has acted alone since the lanes met; -1: none
  bool alone_acts = false;
  u32 other_agent = 0;     // where one lane acts alone the warp's, else that of a lane alone
  Clocks other_clocks;     // the same
  u32 met[3] = {0, 0, 0};  // clocks of the warp, its loads and its stores when the lanes met
  Clocks pipe;             // of its tensor pipe (machine/async.h)
  // What tcgen05.fence::after_thread_sync has made usable, for the warp and for its pipe.
  VectorClock tensor_ready, pipe_ready;
  u32 tensor_loads = 0, tensor_stores = 0;  // tcgen05.ld and .st that it has issued
  u64 collected = 0;  // A in its collector buffer: matrix descriptor or address; 0: none
  std::vector<AsyncCopy> copies;
  std::array<u32, kLanes> copy_groups{};  // committed by each lane
  std::vector<std::shared_ptr<BulkProgress>> bulk_copies;
  std::array<u32, kLanes> bulk_groups{};
  std::vector<Fragment> fragments;
  u32 current = 0;
  u32 patience = 0;  // leaders until another fragment gets its turn
  u32 forced = 0;    // leaders that the current fragment may still run out of order
  bool yield = false;
  bool end_turn = false;  // another warp's turn after this instruction
  u64 executed = 0;       // instructions of this turn
  bool queued = false;
  bool finished = false;

  Fragment& fragment() { return fragments[current]; }
  const Lane32* in(u32 slot) const {
    const u32* base = (slot & kConstant) ? constants : registers;
    return reinterpret_cast<const Lane32*>(base +
                                           static_cast<std::size_t>(slot & ~kConstant) * kLanes);
  }
  const Lane64* in64(u32 slot) const { return reinterpret_cast<const Lane64*>(in(slot)); }
  Lane32* out(u32 slot) {
    return reinterpret_cast<Lane32*>(registers + static_cast<std::size_t>(slot) * kLanes);
  }
  Lane64* out64(u32 slot) { return reinterpret_cast<Lane64*>(out(slot)); }
  // A predicate source, with its negation applied. kConstant: true.
  u32 predicate(u32 slot) const {
    const u32 value = (slot & kConstant) ? kAllLanes : predicates[slot & ~kNegated];
    return (slot & kNegated) ? ~value : value;
  }
  void set_predicate(u32 slot, u32 mask, u32 values) {
    if (slot == kNoSlot) return;
    predicates[slot] = (predicates[slot] & ~mask) | (values & mask);
  }

  // Runs up to `budget` instructions; returns how many. Ends early when all lanes wait or have exited.
  u64 run(u64 budget);

  // For handlers. The lanes in `mask` continue at `target`, the others of the fragment after it.
  void branch(u32 mask, u32 target);
  Fragment& split(u32 mask);
  void exit_lanes(u32 mask);
  // Whether the lanes of `needed` that are alive execute this instruction together. If not, the
  // fragment waits for them and the handler must return at once.
  bool converged(const Code& c, u32 mask, u32 needed);
  // For `.aligned` instructions: all live lanes of the warp.
  bool converged(const Code& c, u32 mask) { return converged(c, mask, kAllLanes); }
  void block(std::string_view what);
  // The same, and the instruction is executed anew after that.
  void block_and_retry(const Code& c, std::string_view what);
  void wake_all(std::string_view what);
  void wake(Fragment& f);
  // Later accesses of this warp are told from earlier ones: after each release.
  void advance_clock() { ++clocks.seen[agent]; }

  // With Checks::strict (machine/alone.cc): `agent` and `clocks` are those of the lanes that execute, which
  // are all of them or one that acts alone. Lanes of `mask` execute next; the lanes meet at a barrier.
  void act(u32 mask);
  void meet();
  LaneAccess lane_access(const Code& c) const;

  [[noreturn]] void fault(const Code& c, int lane, FaultKind kind, const std::string& message);
  bool ready() const;  // some lanes can go on
  std::string where(const Code& c, int lane) const;

 private:
  bool select();
  bool merge();
  u32 first_in_order() const;
  void change_view();
  void forget_unmet(Clocks& known) const;
  bool precedes(const Fragment& a, const Fragment& b) const;
  // Lanes of `mask` in which a source is unwritten; a fault where the instruction does more than compute.
  u32 check_registers(const Code& c, u32 mask);
  [[noreturn]] void refuse_unwritten(const Code& c, u32 slot, u32 lanes);
  u32& written_lanes(u32 slot);  // slot as in Program::checks
};

// What a fragment that waits at a barrier gets when it completes.
struct BarrierWaiter {
  Warp* warp;
  u32 mask;
  const Code* code;  // of bar.red: where the result goes; its variant & 3: 0 popc, 1 and, 2 or
};

struct NamedBarrier {
  u32 expected = 0;  // threads; 0: all of the CTA
  u32 arrived = 0;
  u32 line = 0;                     // of the first arrival
  u32 any = 0, all = 1, count = 0;  // bar.red
  Clocks clocks;
  std::vector<BarrierWaiter> waiters;
};

inline constexpr int kNamedBarriers = 16;

struct Cta {
  Launch* launch = nullptr;
  Cluster* cluster = nullptr;
  u32 rank = 0;
  u32 index[3] = {0, 0, 0};  // %ctaid
  u32 sm = 0;
  std::vector<u8> shared, shared_written;
  std::unique_ptr<RaceChecker> races;
  std::unique_ptr<LaneOrder> lanes;      // with Checks::strict
  std::unique_ptr<TensorMemory> tensor;  // where the program uses it
  std::vector<std::unique_ptr<Warp>> warps;
  NamedBarrier barriers[kNamedBarriers];
  u32 threads = 0;
  u32 exited = 0;
  u32 free_registers = 0;       // given back by setmaxnreg.dec
  bool triggered = false;       // has executed griddepcontrol.launch_dependents, or has exited
  bool cancel_refused = false;  // it has seen that no cluster is left to take over

  void trigger();
  void complete_barriers();
  bool complete(NamedBarrier& barrier);
};

struct ClusterBarrier {
  u32 arrived = 0;
  u32 phase = 0;
  Clocks clocks;
  std::vector<Warp*> waiters;
};

// What the checks know of an mbarrier.
struct MbarrierRecord {
  Clocks arriving, completed;  // released in this phase; and before
  Epoch init = 0;
  u32 init_pc = 0;
  bool valid = false;  // from mbarrier.init to mbarrier.inval
};

// What a fragment waits for, where asynchronous operations end the wait.
inline constexpr std::string_view kWaitsForMbarrier = "an mbarrier";
inline constexpr std::string_view kWaitsForGrids = "the grids before this one";
inline constexpr std::string_view kWaitsForRegisters = "registers that other warps give back";
// What a fragment waits for at tcgen05.alloc and .dealloc.
inline constexpr std::string_view kWaitsForTensorMemory = "columns of tensor memory to be free";
inline constexpr std::string_view kWaitsForPeer =
    "the same instruction in the other CTA of its pair";

struct Cluster {
  u32 index[3] = {0, 0, 0};
  std::vector<std::unique_ptr<Cta>> ctas;
  u32 live_ctas = 0;
  u32 threads = 0;
  u32 exited = 0;
  ClusterBarrier barrier;
  // Clocks released through memory: by strong and atomic accesses, keyed by address.
  std::unordered_map<u64, Clocks> released;
  std::unordered_map<u64, MbarrierRecord> mbarriers;  // by address
  std::vector<u32> slot_times;                        // of the slots of asynchronous operations
  u32 pending = 0;                                    // operations
  void wake(std::string_view what);
  void complete_barrier();
};

struct Dim3 {
  u32 x = 1, y = 1, z = 1;
  u64 count() const { return u64{x} * y * z; }
};

struct Checks {
  bool races = true;
  bool uninitialized = true;
  bool strict = false;  // what kernels of others leave out: tcgen05.fence, bar.warp.sync, waits
};

// What is counted and timed besides (costs/).
struct CostOptions {
  bool count = false;
  bool time = false;      // cycles; the schedule is then that of the modelled times
  bool timeline = false;  // intervals of warps and engines
  bool data = true;       // asynchronous engines move bytes, tensor cores multiply
  u32 sms = 0;            // 0: the chip's
  u32 ctas_per_sm = 0;    // 0: as many as shared memory and threads allow
};
namespace costs {
class Costs;
class Timing;
}  // namespace costs

struct LaunchSpec {
  Dim3 grid, block, cluster;
  u32 dynamic_shared = 0;
  std::vector<u8> parameters;
  u64 seed = 0;
  u64 max_instructions = u64{1} << 33;
  u32 resident_clusters = 4;
  u32 sms = 4;
  u32 shared_limit = 232448;   // bytes a CTA may use; compute capability 10.0
  u32 chip = 100;              // compute capability times ten
  MmaSum mma = MmaSum::model;  // how MMA instructions add
  Checks checks;
  CostOptions costs;
  bool quick =
      true;  // accesses of whole warps at once (machine/quick.h); tests compare with single ones
};

struct Launch {
  const Program* program = nullptr;
  LaunchSpec spec;
  GlobalMemory* global = nullptr;
  Buffer* constant = nullptr;
  std::mt19937_64 random;
  std::vector<std::unique_ptr<Cluster>> resident;
  std::vector<Warp*> runnable;
  std::vector<std::unique_ptr<AsyncOperation>> pending;
  u64 eagerness = 0;             // of 1024 turns, those that go to asynchronous operations
  std::vector<u64> counts;       // by instruction of the program: warps
  std::vector<u64> lane_counts;  // lanes
  u64 bytes_read[8] = {}, bytes_written[8] = {};  // by Space
  u64 instructions = 0;
  static constexpr u64 kTracePrime = 0x100'0000'01B3;
  u64 trace = 0xCBF2'9CE4'8422'2325;  // FNV-1a over what ran when
  std::vector<std::string> warnings;
  std::set<std::pair<u64, u64>> warned;
  u64 next_cluster = 0;
  u32 warps_started = 0;
  // Of the chain (machine/chain.h): the grid's place in it, the grid before, who used global memory.
  u32 number = 0;
  Launch* before = nullptr;
  GlobalOrder* order = nullptr;
  bool started = false;
  u64 triggered_ctas = 0;
  bool overlaps = false;                // it, or a grid before it, has let the next one start early
  std::unique_ptr<costs::Costs> costs;  // null: neither counted nor timed

  void start();
  bool can_step() const;
  void step();  // one turn of a warp, or one asynchronous operation
  bool finished() const { return started && resident.empty(); }
  bool all_triggered() const { return triggered_ctas == spec.grid.count(); }
  [[noreturn]] void report_deadlock();
  void enqueue(Warp* warp);
  void issue(std::unique_ptr<AsyncOperation> operation);
  // Takes the next cluster off the grid; false if none is left.
  bool take_cluster(u32 (&first_cta)[3]);
  // Reports what still uses the memory of a CTA that has exited, and tensor memory that it holds.
  void check_exit(const Cta& cta);
  void check_tensor_exit(const Cta& cta) const;
  void warn(u64 key_a, u64 key_b, const std::function<std::string()>& text);
  u32 shared_bytes() const;  // of a CTA, without the reserved part
  std::string kernel_line(u32 line) const;
  u32 pc_of(const Code& c) const { return static_cast<u32>(&c - program->code.data()); }
  // Agents of a cluster in the race checker: its warps, their tensor pipes, slots of asynchronous operations,
  // what each warp loads from and stores to tensor memory, and what a lane of it does alone.
  u32 warps_of_cluster() const;
  u32 first_tensor_load() const;
  u32 first_tensor_store() const { return first_tensor_load() + warps_of_cluster(); }
  u32 first_alone() const;
  u32 agents() const;
  u32 prerequisite_agent() const { return agents() - 1; }

  Launch();
  ~Launch();

 private:
  friend class costs::Timing;
  void perform_one();
  // One step of a pending operation.
  void perform(std::size_t index);
  void check_budget(const Warp& warp);
  Dim3 clusters() const;  // of the grid
  void start_clusters();
  void retire();
};

std::string describe_lanes(u32 mask);
// Fills the registers of %tid and its like.
void fill_specials(Warp& warp);
u64 special_value(const Warp& warp, Special special, int lane);

// ---- Memory accesses (machine/access.cc)

enum class AccessKind : u8 { read, write, atomic, strong_read, strong_write };

struct Actor {
  Warp& warp;
  const Code& code;
  int lane;
  AsyncOperation* operation = nullptr;

  [[noreturn]] void fault(FaultKind kind, const std::string& message) const;
  Accessor accessor(bool atomic) const;
};

// The bytes [address, address + bytes) of a space, checked: mapped, aligned (accesses of lanes),
// initialised (reads), writable, free of races. The space may be generic. `value`: of a plain
// write, what will be stored.
u8* access(const Actor& actor, Space space, u64 address, u32 bytes, AccessKind kind,
           const void* value = nullptr);
inline u8* access(Warp& warp, const Code& c, int lane, Space space, u64 address, u32 bytes,
                  AccessKind kind, const void* value = nullptr) {
  return access(Actor{warp, c, lane}, space, address, bytes, kind, value);
}
// Reports a race or a missing proxy fence; `same`: two writes of one value, which is a warning. `access`: what
// the actor does.
void report_conflict(const Actor& actor, const RaceConflict& conflict, bool same,
                     const std::string& access);
// Splits a generic address; `address` becomes that of the space.
Space resolve_generic(u64& address);
// Orders this warp after and before others that use the same address to synchronise.
void synchronize_through(Warp& warp, u64 address, bool acquire, bool release);
// Address of operand `n` (its register in c.src[slot], or none), for one lane.
inline u64 address_of(const Warp& warp, const Code& c, int lane, u32 slot, int n) {
  u64 base = 0;
  if (slot != kNoSlot)
    base = (c.address_bits >> n & 1) ? warp.in64(slot)[lane] : warp.in(slot)[lane];
  return base + static_cast<u64>(c.offset[n]);
}

}  // namespace jax_fp4::sim

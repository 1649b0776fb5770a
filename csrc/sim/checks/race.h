// Races on shared and tensor memory, by vector clocks.
//
// An agent is a warp of a cluster, or an asynchronous engine's operation; its own clock counts its
// releases. An access (agent, clock) happens before another one if the other's agent has, through
// barriers and the like, seen that clock. Each word remembers its last write and the reads since (one
// epoch, or a set of epochs where several agents have read it): Flanagan and Freund, "FastTrack" (PLDI
// 2009). A word that was accessed in parts has a history for each byte instead, until it is written whole.
//
// Neighbours mostly have one history, since one instruction accessed them all. So a word holds the number of its history,
// and what an access makes of a history is worked out once and used again for the words that follow.
//
// Proxies (PTX ISA 8.3, 8.9.1.2): a write through the generic proxy is visible to the asynchronous one only if
// a proxy fence lies on the way between the two. What a fence has separated is a clock of its own.
//
// Lanes of one warp count as one agent: races inside a warp are not looked for, but with Checks::strict
// what one lane does alone is told from what lanes do together (machine/alone.cc).
#pragma once

#include <array>
#include <iterator>
#include <vector>

#include "numerics/base.h"

namespace jax_fp4::sim {

using VectorClock = std::vector<u32>;

inline void join(VectorClock& into, const VectorClock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (std::size_t i = 0; i < from.size(); ++i)
    if (from[i] > into[i]) into[i] = from[i];
}

// What an agent knows of the others.
struct Clocks {
  VectorClock seen;    // has happened before
  VectorClock fenced;  // of that, what a proxy fence separates from everything later
  VectorClock inits;   // of that, initialisations of mbarriers that the whole cluster may use
  VectorClock tensor;  // of that, what tcgen05.fence::before_thread_sync or a commit covers

  void assign(std::size_t agents) {
    for (VectorClock* clock : {&seen, &fenced, &inits, &tensor}) clock->assign(agents, 0);
  }
};

inline void join(Clocks& into, const Clocks& from) {
  join(into.seen, from.seen);
  join(into.fenced, from.fenced);
  join(into.inits, from.inits);
  join(into.tensor, from.tensor);
}

// agent << 20 | clock; 0: never. Agents: at most 16 * 32 warps of a cluster, as many of their tensor pipes,
// of their loads from and stores to tensor memory and of their lanes alone, and the slots of asynchronous operations.
using Epoch = u32;
inline constexpr u32 kClockBits = 20;
inline constexpr u32 kMaxClock = (1u << kClockBits) - 1;
inline Epoch make_epoch(u32 agent, u32 clock) {
  return agent << kClockBits | (clock < kMaxClock ? clock : kMaxClock);
}
inline u32 agent_of(Epoch epoch) { return epoch >> kClockBits; }
inline bool happened_before(Epoch epoch, const VectorClock& now) {
  return epoch == 0 || (epoch & kMaxClock) <= now[epoch >> kClockBits];
}

// In a program counter: the access was atomic, or through the asynchronous proxy.
inline constexpr u32 kAtomicAccess = 1u << 31, kAsyncAccess = 1u << 30;
inline constexpr u32 kAccessFlags = kAtomicAccess | kAsyncAccess;

// An access as it is remembered: its epoch, and above it the program counter with its flags.
using Access = u64;
inline Access make_access(Epoch epoch, u32 pc) { return u64{pc} << 32 | epoch; }
inline Epoch epoch_of(Access access) { return static_cast<Epoch>(access); }
inline u32 pc_of(Access access) { return static_cast<u32>(access >> 32); }

// In the place of a read's epoch: several agents have read; above it the number of the set of reads.
inline constexpr Epoch kSharedReads = ~0u;

struct AccessHistory {
  Access write = 0;
  Access read = 0;
  bool operator==(const AccessHistory&) const = default;
};

// Reads by several agents: by agent, 0 where it has not read.
using ReadSet = std::vector<Access>;

struct RaceConflict {
  bool found = false;
  bool earlier_is_write = false;
  bool unfenced = false;  // ordered, but the fence that must lie between the two is missing
  Epoch earlier = 0;
  u32 pc = 0;
};

// Who accesses, and what it knows.
struct Accessor {
  u32 agent;
  Epoch epoch;
  const Clocks& clocks;
  u32 pc;
  bool atomic = false;
  bool async = false;         // through the asynchronous proxy
  bool fences_reads = false;  // generic reads before it, too, need a proxy fence
};

class RaceChecker {
 public:
  explicit RaceChecker(u64 bytes);

  // Each records an access and returns what it races with.
  RaceConflict read(u64 offset, u32 bytes, const Accessor& by);
  RaceConflict write(u64 offset, u32 bytes, const Accessor& by);

  // The same for aligned accesses of `bytes` (a power of 2) by the lanes of a warp. False: some lane races, and
  // `read` or `write` must say what, lane by lane; that others are recorded already changes nothing.
  bool read_lanes(const u32* offsets, u32 mask, u32 bytes, const Accessor& by);
  bool write_lanes(const u32* offsets, u32 mask, u32 bytes, const Accessor& by);
  // For whole words that lie one behind the other.
  bool read_run(u64 offset, u32 bytes, const Accessor& by);
  bool write_run(u64 offset, u32 bytes, const Accessor& by);

 private:
  using Number =
      u32;  // of a history; with kSplit set: of four histories, one for each byte of a word
  static constexpr Number kNoNumber = ~0u, kSplit = 1u << 31;

  // A history that an access has met, and the one that it makes of it.
  struct Memory {
    Number met = kNoNumber, after = kNoNumber;
  };
  // An access on its way over the words. It remembers a few histories: words of several writers take turns.
  struct Pass {
    const Accessor& by;
    Access own;
    bool stops;      // at the first conflict, before it is recorded
    Number written;  // the history of what a write has written; kNoNumber until there is one
    RaceConflict conflict;
    Memory memories[16];

    Memory& memory_of(Number met) { return memories[met % std::size(memories)]; }
  };
  Pass start(const Accessor& by, bool stops);

  // What the access makes of the word or byte; each returns false where the pass stops.
  template <bool kWrites>
  bool touch(Number& place, Pass& pass) {
    const Memory& memory = pass.memory_of(place);
    if (place == memory.met) {
      place = memory.after;
      return true;
    }
    return meet<kWrites>(place, pass);
  }
  template <bool kWrites>
  bool meet(Number& place, Pass& pass);
  template <bool kWrites>
  bool touch_parts(Number& word, Pass& pass);
  template <bool kWrites>
  bool touch_range(u64 offset, u32 bytes, Pass& pass);
  template <bool kWrites>
  bool touch_run(Number* words, u32 count, Pass& pass);
  template <bool kWrites, u32 kWords>
  bool touch_words(const u32* offsets, u32 mask, Pass& pass);
  template <bool kWrites, u32 kBytes>
  bool touch_parts_of_words(const u32* offsets, u32 mask, Pass& pass);
  template <bool kWrites>
  bool touch_lanes(const u32* offsets, u32 mask, u32 bytes, const Accessor& by);

  std::array<Number, 4>& split(Number& word);
  Access reads_with(Access reads, const Accessor& by, Access own);
  Number number_of(const AccessHistory& history);
  u32 new_set();
  void find_free_histories();
  void find_free_sets();

  std::vector<Number> words_;
  std::vector<AccessHistory> histories_;  // 0: never accessed
  std::vector<std::array<Number, 4>> split_;
  std::vector<ReadSet> sets_;  // never changed while a history names them
  std::vector<u32> free_histories_, free_splits_, free_sets_;
  // Histories made lately, by a hash: those that are equal get one number.
  struct Latest {
    AccessHistory history;
    Number number = 0;
  };
  static constexpr int kLatestBits = 6;
  Latest latest_[1 << kLatestBits];
  // Sizes of histories_ and of sets_ at which those that nothing names are looked for.
  std::size_t next_history_sweep_, next_set_sweep_ = 0;
};

}  // namespace jax_fp4::sim

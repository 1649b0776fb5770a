// Races on shared and tensor memory, by vector clocks.
//
// An agent is a warp of a cluster, or an asynchronous engine's operation; its own clock counts its
// releases. An access (agent, clock) happens before another one if the other's agent has, through
// barriers and the like, seen that clock. Each word remembers its last write and the reads since (one
// epoch, or a set of epochs where several agents have read it): Flanagan and Freund, "FastTrack" (PLDI
// 2009). A word that was accessed in parts has a history for each byte instead.
//
// Proxies (PTX ISA 8.3, 8.9.1.2): a write through the generic proxy is visible to the asynchronous one only if
// a proxy fence lies on the way between the two. What a fence has separated is a clock of its own.
//
// Lanes of one warp count as one agent: races inside a warp are not looked for.
#pragma once

#include <array>
#include <cstring>
#include <unordered_map>
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

// agent << 20 | clock; 0: never. Agents: at most 16 * 32 warps of a cluster, as many of their tensor pipes
// and of their loads from and stores to tensor memory, and the slots of asynchronous operations.
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
inline constexpr Epoch kSharedReads = ~0u;  // `read` of a place that several agents have read
inline constexpr Epoch kSplit = ~0u - 1;  // `write` of a word whose bytes have their own histories

struct AccessHistory {
  Epoch write = 0;
  u32 write_pc = 0;
  Epoch read = 0;
  u32 read_pc = 0;  // where read == kSharedReads: number of a ReadSet
                    // where write == kSplit: the whole record is unused
  bool operator==(const AccessHistory& other) const {
    return std::memcmp(this, &other, sizeof *this) == 0;
  }
};

// The reads of a place by several agents: by agent, 0 where it has not read.
struct ReadSet {
  std::vector<Epoch> reads;
  std::vector<u32> pcs;
};

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
  bool async = false;  // through the asynchronous proxy
};

class RaceChecker {
 public:
  explicit RaceChecker(u64 bytes) : words_((bytes + 3) / 4) {}

  // Each records an access and returns what it races with.
  RaceConflict read(u64 offset, u32 bytes, const Accessor& by);
  RaceConflict write(u64 offset, u32 bytes, const Accessor& by);

  // The same for whole words and plain accesses of warps, where nothing can be wrong at first sight.
  // False: not recorded; `read` or `write` must decide.
  bool read_word(u64 word, u32 agent, Epoch epoch, const VectorClock& now, u32 pc) {
    AccessHistory& h = words_[word];
    if (h.write == kSplit || !happened_before(h.write, now)) return false;
    if (h.read == kSharedReads) {
      ReadSet& set = sets_[h.read_pc];
      set.reads[agent] = epoch;
      set.pcs[agent] = pc;
      return true;
    }
    if (h.read != 0 && agent_of(h.read) != agent && !happened_before(h.read, now)) return false;
    h.read = epoch;
    h.read_pc = pc;
    return true;
  }
  bool write_word(u64 word, Epoch epoch, const VectorClock& now, u32 pc) {
    AccessHistory& h = words_[word];
    if (h.write == kSplit || h.read == kSharedReads || !happened_before(h.write, now) ||
        !happened_before(h.read, now))
      return false;
    h = {epoch, pc, 0, 0};
    return true;
  }

 private:
  template <class F>
  void each_record(u64 offset, u32 bytes, F f);
  void read_record(AccessHistory& record, const Accessor& by, RaceConflict& conflict);
  void write_record(AccessHistory& record, const Accessor& by, RaceConflict& conflict);

  std::vector<AccessHistory> words_;
  std::unordered_map<u64, std::array<AccessHistory, 4>> split_;
  std::vector<ReadSet> sets_;
  std::vector<u32> free_sets_;
};

}  // namespace jax_fp4::sim

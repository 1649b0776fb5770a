// Races on shared memory, by vector clocks.
//
// An agent is a warp of a cluster; its own clock counts its releases. An access (agent, clock) happens
// before another one if the other's agent has, through barriers and the like, seen that clock. Each
// word of shared memory remembers its last write and the reads since (one epoch, or a set of epochs
// where several agents have read it): Flanagan and Freund, "FastTrack" (PLDI 2009). A word that was
// accessed in parts has a history for each byte instead.
//
// Lanes of one warp count as one agent: races inside a warp are not looked for.
#pragma once

#include <array>
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

// agent << 20 | clock; 0: never. The agents of a cluster are at most 16 * 32.
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

inline constexpr u32 kAtomicAccess = 1u << 31;  // in a program counter: the access was atomic
inline constexpr Epoch kSharedReads = ~0u;      // `read` of a place that several agents have read
inline constexpr Epoch kSplit = ~0u - 1;  // `write` of a word whose bytes have their own histories

struct AccessHistory {
  Epoch write = 0;
  u32 write_pc = 0;
  Epoch read = 0;
  u32 read_pc = 0;  // where read == kSharedReads: number of a ReadSet
                    // where write == kSplit: the whole record is unused
};

// The reads of a place by several agents: by agent, 0 where it has not read.
struct ReadSet {
  std::vector<Epoch> reads;
  std::vector<u32> pcs;
};

struct RaceConflict {
  bool found = false;
  bool earlier_is_write = false;
  Epoch earlier = 0;
  u32 pc = 0;
};

class RaceChecker {
 public:
  explicit RaceChecker(u64 bytes) : words_((bytes + 3) / 4) {}

  // Each records an access of agent (its clocks: `now`) and returns what it races with.
  RaceConflict read(u64 offset, u32 bytes, u32 agent, const VectorClock& now, u32 pc, bool atomic);
  RaceConflict write(u64 offset, u32 bytes, u32 agent, const VectorClock& now, u32 pc, bool atomic);

  // The same for whole words and plain accesses, where nothing can be wrong at first sight. False: not
  // recorded; `read` or `write` must decide.
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
  struct Access {
    u32 agent;
    Epoch epoch;
    const VectorClock& now;
    u32 pc;
    bool atomic;
  };
  template <class F>
  void each_record(u64 offset, u32 bytes, F f);
  void read_record(AccessHistory& record, const Access& access, RaceConflict& conflict);
  void write_record(AccessHistory& record, const Access& access, RaceConflict& conflict);

  std::vector<AccessHistory> words_;
  std::unordered_map<u64, std::array<AccessHistory, 4>> split_;
  std::vector<ReadSet> sets_;
  std::vector<u32> free_sets_;
};

}  // namespace jax_fp4::sim

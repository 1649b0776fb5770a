// Order between the lanes of a warp on shared memory, with Checks::strict.
//
// PTX orders what different lanes of a warp do by barriers only, bar.warp.sync among them. Reported are two accesses of
// one warp to a byte, by different lanes and instructions, one of them a write, with no barrier between at which the lanes
// met. A word remembers the last write and the last reads; of lanes that share a word byte by byte only the latest.
#pragma once

#include <vector>

#include "numerics/base.h"

namespace jax_fp4::sim {

// Who accesses: a warp of a cluster, when its lanes met last (other for each meeting), and where.
struct LaneAccess {
  u32 warp, met, pc;
};

class LaneOrder {
 public:
  explicit LaneOrder(u64 bytes) : words_((bytes + 3) / 4) {}

  struct Conflict {
    bool found = false;
    bool earlier_is_write = false;
    u32 pc = 0;
  };
  // What the access of a lane conflicts with; without a conflict it is recorded.
  Conflict access(u64 offset, u32 bytes, bool writes, u32 lane, const LaneAccess& by);

 private:
  struct Use {
    u32 met = 0, pc = 0;
    u16 warp = 0;
    u8 lane = 0, bytes = 0;  // of the word, a bit each
  };
  struct Word {
    Use write, read;
  };
  std::vector<Word> words_;
};

}  // namespace jax_fp4::sim

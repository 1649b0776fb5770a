// The common access of a whole warp, checked at once: all lanes aligned and inside one memory (this CTA's
// shared memory, one global buffer, local memory, parameters, constants), what they read written before, nobody racing.
// Everything else goes through access() lane by lane, which decides and reports.
#pragma once

#include "sim/machine/core.h"

namespace jax_fp4::sim {

class QuickAccess {
 public:
  // The `bytes` (a power of 2) at address operand 0, whose register is c.src[0], for each lane of the mask. Where
  // that succeeds, the access is recorded and counted, and false otherwise means that no more than a
  // part of it is recorded; to do all of it again by access() gives what access() alone would have given.
  QuickAccess(Warp& warp, const Code& c, u32 mask, u32 bytes, bool writes);
  explicit operator bool() const { return data_ != nullptr; }

  // Lanes outside the mask have the place of one that is inside.
  u8* at(int lane) const { return data_ + offsets_[lane]; }
  // All lanes access, one behind the other.
  bool contiguous() const { return contiguous_; }

 private:
  // Where the memory that the first lane's address names lies; null if it is none of those.
  struct Place {
    u8* data = nullptr;
    u8* written = nullptr;
    u64 base = 0, bytes = 0;
    u32 lane_stride = 0;
    RaceChecker* races = nullptr;
    LaneOrder* lanes = nullptr;
  };
  static Place find(Warp& warp, Space& space, u64 address, bool writes);
  bool find_offsets(const Warp& warp, const Code& c, u32 mask, u32 bytes, u64 base, u64 size);

  u8* data_ = nullptr;
  bool contiguous_ = false;
  u32 offsets_[kLanes];
};

}  // namespace jax_fp4::sim

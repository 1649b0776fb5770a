// Order between the lanes of a warp: one look at each word of an access.
#include "sim/checks/lane_order.h"

#include <algorithm>

namespace jax_fp4::sim {
namespace {

constexpr u8 kSeveral = 32;  // in the place of a lane

}  // namespace

LaneOrder::Conflict LaneOrder::access(u64 offset, u32 bytes, bool writes, u32 lane,
                                      const LaneAccess& by) {
  const u64 end = offset + bytes;
  for (u64 at = offset; at < end; at = (at / 4 + 1) * 4) {
    const u32 first = at % 4, last = static_cast<u32>(std::min<u64>(end - at / 4 * 4, 4));
    const u8 mask = static_cast<u8>((1u << last) - (1u << first));
    Word& word = words_[at / 4];
    const auto same = [&](const Use& use) {
      return use.met == by.met && use.warp == by.warp && (use.bytes & mask) != 0;
    };
    const auto races = [&](const Use& use) {
      return same(use) && use.lane != lane && use.pc != by.pc;
    };
    if (races(word.write)) return {true, true, word.write.pc};
    if (writes && races(word.read)) return {true, false, word.read.pc};
    Use& use = writes ? word.write : word.read;
    const bool several = !writes && same(use) && use.lane != lane;
    use = {by.met, by.pc, static_cast<u16>(by.warp), several ? kSeveral : static_cast<u8>(lane),
           mask};
  }
  return {};
}

}  // namespace jax_fp4::sim

// What the files of the tcgen05 instructions share.
#pragma once

#include "sim/ops/lanes.h"

namespace jax_fp4::sim {

// The other CTA of a pair: ranks that differ in the last bit (PTX ISA 9.7.16.5.1). Clusters of kernels that
// use pairs have an even number of CTAs.
inline Cta& peer_of(const Cta& cta) { return *cta.cluster->ctas[cta.rank ^ 1]; }

// The value that all lanes of the mask have in a register.
inline u32 uniform(Warp& w, const Code& c, u32 mask, u32 slot, const char* what) {
  const In<u32> values(w, slot);
  const int first = std::countr_zero(mask);
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    if (values[lane] == values[first]) continue;
    w.fault(c, lane, FaultKind::argument,
            std::string(what) + " is the same in all lanes; lane " + std::to_string(first) +
                " has " + std::to_string(values[first]) + ", lane " + std::to_string(lane) +
                " has " + std::to_string(values[lane]));
  }
  return values[first];
}

// Each lane issues an operation of its own where one is meant (PTX ISA 9.7.16.5).
inline void warn_of_lanes(Warp& w, const Code& c, u32 mask) {
  if (std::has_single_bit(mask)) return;
  w.launch->warn(c.line, 0, [&] {
    return "issued by " + std::to_string(std::popcount(mask)) +
           " lanes, each of which starts an operation of its own; one thread is to issue it\n  " +
           w.where(c, std::countr_zero(mask));
  });
}

}  // namespace jax_fp4::sim

// What a warp's load or store asks of memory: sectors of global memory, wavefronts of shared memory.
//
// Shared memory has 32 banks of 4 bytes. Lanes are served in groups that together move at most 128 bytes: all 32
// where each moves up to 4, halves of a warp for 8, quarters for 16. In a group a bank gives one word a wavefront, to
// every lane that wants it; a group takes as many wavefronts as its busiest bank has different words. More than one
// for a group are conflicts. Atomics of lanes on one word follow each other.
#pragma once

#include <array>
#include <vector>

#include "sim/machine/core.h"

namespace jax_fp4::sim::costs {

struct Wavefronts {
  u32 all = 0, least = 0;
};

// `addresses` of the lanes of `mask`, each of `bytes` bytes. `merges`: lanes that want one word get it together.
Wavefronts shared_wavefronts(const std::array<u64, kLanes>& addresses, u32 mask, u32 bytes,
                             bool merges = true);

// The numbers of the different sectors of 32 bytes, in order.
void touched_sectors(const std::array<u64, kLanes>& addresses, u32 mask, u32 bytes,
                     std::vector<u64>& sectors);

struct MemoryAccess {
  enum class Kind : u8 { none, load, store, atomic, copy };  // copy: cp.async, global to shared
  Kind kind = Kind::none;
  Space space = Space::generic;  // of the lanes; of a copy's source
  u32 bytes = 0;                 // of a lane
  u32 lanes = 0;
  std::vector<u64> sectors;  // of global memory
  Wavefronts wavefronts;     // of shared memory
};

// How an instruction uses memory, found once for each.
struct AccessForm {
  MemoryAccess::Kind kind = MemoryAccess::Kind::none;
  u32 bytes = 0;
  u32 address_lanes = kAllLanes;  // ldmatrix: the lanes whose addresses count
};
AccessForm access_form(const Form& form, const Code& code);

// The access that an instruction is about to make.
void find_access(const Warp& warp, const Code& code, const AccessForm& form, u32 mask,
                 MemoryAccess& access);

}  // namespace jax_fp4::sim::costs

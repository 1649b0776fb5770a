// What the instructions that access memory share: the space and the vector size that a form names,
// and numbers of a given width.
#pragma once

#include "sim/ops/lanes.h"

namespace jax_fp4::sim {

// Space that the modifiers name.
inline Space space_of(const Form& form) {
  if (form.has("global")) return Space::global;
  if (form.has("shared") || form.has("shared::cta")) return Space::shared;
  if (form.has("shared::cluster")) return Space::shared_cluster;
  if (form.has("local")) return Space::local;
  if (form.has("param") || form.has("param::entry") || form.has("param::func")) return Space::param;
  if (form.has("const")) return Space::constant;
  return Space::generic;
}

inline int vector_of(const Form& form) {
  return form.has("v2") ? 2 : form.has("v4") ? 4 : form.has("v8") ? 8 : 1;
}

// Little-endian numbers of 1, 2, 4 or 8 bytes. (A copy of variable length through a zeroed word costs
// a store-forwarding stall for each lane.)
inline u64 get_bytes(const u8* from, u32 bytes) {
  u16 half;
  u32 word;
  u64 value;
  switch (bytes) {
    case 1: return *from;
    case 2: std::memcpy(&half, from, 2); return half;
    case 4: std::memcpy(&word, from, 4); return word;
    default: std::memcpy(&value, from, 8); return value;
  }
}
inline void put_bytes(u8* to, u64 value, u32 bytes) {
  const u16 half = static_cast<u16>(value);
  const u32 word = static_cast<u32>(value);
  switch (bytes) {
    case 1: *to = static_cast<u8>(value); break;
    case 2: std::memcpy(to, &half, 2); break;
    case 4: std::memcpy(to, &word, 4); break;
    default: std::memcpy(to, &value, 8);
  }
}

}  // namespace jax_fp4::sim

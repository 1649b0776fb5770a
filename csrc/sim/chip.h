// Chips by name ("100a", "sm_120f"): which PTX runs on which, and what one multiprocessor holds.
#pragma once

#include <string>

#include "numerics/base.h"

namespace jax_fp4::sim {

struct Chip {
  int number = 0;      // 100: compute capability 10.0
  char suffix = '\0';  // 'a', 'f' or none
};

// Of a name with or without "sm_". The number is 0 where the name has none.
Chip chip_of(const std::string& name);

// PTX of target `target` runs on `device` (CUDA programming guide, "family-specific features"): plain
// targets on every later chip, f targets on later chips of the same family, a targets on that chip
// only.
bool runs_on(const std::string& target, const std::string& device);

// What a multiprocessor holds (CUDA programming guide, technical specifications by compute capability).
struct ChipLimits {
  u32 shared_bytes;      // of all its CTAs, the KiB that each of them has reserved included
  u32 cta_shared_bytes;  // that one CTA may use
  u32 threads;
};
ChipLimits limits_of(int chip);

}  // namespace jax_fp4::sim

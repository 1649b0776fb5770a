// What tells chips apart.
#include "sim/chip.h"

namespace jax_fp4::sim {

Chip chip_of(const std::string& name) {
  Chip chip;
  for (char c : name) {
    if (c >= '0' && c <= '9') chip.number = chip.number * 10 + (c - '0');
    if (c == 'a' || c == 'f') chip.suffix = c;
  }
  return chip;
}

bool runs_on(const std::string& target, const std::string& device) {
  const Chip needed = chip_of(target), have = chip_of(device);
  if (needed.suffix == 'a') return needed.number == have.number && have.suffix == 'a';
  if (needed.suffix == 'f')
    return have.suffix != '\0' && needed.number / 10 == have.number / 10 &&
           have.number >= needed.number;
  return have.number >= needed.number;
}

ChipLimits limits_of(int chip) {
  if (chip >= 110) return {chip >= 120 ? 102400u : 233472u, chip >= 120 ? 101376u : 232448u, 1536};
  if (chip >= 90) return {233472, 232448, 2048};
  if (chip == 86 || chip == 89) return {102400, 101376, 1536};
  if (chip >= 80) return {167936, 166912, chip == 87 ? 1536u : 2048u};
  return {65536, 65536, 1024};
}

}  // namespace jax_fp4::sim

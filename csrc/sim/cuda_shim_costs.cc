// What the cycle model says of each launch, for programs that cannot ask: a line of JSON in a file.
//
//   {"entry": "k", "counts": {"global": {"load_bytes": 128, ...}, ...}, "timing": {"cycles": 700, ...}}
//
// The names are those of python/jax_fp4/_sim_costs.py, which reads it.
#include <cstdio>
#include <stdexcept>

#include "sim/cuda_shim_state.h"

namespace jax_fp4::sim {
namespace {

std::string json(u64 value) { return std::to_string(value); }
std::string json(u32 value) { return std::to_string(value); }
std::string json(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}
// Names of PTX, instructions and counts hold nothing that would have to be escaped.
template <class T>
std::string json(const std::map<std::string, T>& values) {
  std::string text;
  for (const auto& [name, value] : values)
    text += (text.empty() ? "\"" : ", \"") + name + "\": " + json(value);
  return "{" + text + "}";
}

}  // namespace

void ShimState::append_costs(const std::string& entry, const LaunchReport& report) {
  std::map<std::string, std::string> timing;
  costs::for_each_result(*report.timing,
                         [&](const char* name, const auto& value) { timing[name] = json(value); });
  std::string line =
      "{\"entry\": \"" + entry + "\", \"counts\": " + json(report.costs) + ", \"timing\": {";
  for (const auto& [name, value] : timing)
    line += (line.back() == '{' ? "\"" : ", \"") + name + "\": " + value;
  line += "}}\n";
  std::FILE* file = std::fopen(options.costs.c_str(), "a");
  const bool written = file && std::fwrite(line.data(), 1, line.size(), file) == line.size();
  if (!file || std::fclose(file) != 0 || !written)
    throw std::runtime_error("JAX_FP4_SIM_COSTS: '" + options.costs + "' cannot be written");
}

}  // namespace jax_fp4::sim

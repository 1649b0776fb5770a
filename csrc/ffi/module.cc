// The Python extension `_core`: FFI handlers as capsules, and the CPU level.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "cpu/cpu.h"
#include "cpu/peak.h"
#include "ffi/cpu_handlers.h"

namespace nb = nanobind;
namespace jf = jax_fp4;

namespace {

constexpr std::pair<const char*, jf::cpu::Level> kLevels[] = {
    {"model", jf::cpu::Level::model},
    {"portable", jf::cpu::Level::portable},
    {"avx512", jf::cpu::Level::avx512},
    {"amx", jf::cpu::Level::amx}};

std::string level_name(jf::cpu::Level level) {
  for (const auto& [name, value] : kLevels) {
    if (value == level) return name;
  }
  return "unknown";
}

void force_cpu_level(const std::string& name) {
  if (name.empty()) {
    jf::cpu::unforce_level();
    return;
  }
  for (const auto& [known, level] : kLevels) {
    if (name != known) continue;
    if (jf::cpu::force_level(level)) return;
    throw nb::value_error(("CPU level '" + name + "' is not available here; the highest one is '" +
                           level_name(jf::cpu::best_level()) + "'")
                              .c_str());
  }
  throw nb::value_error(
      ("CPU level '" + name +
       "' is unknown; expected 'model', 'portable', 'avx512', 'amx', or '' for the "
       "best one")
          .c_str());
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Native part of jax_fp4: XLA FFI handlers and the CPU level they run at.";
  m.attr("FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def(
      "cpu_handlers",
      [] {
        nb::dict handlers;
        for (const auto& [target, handler] : jf::ffi::cpu_registrations()) {
          handlers[target] = nb::capsule(reinterpret_cast<void*>(handler));
        }
        return handlers;
      },
      nb::sig("def cpu_handlers() -> dict[str, object]"),
      "XLA FFI handlers of the CPU backend by call target name, as capsules.");
  m.def(
      "cpu_level", [] { return level_name(jf::cpu::level()); },
      "The CPU level in use: 'portable', 'avx512', 'amx', or 'model' when forced.");
  m.def("cpu_peak_flops", &jf::cpu::peak_flops, nb::arg("seconds"),
        "Multiply-accumulate FLOP/s of this core with operands in registers; 0 below AVX-512.");
  m.def(
      "best_cpu_level", [] { return level_name(jf::cpu::best_level()); },
      "The highest CPU level that processor and operating system offer.");
  m.def("force_cpu_level", &force_cpu_level, nb::arg("name"),
        "Use one CPU level for all later calls; '' goes back to the best one. For tests.");
}

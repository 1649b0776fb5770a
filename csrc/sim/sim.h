// The PTX machine from outside: load PTX text, map host memory, launch kernels, read reports.
//
//   Machine machine("100a");
//   const LoadedModule& module = machine.load(ptx);
//   const u64 address = machine.global().map("x", data, bytes, true, true).base;
//   LaunchReport report = machine.launch(module, "kernel", spec);
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sim/costs/costs.h"
#include "sim/machine/core.h"

namespace jax_fp4::sim {

class LoadedModule {
 public:
  LoadedModule() = default;
  LoadedModule(const LoadedModule&) = delete;
  LoadedModule& operator=(const LoadedModule&) = delete;
  const Module& module() const { return *module_; }
  const Program* find(const std::string& entry) const;
  std::vector<std::string> entries() const;
  // A .global variable and its address; null: there is none of the name.
  const Variable* find_global(const std::string& name, u64& address) const;
  Buffer& constants() { return constants_; }

 private:
  friend class Machine;
  std::unique_ptr<Module> module_;
  Placements placements_;
  Buffer constants_;
  std::map<std::string, std::unique_ptr<Program>> programs_;
};

struct LaunchFault {
  std::string kind;  // "race", "out-of-bounds", ...
  u32 line = 0;      // of the PTX text; 0: no single line
  std::string message;
};

struct LaunchReport {
  std::optional<LaunchFault> fault;
  u64 seed = 0;
  u64 instructions = 0;       // of warps
  u64 lane_instructions = 0;  // of lanes whose guard held
  std::map<std::string, u64> by_class;
  std::map<std::string, u64> bytes_read, bytes_written;  // by space
  std::map<u32, u64> by_line;                            // instructions of warps
  u64 trace = 0;  // hash of the schedule: equal seeds give equal traces
  std::vector<std::string> warnings;
  // Where costs were asked for: counts by group and name, and of the cycle model the times.
  std::map<std::string, std::map<std::string, u64>> costs;
  std::optional<costs::Timing::Summary> timing;
  std::vector<costs::Interval> timeline;
  std::vector<costs::CtaPlace> ctas;
};

// One grid of a chain.
struct LaunchRequest {
  LoadedModule* module;
  std::string entry;
  LaunchSpec spec;
};

class Machine {
 public:
  // `sm`: "100a", "103a", "120a", "90", ...; machines of one program may want addresses of their own.
  explicit Machine(std::string sm, u64 global_base = kGlobalBase);
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  // Throws PtxError. The module lives as long as the machine, or until it is unloaded.
  LoadedModule& load(std::string source);
  // Its variables are no longer mapped.
  void unload(LoadedModule& module);
  GlobalMemory& global() { return global_; }
  const std::string& sm() const { return sm_; }
  u32 shared_limit() const;

  // The kernel of a launch, whose cluster is completed from its directives. Throws
  // std::invalid_argument where the launch itself is wrong.
  const Program& prepare(const LoadedModule& module, const std::string& entry,
                         LaunchSpec& spec) const;
  // Throws what prepare() throws; what goes wrong inside is a fault of
  // the report.
  LaunchReport launch(LoadedModule& module, const std::string& entry, LaunchSpec spec);
  // Grids in the order of a stream, each launched with the programmatic stream serialization
  // attribute (machine/chain.h). After a fault the reports hold what was done until then.
  std::vector<LaunchReport> launch_chain(const std::vector<LaunchRequest>& requests);

 private:
  void place_variables(LoadedModule& loaded);

  std::string sm_;
  GlobalMemory global_;
  std::vector<std::unique_ptr<LoadedModule>> modules_;
};

}  // namespace jax_fp4::sim

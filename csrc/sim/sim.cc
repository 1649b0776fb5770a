// The machine's outer side: loading, placing variables, checking a launch, making its report.
#include "sim/sim.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "sim/chip.h"
#include "sim/coverage.h"
#include "sim/machine/chain.h"
#include "sim/ptx/lexer.h"
#include "sim/ptx/parser.h"

namespace jax_fp4::sim {
namespace {

// XLA runs its handlers with subnormals flushed; the machine's arithmetic must not inherit that.
class DefaultFloatingPoint {
 public:
#if defined(__x86_64__)
  DefaultFloatingPoint() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~DefaultFloatingPoint() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

std::string text(const Dim3& d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

void check_launch(const Program& program, const Machine& machine, const LaunchSpec& spec) {
  const Dim3 &grid = spec.grid, &block = spec.block, &cluster = spec.cluster;
  if (grid.count() == 0 || block.count() == 0 || cluster.count() == 0)
    refuse("grid " + text(grid) + ", block " + text(block) + " and cluster " + text(cluster) +
           " must not be empty");
  if (block.count() > 1024)
    refuse("block " + text(block) + " has " + std::to_string(block.count()) +
           " threads; at most 1024 fit into a CTA");
  if (cluster.count() > 16) refuse("cluster " + text(cluster) + " has more than 16 CTAs");
  if (cluster.count() > 1 && chip_of(machine.sm()).number < 90)
    refuse("sm_" + machine.sm() + " has no clusters; they need sm_90");
  if (grid.x % cluster.x || grid.y % cluster.y || grid.z % cluster.z)
    refuse("grid " + text(grid) + " is no multiple of cluster " + text(cluster));
  const auto differs = [](const u32(&want)[3], const Dim3& have) {
    return want[0] != 0 && (want[0] != have.x || want[1] != have.y || want[2] != have.z);
  };
  const auto wanted = [](const u32(&d)[3]) { return text({d[0], d[1], d[2]}); };
  if (differs(program.required_block, block))
    refuse("block " + text(block) + ": '" + program.entry + "' requires " +
           wanted(program.required_block) + " (.reqntid)");
  const u32(&most)[3] = program.max_block;
  if (most[0] != 0 && block.count() > u64{most[0]} * most[1] * most[2])
    refuse("block " + text(block) + ": '" + program.entry + "' allows at most " + wanted(most) +
           " (.maxntid)");
  if (differs(program.required_cluster, cluster))
    refuse("cluster " + text(cluster) + ": '" + program.entry + "' requires " +
           wanted(program.required_cluster) + " (.reqnctapercluster)");
  if (program.cta_group == 2 && cluster.count() % 2 != 0) {
    refuse("cluster " + text(cluster) + ": '" + program.entry +
           "' uses .cta_group::2, which needs clusters with an even number of CTAs");
  }
  const u64 shared = program.static_shared_bytes + u64{spec.dynamic_shared};
  if (shared > machine.shared_limit())
    refuse("'" + program.entry + "' needs " + std::to_string(shared) +
           " bytes of shared memory; a CTA of sm_" + machine.sm() + " has " +
           std::to_string(machine.shared_limit()));
  if (spec.parameters.size() != program.parameter_bytes)
    refuse("'" + program.entry + "' takes " + std::to_string(program.parameter_bytes) +
           " bytes of parameters, got " + std::to_string(spec.parameters.size()));
}

void check_costs(LaunchSpec& spec, std::size_t grids) {
  if (!spec.costs.data) spec.checks.races = spec.checks.uninitialized = false;
  if (!spec.costs.time) return;
  if (grids > 1) refuse("the cycle model takes one grid at a time");
  if (!costs::constants_of(static_cast<int>(spec.chip)))
    refuse("the cycle model has no constants for sm_" + std::to_string(spec.chip) +
           "; it knows 100, 103, 120 and 121");
}

LaunchReport make_report(const Launch& launch) {
  LaunchReport report;
  report.seed = launch.spec.seed;
  report.trace = launch.trace;
  report.warnings = launch.warnings;
  for (std::size_t pc = 0; pc < launch.counts.size(); ++pc) {
    if (launch.counts[pc] == 0) continue;
    report.instructions += launch.counts[pc];
    report.lane_instructions += launch.lane_counts[pc];
    const Row& row = *launch.program->forms[pc].row;
    report.by_class[std::string(name_of_class(row.op_class))] += launch.counts[pc];
    report.by_line[launch.program->code[pc].line] += launch.counts[pc];
  }
  if (launch.costs) {
    report.costs = launch.costs->counters().table();
    if (const costs::Timing* timing = launch.costs->timing()) {
      report.timing = timing->summary();
      report.timeline = timing->intervals();
      report.ctas = timing->ctas();
    }
  }
  for (int space = 0; space < 8; ++space) {
    const std::string name(name_of_space(static_cast<Space>(space)));
    if (launch.bytes_read[space]) report.bytes_read[name] = launch.bytes_read[space];
    if (launch.bytes_written[space]) report.bytes_written[name] = launch.bytes_written[space];
  }
  return report;
}

}  // namespace

const Program* LoadedModule::find(const std::string& entry) const {
  const auto found = programs_.find(entry);
  return found == programs_.end() ? nullptr : found->second.get();
}

const Variable* LoadedModule::find_global(const std::string& name, u64& address) const {
  const std::vector<Variable>& variables = module_->variables;
  for (std::size_t i = 0; i < variables.size(); ++i) {
    const Variable& v = variables[i];
    if (v.name != name || v.space != Space::global) continue;
    address = placements_[i].address;
    return &v;
  }
  return nullptr;
}

std::vector<std::string> LoadedModule::entries() const {
  std::vector<std::string> names;
  for (const auto& [name, program] : programs_) names.push_back(name);
  return names;
}

Machine::Machine(std::string sm, u64 global_base) : sm_(std::move(sm)), global_(global_base) {
  if (sm_.starts_with("sm_")) sm_ = sm_.substr(3);
  const int number = chip_of(sm_).number;
  if (number < 50 || number > 130)
    refuse("sm '" + sm_ + "' is no chip that is modelled; expected for example '100a' or '120a'");
}

u32 Machine::shared_limit() const { return limits_of(chip_of(sm_).number).cta_shared_bytes; }

void Machine::place_variables(LoadedModule& loaded) {
  const std::vector<Variable>& variables = loaded.module_->variables;
  loaded.placements_.resize(variables.size());
  u64 constant_bytes = 0;
  std::vector<u8*> bytes(variables.size(), nullptr);
  for (std::size_t i = 0; i < variables.size(); ++i) {
    const Variable& v = variables[i];
    if (v.space == Space::constant) {
      constant_bytes = static_cast<u64>(round_up(static_cast<i64>(constant_bytes), v.align));
      loaded.placements_[i] = {constant_bytes, true};
      constant_bytes += v.bytes;
    } else if (v.space == Space::global) {
      Buffer& buffer = global_.allocate(v.name, v.bytes, true);
      loaded.placements_[i] = {buffer.base, true};
      bytes[i] = buffer.data;
    }
  }
  loaded.constants_.bytes = constant_bytes;
  loaded.constants_.storage.assign(constant_bytes, 0);
  loaded.constants_.data = loaded.constants_.storage.data();
  for (std::size_t i = 0; i < variables.size(); ++i) {
    const Variable& v = variables[i];
    if (v.space == Space::constant)
      bytes[i] = loaded.constants_.data + loaded.placements_[i].address;
    if (!bytes[i] || v.initial.empty()) continue;
    std::memcpy(bytes[i], v.initial.data(), v.initial.size());
    for (const Relocation& relocation : v.relocations) {
      const auto target =
          std::find_if(variables.begin(), variables.end(),
                       [&](const Variable& other) { return other.name == relocation.symbol; });
      if (target == variables.end())
        throw PtxError(loaded.module_->source, v.line,
                       "the initialiser names '" + relocation.symbol + "', which is not declared");
      const std::size_t index = static_cast<std::size_t>(target - variables.begin());
      u64 address = loaded.placements_[index].address + static_cast<u64>(relocation.addend);
      if (relocation.generic && target->space == Space::constant) address += kConstantWindow;
      std::memcpy(bytes[i] + relocation.offset, &address, relocation.bytes);
    }
  }
}

LoadedModule& Machine::load(std::string source) {
  auto loaded = std::make_unique<LoadedModule>();
  loaded->module_ = parse(std::move(source));
  const Module& module = *loaded->module_;
  if (!runs_on(module.target, sm_))
    throw PtxError(
        module.source, 1,
        "the module is for " + module.target + ", which a device sm_" + sm_ + " does not run");
  place_variables(*loaded);
  for (const Function& f : module.functions)
    if (f.entry && f.defined) loaded->programs_[f.name] = lower(module, f, loaded->placements_);
  modules_.push_back(std::move(loaded));
  return *modules_.back();
}

void Machine::unload(LoadedModule& module) {
  const std::vector<Variable>& variables = module.module_->variables;
  for (std::size_t i = 0; i < variables.size(); ++i)
    if (variables[i].space == Space::global) global_.unmap(module.placements_[i].address);
  std::erase_if(modules_, [&](const auto& loaded) { return loaded.get() == &module; });
}

const Program& Machine::prepare(const LoadedModule& module, const std::string& entry,
                                LaunchSpec& spec) const {
  const Program* program = module.find(entry);
  if (!program) {
    std::string known;
    for (const std::string& name : module.entries()) known += (known.empty() ? "" : ", ") + name;
    refuse("entry '" + entry + "' is not in the module; it has: " + known);
  }
  if (program->required_cluster[0] != 0 && spec.cluster.count() == 1)
    spec.cluster = {program->required_cluster[0], program->required_cluster[1],
                    program->required_cluster[2]};
  check_launch(*program, *this, spec);
  return *program;
}

LaunchReport Machine::launch(LoadedModule& module, const std::string& entry, LaunchSpec spec) {
  return launch_chain({{&module, entry, std::move(spec)}}).front();
}

std::vector<LaunchReport> Machine::launch_chain(const std::vector<LaunchRequest>& requests) {
  std::vector<std::unique_ptr<Launch>> launches;
  std::vector<Launch*> grids;
  for (const LaunchRequest& request : requests) {
    auto launch = std::make_unique<Launch>();
    launch->spec = request.spec;
    launch->spec.chip = static_cast<u32>(chip_of(sm_).number);
    launch->program = &prepare(*request.module, request.entry, launch->spec);
    check_costs(launch->spec, requests.size());
    launch->global = &global_;
    launch->constant = &request.module->constants();
    grids.push_back(launch.get());
    launches.push_back(std::move(launch));
  }
  std::optional<LaunchFault> fault;
  const Launch* faulty = nullptr;
  {
    const DefaultFloatingPoint guard;
    try {
      Chain(grids).run();
    } catch (const Fault& f) {
      fault = LaunchFault{std::string(name_of_fault(f.kind)), f.line, f.what()};
      faulty = f.launch;
    }
  }
  std::vector<LaunchReport> reports;
  for (const auto& launch : launches) {
    if (launch->started) record_executed(*launch);
    reports.push_back(make_report(*launch));
    if (launch.get() == faulty || (fault && !faulty && launch == launches.front()))
      reports.back().fault = fault;
  }
  return reports;
}

}  // namespace jax_fp4::sim

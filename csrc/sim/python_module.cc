// The Python extension `_sim`: the machine for python/jax_fp4/sim.py, which is its only user.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "sim/coverage.h"
#include "sim/ptx/lexer.h"
#include "sim/sim.h"
#include "sim/tensor_map.h"

namespace nb = nanobind;
namespace sim = jax_fp4::sim;

namespace {

using Size = std::tuple<jax_fp4::u32, jax_fp4::u32, jax_fp4::u32>;

sim::Dim3 dim3(const Size& size) {
  return {std::get<0>(size), std::get<1>(size), std::get<2>(size)};
}

// (name, type, offset, bytes, is_array) of each parameter.
nb::list parameters(const sim::LoadedModule& module, const std::string& entry) {
  const sim::Program* program = module.find(entry);
  if (!program) throw nb::key_error(entry.c_str());
  nb::list result;
  for (const sim::ParameterLayout& p : program->parameters) {
    result.append(nb::make_tuple(p.name, std::string(sim::name_of_type(p.type)), p.offset, p.bytes,
                                 p.is_array));
  }
  return result;
}

// The cycle model's results, or None. Intervals: (track, CTA, warp, line, begin, end, name).
nb::object timing(const sim::LaunchReport& report) {
  if (!report.timing) return nb::none();
  nb::dict d;
  sim::costs::for_each_result(*report.timing,
                              [&](const char* name, const auto& value) { d[name] = value; });
  constexpr const char* kTracks[] = {"warp",        "wait",    "tensor",
                                     "tensor copy", "copy in", "copy out"};
  nb::list intervals, ctas;
  for (const sim::costs::Interval& i : report.timeline) {
    intervals.append(nb::make_tuple(kTracks[static_cast<int>(i.track)], i.cta, i.warp, i.line,
                                    i.begin, i.end, std::string(i.name)));
  }
  for (const sim::costs::CtaPlace& cta : report.ctas)
    ctas.append(
        nb::make_tuple(cta.index[0], cta.index[1], cta.index[2], cta.sm, cta.begin, cta.end));
  d["intervals"] = intervals;
  d["ctas"] = ctas;
  return d;
}

nb::dict as_dict(const sim::LaunchReport& report) {
  nb::dict d;
  if (report.fault) {
    d["fault"] = nb::make_tuple(report.fault->kind, report.fault->line, report.fault->message);
  } else {
    d["fault"] = nb::none();
  }
  d["seed"] = report.seed;
  d["instructions"] = report.instructions;
  d["lane_instructions"] = report.lane_instructions;
  d["by_class"] = report.by_class;
  d["bytes_read"] = report.bytes_read;
  d["bytes_written"] = report.bytes_written;
  d["by_line"] = report.by_line;
  d["trace"] = report.trace;
  d["warnings"] = report.warnings;
  d["costs"] = report.costs;
  d["timing"] = timing(report);
  return d;
}

// (count, time, timeline, data, SMs, CTAs of an SM): CostOptions.
using Costs = std::tuple<bool, bool, bool, bool, jax_fp4::u32, jax_fp4::u32>;

// (module, entry, grid, block, cluster, dynamic shared memory, parameters, seed) of a grid.
using Request = std::tuple<sim::LoadedModule*, std::string, Size, Size, Size, jax_fp4::u32,
                           nb::bytes, jax_fp4::u64>;

nb::list launch(sim::Machine& machine, const std::vector<Request>& grids,
                jax_fp4::u64 max_instructions, bool races, bool uninitialized, bool strict,
                const std::string& mma, const Costs& costs, bool quick,
                jax_fp4::u32 resident_clusters) {
  std::vector<sim::LaunchRequest> requests;
  for (const auto& [module, entry, grid, block, cluster, shared, parameters, seed] : grids) {
    sim::LaunchSpec spec;
    spec.grid = dim3(grid);
    spec.block = dim3(block);
    spec.cluster = dim3(cluster);
    spec.dynamic_shared = shared;
    const auto* bytes = reinterpret_cast<const jax_fp4::u8*>(parameters.c_str());
    spec.parameters.assign(bytes, bytes + parameters.size());
    spec.seed = seed;
    spec.max_instructions = max_instructions;
    spec.checks = {races, uninitialized, strict};
    spec.mma = mma == "exact"       ? jax_fp4::MmaSum::exact
               : mma == "f32-chain" ? jax_fp4::MmaSum::f32_chain
                                    : jax_fp4::MmaSum::model;
    spec.quick = quick;
    if (resident_clusters != 0) spec.resident_clusters = resident_clusters;
    const auto& [count, time, timeline, data, sms, ctas_per_sm] = costs;
    spec.costs = {count || time, time, timeline, data, sms, ctas_per_sm};
    requests.push_back({module, entry, std::move(spec)});
  }
  std::vector<sim::LaunchReport> reports;
  {
    nb::gil_scoped_release release;
    reports = machine.launch_chain(requests);
  }
  nb::list result;
  for (const sim::LaunchReport& report : reports) result.append(as_dict(report));
  return result;
}

// Tensor map of `rank` dimensions; `strides` are those of dimensions 1 and up.
nb::bytes tensor_map(jax_fp4::u64 address, jax_fp4::u32 data_type,
                     const std::vector<jax_fp4::u64>& dims,
                     const std::vector<jax_fp4::u64>& strides, const std::vector<jax_fp4::u32>& box,
                     const std::vector<jax_fp4::u32>& element_strides, jax_fp4::u32 interleave,
                     jax_fp4::u32 swizzle, jax_fp4::u32 l2_promotion, jax_fp4::u32 oob_fill) {
  const std::size_t rank = dims.size();
  if (rank > sim::kMaxTensorRank)
    throw std::invalid_argument("tensorRank: expected 1 to 5, got " + std::to_string(rank));
  if (strides.size() + 1 != rank || box.size() != rank || element_strides.size() != rank)
    throw std::invalid_argument("box and element_strides need a number for each of the " +
                                std::to_string(rank) +
                                " dimensions, strides one for each but the first");
  sim::TensorMap map;
  map.data_type = data_type;
  map.rank = static_cast<jax_fp4::u32>(rank);
  map.address = address;
  for (std::size_t d = 0; d < rank; ++d) {
    map.dims[d] = dims[d];
    map.strides[d] = d > 0 ? strides[d - 1] : sim::element_bits(data_type) / 8;
    map.box[d] = box[d];
    map.element_strides[d] = element_strides[d];
  }
  map.interleave = interleave;
  map.swizzle = swizzle;
  map.l2_promotion = l2_promotion;
  map.oob_fill = oob_fill;
  if (const std::string wrong = sim::check(map); !wrong.empty()) throw std::invalid_argument(wrong);
  jax_fp4::u8 bytes[sim::kTensorMapBytes];
  sim::encode(map, bytes);
  return nb::bytes(reinterpret_cast<const char*>(bytes), sizeof bytes);
}

}  // namespace

NB_MODULE(_sim, m) {
  m.doc() = "The PTX machine; see jax_fp4.sim.";
  nb::class_<sim::LoadedModule>(m, "Module")
      .def("entries", &sim::LoadedModule::entries)
      .def("parameters", &parameters, nb::arg("entry"));
  nb::class_<sim::Machine>(m, "Machine")
      .def(nb::init<std::string>(), nb::arg("sm"))
      .def("load", &sim::Machine::load, nb::arg("source"), nb::rv_policy::reference_internal)
      .def(
          "map",
          [](sim::Machine& machine, const std::string& name, std::uintptr_t data,
             jax_fp4::u64 bytes, bool writable, bool initialized) {
            auto* host = reinterpret_cast<jax_fp4::u8*>(data);
            return machine.global().map(name, host, bytes, writable, initialized).base;
          },
          nb::arg("name"), nb::arg("data"), nb::arg("bytes"), nb::arg("writable"),
          nb::arg("initialized"))
      .def(
          "unmap",
          [](sim::Machine& machine, jax_fp4::u64 address) { machine.global().unmap(address); },
          nb::arg("address"))
      .def("launch", &launch, nb::arg("grids"), nb::arg("max_instructions"), nb::arg("races"),
           nb::arg("uninitialized"), nb::arg("strict"), nb::arg("mma"),
           nb::arg("costs") = Costs{false, false, false, true, 0, 0}, nb::arg("quick") = true,
           nb::arg("resident_clusters") = 0);
  m.def("tensor_map", &tensor_map, nb::arg("address"), nb::arg("data_type"), nb::arg("dims"),
        nb::arg("strides"), nb::arg("box"), nb::arg("element_strides"), nb::arg("interleave"),
        nb::arg("swizzle"), nb::arg("l2_promotion"), nb::arg("oob_fill"));
  m.def("count_forms", &sim::count_forms);
  m.def("unreached_forms", [] {
    std::vector<std::tuple<std::string, std::string, std::string, std::string>> result;
    for (const sim::InstructionForm& f : sim::unreached_forms())
      result.emplace_back(f.opcode, f.modifiers, f.operands, f.alternative);
    return result;
  });
}

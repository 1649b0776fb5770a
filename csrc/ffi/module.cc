// The Python extension `_core`: FFI handlers as capsules, and the CPU level.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "compile/images.h"
#include "cpu/cpu.h"
#include "cpu/peak.h"
#include "cpu/search.h"
#include "cpu/squares.h"
#include "ffi/attributes.h"
#include "ffi/cpu_handlers.h"
#include "ffi/device_handlers.h"
#include "plan/gemm.h"

namespace nb = nanobind;
namespace jf = jax_fp4;

namespace {

constexpr std::pair<const char*, jf::cpu::Level> kLevels[] = {
    {"model", jf::cpu::Level::model},
    {"portable", jf::cpu::Level::portable},
    {"avx2", jf::cpu::Level::avx2},
    {"avx512", jf::cpu::Level::avx512},
    {"avx512_bf16", jf::cpu::Level::avx512_bf16},
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
       "' is unknown; expected 'model', 'portable', 'avx2', 'avx512', 'avx512_bf16', 'amx', or '' "
       "for the best one")
          .c_str());
}

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ReadBytes =
    nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

jf::cpu::Dtype dtype_of(const std::string& name) {
  if (name == "float32") return jf::cpu::Dtype::f32;
  if (name == "bfloat16") return jf::cpu::Dtype::bf16;
  if (name == "float16") return jf::cpu::Dtype::f16;
  throw nb::value_error("dtype is none of float32, bfloat16, float16");
}

template <class Array>
bool has_shape(const Array& array, std::int64_t rows, std::int64_t bytes) {
  return static_cast<std::int64_t>(array.shape(0)) == rows &&
         static_cast<std::int64_t>(array.shape(1)) == bytes;
}

void search_nvfp4(ReadBytes x, const std::string& dtype, float amax, Bytes scales, Bytes values) {
  const jf::cpu::Dtype kind = dtype_of(dtype);
  const auto rows = static_cast<std::int64_t>(scales.shape(0));
  const auto length = static_cast<std::int64_t>(scales.shape(1)) * 16;
  if (!has_shape(x, rows, length * jf::cpu::dtype_bytes(kind)) ||
      !has_shape(values, rows, jf::row_bytes(jf::Element::e2m1, length)))
    throw nb::value_error("shapes of x, scales and values do not go together");
  const nb::gil_scoped_release released;
  jf::cpu::search_nvfp4(kind, x.data(), rows, length, amax, scales.data(), values.data());
}

std::pair<double, double> squares(ReadBytes x, const std::string& dtype, const std::string& format,
                                  ReadBytes values, ReadBytes scales, float global) {
  const jf::cpu::Dtype kind = dtype_of(dtype);
  jf::ffi::Fields fields(format);
  const jf::Format target = jf::ffi::parse_format(fields);
  fields.finish();
  const auto rows = static_cast<std::int64_t>(scales.shape(0));
  const auto length = static_cast<std::int64_t>(scales.shape(1)) * target.block;
  if (!has_shape(x, rows, length * jf::cpu::dtype_bytes(kind)) ||
      !has_shape(values, rows, length * jf::minifloat(target.element).bits() / 8))
    throw nb::value_error("shapes of x, scales and values do not go together");
  const nb::gil_scoped_release released;
  const auto sums =
      jf::cpu::squares(kind, x.data(), rows, length, target, values.data(), scales.data(), global);
  return {sums.error, sums.norm};
}

// {target: {stage: handler}}
nb::dict handlers(const std::vector<jf::ffi::Registration>& registrations) {
  nb::dict result;
  for (const auto& [target, execute, initialize] : registrations) {
    nb::dict stages;
    stages["execute"] = nb::capsule(reinterpret_cast<void*>(execute));
    if (initialize != nullptr)
      stages["initialize"] = nb::capsule(reinterpret_cast<void*>(initialize));
    result[target] = stages;
  }
  return result;
}

jf::plan::GemmShape gemm_shape(const std::string& a, const std::string& b, std::int64_t batch,
                               std::int64_t m, std::int64_t n, std::int64_t k, bool a_batched,
                               bool b_batched, const std::string& out_dtype,
                               const std::string& grouping) {
  const auto operand = [](const std::string& attribute, bool batched) {
    jf::ffi::Fields fields(attribute);
    jf::plan::GemmOperand result;
    result.format = jf::ffi::parse_format(fields);
    result.layout = jf::ffi::parse_layout(fields);
    result.batched = batched;
    fields.finish();
    return result;
  };
  jf::plan::GemmShape shape{batch, m, n, k, operand(a, a_batched), operand(b, b_batched)};
  if (out_dtype == "bfloat16")
    shape.out = jf::Dtype::bf16;
  else if (out_dtype == "float16")
    shape.out = jf::Dtype::f16;
  else if (out_dtype != "float32")
    throw nb::value_error("out_dtype is none of float32, bfloat16, float16");
  if (grouping == "rows")
    shape.grouping = jf::plan::Grouping::rows;
  else if (grouping == "k")
    shape.grouping = jf::plan::Grouping::k;
  else if (!grouping.empty())
    throw nb::value_error("grouping is none of '', 'rows', 'k'");
  return shape;
}

nb::dict plan_gemm(const std::string& a, const std::string& b, std::int64_t batch, std::int64_t m,
                   std::int64_t n, std::int64_t k, bool a_batched, bool b_batched,
                   const std::string& out_dtype, const std::string& grouping, int chip,
                   unsigned multiprocessors) {
  const auto shape = gemm_shape(a, b, batch, m, n, k, a_batched, b_batched, out_dtype, grouping);
  const jf::u64 workspace = jf::plan::gemm_workspace(shape);
  const auto plan = jf::plan::plan_gemm(shape, {chip, multiprocessors}, workspace);
  nb::dict result;
  result["kernel"] = plan.kernel;
  result["exchanged"] = plan.exchanged;
  result["splits"] = plan.splits;
  result["split_k"] = plan.kernel.empty() ? 0 : plan.split_steps * plan.tile.step_k();
  result["workspace_bytes"] = plan.workspace_bytes();
  result["predicted_cycles"] = plan.predicted_cycles;
  result["text"] = describe(plan, shape);
  return result;
}

std::vector<std::pair<std::string, std::string>> kernel_images() {
  std::vector<std::pair<std::string, std::string>> result;
  const jf::ImageTable table = jf::images();
  for (std::size_t i = 0; i < table.count; ++i) {
    const jf::ImageEntry& image = table.entries[i];
    result.emplace_back(
        image.kernel,
        std::string(image.kind == jf::ImageKind::cubin ? "cubin sm_" : "PTX sm_") + image.target);
  }
  return result;
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Native part of jax_fp4: XLA FFI handlers and the CPU level they run at.";
  m.attr("FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def(
      "cpu_handlers", [] { return handlers(jf::ffi::cpu_registrations()); },
      nb::sig("def cpu_handlers() -> dict[str, dict[str, object]]"),
      "XLA FFI handlers of the CPU backend by call target name and stage, as capsules.");
  m.def(
      "cuda_handlers", [] { return handlers(jf::ffi::cuda_registrations()); },
      nb::sig("def cuda_handlers() -> dict[str, dict[str, object]]"),
      "Those of GPUs, which need a driver only when they run.");
  m.def(
      "sim_handlers", [] { return handlers(jf::ffi::sim_registrations()); },
      nb::sig("def sim_handlers() -> dict[str, dict[str, object]]"),
      "Those of GPUs over the simulated driver, for the CPU platform.");
  m.def(
      "gemm_workspace",
      [](const std::string& a, const std::string& b, std::int64_t batch, std::int64_t mm,
         std::int64_t n, std::int64_t k, bool a_batched, bool b_batched,
         const std::string& out_dtype, const std::string& grouping) {
        return jf::plan::gemm_workspace(
            gemm_shape(a, b, batch, mm, n, k, a_batched, b_batched, out_dtype, grouping));
      },
      nb::arg("a"), nb::arg("b"), nb::arg("batch"), nb::arg("m"), nb::arg("n"), nb::arg("k"),
      nb::arg("a_batched"), nb::arg("b_batched"), nb::arg("out_dtype"), nb::arg("grouping"),
      "Bytes of the result `workspace` of a product on a GPU; a and b are operand attributes.");
  m.def(
      "plan_gemm", &plan_gemm, nb::arg("a"), nb::arg("b"), nb::arg("batch"), nb::arg("m"),
      nb::arg("n"), nb::arg("k"), nb::arg("a_batched"), nb::arg("b_batched"), nb::arg("out_dtype"),
      nb::arg("grouping"), nb::arg("chip"), nb::arg("multiprocessors"),
      nb::sig("def plan_gemm(a: str, b: str, batch: int, m: int, n: int, k: int, a_batched: bool, "
              "b_batched: bool, out_dtype: str, grouping: str, chip: int, multiprocessors: int) -> "
              "dict[str, object]"),
      "What runs on a GPU of compute capability `chip` (100 for 10.0): csrc/plan.");
  m.def("kernel_images", &kernel_images, "(kernel, image) for every image of this build.");
  m.def("launch_counts", &jf::ffi::launch_counts, "Launches in this process, by kernel.");
  m.def("reset_sim_driver", &jf::ffi::reset_sim_driver, nb::arg("devices"), nb::arg("seed"),
        "A new simulated driver; devices is a list such as '100a,103a'.");
  m.def("fail_sim_driver", &jf::ffi::fail_sim_driver, nb::arg("function"), nb::arg("nth"),
        nb::arg("error"), "The nth call of a driver function fails (0: every call). For tests.");
  m.def("sim_driver_reports", &jf::ffi::sim_driver_reports,
        "Reports of faults and warnings of the simulated driver since its reset.");
  m.def(
      "cpu_level", [] { return level_name(jf::cpu::level()); },
      "The CPU level in use: 'portable', 'avx2', 'avx512', 'avx512_bf16', 'amx', or 'model'.");
  m.def("cpu_peak_flops", &jf::cpu::peak_flops, nb::arg("seconds"),
        "Multiply-accumulate FLOP/s of this core with operands in registers; 0 below AVX2.");
  m.def("search_nvfp4", &search_nvfp4, nb::arg("x"), nb::arg("dtype"), nb::arg("amax"),
        nb::arg("scales"), nb::arg("values"),
        nb::sig("def search_nvfp4(x: object, dtype: str, amax: float, scales: object, "
                "values: object) -> None"),
        "Rows of bytes (uint8): replaces scales by the best ones, and writes their codes.");
  m.def("squares", &squares, nb::arg("x"), nb::arg("dtype"), nb::arg("format"), nb::arg("values"),
        nb::arg("scales"), nb::arg("global_scale"),
        nb::sig("def squares(x: object, dtype: str, format: str, values: object, scales: object, "
                "global_scale: float) -> tuple[float, float]"),
        "Sums of (value - x)**2 and of x**2, of rows of bytes (uint8).");
  m.def(
      "best_cpu_level", [] { return level_name(jf::cpu::best_level()); },
      "The highest CPU level that processor and operating system offer.");
  m.def("force_cpu_level", &force_cpu_level, nb::arg("name"),
        "Use one CPU level for all later calls; '' goes back to the best one. For tests.");
}

#include "ffi/device_handlers.h"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/device_places.h"
#include "ffi/operands.h"
#include "plan/gemm.h"
#include "plan/quantize.h"

namespace jax_fp4::ffi {
namespace {

using cuda::CUstream;
using cuda::Launcher;

// ---- Launches are counted -------------------------------------------------------------------------

struct LaunchCounter {
  std::mutex mutex;
  std::map<std::string, unsigned long long, std::less<>> launches;
};

LaunchCounter& launch_counter() {
  static LaunchCounter counter;
  return counter;
}

template <class Place>
void run(Place& place, const plan::Steps& steps) {
  place.run(steps);
  const std::lock_guard lock(launch_counter().mutex);
  for (const plan::Step& step : steps)
    if (const auto* launch = std::get_if<plan::Launch>(&step))
      ++launch_counter().launches[launch->kernel];
}

// ---- Operands as parameters of kernels ------------------------------------------------------------

// The three lists of input types are in the same order.
static_assert(static_cast<int>(cpu::Dtype::f32) == 0 && static_cast<int>(cpu::Dtype::bf16) == 1 &&
              static_cast<int>(cpu::Dtype::f16) == 2);
static_assert(static_cast<int>(InputType::bf16) == 1 && static_cast<int>(InputType::f16) == 2);
static_assert(static_cast<int>(Dtype::bf16) == 1 && static_cast<int>(Dtype::f16) == 2);
InputType input_type(cpu::Dtype type) { return static_cast<InputType>(type); }
Dtype dtype(cpu::Dtype type) { return static_cast<Dtype>(type); }

u32 size(std::int64_t n, const char* what) {
  if (n < 0 || n > 0x7FFF'FFFF)
    throw std::invalid_argument(std::string("jax_fp4: ") + what + " has to be below 2^31, got " +
                                std::to_string(n));
  return static_cast<u32>(n);
}

template <class Place>
CopyParams copy_params(const CopyArrays& arrays, const Place& place) {
  const cpu::Copy& copy = arrays.copy;
  CopyParams p{};
  p.values = place.at(copy.values);
  p.scales = place.at(copy.scales);
  p.global_scale = place.at(copy.global_scale);
  p.amax = place.at(copy.amax);
  p.seed = place.at(arrays.seeds);
  p.stream = copy.stream;
  p.signs = copy.signs;
  p.stochastic = copy.stochastic;
  p.hadamard = copy.hadamard;
  p.tiles = copy.tiles;
  p.four_over_six = copy.four_over_six;
  p.rule = copy.rule;
  p.layout = copy.layout;
  return p;
}

template <class Place>
plan::GemmArrays::Quantized quantized(const Place& place, const cpu::Operand& o) {
  return {place.at(o.values), place.at(o.scales), place.at(o.global_scale)};
}

plan::GemmShape shape_of(const cpu::GemmProblem& p) {
  const auto operand = [](const cpu::Operand& o) {
    return plan::GemmOperand{o.format, o.layout, o.batch != 1};
  };
  return {p.batch, p.m, p.n, p.k, operand(p.a), operand(p.b), dtype(p.out_dtype)};
}

// ---- Handlers ---------------------------------------------------------------------------------------

template <class Place>
xf::Error amax(typename Place::Handle handle, xf::RemainingArgs args, xf::RemainingRets rets,
               bool rotate, std::string_view axis, std::int64_t signs, bool fingerprint,
               std::int64_t logical_rows, std::int64_t logical_cols) {
  return guarded([&] {
    Operands operands(args);
    Results results(rets);
    const InputArrays x(operands, logical_rows, logical_cols);
    operands.finish();
    const AmaxArrays arrays(x, results, rotate, axis, signs, fingerprint);
    results.finish();
    Place place(handle, args, rets);
    AmaxParams p{};
    p.x = place.at(x.x.buffer.untyped_data());
    p.origin = place.at(x.origin.words());
    p.logical_rows = logical_rows;
    p.logical_cols = logical_cols;
    p.leads = size(x.leads(), "the number of leading dimensions");
    p.matrices = size(x.count() * x.leads(), "the number of matrices");
    p.rows = size(x.rows(), "the number of rows");
    p.cols = size(x.cols(), "the number of columns");
    p.input = input_type(x.x.dtype());
    p.signs = arrays.request.signs;
    p.amax = place.at(arrays.request.amax);
    p.rotated = place.at(arrays.request.amax_rotated);
    p.fingerprint = place.at(arrays.request.fingerprint);
    run(place, plan::amax(p, arrays.request.axis == cpu::Axis::rows, place.chip()));
    place.finish();
  });
}

template <class Place>
xf::Error quantize(typename Place::Handle handle, xf::RemainingArgs args, xf::RemainingRets rets,
                   std::string_view first, std::string_view second, std::int64_t logical_rows,
                   std::int64_t logical_cols) {
  return guarded([&] {
    Operands operands(args);
    Results results(rets);
    const InputArrays x(operands, logical_rows, logical_cols);
    const std::vector<CopyArrays> copies = parse_copies(first, second, x, operands, results);
    operands.finish();
    results.finish();
    Place place(handle, args, rets);
    QuantizeParams p{};
    p.x = place.at(x.x.buffer.untyped_data());
    p.origin = place.at(x.origin.words());
    p.logical_rows = logical_rows;
    p.logical_cols = logical_cols;
    p.leads = size(x.leads(), "the number of leading dimensions");
    p.matrices = size(x.count() * x.leads(), "the number of matrices");
    p.rows = size(x.rows(), "the number of rows");
    p.cols = size(x.cols(), "the number of columns");
    p.input = input_type(x.x.dtype());
    // One pass makes copies of one format.
    const bool together = copies.size() == 1 || copies[0].copy.format == copies[1].copy.format;
    for (std::size_t i = 0; i < copies.size(); ++i) {
      const CopyArrays& copy = copies[i];
      p.format = copy.copy.format;
      (copy.copy.axis == cpu::Axis::cols ? p.row : p.col) = copy_params(copy, place);
      if (together && i + 1 < copies.size()) continue;
      run(place, plan::quantize(p));
      p.row = p.col = {};
    }
    place.finish();
  });
}

template <class Place>
xf::Error dequantize(typename Place::Handle handle, xf::RemainingArgs args, xf::RemainingRets rets,
                     std::string_view operand, std::int64_t k) {
  return guarded([&] {
    Operands operands(args);
    Results results(rets);
    const QuantizedArrays q("q", operand, k, operands);
    operands.finish();
    const Array out = results.next("x");
    results.finish();
    out.expect_shape({q.batch, q.rows, k});
    Place place(handle, args, rets);
    DequantizeParams p{};
    p.values = place.at(q.values);
    p.scales = place.at(q.scales);
    p.global_scale = place.at(q.global_scale);
    p.out = place.at(out.buffer.untyped_data());
    p.matrices = size(q.batch, "the number of matrices");
    p.rows = size(q.rows, "the number of rows");
    p.k = size(k, "K");
    p.format = q.format;
    p.layout = q.layout;
    p.output = input_type(out.dtype());
    run(place, plan::dequantize(p));
    place.finish();
  });
}

template <class Place>
xf::Error scaled_matmul(typename Place::Handle handle, xf::RemainingArgs args,
                        xf::RemainingRets rets, std::string_view a, std::string_view b,
                        std::int64_t k, bool has_bias, bool has_accumulate) {
  return guarded([&] {
    Operands operands(args);
    Results results(rets);
    const ProductArrays product(a, b, k, has_bias, has_accumulate, operands, results);
    operands.finish();
    const Array workspace = results.next("workspace");
    results.finish();
    workspace.expect_rank(1);
    const cpu::GemmProblem& problem = product.problem;
    Place place(handle, args, rets);
    plan::GemmArrays arrays{quantized(place, problem.a), quantized(place, problem.b)};
    arrays.bias = place.at(problem.bias);
    arrays.bias_batched = !product.shared_bias;
    arrays.bias_type = dtype(problem.bias_dtype);
    arrays.c = place.at(problem.accumulate);
    arrays.c_type = dtype(problem.accumulate_dtype);
    arrays.out = place.at(problem.out);
    arrays.workspace = place.at(workspace.bytes());
    const plan::GemmShape shape = shape_of(problem);
    const plan::GemmPlan plan =
        plan::plan_gemm(shape, place.chip(), static_cast<u64>(workspace.dim(0)));
    run(place, plan::gemm_steps(plan, shape, arrays));
    place.finish();
  });
}

template <class Place>
xf::Error grouped_matmul(typename Place::Handle handle, xf::RemainingArgs args,
                         xf::RemainingRets rets, std::string_view a, std::string_view b,
                         std::int64_t k, std::int64_t groups, std::string_view grouping) {
  return guarded([&] {
    Operands operands(args);
    Results results(rets);
    const GroupedArrays product(a, b, k, groups, grouping, operands, results);
    operands.finish();
    const Array workspace = results.next("workspace");
    results.finish();
    workspace.expect_rank(1);
    Place place(handle, args, rets);
    const plan::GemmShape shape{groups,
                                product.a.rows,
                                product.b.rows,
                                k,
                                {product.a.format, product.a.layout, false},
                                {product.b.format, product.b.layout, product.of_rows},
                                dtype(product.out.dtype()),
                                product.of_rows ? plan::Grouping::rows : plan::Grouping::k};
    const plan::GemmPlan plan =
        plan::plan_gemm(shape, place.chip(), static_cast<u64>(workspace.dim(0)));
    for (std::int64_t v = 0; v < product.examples; ++v) {
      const cpu::GroupedProblem example = product.example(v);
      plan::GemmArrays arrays{quantized(place, example.a), quantized(place, example.b)};
      arrays.groups = place.at(example.where);
      arrays.out = place.at(example.out);
      arrays.workspace = place.at(workspace.bytes());
      run(place, plan::gemm_steps(plan, shape, arrays));
    }
    place.finish();
  });
}

// Loads the kernels whose names begin so for the stream's device.
template <const char* const& kPrefix>
xf::Error load(CUstream stream, xf::RemainingArgs, xf::RemainingRets, xf::Dictionary) {
  return guarded([&] { cuda_launcher().load(stream, kPrefix); });
}

xf::Error load_products(CUstream stream, xf::RemainingArgs, xf::RemainingRets, xf::Dictionary) {
  return guarded([&] {
    Launcher& launcher = cuda_launcher();
    for (const std::string& prefix : plan::gemm_kernels(launcher.chip(stream)))
      launcher.load(stream, prefix);
  });
}

constexpr const char* kAmaxKernels = "amax";
constexpr const char* kQuantizeKernels = "quantize";
constexpr const char* kDequantizeKernels = "dequantize";

auto bind_load() {
  return xf::Ffi::Bind<xf::ExecutionStage::kInitialize>()
      .Ctx<xf::PlatformStream<CUstream>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

template <class Context>
auto bind_amax() {
  return xf::Ffi::Bind()
      .Ctx<Context>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<bool>("rotate")
      .template Attr<std::string_view>("axis")
      .template Attr<std::int64_t>("signs")
      .template Attr<bool>("fingerprint")
      .template Attr<std::int64_t>("logical_rows")
      .template Attr<std::int64_t>("logical_cols");
}

template <class Context>
auto bind_quantize() {
  return xf::Ffi::Bind()
      .Ctx<Context>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::string_view>("first")
      .template Attr<std::string_view>("second")
      .template Attr<std::int64_t>("logical_rows")
      .template Attr<std::int64_t>("logical_cols");
}

template <class Context>
auto bind_dequantize() {
  return xf::Ffi::Bind()
      .Ctx<Context>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::string_view>("operand")
      .template Attr<std::int64_t>("k");
}

template <class Context>
auto bind_scaled_matmul() {
  return xf::Ffi::Bind()
      .Ctx<Context>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::string_view>("a")
      .template Attr<std::string_view>("b")
      .template Attr<std::int64_t>("k")
      .template Attr<bool>("has_bias")
      .template Attr<bool>("has_accumulate");
}

template <class Context>
auto bind_grouped_matmul() {
  return xf::Ffi::Bind()
      .Ctx<Context>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::string_view>("a")
      .template Attr<std::string_view>("b")
      .template Attr<std::int64_t>("k")
      .template Attr<std::int64_t>("groups")
      .template Attr<std::string_view>("grouping");
}

using OnStream = xf::PlatformStream<CUstream>;
using OnOrdinal = xf::DeviceOrdinal;
constexpr auto kCapturable = {xf::Traits::kCmdBufferCompatible};

XLA_FFI_DEFINE_HANDLER(kCudaAmax, amax<CudaPlace>, bind_amax<OnStream>(), kCapturable);
XLA_FFI_DEFINE_HANDLER(kCudaQuantize, quantize<CudaPlace>, bind_quantize<OnStream>(), kCapturable);
XLA_FFI_DEFINE_HANDLER(kCudaDequantize, dequantize<CudaPlace>, bind_dequantize<OnStream>(),
                       kCapturable);
XLA_FFI_DEFINE_HANDLER(kCudaScaledMatmul, scaled_matmul<CudaPlace>, bind_scaled_matmul<OnStream>(),
                       kCapturable);
XLA_FFI_DEFINE_HANDLER(kCudaGroupedMatmul, grouped_matmul<CudaPlace>,
                       bind_grouped_matmul<OnStream>(), kCapturable);
XLA_FFI_DEFINE_HANDLER(kLoadAmax, load<kAmaxKernels>, bind_load());
XLA_FFI_DEFINE_HANDLER(kLoadQuantize, load<kQuantizeKernels>, bind_load());
XLA_FFI_DEFINE_HANDLER(kLoadDequantize, load<kDequantizeKernels>, bind_load());
XLA_FFI_DEFINE_HANDLER(kLoadProduct, load_products, bind_load());

XLA_FFI_DEFINE_HANDLER(kSimAmax, amax<SimPlace>, bind_amax<OnOrdinal>());
XLA_FFI_DEFINE_HANDLER(kSimQuantize, quantize<SimPlace>, bind_quantize<OnOrdinal>());
XLA_FFI_DEFINE_HANDLER(kSimDequantize, dequantize<SimPlace>, bind_dequantize<OnOrdinal>());
XLA_FFI_DEFINE_HANDLER(kSimScaledMatmul, scaled_matmul<SimPlace>, bind_scaled_matmul<OnOrdinal>());
XLA_FFI_DEFINE_HANDLER(kSimGroupedMatmul, grouped_matmul<SimPlace>,
                       bind_grouped_matmul<OnOrdinal>());

}  // namespace

const std::vector<Registration>& cuda_registrations() {
  static const std::vector<Registration> all = {
      {"jax_fp4_amax", kCudaAmax, kLoadAmax},
      {"jax_fp4_quantize", kCudaQuantize, kLoadQuantize},
      {"jax_fp4_dequantize", kCudaDequantize, kLoadDequantize},
      {"jax_fp4_scaled_matmul", kCudaScaledMatmul, kLoadProduct},
      {"jax_fp4_grouped_matmul", kCudaGroupedMatmul, kLoadProduct}};
  return all;
}

const std::vector<Registration>& sim_registrations() {
  static const std::vector<Registration> all = {{"jax_fp4_amax", kSimAmax},
                                                {"jax_fp4_quantize", kSimQuantize},
                                                {"jax_fp4_dequantize", kSimDequantize},
                                                {"jax_fp4_scaled_matmul", kSimScaledMatmul},
                                                {"jax_fp4_grouped_matmul", kSimGroupedMatmul}};
  return all;
}

void reset_sim_driver(const std::string& devices, unsigned long long seed) {
  sim::ShimOptions options;
  options.devices = sim::split_devices(devices);
  options.seed = seed;
  SimDriver::instance().reset(std::move(options));
}

void fail_sim_driver(const std::string& function, unsigned nth, int error) {
  SimDriver::shim().inject(function, nth, static_cast<cuda::CUresult>(error));
}

std::vector<std::string> sim_driver_reports() {
  std::vector<std::string> reports = SimDriver::shim().fault_reports();
  for (std::string& warning : SimDriver::shim().warnings()) reports.push_back(std::move(warning));
  return reports;
}

std::vector<std::pair<std::string, unsigned long long>> launch_counts() {
  const std::lock_guard lock(launch_counter().mutex);
  return {launch_counter().launches.begin(), launch_counter().launches.end()};
}

}  // namespace jax_fp4::ffi

// The simulated driver's state: calls, handles, contexts, errors.
#include "sim/cuda_shim.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "sim/costs/constants.h"
#include "sim/cuda_shim_state.h"

namespace jax_fp4::sim {
namespace {

struct ErrorName {
  CUresult code;
  const char *name, *text;
};
constexpr ErrorName kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "an argument is wrong"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "not enough memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "cuInit has not been called"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "there is no device"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "no device has this number"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "the module image is damaged"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "there is no such context"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "the module has no code for this device"},
    {CUDA_ERROR_INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "the PTX text does not compile"},
    {CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
     "the PTX text is newer than the driver"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "there is no object of this handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "nothing has this name"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "earlier work has not ended"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS",
     "a kernel accessed memory that is not its own"},
    {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "the launch asks for more than the device has"},
    {CUDA_ERROR_LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT", "a kernel did not end in time"},
    {CUDA_ERROR_MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS",
     "a kernel accessed a misaligned address"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "a kernel failed"},
    {CUDA_ERROR_TENSOR_MEMORY_LEAK, "CUDA_ERROR_TENSOR_MEMORY_LEAK",
     "a kernel ended without freeing its tensor memory"},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "the operation is not permitted"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "the operation is not supported"},
    {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "kernel driver and libcuda are of different versions"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "the operation cannot be captured"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "an earlier error has ended the capture"},
    {CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "the stream is not capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "the legacy stream would wait for a stream that is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "another thread has begun the capture"},
    {CUDA_ERROR_INVALID_CLUSTER_SIZE, "CUDA_ERROR_INVALID_CLUSTER_SIZE",
     "the device cannot run clusters of this size"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorName* find_error(CUresult error) {
  for (const ErrorName& e : kErrors)
    if (e.code == error) return &e;
  return nullptr;
}

// "cuMemAlloc_v2" -> "cuMemAlloc"
std::string without_version(std::string symbol) {
  if (symbol.size() > 3 && symbol.compare(symbol.size() - 3, 2, "_v") == 0)
    symbol.resize(symbol.size() - 3);
  return symbol;
}

}  // namespace

const char* name_of_error(CUresult error) {
  const ErrorName* found = find_error(error);
  return found ? found->name : nullptr;
}
const char* text_of_error(CUresult error) {
  const ErrorName* found = find_error(error);
  return found ? found->text : nullptr;
}

std::vector<CUcontext>& thread_contexts() {
  thread_local std::vector<CUcontext> stack;
  return stack;
}

ShimState::ShimState(ShimOptions given) : options(std::move(given)) {
  for (std::string& sm : options.devices) {
    sm = Machine(sm).sm();  // refuses what is no chip
    if (!options.costs.empty() && !costs::constants_of(chip_of(sm).number))
      throw std::invalid_argument("JAX_FP4_SIM_COSTS: the cycle model has no constants for sm_" +
                                  sm);
  }
  primary.resize(options.devices.size());
}

CUresult ShimState::call(const char* function, bool needs_init, const std::function<void()>& body) {
  const std::scoped_lock lock(mutex);
  CUresult code;
  std::string why;
  try {
    const auto injected = injections.find(function);
    if (injected != injections.end() &&
        (injected->second.nth == 0 || --injected->second.nth == 0)) {
      const auto [nth, error, every] = injected->second;
      if (!every) injections.erase(injected);
      throw ApiError(error, "this error was asked for");
    }
    if (needs_init && !initialized)
      throw ApiError(CUDA_ERROR_NOT_INITIALIZED, "cuInit must be called first");
    body();
    return CUDA_SUCCESS;
  } catch (const ApiError& e) {
    code = e.code;
    why = e.what();
  } catch (const std::bad_alloc&) {
    code = CUDA_ERROR_OUT_OF_MEMORY;
    why = "the host has no more memory";
  } catch (const std::exception& e) {
    code = CUDA_ERROR_UNKNOWN;
    why = e.what();
  }
  const char* name = name_of_error(code);
  report = std::string(function) + " gave " + (name ? name : "error") + " (" +
           std::to_string(code) + "): " + why;
  if (to_stderr) std::fprintf(stderr, "PTX machine: %s\n", report.c_str());
  return code;
}

void ShimState::warn(const std::string& text) {
  warnings.push_back(text);
  if (to_stderr) std::fprintf(stderr, "PTX machine: warning: %s\n", text.c_str());
}

const std::string& ShimState::chip(CUdevice device) const {
  if (device < 0 || static_cast<std::size_t>(device) >= options.devices.size())
    throw ApiError(CUDA_ERROR_INVALID_DEVICE, "device: expected a number below " +
                                                  std::to_string(options.devices.size()) +
                                                  ", got " + std::to_string(device));
  return options.devices[static_cast<std::size_t>(device)];
}

u32 ShimState::multiprocessors(CUdevice device) const {
  const std::string& sm = chip(device);
  return options.costs.empty() ? kMultiprocessors : costs::constants_of(chip_of(sm).number)->sms;
}

Context& ShimState::context_of(CUcontext handle) const {
  Context* context = contexts.find(handle);
  if (!context)
    throw ApiError(CUDA_ERROR_INVALID_CONTEXT, "context: the handle is of no live context");
  return *context;
}

Context& ShimState::usable(Context& context) {
  if (context.stuck) throw *context.stuck;
  return context;
}

Context& ShimState::current() {
  if (thread_contexts().empty() || !thread_contexts().back())
    throw ApiError(CUDA_ERROR_INVALID_CONTEXT,
                   "this thread has no current context; call cuCtxSetCurrent");
  return usable(context_of(thread_contexts().back()));
}

Stream& ShimState::stream_of(CUstream handle) {
  const auto number = reinterpret_cast<u64>(handle);
  if (number == kPerThreadStream) return current().per_thread;
  if (number == 0 || number == kLegacyStream) return current().legacy;
  Stream* stream = streams.find(handle);
  if (!stream) throw ApiError(CUDA_ERROR_INVALID_HANDLE, "stream: the handle is of no live stream");
  usable(*stream->context);
  return *stream;
}

ShimModule& ShimState::module_of(CUmodule handle) const {
  ShimModule* module = modules.find(handle);
  if (!module) throw ApiError(CUDA_ERROR_INVALID_HANDLE, "module: the handle is of no live module");
  usable(*module->context);
  return *module;
}

ShimFunction& ShimState::function_of(CUfunction handle) const {
  ShimFunction* function = functions.find(handle);
  if (!function)
    throw ApiError(CUDA_ERROR_INVALID_HANDLE,
                   "function: the handle is of no function of a live module");
  usable(*function->module->context);
  return *function;
}

CUcontext ShimState::retain(CUdevice device) {
  const std::string& sm = chip(device);
  CUcontext& handle = primary[static_cast<std::size_t>(device)];
  if (!handle) {
    auto made = std::make_unique<Context>();
    Context& context = *made;
    context.device = device;
    context.machine =
        std::make_unique<Machine>(sm, kGlobalBase + static_cast<u64>(device) * kDeviceAddressBytes);
    context.legacy.context = context.per_thread.context = &context;
    handle = context.handle = contexts.add(std::move(made));
  }
  ++contexts.find(handle)->references;
  return handle;
}

void ShimState::release(CUdevice device) {
  chip(device);
  CUcontext& handle = primary[static_cast<std::size_t>(device)];
  if (!handle)
    throw ApiError(CUDA_ERROR_INVALID_CONTEXT,
                   "device " + std::to_string(device) + " has no primary context to release");
  Context* context = contexts.find(handle);
  if (--context->references > 0) return;
  graphs.erase_if([&](const Graph& g) { return g.context == context; });
  graph_execs.erase_if([&](const GraphExec& g) { return g.context == context; });
  functions.erase_if([&](const ShimFunction& f) { return f.module->context == context; });
  modules.erase_if([&](const ShimModule& m) { return m.context == context; });
  streams.erase_if([&](const Stream& s) { return s.context == context; });
  contexts.erase(handle);
  handle = nullptr;
}

CudaShim::CudaShim() : state_(std::make_unique<ShimState>(shim_options_from_environment())) {
  fill_api(api_);
}
CudaShim::~CudaShim() = default;

CudaShim& CudaShim::instance() {
  // Never destroyed: programs give up handles as late as they like.
  static CudaShim& shim = *new CudaShim;
  return shim;
}

void CudaShim::reset(ShimOptions options) {
  auto fresh = std::make_unique<ShimState>(std::move(options));
  fresh->to_stderr = state_->to_stderr;
  state_ = std::move(fresh);
}

void CudaShim::inject(const std::string& function, u32 nth, CUresult error) {
  std::string known;
  for_each_shim_function(api_, [&](const char* symbol, auto&) {
    known += (known.empty() ? "" : ", ") + without_version(symbol);
    if (without_version(symbol) != function) return;
    const std::scoped_lock lock(state_->mutex);
    state_->injections[function] = {nth, error, nth == 0};
  });
  if ((", " + known + ",").find(", " + function + ",") == std::string::npos)
    throw std::invalid_argument("function: expected one of " + known + ", got '" + function + "'");
}

std::string CudaShim::last_report() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->report;
}

std::vector<std::string> CudaShim::fault_reports() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->fault_reports;
}

std::vector<std::string> CudaShim::warnings() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->warnings;
}

void CudaShim::report_to_stderr(bool on) {
  const std::scoped_lock lock(state_->mutex);
  state_->to_stderr = on;
}

CUdeviceptr CudaShim::map(CUcontext context, std::string name, void* data, u64 bytes, bool writable,
                          bool initialized) {
  const std::scoped_lock lock(state_->mutex);
  GlobalMemory& memory = state_->context_of(context).machine->global();
  return memory.map(std::move(name), static_cast<u8*>(data), bytes, writable, initialized).base;
}

void CudaShim::unmap(CUcontext context, CUdeviceptr address) {
  const std::scoped_lock lock(state_->mutex);
  Context& owner = state_->context_of(context);
  const Buffer* buffer = owner.machine->global().find(address);
  if (!buffer || buffer->base != address || owner.allocations.contains(address))
    throw std::invalid_argument("address: expected one that map() has given");
  try {
    if (!owner.stuck) state_->drain(owner);
  } catch (const ApiError&) {
    // It has stuck to the context: the next call reports it.
  }
  owner.machine->global().unmap(address);
}

std::vector<std::string> split_devices(const std::string& names) {
  std::vector<std::string> devices;
  for (std::size_t at = 0; at < names.size();) {
    const std::size_t end = std::min(names.find(',', at), names.size());
    if (end > at) devices.push_back(names.substr(at, end - at));
    at = end + 1;
  }
  return devices;
}

bool CudaShim::owns(CUcontext context, CUdeviceptr address) {
  const std::scoped_lock lock(state_->mutex);
  return state_->context_of(context).machine->global().find(address) != nullptr;
}

ShimOptions shim_options_from_environment() {
  ShimOptions options;
  if (const char* devices = std::getenv("JAX_FP4_SIM_DEVICES"))
    options.devices = split_devices(devices);
  if (const char* seed = std::getenv("JAX_FP4_SIM_SEED")) {
    char* end = nullptr;
    options.seed = std::strtoull(seed, &end, 10);
    if (end == seed || *end != '\0')
      throw std::invalid_argument("JAX_FP4_SIM_SEED: expected a number, got '" + std::string(seed) +
                                  "'");
  }
  if (const char* costs = std::getenv("JAX_FP4_SIM_COSTS")) options.costs = costs;
  return options;
}

}  // namespace jax_fp4::sim

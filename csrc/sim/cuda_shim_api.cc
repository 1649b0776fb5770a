// The driver functions of the simulated driver: initialisation, devices, contexts, modules, launches.
#include <cstring>

#include "sim/cuda_shim_entry.h"

namespace jax_fp4::sim {
namespace {

// ---- Initialisation and errors

void init(ShimState& state, unsigned int flags) {
  if (flags != 0)
    throw ApiError(CUDA_ERROR_INVALID_VALUE, "flags: expected 0, got " + std::to_string(flags));
  if (state.options.devices.empty())
    throw ApiError(CUDA_ERROR_NO_DEVICE, "no chip is named in the machine's devices");
  state.initialized = true;
}

void driver_get_version(ShimState& state, int* version) {
  require(version, "driverVersion");
  *version = state.options.driver_version;
}

void get_error_name(ShimState&, CUresult error, const char** name) {
  require(name, "pStr");
  *name = name_of_error(error);
  if (!*name)
    throw ApiError(CUDA_ERROR_INVALID_VALUE,
                   "error: " + std::to_string(error) + " is no code of this driver");
}

void get_error_string(ShimState&, CUresult error, const char** text) {
  require(text, "pStr");
  *text = text_of_error(error);
  if (!*text)
    throw ApiError(CUDA_ERROR_INVALID_VALUE,
                   "error: " + std::to_string(error) + " is no code of this driver");
}

// ---- Devices and contexts

void device_get_count(ShimState& state, int* count) {
  require(count, "count");
  *count = static_cast<int>(state.options.devices.size());
}

void device_get(ShimState& state, CUdevice* device, int ordinal) {
  require(device, "device");
  state.chip(ordinal);
  *device = ordinal;
}

void device_get_name(ShimState& state, char* name, int length, CUdevice device) {
  require(name, "name");
  const std::string text = "PTX machine sm_" + state.chip(device);
  if (length < 1)
    throw ApiError(CUDA_ERROR_INVALID_VALUE,
                   "len: expected at least 1, got " + std::to_string(length));
  std::strncpy(name, text.c_str(), static_cast<std::size_t>(length));
  name[length - 1] = '\0';
}

void device_get_attribute(ShimState& state, int* value, CUdevice_attribute attribute,
                          CUdevice device) {
  require(value, "pi");
  *value = device_attribute(state, device, attribute);
}

void device_total_mem(ShimState& state, std::size_t* bytes, CUdevice device) {
  require(bytes, "bytes");
  state.chip(device);
  *bytes = state.options.memory_bytes;
}

void primary_ctx_retain(ShimState& state, CUcontext* context, CUdevice device) {
  require(context, "pctx");
  *context = state.retain(device);
}

void primary_ctx_release(ShimState& state, CUdevice device) { state.release(device); }

void ctx_get_current(ShimState&, CUcontext* context) {
  require(context, "pctx");
  *context = thread_contexts().empty() ? nullptr : thread_contexts().back();
}

void ctx_set_current(ShimState& state, CUcontext context) {
  if (context) state.context_of(context);
  if (!thread_contexts().empty()) thread_contexts().pop_back();
  if (context) thread_contexts().push_back(context);
}

void ctx_push_current(ShimState& state, CUcontext context) {
  state.context_of(context);
  thread_contexts().push_back(context);
}

void ctx_pop_current(ShimState&, CUcontext* context) {
  if (thread_contexts().empty())
    throw ApiError(CUDA_ERROR_INVALID_CONTEXT, "this thread has no context to pop");
  if (context) *context = thread_contexts().back();
  thread_contexts().pop_back();
}

void ctx_get_device(ShimState& state, CUdevice* device) {
  require(device, "device");
  if (thread_contexts().empty())
    throw ApiError(CUDA_ERROR_INVALID_CONTEXT, "this thread has no current context");
  *device = state.context_of(thread_contexts().back()).device;
}

void ctx_synchronize(ShimState& state) {
  Context& context = state.current();
  state.forbid_during_capture("cuCtxSynchronize");
  state.drain(context);
}

// ---- Modules and functions

void module_load_data_ex(ShimState& state, CUmodule* module, const void* image,
                         unsigned int options, CUjit_option* option, void** value) {
  require(module, "module");
  Context& context = state.current();
  state.forbid_during_capture("loading a module");
  // Options that tune a compiler change nothing here; buffers for its words are filled.
  char* log = nullptr;
  std::size_t log_bytes = 0;
  for (unsigned i = 0; i < options; ++i) {
    if (option[i] == CU_JIT_ERROR_LOG_BUFFER) log = static_cast<char*>(value[i]);
    if (option[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
      log_bytes = reinterpret_cast<std::size_t>(value[i]);
    if (option[i] == CU_JIT_INFO_LOG_BUFFER && value[i]) *static_cast<char*>(value[i]) = '\0';
  }
  if (log && log_bytes > 0) *log = '\0';
  try {
    *module = load_module(state, context, image);
  } catch (const ApiError& e) {
    if (log && log_bytes > 0) {
      std::strncpy(log, e.what(), log_bytes - 1);
      log[log_bytes - 1] = '\0';
    }
    throw;
  }
}

void module_load_data(ShimState& state, CUmodule* module, const void* image) {
  module_load_data_ex(state, module, image, 0, nullptr, nullptr);
}

void module_unload(ShimState& state, CUmodule module) {
  state.module_of(module);
  state.forbid_during_capture("unloading a module");
  state.unload(module);
}

void module_get_function(ShimState& state, CUfunction* function, CUmodule module,
                         const char* name) {
  require(function, "hfunc");
  require(name, "name");
  ShimModule& owner = state.module_of(module);
  if (!owner.loaded->find(name)) {
    std::string known;
    for (const std::string& entry : owner.loaded->entries())
      known += (known.empty() ? "" : ", ") + entry;
    throw ApiError(CUDA_ERROR_NOT_FOUND,
                   "name: the module has no entry '" + std::string(name) + "'; it has: " + known);
  }
  auto made = std::make_unique<ShimFunction>();
  made->handle = module;
  made->module = &owner;
  made->entry = name;
  const u32 fixed = made->program().static_shared_bytes;
  made->max_dynamic_shared = fixed < kDefaultSharedBytes ? kDefaultSharedBytes - fixed : 0;
  *function = state.functions.add(std::move(made));
}

void module_get_global(ShimState& state, CUdeviceptr* address, std::size_t* bytes, CUmodule module,
                       const char* name) {
  require(name, "name");
  u64 place = 0;
  const Variable* variable = state.module_of(module).loaded->find_global(name, place);
  if (!variable)
    throw ApiError(CUDA_ERROR_NOT_FOUND,
                   "name: the module has no .global variable '" + std::string(name) + "'");
  if (address) *address = place;
  if (bytes) *bytes = variable->bytes;
}

void func_get_attribute(ShimState& state, int* value, CUfunction_attribute attribute,
                        CUfunction function) {
  require(value, "pi");
  *value = function_attribute(state, state.function_of(function), attribute);
}

void func_set_attribute(ShimState& state, CUfunction function, CUfunction_attribute attribute,
                        int value) {
  set_function_attribute(state, state.function_of(function), attribute, value);
}

// ---- Launches

void launch_kernel_ex(ShimState& state, const CUlaunchConfig* config, CUfunction function,
                      void** parameters, void** extra) {
  require(config, "config");
  const ShimFunction& callee = state.function_of(function);
  Stream& stream = state.stream_of(config->hStream);
  if (stream.context != callee.module->context)
    throw ApiError(CUDA_ERROR_INVALID_HANDLE,
                   "function: '" + callee.entry + "' was loaded into the context of device " +
                       std::to_string(callee.module->context->device) +
                       ", the stream is of device " + std::to_string(stream.context->device));
  KernelLaunch launch = make_launch(state, callee, *config);
  launch.spec.parameters = pack_parameters(callee.program(), parameters, extra);
  try {
    stream.context->machine->prepare(*callee.module->loaded, launch.entry, launch.spec);
  } catch (const std::invalid_argument& e) {
    throw ApiError(CUDA_ERROR_INVALID_VALUE, e.what());
  }
  state.submit(stream, std::move(launch));
}

void launch_kernel(ShimState& state, CUfunction function, unsigned int grid_x, unsigned int grid_y,
                   unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                   unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                   void** parameters, void** extra) {
  const CUlaunchConfig config = {grid_x,  grid_y,       grid_z, block_x, block_y,
                                 block_z, shared_bytes, stream, nullptr, 0};
  launch_kernel_ex(state, &config, function, parameters, extra);
}

void occupancy_max_active_clusters(ShimState& state, int* clusters, CUfunction function,
                                   const CUlaunchConfig* config) {
  require(clusters, "numClusters");
  require(config, "config");
  try {
    *clusters = static_cast<int>(
        make_launch(state, state.function_of(function), *config).spec.resident_clusters);
  } catch (const ApiError& e) {
    if (e.code != CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES) throw;
    *clusters = 0;
  }
}

void occupancy_max_active_blocks(ShimState& state, int* blocks, CUfunction function,
                                 int block_threads, std::size_t dynamic_shared_bytes) {
  require(blocks, "numBlocks");
  const ShimFunction& callee = state.function_of(function);
  if (block_threads < 1)
    throw ApiError(CUDA_ERROR_INVALID_VALUE,
                   "blockSize: expected at least 1, got " + std::to_string(block_threads));
  *blocks = static_cast<int>(
      ctas_per_multiprocessor(state.chip(callee.module->context->device), callee.program(),
                              static_cast<u64>(block_threads), dynamic_shared_bytes));
}

// ---- Look-up of functions

// Where a symbol that cuGetProcAddress is asked for is answered with the newest version of it.
void get_proc_address(ShimState&, const char* symbol, void** function, int version,
                      unsigned long long flags, int* status) {
  require(symbol, "symbol");
  require(function, "pfn");
  if (flags > 2)
    throw ApiError(CUDA_ERROR_INVALID_VALUE,
                   "flags: expected 0 to 2, got " + std::to_string(flags));
  if (version < 12000)
    throw ApiError(CUDA_ERROR_NOT_SUPPORTED,
                   "cudaVersion: functions as they were before 12.0 are not offered");
  *function = nullptr;
  ShimApi api;
  fill_api(api);
  for_each_shim_function(api, [&](const char* name, auto& pointer) {
    const std::size_t length = std::strlen(symbol);
    if (std::strncmp(name, symbol, length) == 0 &&
        (name[length] == '\0' || std::strncmp(name + length, "_v", 2) == 0))
      *function = reinterpret_cast<void*>(pointer);
  });
  constexpr int kFound = 0, kNotFound = 1;  // CUdriverProcAddressQueryResult
  if (status) *status = *function ? kFound : kNotFound;
  if (!*function)
    throw ApiError(CUDA_ERROR_NOT_FOUND,
                   "symbol: the simulated driver has no '" + std::string(symbol) + "'");
}

}  // namespace

void fill_api(ShimApi& api) {
  constexpr bool kBeforeInit = false;
  fill<init>(api.cuInit, "cuInit", kBeforeInit);
  fill<driver_get_version>(api.cuDriverGetVersion, "cuDriverGetVersion", kBeforeInit);
  fill<get_error_name>(api.cuGetErrorName, "cuGetErrorName", kBeforeInit);
  fill<get_error_string>(api.cuGetErrorString, "cuGetErrorString", kBeforeInit);
  fill<get_proc_address>(api.cuGetProcAddress, "cuGetProcAddress", kBeforeInit);
  fill<device_get_count>(api.cuDeviceGetCount, "cuDeviceGetCount");
  fill<device_get>(api.cuDeviceGet, "cuDeviceGet");
  fill<device_get_name>(api.cuDeviceGetName, "cuDeviceGetName");
  fill<device_get_attribute>(api.cuDeviceGetAttribute, "cuDeviceGetAttribute");
  fill<device_total_mem>(api.cuDeviceTotalMem, "cuDeviceTotalMem");
  fill<primary_ctx_retain>(api.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  fill<primary_ctx_release>(api.cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease");
  fill<ctx_get_current>(api.cuCtxGetCurrent, "cuCtxGetCurrent");
  fill<ctx_set_current>(api.cuCtxSetCurrent, "cuCtxSetCurrent");
  fill<ctx_push_current>(api.cuCtxPushCurrent, "cuCtxPushCurrent");
  fill<ctx_pop_current>(api.cuCtxPopCurrent, "cuCtxPopCurrent");
  fill<ctx_get_device>(api.cuCtxGetDevice, "cuCtxGetDevice");
  fill<ctx_synchronize>(api.cuCtxSynchronize, "cuCtxSynchronize");
  fill<module_load_data_ex>(api.cuModuleLoadDataEx, "cuModuleLoadDataEx");
  fill<module_load_data>(api.cuModuleLoadData, "cuModuleLoadData");
  fill<module_unload>(api.cuModuleUnload, "cuModuleUnload");
  fill<module_get_function>(api.cuModuleGetFunction, "cuModuleGetFunction");
  fill<module_get_global>(api.cuModuleGetGlobal, "cuModuleGetGlobal");
  fill<func_get_attribute>(api.cuFuncGetAttribute, "cuFuncGetAttribute");
  fill<func_set_attribute>(api.cuFuncSetAttribute, "cuFuncSetAttribute");
  fill<occupancy_max_active_clusters>(api.cuOccupancyMaxActiveClusters,
                                      "cuOccupancyMaxActiveClusters");
  fill<occupancy_max_active_blocks>(api.cuOccupancyMaxActiveBlocksPerMultiprocessor,
                                    "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  fill<launch_kernel_ex>(api.cuLaunchKernelEx, "cuLaunchKernelEx");
  fill<launch_kernel>(api.cuLaunchKernel, "cuLaunchKernel");
  fill_work_api(api);
}

}  // namespace jax_fp4::sim

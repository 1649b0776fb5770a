// A stand-in for libcudart over the PTX machine: registration, devices, launches. Programs that nvcc has
// compiled with PTX inside link with it instead of NVIDIA's library and run on the CPU:
//
//   nvcc -gencode arch=compute_100a,code=compute_100a -Xfatbin -compress-mode=none -cudart none ...
//
// The variables JAX_FP4_SIM_* are those of stand_ins/libcuda.cc. Signatures are those of the
// runtime's ABI (cuda_runtime_api.h and crt/host_runtime.h of CUDA 12.9 and 13).
#include "sim/stand_ins/cudart.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace jax_fp4::cudart {
namespace {

struct Registered {
  const void* image;
  std::string name;
};
// What the program's start-up code has registered, and what of it is loaded on which device. Never
// destroyed: programs unregister after their static objects are gone.
struct Registry {
  std::mutex mutex;
  std::map<const void*, Registered> functions, variables;  // by their host address
  std::map<std::pair<const void*, int>, CUmodule> modules;
  std::map<std::pair<const void*, int>, CUfunction> loaded;
};
Registry& registry() {
  static Registry& made = *new Registry;
  return made;
}

CUmodule module_of(Registry& known, const void* image) {
  CUmodule& module = known.modules[{image, thread_device()}];
  if (!module) check(api().cuModuleLoadData(&module, image));
  return module;
}

struct CallConfiguration {
  unsigned grid[3], block[3];
  std::size_t shared_bytes;
  CUstream stream;
};
std::vector<CallConfiguration>& call_configurations() {
  thread_local std::vector<CallConfiguration> stack;
  return stack;
}

}  // namespace

CudaShim& shim() {
  static CudaShim& instance = []() -> CudaShim& {
    try {
      CudaShim& made = CudaShim::instance();
      made.report_to_stderr(true);
      return made;
    } catch (const std::exception& e) {
      std::fprintf(stderr, "PTX machine: %s\n", e.what());
      std::abort();
    }
  }();
  return instance;
}

int& thread_device() {
  thread_local int device = 0;
  return device;
}

int& last_error() {
  thread_local int error = kSuccess;
  return error;
}

int call(const std::function<void()>& body) {
  try {
    body();
    return kSuccess;
  } catch (const Failure& failure) {
    return last_error() = failure.code;
  }
}

void refuse(int code, const std::string& why) {
  std::fprintf(stderr, "PTX machine: %s\n", why.c_str());
  throw Failure{code};
}

CUcontext use_device() {
  static std::mutex mutex;
  static std::map<int, CUcontext> retained;
  const std::scoped_lock lock(mutex);
  CUcontext& context = retained[thread_device()];
  if (!context) {
    check(api().cuInit(0));
    check(api().cuDevicePrimaryCtxRetain(&context, thread_device()));
  }
  check(api().cuCtxSetCurrent(context));
  return context;
}

CUfunction function_of(const void* host_function) {
  use_device();
  Registry& known = registry();
  const std::scoped_lock lock(known.mutex);
  const auto found = known.functions.find(host_function);
  if (found == known.functions.end())
    refuse(kInvalidDeviceFunction, "func: the address is of no registered kernel");
  CUfunction& function = known.loaded[{host_function, thread_device()}];
  if (!function)
    check(api().cuModuleGetFunction(&function, module_of(known, found->second.image),
                                    found->second.name.c_str()));
  return function;
}

CUdeviceptr symbol_of(const void* host_variable, std::size_t* bytes) {
  use_device();
  Registry& known = registry();
  const std::scoped_lock lock(known.mutex);
  const auto found = known.variables.find(host_variable);
  if (found == known.variables.end())
    refuse(kInvalidSymbol, "symbol: the address is of no registered variable");
  CUdeviceptr address = 0;
  check(api().cuModuleGetGlobal(&address, bytes, module_of(known, found->second.image),
                                found->second.name.c_str()));
  return address;
}

}  // namespace jax_fp4::cudart

namespace {

using namespace jax_fp4::cudart;

struct Size3 {
  unsigned x, y, z;
};
struct LaunchConfig {
  Size3 grid, block;
  std::size_t shared_bytes;
  CUstream stream;
  CUlaunchAttribute*
      attributes;  // cudaLaunchAttribute has the layout and the numbers of the driver's
  unsigned attribute_count;
};

// cudaFuncAttributes. Registers stay 0: PTX has as many as it likes, and nothing here assigns real ones.
struct FunctionAttributes {
  std::size_t shared_bytes, constant_bytes, local_bytes;
  int max_threads, registers, ptx_version, binary_version, cache_mode, max_dynamic_shared, carveout,
      cluster_must_be_set, cluster[3], scheduling_policy, non_portable_cluster, reserved[16];
};
static_assert(sizeof(FunctionAttributes) == 144);

CUlaunchConfig driver_config(const LaunchConfig& c) {
  return {c.grid.x,
          c.grid.y,
          c.grid.z,
          c.block.x,
          c.block.y,
          c.block.z,
          static_cast<unsigned>(c.shared_bytes),
          c.stream,
          c.attributes,
          c.attribute_count};
}

int launch(const void* function, const LaunchConfig& config, void** arguments) {
  return call([&] {
    CUfunction kernel = function_of(function);
    const CUlaunchConfig driver = driver_config(config);
    check(api().cuLaunchKernelEx(&driver, kernel, arguments, nullptr));
  });
}

}  // namespace

// ---- Registration, called by the code that nvcc generates

CUDART_EXPORT void** __cudaRegisterFatBinary(void* wrapper) { return static_cast<void**>(wrapper); }
CUDART_EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
CUDART_EXPORT void __cudaUnregisterFatBinary(void**) {}
CUDART_EXPORT char __cudaInitModule(void**) { return 1; }

CUDART_EXPORT void __cudaRegisterFunction(void** binary, const char* host_function, char*,
                                          const char* device_name, int, void*, void*, void*, void*,
                                          int*) {
  Registry& known = registry();
  const std::scoped_lock lock(known.mutex);
  known.functions[host_function] = {binary, device_name};
}

CUDART_EXPORT void __cudaRegisterVar(void** binary, char* host_variable, char*,
                                     const char* device_name, int, std::size_t, int, int) {
  Registry& known = registry();
  const std::scoped_lock lock(known.mutex);
  known.variables[host_variable] = {binary, device_name};
}

// ---- Launches: three ways, of three generations of nvcc

CUDART_EXPORT unsigned __cudaPushCallConfiguration(Size3 grid, Size3 block,
                                                   std::size_t shared_bytes, CUstream stream) {
  call_configurations().push_back(
      {{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes, stream});
  return 0;
}

CUDART_EXPORT int __cudaPopCallConfiguration(Size3* grid, Size3* block, std::size_t* shared_bytes,
                                             void* stream) {
  return call([&] {
    if (call_configurations().empty())
      refuse(9, "a kernel's stub was called without a launch configuration");
    const CallConfiguration top = call_configurations().back();
    call_configurations().pop_back();
    *grid = {top.grid[0], top.grid[1], top.grid[2]};
    *block = {top.block[0], top.block[1], top.block[2]};
    *shared_bytes = top.shared_bytes;
    *static_cast<CUstream*>(stream) = top.stream;
  });
}

CUDART_EXPORT int cudaLaunchKernel(const void* function, Size3 grid, Size3 block, void** arguments,
                                   std::size_t shared_bytes, CUstream stream) {
  return launch(function, {grid, block, shared_bytes, stream, nullptr, 0}, arguments);
}

CUDART_EXPORT int cudaLaunchKernelExC(const LaunchConfig* config, const void* function,
                                      void** arguments) {
  if (!config) return call([] { refuse(kInvalidValue, "config: got a null pointer"); });
  return launch(function, *config, arguments);
}

// A kernel's handle is the address of its host function.
CUDART_EXPORT int __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return kSuccess;
}
CUDART_EXPORT int __cudaLaunchKernel(const void* kernel, Size3 grid, Size3 block, void** arguments,
                                     std::size_t shared_bytes, CUstream stream) {
  return launch(kernel, {grid, block, shared_bytes, stream, nullptr, 0}, arguments);
}

CUDART_EXPORT int cudaFuncSetAttribute(const void* function, int attribute, int value) {
  // The numbers of cudaFuncAttribute are the driver's.
  return call([&] {
    check(api().cuFuncSetAttribute(function_of(function),
                                   static_cast<CUfunction_attribute>(attribute), value));
  });
}

CUDART_EXPORT int cudaFuncGetAttributes(FunctionAttributes* attributes, const void* function) {
  return call([&] {
    CUfunction kernel = function_of(function);
    const auto get = [&](CUfunction_attribute attribute) {
      int value = 0;
      check(api().cuFuncGetAttribute(&value, attribute, kernel));
      return value;
    };
    *attributes = {};
    attributes->shared_bytes = static_cast<std::size_t>(get(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES));
    attributes->constant_bytes = static_cast<std::size_t>(get(CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES));
    attributes->local_bytes = static_cast<std::size_t>(get(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES));
    attributes->max_threads = get(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
    attributes->ptx_version = get(CU_FUNC_ATTRIBUTE_PTX_VERSION);
    attributes->binary_version = get(CU_FUNC_ATTRIBUTE_BINARY_VERSION);
    attributes->max_dynamic_shared = get(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
    attributes->cluster[0] = get(CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH);
    attributes->cluster[1] = get(CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT);
    attributes->cluster[2] = get(CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH);
    attributes->non_portable_cluster = get(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
  });
}

CUDART_EXPORT int cudaOccupancyMaxActiveClusters(int* clusters, const void* function,
                                                 const LaunchConfig* config) {
  return call([&] {
    if (!config) refuse(kInvalidValue, "config: got a null pointer");
    const CUlaunchConfig driver = driver_config(*config);
    check(api().cuOccupancyMaxActiveClusters(clusters, function_of(function), &driver));
  });
}

CUDART_EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function,
                                                                int block_threads,
                                                                std::size_t shared_bytes) {
  return call([&] {
    check(api().cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function_of(function),
                                                            block_threads, shared_bytes));
  });
}
CUDART_EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void* function, int block_threads, std::size_t shared_bytes, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, block_threads,
                                                       shared_bytes);
}

#undef CUDART_EXPORT

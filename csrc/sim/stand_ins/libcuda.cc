// A stand-in for libcuda.so.1: the symbols that the driver exports, over the PTX machine. A program that
// opens it as its driver runs its kernels on the CPU.
//
//   JAX_FP4_SIM_DEVICES  chips, by ordinal: "100a,120a"; by default one "100a"
//   JAX_FP4_SIM_SEED     of the schedules
//   JAX_FP4_SIM_COSTS    file to which each launch appends what the cycle model says of it; without data
//
// What goes wrong is told on stderr as well. Functions named jax_fp4_sim_* are not the driver's: they
// let a test set the device up, ask for errors and read reports.
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "sim/cuda_shim.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace jax_fp4::sim;

// C callers cannot catch what a wrong environment variable throws.
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

const ShimApi& api() { return shim().api(); }

// For strings that a call returns: they live until the thread's next such call.
const char* keep(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

std::string joined(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) all += text + "\f";
  return all;
}

}  // namespace

// Returns why the options are wrong; null: they are set.
EXPORT const char* jax_fp4_sim_reset(const char* devices, int driver_version,
                                     unsigned long long memory_bytes, unsigned long long seed,
                                     unsigned long long max_instructions) {
  try {
    ShimOptions options;
    options.devices = split_devices(devices);
    options.driver_version = driver_version;
    options.memory_bytes = memory_bytes;
    options.seed = seed;
    options.max_instructions = max_instructions;
    shim().reset(std::move(options));
    return nullptr;
  } catch (const std::exception& e) {
    return keep(e.what());
  }
}

// Likewise.
EXPORT const char* jax_fp4_sim_inject(const char* function, unsigned nth, CUresult error) {
  try {
    shim().inject(function, nth, error);
    return nullptr;
  } catch (const std::exception& e) {
    return keep(e.what());
  }
}

EXPORT void jax_fp4_sim_report_to_stderr(int on) { shim().report_to_stderr(on != 0); }
EXPORT const char* jax_fp4_sim_last_report() { return keep(shim().last_report()); }
// Each followed by a form feed.
EXPORT const char* jax_fp4_sim_fault_reports() { return keep(joined(shim().fault_reports())); }
EXPORT const char* jax_fp4_sim_warnings() { return keep(joined(shim().warnings())); }

// 0: the context is not live.
EXPORT CUdeviceptr jax_fp4_sim_map(CUcontext context, const char* name, void* data,
                                   unsigned long long bytes, int writable, int initialized) {
  try {
    return shim().map(context, name, data, bytes, writable != 0, initialized != 0);
  } catch (const std::exception&) {
    return 0;
  }
}
// Whether the address was mapped.
EXPORT int jax_fp4_sim_unmap(CUcontext context, CUdeviceptr address) {
  try {
    shim().unmap(context, address);
    return 1;
  } catch (const std::exception&) {
    return 0;
  }
}

// NVIDIA's own libraries ask for private tables of functions and call this without checking that it is
// there; NVRTC does so wherever a libcuda is loaded. There are none.
EXPORT CUresult cuGetExportTable(const void** table, const void*) {
  if (table) *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuInit(unsigned int flags) { return api().cuInit(flags); }
EXPORT CUresult cuDriverGetVersion(int* version) { return api().cuDriverGetVersion(version); }
EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
  return api().cuGetErrorName(error, name);
}
EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  return api().cuGetErrorString(error, text);
}
EXPORT CUresult cuDeviceGetCount(int* count) { return api().cuDeviceGetCount(count); }
EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return api().cuDeviceGet(device, ordinal);
}
EXPORT CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  return api().cuDeviceGetName(name, length, device);
}
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return api().cuDeviceGetAttribute(value, attribute, device);
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return api().cuDevicePrimaryCtxRetain(context, device);
}
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return api().cuDevicePrimaryCtxRelease(device);
}
EXPORT CUresult cuCtxGetCurrent(CUcontext* context) { return api().cuCtxGetCurrent(context); }
EXPORT CUresult cuCtxSetCurrent(CUcontext context) { return api().cuCtxSetCurrent(context); }
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) { return api().cuCtxPushCurrent(context); }
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* context) { return api().cuCtxPopCurrent(context); }
EXPORT CUresult cuCtxGetDevice(CUdevice* device) { return api().cuCtxGetDevice(device); }
EXPORT CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int options,
                                   CUjit_option* option, void** value) {
  return api().cuModuleLoadDataEx(module, image, options, option, value);
}
EXPORT CUresult cuModuleUnload(CUmodule module) { return api().cuModuleUnload(module); }
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  return api().cuModuleGetFunction(function, module, name);
}
EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute,
                                   CUfunction function) {
  return api().cuFuncGetAttribute(value, attribute, function);
}
EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return api().cuFuncSetAttribute(function, attribute, value);
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction function,
                                             const CUlaunchConfig* config) {
  return api().cuOccupancyMaxActiveClusters(clusters, function, config);
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function,
                                 void** parameters, void** extra) {
  return api().cuLaunchKernelEx(config, function, parameters, extra);
}
EXPORT CUresult cuStreamCreate(CUstream* stream, unsigned int flags) {
  return api().cuStreamCreate(stream, flags);
}
EXPORT CUresult cuStreamDestroy_v2(CUstream stream) { return api().cuStreamDestroy(stream); }
EXPORT CUresult cuStreamSynchronize(CUstream stream) { return api().cuStreamSynchronize(stream); }
EXPORT CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  return api().cuStreamGetCtx(stream, context);
}
EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return api().cuStreamIsCapturing(stream, status);
}
EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* address, std::size_t bytes) {
  return api().cuMemAlloc(address, bytes);
}
EXPORT CUresult cuMemFree_v2(CUdeviceptr address) { return api().cuMemFree(address); }
EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr destination, const void* source, std::size_t bytes,
                                     CUstream stream) {
  return api().cuMemcpyHtoDAsync(destination, source, bytes, stream);
}
EXPORT CUresult cuMemcpyDtoHAsync_v2(void* destination, CUdeviceptr source, std::size_t bytes,
                                     CUstream stream) {
  return api().cuMemcpyDtoHAsync(destination, source, bytes, stream);
}
EXPORT CUresult cuMemsetD8Async(CUdeviceptr destination, unsigned char value, std::size_t bytes,
                                CUstream stream) {
  return api().cuMemsetD8Async(destination, value, bytes, stream);
}
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType data_type,
                                       unsigned int rank, void* address,
                                       const unsigned long long* dims,
                                       const unsigned long long* strides, const unsigned int* box,
                                       const unsigned int* element_strides,
                                       CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion l2_promotion,
                                       CUtensorMapFloatOOBfill oob_fill) {
  return api().cuTensorMapEncodeTiled(map, data_type, rank, address, dims, strides, box,
                                      element_strides, interleave, swizzle, l2_promotion, oob_fill);
}
EXPORT CUresult cuDeviceTotalMem_v2(std::size_t* bytes, CUdevice device) {
  return api().cuDeviceTotalMem(bytes, device);
}
EXPORT CUresult cuCtxSynchronize() { return api().cuCtxSynchronize(); }
EXPORT CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  return api().cuModuleLoadData(module, image);
}
EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr* address, std::size_t* bytes, CUmodule module,
                                     const char* name) {
  return api().cuModuleGetGlobal(address, bytes, module, name);
}
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                               unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                               unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                               void** parameters, void** extra) {
  return api().cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
                              shared_bytes, stream, parameters, extra);
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function,
                                                            int block_threads,
                                                            std::size_t dynamic_shared_bytes) {
  return api().cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, block_threads,
                                                           dynamic_shared_bytes);
}
EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr destination, const void* source, std::size_t bytes) {
  return api().cuMemcpyHtoD(destination, source, bytes);
}
EXPORT CUresult cuMemcpyDtoH_v2(void* destination, CUdeviceptr source, std::size_t bytes) {
  return api().cuMemcpyDtoH(destination, source, bytes);
}
EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr destination, CUdeviceptr source, std::size_t bytes,
                                     CUstream stream) {
  return api().cuMemcpyDtoDAsync(destination, source, bytes, stream);
}
EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  return api().cuStreamBeginCapture(stream, mode);
}
EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  return api().cuStreamEndCapture(stream, graph);
}
EXPORT CUresult cuGraphDestroy(CUgraph graph) { return api().cuGraphDestroy(graph); }
EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph,
                                            unsigned long long flags) {
  return api().cuGraphInstantiateWithFlags(exec, graph, flags);
}
EXPORT CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
  return api().cuGraphLaunch(exec, stream);
}
EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec) { return api().cuGraphExecDestroy(exec); }
EXPORT CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version,
                                    unsigned long long flags, int* status) {
  return api().cuGetProcAddress(symbol, function, version, flags, status);
}

#undef EXPORT

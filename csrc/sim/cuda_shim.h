// The PTX machine offered as a CUDA driver: a table of driver functions, and what no driver offers:
// errors on demand, and the machine's report of what went wrong.
//
//   CudaShim& shim = CudaShim::instance();
//   shim.reset({.devices = {"100a", "103a"}});
//   shim.api().cuInit(0); ...
//   shim.last_report();
//
// One driver per process, as with libcuda. Handles are numbers that are never used twice and point to
// nothing, so a stale, foreign or invented one is an error and not a crash. Work runs on the calling
// thread when something waits for it: a kernel when its stream is synchronised or gets work that
// must follow it, a copy at once, after what precedes it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "driver/cuda_api.h"
#include "sim/sim.h"

namespace jax_fp4::sim {

using namespace jax_fp4::cuda;

struct CUgraph_st;
using CUgraph = CUgraph_st*;
struct CUgraphExec_st;
using CUgraphExec = CUgraphExec_st*;

enum CUstreamCaptureMode : int {
  CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
  CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
  CU_STREAM_CAPTURE_MODE_RELAXED = 2,
};

// What programs of others and tests call beyond CudaApi.
struct ShimApi : CudaApi {
  CUresult (*cuDeviceTotalMem)(std::size_t* bytes, CUdevice device);
  CUresult (*cuCtxSynchronize)();
  CUresult (*cuModuleLoadData)(CUmodule* module, const void* image);
  CUresult (*cuModuleGetGlobal)(CUdeviceptr* address, std::size_t* bytes, CUmodule module,
                                const char* name);
  CUresult (*cuLaunchKernel)(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                             unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                             unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                             void** parameters, void** extra);
  CUresult (*cuOccupancyMaxActiveBlocksPerMultiprocessor)(int* blocks, CUfunction function,
                                                          int block_threads,
                                                          std::size_t dynamic_shared_bytes);
  CUresult (*cuMemcpyHtoD)(CUdeviceptr destination, const void* source, std::size_t bytes);
  CUresult (*cuMemcpyDtoH)(void* destination, CUdeviceptr source, std::size_t bytes);
  CUresult (*cuMemcpyDtoDAsync)(CUdeviceptr destination, CUdeviceptr source, std::size_t bytes,
                                CUstream stream);
  CUresult (*cuStreamBeginCapture)(CUstream stream, CUstreamCaptureMode mode);
  CUresult (*cuStreamEndCapture)(CUstream stream, CUgraph* graph);
  CUresult (*cuGraphDestroy)(CUgraph graph);
  CUresult (*cuGraphInstantiateWithFlags)(CUgraphExec* exec, CUgraph graph,
                                          unsigned long long flags);
  CUresult (*cuGraphLaunch)(CUgraphExec exec, CUstream stream);
  CUresult (*cuGraphExecDestroy)(CUgraphExec exec);
  CUresult (*cuGetProcAddress)(const char* symbol, void** function, int version,
                               unsigned long long flags, int* status);
};

struct ShimOptions {
  std::vector<std::string> devices = {"100a"};  // chips, by ordinal
  int driver_version = 13050;                   // which PTX versions load
  u64 memory_bytes = u64{16} << 30;             // of each device
  u64 seed = 0;                                 // of every launch's schedule
  u64 max_instructions = u64{1} << 33;          // of a launch, which then ends as a timeout
  Checks checks;
  // A file to which every launch appends what the cycle model says of it (cuda_shim_costs.cc); empty: nothing
  // is modelled. A device then has its chip's number of multiprocessors, and kernels run without data.
  std::string costs;
};

// "100a,120a" -> {"100a", "120a"}
std::vector<std::string> split_devices(const std::string& names);
// JAX_FP4_SIM_DEVICES="100a,120a", JAX_FP4_SIM_SEED and JAX_FP4_SIM_COSTS. Throws std::invalid_argument.
ShimOptions shim_options_from_environment();

class ShimState;

class CudaShim {
 public:
  // With the options of the environment.
  static CudaShim& instance();
  const ShimApi& api() const { return api_; }

  // A new driver: handles, memory, errors and reports of the old one are gone. No call may be under way.
  void reset(ShimOptions options);

  // The `nth` call of a function from now on fails with `error` and does nothing else; 0: every call.
  // `function` is a member of ShimApi. Throws std::invalid_argument for a name that is none.
  void inject(const std::string& function, u32 nth, CUresult error);

  // Why the latest call failed.
  std::string last_report() const;
  // The machine's whole report of every kernel fault since the last reset.
  std::vector<std::string> fault_reports() const;
  // What the machine found doubtful and no call failed for, likewise.
  std::vector<std::string> warnings() const;
  // Also writes reports and warnings to stderr, for programs that cannot ask.
  void report_to_stderr(bool on);

  // Host memory as device memory of a context. Unmapping waits for the context's work.
  CUdeviceptr map(CUcontext context, std::string name, void* data, u64 bytes, bool writable,
                  bool initialized);
  void unmap(CUcontext context, CUdeviceptr address);
  // Whether an address is device memory of a context.
  bool owns(CUcontext context, CUdeviceptr address);

  ShimState& state() { return *state_; }

 private:
  CudaShim();
  ~CudaShim();
  ShimApi api_;
  std::unique_ptr<ShimState> state_;
};

// As for CudaApi, with the symbols that libcuda exports.
template <class Visit>
void for_each_shim_function(ShimApi& api, Visit&& visit) {
  for_each_function(api, visit);
  visit("cuDeviceTotalMem_v2", api.cuDeviceTotalMem);
  visit("cuCtxSynchronize", api.cuCtxSynchronize);
  visit("cuModuleLoadData", api.cuModuleLoadData);
  visit("cuModuleGetGlobal_v2", api.cuModuleGetGlobal);
  visit("cuLaunchKernel", api.cuLaunchKernel);
  visit("cuOccupancyMaxActiveBlocksPerMultiprocessor",
        api.cuOccupancyMaxActiveBlocksPerMultiprocessor);
  visit("cuMemcpyHtoD_v2", api.cuMemcpyHtoD);
  visit("cuMemcpyDtoH_v2", api.cuMemcpyDtoH);
  visit("cuMemcpyDtoDAsync_v2", api.cuMemcpyDtoDAsync);
  visit("cuStreamBeginCapture_v2", api.cuStreamBeginCapture);
  visit("cuStreamEndCapture", api.cuStreamEndCapture);
  visit("cuGraphDestroy", api.cuGraphDestroy);
  visit("cuGraphInstantiateWithFlags", api.cuGraphInstantiateWithFlags);
  visit("cuGraphLaunch", api.cuGraphLaunch);
  visit("cuGraphExecDestroy", api.cuGraphExecDestroy);
  visit("cuGetProcAddress_v2", api.cuGetProcAddress);
}

}  // namespace jax_fp4::sim

// What the files of the stand-in CUDA runtime share: error codes of calls, the thread's device, and the
// kernels that programs register.
#pragma once

#include <functional>

#include "sim/cuda_shim.h"

namespace jax_fp4::cudart {

using namespace jax_fp4::cuda;
using sim::CudaShim;
using sim::ShimApi;

// Codes of cudaError_t. Those of the driver have the same numbers (driver_types.h, since CUDA 10.1), so
// they pass through.
inline constexpr int kSuccess = 0;
inline constexpr int kInvalidValue = 1;
inline constexpr int kInvalidSymbol = 13;
inline constexpr int kInvalidMemcpyDirection = 21;
inline constexpr int kInvalidDeviceFunction = 98;
inline constexpr int kInvalidDevice = 101;
inline constexpr int kInvalidHandle = 400;
inline constexpr int kNotSupported = 801;

// What a runtime function throws.
struct Failure {
  int code;
};

// The simulated driver, which reports on stderr.
CudaShim& shim();
inline const ShimApi& api() { return shim().api(); }
inline void check(CUresult status) {
  if (status != CUDA_SUCCESS) throw Failure{status};
}

// A runtime function's body: its code becomes the thread's last error.
int call(const std::function<void()>& body);
// Says on stderr why the runtime itself refuses something.
[[noreturn]] void refuse(int code, const std::string& why);

// The thread's device, its primary context made current.
CUcontext use_device();
int& thread_device();
int& last_error();

// The kernel of a host function, and the address of a host variable's twin, on the thread's device.
CUfunction function_of(const void* host_function);
CUdeviceptr symbol_of(const void* host_variable, std::size_t* bytes);

}  // namespace jax_fp4::cudart

#define CUDART_EXPORT extern "C" __attribute__((visibility("default")))

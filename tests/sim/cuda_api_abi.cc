// csrc/driver/cuda_api.h against NVIDIA's header, which only this test includes: values, layouts and the
// shape of every signature. Compiling is most of the test; the symbols are compared when it runs.
#include <cuda.h>
// After it: cuda.h renames functions by macros, the members of our tables alike.
#include <cstring>
#include <type_traits>

#include "sim/cuda_shim.h"

namespace ours = jax_fp4::cuda;
using jax_fp4::sim::ShimApi;

#define SAME(name) static_assert(static_cast<int>(ours::name) == static_cast<int>(::name))
SAME(CUDA_SUCCESS);
SAME(CUDA_ERROR_INVALID_VALUE);
SAME(CUDA_ERROR_OUT_OF_MEMORY);
SAME(CUDA_ERROR_NOT_INITIALIZED);
SAME(CUDA_ERROR_NO_DEVICE);
SAME(CUDA_ERROR_INVALID_DEVICE);
SAME(CUDA_ERROR_INVALID_IMAGE);
SAME(CUDA_ERROR_INVALID_CONTEXT);
SAME(CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME(CUDA_ERROR_INVALID_PTX);
SAME(CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
SAME(CUDA_ERROR_INVALID_HANDLE);
SAME(CUDA_ERROR_NOT_FOUND);
SAME(CUDA_ERROR_NOT_READY);
SAME(CUDA_ERROR_ILLEGAL_ADDRESS);
SAME(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
SAME(CUDA_ERROR_LAUNCH_TIMEOUT);
SAME(CUDA_ERROR_MISALIGNED_ADDRESS);
SAME(CUDA_ERROR_LAUNCH_FAILED);
SAME(CUDA_ERROR_TENSOR_MEMORY_LEAK);
SAME(CUDA_ERROR_NOT_PERMITTED);
SAME(CUDA_ERROR_NOT_SUPPORTED);
SAME(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
SAME(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
SAME(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
SAME(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
SAME(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
SAME(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
SAME(CUDA_ERROR_INVALID_CLUSTER_SIZE);
SAME(CUDA_ERROR_UNKNOWN);
SAME(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
SAME(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X);
SAME(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y);
SAME(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z);
SAME(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X);
SAME(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y);
SAME(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z);
SAME(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
SAME(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY);
SAME(CU_DEVICE_ATTRIBUTE_WARP_SIZE);
SAME(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK);
SAME(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT);
SAME(CU_DEVICE_ATTRIBUTE_INTEGRATED);
SAME(CU_DEVICE_ATTRIBUTE_COMPUTE_MODE);
SAME(CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS);
SAME(CU_DEVICE_ATTRIBUTE_ECC_ENABLED);
SAME(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
SAME(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
SAME(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
SAME(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR);
SAME(CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY);
SAME(CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH);
SAME(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
SAME(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR);
SAME(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK);
SAME(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);
SAME(CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH);
SAME(CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED);
SAME(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
SAME(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
SAME(CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES);
SAME(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
SAME(CU_FUNC_ATTRIBUTE_NUM_REGS);
SAME(CU_FUNC_ATTRIBUTE_PTX_VERSION);
SAME(CU_FUNC_ATTRIBUTE_BINARY_VERSION);
SAME(CU_FUNC_ATTRIBUTE_CACHE_MODE_CA);
SAME(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT);
SAME(CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET);
SAME(CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH);
SAME(CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT);
SAME(CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH);
SAME(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
SAME(CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE);
SAME(CU_JIT_INFO_LOG_BUFFER);
SAME(CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES);
SAME(CU_JIT_ERROR_LOG_BUFFER);
SAME(CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES);
SAME(CU_LAUNCH_ATTRIBUTE_IGNORE);
SAME(CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW);
SAME(CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
SAME(CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY);
SAME(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME(CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE);
SAME(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
SAME(CU_LAUNCH_ATTRIBUTE_PRIORITY);
SAME(CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP);
SAME(CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN);
SAME(CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION);
SAME(CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT);
SAME(CU_STREAM_CAPTURE_STATUS_NONE);
SAME(CU_STREAM_CAPTURE_STATUS_ACTIVE);
SAME(CU_STREAM_CAPTURE_STATUS_INVALIDATED);
#undef SAME
static_assert(jax_fp4::sim::CU_STREAM_CAPTURE_MODE_GLOBAL == int{::CU_STREAM_CAPTURE_MODE_GLOBAL});
static_assert(jax_fp4::sim::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL ==
              int{::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL});
static_assert(jax_fp4::sim::CU_STREAM_CAPTURE_MODE_RELAXED ==
              int{::CU_STREAM_CAPTURE_MODE_RELAXED});

#define SAME_PLACE(type, member)                                            \
  static_assert(offsetof(ours::type, member) == offsetof(::type, member) && \
                sizeof(ours::type::member) == sizeof(::type::member))
SAME_PLACE(CUlaunchConfig, gridDimX);
SAME_PLACE(CUlaunchConfig, gridDimY);
SAME_PLACE(CUlaunchConfig, gridDimZ);
SAME_PLACE(CUlaunchConfig, blockDimX);
SAME_PLACE(CUlaunchConfig, blockDimY);
SAME_PLACE(CUlaunchConfig, blockDimZ);
SAME_PLACE(CUlaunchConfig, sharedMemBytes);
SAME_PLACE(CUlaunchConfig, hStream);
SAME_PLACE(CUlaunchConfig, attrs);
SAME_PLACE(CUlaunchConfig, numAttrs);
SAME_PLACE(CUlaunchAttribute, id);
SAME_PLACE(CUlaunchAttribute, value);
SAME_PLACE(CUlaunchAttributeValue, clusterDim);
#undef SAME_PLACE

template <class A, class B>
constexpr bool same_object = sizeof(A) == sizeof(B) && alignof(A) == alignof(B);
static_assert(same_object<ours::CUlaunchConfig, ::CUlaunchConfig>);
static_assert(same_object<ours::CUlaunchAttribute, ::CUlaunchAttribute>);
static_assert(same_object<ours::CUlaunchAttributeValue, ::CUlaunchAttributeValue>);
static_assert(same_object<ours::CUtensorMap, ::CUtensorMap>);
static_assert(same_object<ours::CUdeviceptr, ::CUdeviceptr>);
static_assert(same_object<ours::CUdevice, ::CUdevice>);
static_assert(offsetof(::CUlaunchAttributeValue, priority) == 0 &&
              offsetof(::CUlaunchAttributeValue, cooperative) == 0 &&
              offsetof(::CUlaunchAttributeValue, programmaticStreamSerializationAllowed) == 0);

// The same calling convention: as many arguments, each of the same size and kind, pointing to objects
// of the same size and constness. Handles point to types that neither header defines.
template <class A, class B>
constexpr bool same_pointee() {
  using X = std::remove_pointer_t<A>;
  using Y = std::remove_pointer_t<B>;
  if (std::is_const_v<X> != std::is_const_v<Y>) return false;
  if constexpr (requires { sizeof(X); } && requires { sizeof(Y); }) {
    if constexpr (!std::is_void_v<X> && !std::is_void_v<Y>) return same_object<X, Y>;
  }
  return std::is_void_v<X> == std::is_void_v<Y>;
}
template <class A, class B>
constexpr bool same_argument() {
  if (std::is_pointer_v<A> != std::is_pointer_v<B>) return false;
  if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>) return same_pointee<A, B>();
  return same_object<A, B>;
}
template <class... A, class... B>
constexpr bool same_call(ours::CUresult (*)(A...), ::CUresult (*)(B...)) {
  if constexpr (sizeof...(A) != sizeof...(B))
    return false;
  else
    return (same_argument<A, B>() && ...);
}

// Symbols in the order of for_each_shim_function(), as cuda.h's macros spell them.
#define NAME(symbol) #symbol
#define FUNCTION(name)                                                                    \
  (static_cast<void>(                                                                     \
       [] { static_assert(same_call(decltype(ShimApi::name){}, decltype(&::name){})); }), \
   NAME(name))
#define SYMBOL(name) FUNCTION(name)
static const char* const kSymbols[] = {
    SYMBOL(cuInit),
    SYMBOL(cuDriverGetVersion),
    SYMBOL(cuGetErrorName),
    SYMBOL(cuGetErrorString),
    SYMBOL(cuDeviceGetCount),
    SYMBOL(cuDeviceGet),
    SYMBOL(cuDeviceGetName),
    SYMBOL(cuDeviceGetAttribute),
    SYMBOL(cuDevicePrimaryCtxRetain),
    SYMBOL(cuDevicePrimaryCtxRelease),
    SYMBOL(cuCtxGetCurrent),
    SYMBOL(cuCtxSetCurrent),
    SYMBOL(cuCtxPushCurrent),
    SYMBOL(cuCtxPopCurrent),
    SYMBOL(cuCtxGetDevice),
    SYMBOL(cuModuleLoadDataEx),
    SYMBOL(cuModuleUnload),
    SYMBOL(cuModuleGetFunction),
    SYMBOL(cuFuncGetAttribute),
    SYMBOL(cuFuncSetAttribute),
    SYMBOL(cuOccupancyMaxActiveClusters),
    SYMBOL(cuLaunchKernelEx),
    SYMBOL(cuStreamCreate),
    SYMBOL(cuStreamDestroy),
    SYMBOL(cuStreamSynchronize),
    SYMBOL(cuStreamGetCtx),
    SYMBOL(cuStreamIsCapturing),
    SYMBOL(cuMemAlloc),
    SYMBOL(cuMemFree),
    SYMBOL(cuMemcpyHtoDAsync),
    SYMBOL(cuMemcpyDtoHAsync),
    SYMBOL(cuMemsetD8Async),
    SYMBOL(cuTensorMapEncodeTiled),
    SYMBOL(cuDeviceTotalMem),
    SYMBOL(cuCtxSynchronize),
    SYMBOL(cuModuleLoadData),
    SYMBOL(cuModuleGetGlobal),
    SYMBOL(cuLaunchKernel),
    SYMBOL(cuOccupancyMaxActiveBlocksPerMultiprocessor),
    SYMBOL(cuMemcpyHtoD),
    SYMBOL(cuMemcpyDtoH),
    SYMBOL(cuMemcpyDtoDAsync),
    SYMBOL(cuStreamBeginCapture),
    SYMBOL(cuStreamEndCapture),
    SYMBOL(cuGraphDestroy),
    SYMBOL(cuGraphInstantiateWithFlags),
    SYMBOL(cuGraphLaunch),
    SYMBOL(cuGraphExecDestroy),
    SYMBOL(cuGetProcAddress),
};
#undef SYMBOL
#undef FUNCTION
#undef NAME

// The first symbol that differs from cuda.h's; null: none does.
extern "C" const char* first_wrong_symbol() {
  ShimApi api = {};
  std::size_t count = 0;
  const char* wrong = nullptr;
  jax_fp4::sim::for_each_shim_function(api, [&](const char* symbol, auto&) {
    const bool same = count < std::size(kSymbols) && std::strcmp(symbol, kSymbols[count]) == 0;
    if (!same && !wrong) wrong = symbol;
    ++count;
  });
  return wrong ? wrong : count == std::size(kSymbols) ? nullptr : "a symbol is missing";
}

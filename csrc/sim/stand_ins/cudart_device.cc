// The stand-in CUDA runtime: devices, memory, streams, events, errors.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "sim/stand_ins/cudart.h"

namespace {

using namespace jax_fp4::cudart;

// Where cudaDeviceProp has the fields that are filled; everything else of it is zero. The structure of
// CUDA 13 has lost some members (driver_types.h of 12.9 and 13.3, offsetof on x86-64).
struct PropertyPlaces {
  std::size_t bytes, multiprocessors, concurrent_kernels, unified_addressing,
      threads_per_multiprocessor, shared_per_multiprocessor, registers_per_multiprocessor,
      shared_optin, ctas_per_multiprocessor, reserved_shared, cluster_launch;
};
constexpr PropertyPlaces kProperties12 = {1032, 388, 576, 604, 624, 640, 648, 696, 712, 720, 772};
constexpr PropertyPlaces kProperties13 = {1008, 384, 560, 588, 604, 624, 632, 672, 688, 696, 748};

template <class T>
void put(void* properties, std::size_t offset, T value) {
  std::memcpy(static_cast<char*>(properties) + offset, &value, sizeof value);
}

int fill_properties(void* properties, int device, const PropertyPlaces& places) {
  return call([&] {
    use_device();
    const auto get = [&](CUdevice_attribute attribute) {
      int value = 0;
      check(api().cuDeviceGetAttribute(&value, attribute, device));
      return value;
    };
    std::size_t memory = 0;
    check(api().cuDeviceTotalMem(&memory, device));
    std::memset(properties, 0, places.bytes);
    check(api().cuDeviceGetName(static_cast<char*>(properties), 256, device));
    put<std::size_t>(properties, 288, memory);
    put<std::size_t>(properties, 296, get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK));
    put(properties, 304, get(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK));
    put(properties, 308, get(CU_DEVICE_ATTRIBUTE_WARP_SIZE));
    put(properties, 320, get(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK));
    put(properties, 324, get(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X));
    put(properties, 328, get(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y));
    put(properties, 332, get(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z));
    put(properties, 336, get(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X));
    put(properties, 340, get(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y));
    put(properties, 344, get(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z));
    put<std::size_t>(properties, 352, get(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY));
    put(properties, 360, get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR));
    put(properties, 364, get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
    put(properties, places.multiprocessors, get(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
    put(properties, places.concurrent_kernels, get(CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS));
    put(properties, places.unified_addressing, get(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING));
    put(properties, places.threads_per_multiprocessor,
        get(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR));
    put<std::size_t>(properties, places.shared_per_multiprocessor,
                     get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR));
    put(properties, places.registers_per_multiprocessor,
        get(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR));
    put<std::size_t>(properties, places.shared_optin,
                     get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN));
    put(properties, places.ctas_per_multiprocessor,
        get(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR));
    put<std::size_t>(properties, places.reserved_shared,
                     get(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK));
    put(properties, places.cluster_launch, get(CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH));
  });
}

CUdeviceptr address_of(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

// cudaMemcpyKind
enum Direction : int { host_to_host, host_to_device, device_to_host, device_to_device, by_address };

void copy(void* destination, const void* source, std::size_t bytes, int kind, CUstream stream) {
  const CUcontext context = use_device();
  if (bytes != 0 && (!destination || !source))
    refuse(kInvalidValue, std::string(destination ? "src" : "dst") + ": got a null pointer");
  if (kind == by_address) {
    const bool to = shim().owns(context, address_of(destination));
    const bool from = shim().owns(context, address_of(source));
    kind = to ? (from ? device_to_device : host_to_device) : (from ? device_to_host : host_to_host);
  }
  switch (kind) {
    case host_to_host:
      check(api().cuStreamSynchronize(stream));
      std::memcpy(destination, source, bytes);
      return;
    case host_to_device:
      check(api().cuMemcpyHtoDAsync(address_of(destination), source, bytes, stream));
      return;
    case device_to_host:
      check(api().cuMemcpyDtoHAsync(destination, address_of(source), bytes, stream));
      return;
    case device_to_device:
      check(api().cuMemcpyDtoDAsync(address_of(destination), address_of(source), bytes, stream));
      return;
    default: refuse(kInvalidMemcpyDirection, "kind: expected 0 to 4, got " + std::to_string(kind));
  }
}

// An event is the moment at which the host has seen everything before it done.
struct Event {
  std::chrono::steady_clock::time_point time;
  bool recorded = false;
};
std::mutex event_mutex;
std::map<Event*, std::unique_ptr<Event>>& events() {
  static auto& made = *new std::map<Event*, std::unique_ptr<Event>>;
  return made;
}
Event& event_of(Event* handle) {
  const auto found = events().find(handle);
  if (found == events().end()) refuse(kInvalidHandle, "event: the handle is of no live event");
  return *found->second;
}

}  // namespace

// ---- Devices and errors

CUDART_EXPORT int cudaGetDeviceCount(int* count) {
  return call([&] {
    check(api().cuInit(0));
    check(api().cuDeviceGetCount(count));
  });
}
CUDART_EXPORT int cudaGetDevice(int* device) {
  *device = thread_device();
  return kSuccess;
}
CUDART_EXPORT int cudaSetDevice(int device) {
  return call([&] {
    int count = 0;
    check(api().cuInit(0));
    check(api().cuDeviceGetCount(&count));
    if (device < 0 || device >= count)
      refuse(kInvalidDevice, "device: expected a number below " + std::to_string(count) + ", got " +
                                 std::to_string(device));
    thread_device() = device;
    use_device();
  });
}
CUDART_EXPORT int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  return call([&] {
    use_device();
    check(api().cuDeviceGetAttribute(value, static_cast<CUdevice_attribute>(attribute), device));
  });
}
// Headers of CUDA 12 rename the function, those of CUDA 13 do not.
CUDART_EXPORT int cudaGetDeviceProperties_v2(void* properties, int device) {
  return fill_properties(properties, device, kProperties12);
}
CUDART_EXPORT int cudaGetDeviceProperties(void* properties, int device) {
  return fill_properties(properties, device, kProperties13);
}
CUDART_EXPORT int cudaDeviceSynchronize() {
  return call([] {
    use_device();
    check(api().cuCtxSynchronize());
  });
}
CUDART_EXPORT int cudaDriverGetVersion(int* version) {
  return call([&] { check(api().cuDriverGetVersion(version)); });
}
CUDART_EXPORT int cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

CUDART_EXPORT int cudaGetLastError() { return std::exchange(last_error(), kSuccess); }
CUDART_EXPORT int cudaPeekAtLastError() { return last_error(); }
CUDART_EXPORT const char* cudaGetErrorName(int error) {
  const char* name = nullptr;
  api().cuGetErrorName(static_cast<CUresult>(error), &name);
  return name ? name : "unrecognized error code";
}
CUDART_EXPORT const char* cudaGetErrorString(int error) {
  const char* text = nullptr;
  api().cuGetErrorString(static_cast<CUresult>(error), &text);
  return text ? text : "unrecognized error code";
}

// The runtime's query results are the driver's: 0 found, 1 not found.
CUDART_EXPORT int cudaGetDriverEntryPointByVersion(const char* symbol, void** function,
                                                   unsigned version, unsigned long long flags,
                                                   int* status) {
  return call([&] {
    check(api().cuGetProcAddress(symbol, function, static_cast<int>(version), flags, status));
  });
}
CUDART_EXPORT int cudaGetDriverEntryPoint(const char* symbol, void** function,
                                          unsigned long long flags, int* status) {
  return cudaGetDriverEntryPointByVersion(symbol, function, 12000, flags, status);
}

// ---- Memory

CUDART_EXPORT int cudaMalloc(void** pointer, std::size_t bytes) {
  return call([&] {
    use_device();
    CUdeviceptr address = 0;
    if (bytes != 0) check(api().cuMemAlloc(&address, bytes));
    *pointer = reinterpret_cast<void*>(address);
  });
}
CUDART_EXPORT int cudaFree(void* pointer) {
  return call([&] {
    use_device();
    check(api().cuMemFree(address_of(pointer)));
  });
}
CUDART_EXPORT int cudaMallocHost(void** pointer, std::size_t bytes) {
  *pointer = std::malloc(bytes);
  return call([&] {
    if (!*pointer) refuse(CUDA_ERROR_OUT_OF_MEMORY, "the host has no more memory");
  });
}
CUDART_EXPORT int cudaFreeHost(void* pointer) {
  std::free(pointer);
  return kSuccess;
}
CUDART_EXPORT int cudaMemcpyAsync(void* destination, const void* source, std::size_t bytes,
                                  int kind, CUstream stream) {
  return call([&] { copy(destination, source, bytes, kind, stream); });
}
CUDART_EXPORT int cudaMemcpy(void* destination, const void* source, std::size_t bytes, int kind) {
  return cudaMemcpyAsync(destination, source, bytes, kind, nullptr);
}
CUDART_EXPORT int cudaMemsetAsync(void* pointer, int value, std::size_t bytes, CUstream stream) {
  return call([&] {
    use_device();
    check(api().cuMemsetD8Async(address_of(pointer), static_cast<unsigned char>(value), bytes,
                                stream));
  });
}
CUDART_EXPORT int cudaMemset(void* pointer, int value, std::size_t bytes) {
  return cudaMemsetAsync(pointer, value, bytes, nullptr);
}
CUDART_EXPORT int cudaGetSymbolAddress(void** pointer, const void* symbol) {
  return call([&] { *pointer = reinterpret_cast<void*>(symbol_of(symbol, nullptr)); });
}
CUDART_EXPORT int cudaMemcpyToSymbol(const void* symbol, const void* source, std::size_t bytes,
                                     std::size_t offset, int kind) {
  return call([&] {
    const CUdeviceptr target = symbol_of(symbol, nullptr) + offset;
    copy(reinterpret_cast<void*>(target), source, bytes, kind, nullptr);
  });
}
CUDART_EXPORT int cudaMemcpyFromSymbol(void* destination, const void* symbol, std::size_t bytes,
                                       std::size_t offset, int kind) {
  return call([&] {
    const CUdeviceptr from = symbol_of(symbol, nullptr) + offset;
    copy(destination, reinterpret_cast<const void*>(from), bytes, kind, nullptr);
  });
}

// ---- Streams and events

CUDART_EXPORT int cudaStreamCreateWithFlags(CUstream* stream, unsigned flags) {
  return call([&] {
    use_device();
    check(api().cuStreamCreate(stream, flags));
  });
}
CUDART_EXPORT int cudaStreamCreateWithPriority(CUstream* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
CUDART_EXPORT int cudaStreamCreate(CUstream* stream) {
  return cudaStreamCreateWithFlags(stream, 0);
}
CUDART_EXPORT int cudaStreamDestroy(CUstream stream) {
  return call([&] { check(api().cuStreamDestroy(stream)); });
}
CUDART_EXPORT int cudaStreamSynchronize(CUstream stream) {
  return call([&] {
    use_device();
    check(api().cuStreamSynchronize(stream));
  });
}
CUDART_EXPORT int cudaStreamQuery(CUstream stream) { return cudaStreamSynchronize(stream); }
CUDART_EXPORT int cudaStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return call([&] {
    use_device();
    check(api().cuStreamIsCapturing(stream, status));
  });
}

CUDART_EXPORT int cudaEventCreateWithFlags(Event** event, unsigned) {
  const std::scoped_lock lock(event_mutex);
  auto made = std::make_unique<Event>();
  *event = made.get();
  events().emplace(*event, std::move(made));
  return kSuccess;
}
CUDART_EXPORT int cudaEventCreate(Event** event) { return cudaEventCreateWithFlags(event, 0); }
CUDART_EXPORT int cudaEventDestroy(Event* event) {
  return call([&] {
    const std::scoped_lock lock(event_mutex);
    event_of(event);
    events().erase(event);
  });
}
CUDART_EXPORT int cudaEventRecord(Event* event, CUstream stream) {
  return call([&] {
    use_device();
    check(api().cuStreamSynchronize(stream));
    const std::scoped_lock lock(event_mutex);
    event_of(event) = {std::chrono::steady_clock::now(), true};
  });
}
CUDART_EXPORT int cudaEventSynchronize(Event* event) {
  return call([&] {
    const std::scoped_lock lock(event_mutex);
    event_of(event);
  });
}
CUDART_EXPORT int cudaEventQuery(Event* event) { return cudaEventSynchronize(event); }
CUDART_EXPORT int cudaStreamWaitEvent(CUstream, Event* event, unsigned) {
  return cudaEventSynchronize(event);
}
// Time of the host, which says nothing about a GPU.
CUDART_EXPORT int cudaEventElapsedTime(float* milliseconds, Event* start, Event* end) {
  return call([&] {
    const std::scoped_lock lock(event_mutex);
    if (!event_of(start).recorded || !event_of(end).recorded)
      refuse(kInvalidHandle, "event: it was never recorded");
    *milliseconds =
        std::chrono::duration<float, std::milli>(event_of(end).time - event_of(start).time).count();
  });
}

#undef CUDART_EXPORT

// The simulated driver inside: devices, contexts, and what handles stand for. Only the cuda_shim_*.cc
// files include it.
//
//   ShimState   devices, live handles, injected errors, reports; one mutex over everything
//   Context     of a device: a machine with memory of its own, streams, and the error that has stuck
//   Stream      work in order: a chain of kernels that wait to run, and a recording if it captures
//   Operation   what a stream is given: a kernel launch, a copy, a fill
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <variant>

#include "sim/chip.h"
#include "sim/cuda_shim.h"

namespace jax_fp4::sim {

// What a driver function that is refused throws: the code it returns, and why.
struct ApiError : std::runtime_error {
  ApiError(CUresult code, const std::string& why) : std::runtime_error(why), code(code) {}
  CUresult code;
};

struct Context;

// The model of a device. Few multiprocessors make persistent kernels take several turns even on small
// problems; with the cycle model a device has as many as its chip. What a query promises to be resident at
// once is what a launch runs at once.
inline constexpr u32 kMultiprocessors = 16;
inline constexpr u32 kCtasPerMultiprocessor = 4;
// Dynamic shared memory of a kernel that has not asked for more (CUDA programming guide).
inline constexpr u32 kDefaultSharedBytes = 49152;
// Clusters that every device with clusters runs; larger ones need the kernel's consent.
inline constexpr u32 kPortableCluster = 8;
// Devices' addresses are this far apart: a pointer of one is unmapped on the others.
inline constexpr u64 kDeviceAddressBytes = u64{1} << 42;

struct ShimModule {
  static constexpr u64 kHandleType = 1;
  Context* context;
  LoadedModule* loaded;
};

struct ShimFunction {
  static constexpr u64 kHandleType = 2;
  CUmodule handle;  // of the module
  ShimModule* module;
  std::string entry;
  u32 max_dynamic_shared = 0;
  bool non_portable_cluster = false;

  const Program& program() const { return *module->loaded->find(entry); }
};

struct KernelLaunch {
  CUmodule module;
  std::string entry;
  LaunchSpec spec;
  bool programmatic;  // may start before its predecessor has ended
};
// Of device memory; `host` is read or written when the operation runs.
struct CopyOperation {
  enum Kind { to_device, to_host, on_device } kind;
  u64 device;
  u64 source;  // on_device
  void* host;
  u64 bytes;
};
struct FillOperation {
  u64 device;
  u8 value;
  u64 bytes;
};
using Operation = std::variant<KernelLaunch, CopyOperation, FillOperation>;
struct Graph {
  static constexpr u64 kHandleType = 4;
  Context* context = nullptr;
  std::vector<Operation> operations;
};
struct GraphExec : Graph {
  static constexpr u64 kHandleType = 5;
};

struct Stream {
  static constexpr u64 kHandleType = 3;
  Context* context = nullptr;
  bool non_blocking = false;  // not ordered with the legacy stream
  std::vector<KernelLaunch> chain;
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id capture_thread;
  std::vector<Operation> recording;
};

struct Context {
  static constexpr u64 kHandleType = 0;
  CUcontext handle = nullptr;
  CUdevice device = 0;
  u32 references = 0;
  std::unique_ptr<Machine> machine;
  std::map<u64, std::unique_ptr<u8[]>> allocations;  // by address
  u64 allocated_bytes = 0;
  Stream legacy, per_thread;
  std::optional<ApiError> stuck;  // a kernel's fault: the context is of no more use
};

// Live objects by handle. A handle is a number that points to nothing and is never used again, by no
// type and after no reset.
template <class Handle, class T>
class Handles {
 public:
  Handle add(std::unique_ptr<T> object) {
    static std::atomic<u64> next = kFirstHandle;
    const auto handle = reinterpret_cast<Handle>(next += kHandleStep);
    objects_.emplace(handle, std::move(object));
    return handle;
  }
  T* find(Handle handle) const {
    const auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second.get();
  }
  bool erase(Handle handle) { return objects_.erase(handle) != 0; }
  template <class Predicate>
  void erase_if(Predicate&& dead) {
    std::erase_if(objects_, [&](const auto& item) { return dead(*item.second); });
  }
  template <class Visit>
  void for_each(Visit&& visit) const {
    for (const auto& [handle, object] : objects_) visit(*object);
  }

 private:
  // Types take turns: each has numbers of its own.
  static constexpr u64 kHandleTypes = 8;
  static constexpr u64 kHandleStep = kHandleTypes * 16;
  static constexpr u64 kFirstHandle = (u64{0xC0} << 40) + T::kHandleType * 16;
  std::map<Handle, std::unique_ptr<T>> objects_;
};

class ShimState {
 public:
  explicit ShimState(ShimOptions options);

  // The call of a driver function: injected errors, whether cuInit must have been called, and what the
  // body throws.
  CUresult call(const char* function, bool needs_init, const std::function<void()>& body);

  // These check their argument and throw.
  const std::string& chip(CUdevice device) const;
  u32 multiprocessors(CUdevice device) const;
  Context& context_of(CUcontext handle) const;
  Stream& stream_of(CUstream handle);
  ShimModule& module_of(CUmodule handle) const;
  ShimFunction& function_of(CUfunction handle) const;
  // The context of this thread, and one that must be usable: no kernel has failed in it.
  Context& current();
  static Context& usable(Context& context);

  CUcontext retain(CUdevice device);
  void release(CUdevice device);
  void unload(CUmodule handle);

  // Gives a stream work. What precedes it has run when a copy is done; a kernel runs with the ones that
  // programmatically follow it when something must wait for them.
  void submit(Stream& stream, Operation operation);
  // The legacy stream and the blocking ones wait for each other: runs what `stream` must wait for.
  void wait_for_others(Stream& stream);
  // Runs what waits in a stream, or in all streams of a context.
  void drain(Stream& stream);
  void drain(Context& context);
  // Refuses what a capture forbids to the calling thread, and invalidates the capture.
  void forbid_during_capture(const std::string& what);
  [[noreturn]] static void invalidate(Stream& stream, CUresult code, const std::string& why);

  // The device memory [address, address + bytes).
  static Buffer& buffer_of(Context& context, u64 address, u64 bytes);
  void warn(const std::string& text);

  ShimOptions options;
  bool initialized = false;
  Handles<CUcontext, Context> contexts;
  std::vector<CUcontext> primary;  // by device; null where none is retained
  Handles<CUmodule, ShimModule> modules;
  Handles<CUfunction, ShimFunction> functions;
  Handles<CUstream, Stream> streams;
  Handles<CUgraph, Graph> graphs;
  Handles<CUgraphExec, GraphExec> graph_execs;
  struct Injection {
    u32 nth;  // calls until it happens
    CUresult error;
    bool every;
  };
  std::map<std::string, Injection> injections;
  std::string report;
  std::vector<std::string> fault_reports, warnings;
  bool to_stderr = false;
  mutable std::mutex mutex;

 private:
  void run(Context& context, const std::vector<KernelLaunch>& chain);
  void append_costs(const std::string& entry, const LaunchReport& report);  // cuda_shim_costs.cc
  void execute(Context& context, const CopyOperation& copy);
  void execute(Context& context, const FillOperation& fill);
  template <class Visit>
  void for_each_stream(Context& context, Visit&& visit);
};

// Name and description of an error code; null: unknown.
const char* name_of_error(CUresult error);
const char* text_of_error(CUresult error);

// Modules and launches (cuda_shim_module.cc).
CUmodule load_module(ShimState& state, Context& context, const void* image);
int function_attribute(const ShimState& state, const ShimFunction& function,
                       CUfunction_attribute attribute);
void set_function_attribute(const ShimState& state, ShimFunction& function,
                            CUfunction_attribute attribute, int value);
// The launch that a configuration describes, checked; its parameters are empty.
KernelLaunch make_launch(const ShimState& state, const ShimFunction& function,
                         const CUlaunchConfig& config);
std::vector<u8> pack_parameters(const Program& program, void** parameters, void** extra);
// CTAs of a launch that a multiprocessor holds.
u32 ctas_per_multiprocessor(const std::string& chip, const Program& program, u64 threads,
                            u64 dynamic_shared);
int device_attribute(const ShimState& state, CUdevice device, CUdevice_attribute attribute);

// The contexts of the calling thread, the current one last.
std::vector<CUcontext>& thread_contexts();
void fill_api(ShimApi& api);  // cuda_shim_api.cc

}  // namespace jax_fp4::sim

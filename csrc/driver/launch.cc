#include "driver/launch.h"

#include <algorithm>
#include <cstdlib>
#include <tuple>
#include <vector>

namespace jax_fp4::cuda {
namespace {

int number_of(const char* target) { return std::atoi(target); }
char suffix_of(const char* target) { return std::string_view(target).back(); }

// Makes a context current for a scope. `leave` tells whether the one before is current again; the
// destructor is for exceptions, which have a reason of their own.
class Current {
 public:
  Current(const CudaApi& api, CUcontext context)
      : api_(api), entered_(api.cuCtxPushCurrent(context)) {}
  ~Current() {
    if (!left_) leave();
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  CUresult entered() const { return entered_; }
  CUresult leave() {
    left_ = true;
    CUcontext popped = nullptr;
    return entered_ == CUDA_SUCCESS ? api_.cuCtxPopCurrent(&popped) : CUDA_SUCCESS;
  }

 private:
  const CudaApi& api_;
  const CUresult entered_;
  bool left_ = false;
};

// Of cuTensorMapEncodeTiled, as numbers (cuda.h of CUDA 12.8).
constexpr CUtensorMapInterleave kNoInterleave = 0;
constexpr CUtensorMapSwizzle kNoSwizzle = 0, kSwizzle64B = 2, kSwizzle128B = 3;
constexpr CUtensorMapL2promotion kPromote256B = 3;
constexpr CUtensorMapFloatOOBfill kZeros = 0;

}  // namespace

bool image_fits(const ImageEntry& image, int chip) {
  const int number = number_of(image.target);
  switch (suffix_of(image.target)) {
    case 'a': return number == chip;
    case 'f': return number / 10 == chip / 10 && number <= chip;
    default:
      return image.kind == ImageKind::cubin ? number / 10 == chip / 10 && number <= chip
                                            : number <= chip;
  }
}

bool image_better(const ImageEntry& a, const ImageEntry& b) {
  const auto rank = [](const ImageEntry& image) {
    const char suffix = suffix_of(image.target);
    return std::tuple(image.kind == ImageKind::cubin, number_of(image.target),
                      suffix == 'a'   ? 2
                      : suffix == 'f' ? 1
                                      : 0);
  };
  return rank(a) > rank(b);
}

void Launcher::check(CUresult status, const std::string& what) const {
  if (status != CUDA_SUCCESS)
    throw DriverError("jax_fp4: " + what + " failed with " + error_text(api_, status));
}

CUcontext Launcher::context_of(CUstream stream) const {
  CUcontext context = nullptr;
  const auto value = reinterpret_cast<unsigned long long>(stream);
  if (value == 0 || value == kLegacyStream || value == kPerThreadStream)
    check(api_.cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  else
    check(api_.cuStreamGetCtx(stream, &context), "cuStreamGetCtx");
  if (context == nullptr)
    throw DriverError("jax_fp4: the default stream was given, and this thread has no CUDA context");
  return context;
}

// The context's entry; it must be current. The mutex is held by the caller.
Launcher::Context& Launcher::enter(CUcontext handle) {
  if (const auto found = contexts_.find(handle); found != contexts_.end()) return found->second;
  CUdevice device = 0;
  check(api_.cuCtxGetDevice(&device), "cuCtxGetDevice");
  const auto attribute = [&](CUdevice_attribute which, const char* name) {
    int value = 0;
    check(api_.cuDeviceGetAttribute(&value, which, device),
          std::string("cuDeviceGetAttribute of ") + name);
    return value;
  };
  const int major =
      attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, "the compute capability");
  const int minor =
      attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, "the compute capability");
  const int sms = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, "the number of SMs");
  Context context;
  context.chip = {major * 10 + minor, static_cast<u32>(sms)};
  context.shared_bytes =
      attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, "the shared memory");
  if (context.chip.number < plan::kLeastChip)
    throw DriverError("jax_fp4: the GPU has compute capability " + std::to_string(major) + "." +
                      std::to_string(minor) +
                      ", and the kernels need 8.0 or newer; run on the CPU");
  return contexts_.emplace(handle, std::move(context)).first->second;
}

// Runs body(context's entry) with the context of the stream current.
template <class Body>
void Launcher::in_context(CUstream stream, const Body& body) {
  const CUcontext handle = context_of(stream);
  Current current(api_, handle);
  check(current.entered(), "cuCtxPushCurrent");
  {
    const std::lock_guard lock(mutex_);
    body(enter(handle));
  }
  check(current.leave(), "cuCtxPopCurrent");
}

plan::Chip Launcher::chip(CUstream stream) {
  plan::Chip chip;
  in_context(stream, [&](Context& context) { chip = context.chip; });
  return chip;
}

void Launcher::load(CUstream stream, std::string_view prefix) {
  in_context(stream, [&](Context& context) {
    for (std::size_t i = 0; i < images_.count; ++i) {
      const ImageEntry& image = images_.entries[i];
      if (std::string_view(image.kernel).substr(0, prefix.size()) == prefix &&
          image_fits(image, context.chip.number))
        kernel(context, stream, image.kernel);
    }
  });
}

CUfunction Launcher::kernel(Context& context, CUstream stream, std::string_view name) {
  if (const auto found = context.kernels.find(name); found != context.kernels.end())
    return found->second;
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  check(api_.cuStreamIsCapturing(stream, &capture), "cuStreamIsCapturing");
  if (capture != CU_STREAM_CAPTURE_STATUS_NONE)
    throw DriverError("jax_fp4: kernel " + std::string(name) +
                      " is not loaded, and it cannot be loaded while a CUDA graph is captured; run "
                      "the program once before the capture");
  const CUfunction loaded = load_kernel(context, name);
  // The key has to outlive `name`.
  const char* key = nullptr;
  for (std::size_t i = 0; i < images_.count && !key; ++i)
    if (name == images_.entries[i].kernel) key = images_.entries[i].kernel;
  return context.kernels.emplace(key, loaded).first->second;
}

CUfunction Launcher::load_kernel(const Context& context, std::string_view name) {
  std::vector<const ImageEntry*> fitting;
  for (std::size_t i = 0; i < images_.count; ++i) {
    const ImageEntry& image = images_.entries[i];
    if (name == image.kernel && image_fits(image, context.chip.number)) fitting.push_back(&image);
  }
  std::sort(fitting.begin(), fitting.end(),
            [](const ImageEntry* a, const ImageEntry* b) { return image_better(*a, *b); });
  const std::string chip = std::to_string(context.chip.number);
  std::string tried;
  for (const ImageEntry* image : fitting) {
    char log[4096] = "";
    CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    void* values[] = {log, reinterpret_cast<void*>(sizeof log)};
    CUmodule module = nullptr;
    const CUresult status =
        api_.cuModuleLoadDataEx(&module, images_.data + image->offset, 2, options, values);
    if (status == CUDA_SUCCESS) {
      CUfunction function = nullptr;
      check(api_.cuModuleGetFunction(&function, module, image->kernel),
            "cuModuleGetFunction of " + std::string(name));
      // Whatever a plan may ask for: this call is not for the time of a capture.
      int fixed = 0;
      check(api_.cuFuncGetAttribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function),
            "cuFuncGetAttribute of " + std::string(name));
      check(api_.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                    context.shared_bytes - fixed),
            "cuFuncSetAttribute of " + std::string(name));
      return function;
    }
    tried += std::string(tried.empty() ? "" : "; ") +
             (image->kind == ImageKind::cubin ? "cubin sm_" : "PTX sm_") + image->target + ": " +
             error_text(api_, status) + (log[0] ? std::string(", ") + log : "");
    // Only an image that does not suit the driver makes room for the next one.
    if (status != CUDA_ERROR_NO_BINARY_FOR_GPU && status != CUDA_ERROR_INVALID_IMAGE) break;
  }
  if (tried.empty())
    throw DriverError("jax_fp4: kernel " + std::string(name) + " was not compiled for sm_" + chip +
                      "; rebuild with JAX_FP4_ARCHS=all, or run on the CPU");
  throw DriverError("jax_fp4: kernel " + std::string(name) + " could not be loaded on sm_" + chip +
                    " (cuModuleLoadDataEx: " + tried +
                    "); a driver older than CUDA 12.9 may be the reason: update it");
}

void Launcher::run(CUstream stream, const plan::Steps& steps) {
  if (steps.empty()) return;
  in_context(stream, [&](Context& context) {
    for (const plan::Step& step : steps) {
      if (const auto* clear = std::get_if<plan::Clear>(&step)) {
        check(api_.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(clear->address), 0, clear->bytes,
                                   stream),
              "cuMemsetD8Async");
      } else {
        launch(context, stream, std::get<plan::Launch>(step));
      }
    }
  });
}

void Launcher::launch(Context& context, CUstream stream, const plan::Launch& l) {
  const CUfunction function = kernel(context, stream, l.kernel);
  const std::string& name = l.kernel;
  alignas(64) unsigned char parameters[plan::kMostParameterBytes];
  std::copy_n(l.parameters, l.parameter_bytes, parameters);
  for (const plan::MapRequest& map : l.maps) {
    CUtensorMap encoded;
    const unsigned int ones[] = {1, 1, 1, 1};
    const CUtensorMapSwizzle swizzle = map.swizzle == 128  ? kSwizzle128B
                                       : map.swizzle == 64 ? kSwizzle64B
                                                           : kNoSwizzle;
    check(
        api_.cuTensorMapEncodeTiled(&encoded, static_cast<CUtensorMapDataType>(map.type), map.rank,
                                    const_cast<void*>(map.address), map.dims, map.strides, map.box,
                                    ones, kNoInterleave, swizzle, kPromote256B, kZeros),
        "cuTensorMapEncodeTiled for " + name);
    std::memcpy(parameters + map.offset, &encoded, sizeof encoded);
  }
  CUlaunchAttribute attributes[2] = {};
  unsigned int count = 0;
  if (l.cluster > 1) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[count++].value.clusterDim = {l.cluster, 1, 1};
  }
  if (l.overlaps && context.chip.dependent_launches()) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[count++].value.number = 1;
  }
  const CUlaunchConfig config = {l.grid.x, l.grid.y,       l.grid.z, l.threads,  1,
                                 1,        l.shared_bytes, stream,   attributes, count};
  void* pointers[] = {parameters};
  check(api_.cuLaunchKernelEx(&config, function, pointers, nullptr), "cuLaunchKernelEx of " + name);
}

}  // namespace jax_fp4::cuda

// The simulated driver's streams: order of work, kernels that run, copies, captures.
#include <algorithm>
#include <cstring>

#include "sim/cuda_shim_state.h"

namespace jax_fp4::sim {
namespace {

// What hardware would have made of a fault that the machine has found. Most of them it does not see at
// all; they count as failed launches.
CUresult code_of(const LaunchFault& fault) {
  if (fault.kind == "out-of-bounds" || fault.kind == "read-only") return CUDA_ERROR_ILLEGAL_ADDRESS;
  if (fault.kind == "misaligned") return CUDA_ERROR_MISALIGNED_ADDRESS;
  if (fault.kind == "timeout") return CUDA_ERROR_LAUNCH_TIMEOUT;
  return CUDA_ERROR_LAUNCH_FAILED;
}

std::string hex(u64 value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", value);
  return text;
}

}  // namespace

template <class Visit>
void ShimState::for_each_stream(Context& context, Visit&& visit) {
  visit(context.legacy);
  visit(context.per_thread);
  streams.for_each([&](Stream& s) {
    if (s.context == &context) visit(s);
  });
}

Buffer& ShimState::buffer_of(Context& context, u64 address, u64 bytes) {
  GlobalMemory& memory = context.machine->global();
  Buffer* buffer = memory.find(address);
  if (buffer && bytes <= buffer->bytes - (address - buffer->base)) return *buffer;
  std::string why = "the " + std::to_string(bytes) + " bytes at device address " + hex(address);
  const Buffer* near = memory.nearest(address);
  if (buffer) {
    why += " reach beyond '" + buffer->name + "' (" + std::to_string(buffer->bytes) +
           " bytes), of which the first is byte " + std::to_string(address - buffer->base);
  } else if (near) {
    why += " are no device memory of this context; the nearest is '" + near->name + "' (" +
           std::to_string(near->bytes) + " bytes), and this is its byte " +
           std::to_string(static_cast<i64>(address - near->base));
  } else {
    why += " are no device memory: this context has none";
  }
  throw ApiError(CUDA_ERROR_INVALID_VALUE, why);
}

void ShimState::invalidate(Stream& stream, CUresult code, const std::string& why) {
  stream.capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  stream.recording.clear();
  throw ApiError(code, why);
}

void ShimState::forbid_during_capture(const std::string& what) {
  streams.for_each([&](Stream& s) {
    const bool concerned = s.capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL ||
                           (s.capture_mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL &&
                            s.capture_thread == std::this_thread::get_id());
    if (s.capture == CU_STREAM_CAPTURE_STATUS_ACTIVE && concerned)
      invalidate(s, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                 what + " while a stream captures; do it before the capture begins");
  });
}

void ShimState::wait_for_others(Stream& stream) {
  Context& context = *stream.context;
  if (&stream == &context.legacy) {
    for_each_stream(context, [&](Stream& other) {
      if (&other == &stream || other.non_blocking) return;
      if (other.capture == CU_STREAM_CAPTURE_STATUS_ACTIVE)
        invalidate(
            other, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
            "stream: work on the legacy stream would wait for a blocking stream that captures");
      drain(other);
    });
  } else if (!stream.non_blocking) {
    drain(context.legacy);
  }
}

void ShimState::submit(Stream& stream, Operation operation) {
  Context& context = usable(*stream.context);
  if (stream.capture == CU_STREAM_CAPTURE_STATUS_INVALIDATED)
    throw ApiError(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
                   "stream: its capture was invalidated; end it with cuStreamEndCapture");
  if (stream.capture == CU_STREAM_CAPTURE_STATUS_ACTIVE) {
    stream.recording.push_back(std::move(operation));
    return;
  }
  wait_for_others(stream);
  if (auto* launch = std::get_if<KernelLaunch>(&operation)) {
    // Under the cycle model grids follow each other.
    if (!launch->programmatic || !options.costs.empty()) drain(stream);
    stream.chain.push_back(std::move(*launch));
    return;
  }
  drain(stream);
  if (const auto* copy = std::get_if<CopyOperation>(&operation)) execute(context, *copy);
  if (const auto* fill = std::get_if<FillOperation>(&operation)) execute(context, *fill);
}

void ShimState::drain(Stream& stream) {
  if (!stream.chain.empty()) run(*stream.context, std::exchange(stream.chain, {}));
}

void ShimState::drain(Context& context) {
  for_each_stream(context, [&](Stream& stream) { drain(stream); });
}

// `chain`: a kernel and those that may each start before the one before it has ended.
void ShimState::run(Context& context, const std::vector<KernelLaunch>& chain) {
  usable(context);
  std::vector<LaunchRequest> requests;
  for (const KernelLaunch& launch : chain) {
    const ShimModule* module = modules.find(launch.module);
    if (!module)
      throw ApiError(CUDA_ERROR_INVALID_HANDLE, "the module of '" + launch.entry +
                                                    "' was unloaded after its launch was captured");
    requests.push_back({module->loaded, launch.entry, launch.spec});
  }
  for (const LaunchReport& done : context.machine->launch_chain(requests)) {
    for (const std::string& warning : done.warnings) warn(warning);
    if (done.timing && !done.fault) append_costs(chain.front().entry, done);
    if (!done.fault || context.stuck) continue;
    fault_reports.push_back(done.fault->message);
    context.stuck.emplace(code_of(*done.fault),
                          done.fault->message + "\n  The context cannot be used any more.");
  }
  usable(context);
}

void ShimState::execute(Context& context, const CopyOperation& copy) {
  const auto mark = [&](Buffer& buffer, u64 address, u8 value) {
    if (!buffer.written.empty())
      std::memset(buffer.written.data() + (address - buffer.base), value, copy.bytes);
  };
  const auto writable = [&](Buffer& buffer) -> Buffer& {
    if (!buffer.writable)
      throw ApiError(CUDA_ERROR_INVALID_VALUE, "'" + buffer.name + "' is read only");
    return buffer;
  };
  if (copy.bytes == 0) return;
  Buffer& device = buffer_of(context, copy.device, copy.bytes);
  u8* bytes = device.data + (copy.device - device.base);
  if (copy.kind == CopyOperation::to_device) {
    mark(writable(device), copy.device, 1);
    std::memcpy(bytes, copy.host, copy.bytes);
  } else if (copy.kind == CopyOperation::to_host) {
    if (!device.written.empty()) {
      const auto first = device.written.begin() + static_cast<i64>(copy.device - device.base);
      const auto unset = std::count(first, first + static_cast<i64>(copy.bytes), 0);
      if (unset != 0)
        warn("a copy to the host reads " + std::to_string(copy.bytes) + " bytes of '" +
             device.name + "', of which nothing has written " + std::to_string(unset));
    }
    std::memcpy(copy.host, bytes, copy.bytes);
  } else {
    Buffer& source = buffer_of(context, copy.source, copy.bytes);
    mark(writable(device), copy.device, 1);
    if (!device.written.empty() && !source.written.empty())
      std::memmove(device.written.data() + (copy.device - device.base),
                   source.written.data() + (copy.source - source.base), copy.bytes);
    std::memmove(bytes, source.data + (copy.source - source.base), copy.bytes);
  }
}

void ShimState::execute(Context& context, const FillOperation& fill) {
  if (fill.bytes == 0) return;
  Buffer& device = buffer_of(context, fill.device, fill.bytes);
  if (!device.writable)
    throw ApiError(CUDA_ERROR_INVALID_VALUE, "'" + device.name + "' is read only");
  std::memset(device.data + (fill.device - device.base), fill.value, fill.bytes);
  if (!device.written.empty())
    std::memset(device.written.data() + (fill.device - device.base), 1, fill.bytes);
}

}  // namespace jax_fp4::sim

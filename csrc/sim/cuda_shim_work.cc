// The driver functions of the simulated driver that give it work: streams, captures, memory, tensor maps.
#include <cstring>

#include "sim/cuda_shim_entry.h"
#include "sim/tensor_map.h"

namespace jax_fp4::sim {
namespace {

// ---- Streams and graphs

void stream_create(ShimState& state, CUstream* stream, unsigned int flags) {
  require(stream, "phStream");
  if (flags > 1)
    throw ApiError(CUDA_ERROR_INVALID_VALUE,
                   "flags: expected 0 or 1 (CU_STREAM_NON_BLOCKING), got " + std::to_string(flags));
  auto made = std::make_unique<Stream>();
  made->context = &state.current();
  made->non_blocking = flags == 1;
  *stream = state.streams.add(std::move(made));
}

void stream_destroy(ShimState& state, CUstream stream) {
  if (!state.streams.find(stream))
    throw ApiError(CUDA_ERROR_INVALID_HANDLE,
                   "stream: the handle is of no live stream; default streams cannot be destroyed");
  Stream& dying = state.stream_of(stream);
  if (dying.capture != CU_STREAM_CAPTURE_STATUS_NONE)
    throw ApiError(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "stream: it is capturing");
  state.drain(dying);
  state.streams.erase(stream);
}

void stream_synchronize(ShimState& state, CUstream handle) {
  Stream& stream = state.stream_of(handle);
  if (stream.capture == CU_STREAM_CAPTURE_STATUS_ACTIVE)
    ShimState::invalidate(
        stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        "stream: it is capturing, and nothing of it runs that could be waited for");
  state.wait_for_others(stream);
  state.drain(stream);
}

void stream_get_ctx(ShimState& state, CUstream stream, CUcontext* context) {
  require(context, "pctx");
  *context = state.stream_of(stream).context->handle;
}

void stream_is_capturing(ShimState& state, CUstream handle, CUstreamCaptureStatus* status) {
  require(status, "captureStatus");
  Stream& stream = state.stream_of(handle);
  if (&stream == &stream.context->legacy)
    state.streams.for_each([&](Stream& other) {
      if (other.context == stream.context && !other.non_blocking &&
          other.capture == CU_STREAM_CAPTURE_STATUS_ACTIVE)
        throw ApiError(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                       "stream: a blocking stream captures, so the legacy stream must not be used");
    });
  *status = stream.capture;
}

void stream_begin_capture(ShimState& state, CUstream handle, CUstreamCaptureMode mode) {
  Stream& stream = state.stream_of(handle);
  if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED)
    throw ApiError(CUDA_ERROR_INVALID_VALUE, "mode: expected 0 to 2, got " + std::to_string(mode));
  if (!state.streams.find(handle))
    throw ApiError(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                   "stream: expected a created stream; default streams are not captured here");
  if (stream.capture != CU_STREAM_CAPTURE_STATUS_NONE)
    throw ApiError(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "stream: it is capturing already");
  stream.capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  stream.capture_mode = mode;
  stream.capture_thread = std::this_thread::get_id();
}

void stream_end_capture(ShimState& state, CUstream handle, CUgraph* graph) {
  require(graph, "phGraph");
  *graph = nullptr;
  Stream& stream = state.stream_of(handle);
  if (stream.capture == CU_STREAM_CAPTURE_STATUS_NONE)
    throw ApiError(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "stream: it is not capturing");
  if (stream.capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
      stream.capture_thread != std::this_thread::get_id())
    throw ApiError(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
                   "stream: another thread began its capture and must end it");
  const bool broken = stream.capture == CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  stream.capture = CU_STREAM_CAPTURE_STATUS_NONE;
  if (broken)
    throw ApiError(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
                   "stream: an earlier call has invalidated its capture");
  auto made = std::make_unique<Graph>();
  made->context = stream.context;
  made->operations = std::exchange(stream.recording, {});
  *graph = state.graphs.add(std::move(made));
}

void graph_destroy(ShimState& state, CUgraph graph) {
  if (!state.graphs.erase(graph))
    throw ApiError(CUDA_ERROR_INVALID_VALUE, "graph: the handle is of no live graph");
}

void graph_instantiate(ShimState& state, CUgraphExec* exec, CUgraph graph,
                       unsigned long long flags) {
  require(exec, "phGraphExec");
  if (flags != 0)
    throw ApiError(CUDA_ERROR_NOT_SUPPORTED, "flags: expected 0, got " + std::to_string(flags));
  const Graph* found = state.graphs.find(graph);
  if (!found) throw ApiError(CUDA_ERROR_INVALID_VALUE, "graph: the handle is of no live graph");
  auto made = std::make_unique<GraphExec>();
  made->context = found->context;
  made->operations = found->operations;
  *exec = state.graph_execs.add(std::move(made));
}

void graph_launch(ShimState& state, CUgraphExec exec, CUstream stream) {
  const GraphExec* graph = state.graph_execs.find(exec);
  if (!graph) throw ApiError(CUDA_ERROR_INVALID_VALUE, "graphExec: the handle is of no live graph");
  Stream& target = state.stream_of(stream);
  if (target.context != graph->context)
    throw ApiError(CUDA_ERROR_INVALID_HANDLE, "stream: the graph is of another context");
  for (const Operation& operation : graph->operations) state.submit(target, operation);
}

void graph_exec_destroy(ShimState& state, CUgraphExec exec) {
  if (!state.graph_execs.erase(exec))
    throw ApiError(CUDA_ERROR_INVALID_VALUE, "graphExec: the handle is of no live graph");
}

// ---- Memory

void mem_alloc(ShimState& state, CUdeviceptr* address, std::size_t bytes) {
  require(address, "dptr");
  Context& context = state.current();
  state.forbid_during_capture("cuMemAlloc");
  if (bytes == 0) throw ApiError(CUDA_ERROR_INVALID_VALUE, "bytesize: expected more than 0");
  if (bytes > state.options.memory_bytes - context.allocated_bytes)
    throw ApiError(CUDA_ERROR_OUT_OF_MEMORY,
                   std::to_string(bytes) + " bytes were asked for; of the device's " +
                       std::to_string(state.options.memory_bytes) + " bytes " +
                       std::to_string(context.allocated_bytes) + " are taken");
  auto storage = std::make_unique_for_overwrite<u8[]>(bytes);
  // A pattern that shows, since what a kernel has not written is not zero on hardware either.
  std::memset(storage.get(), 0xCC, bytes);
  *address = context.machine->global()
                 .map("cuMemAlloc of " + std::to_string(bytes) + " bytes", storage.get(), bytes,
                      true, false)
                 .base;
  context.allocated_bytes += bytes;
  context.allocations.emplace(*address, std::move(storage));
}

void mem_free(ShimState& state, CUdeviceptr address) {
  Context& context = state.current();
  state.forbid_during_capture("cuMemFree");
  if (address == 0) return;
  const auto found = context.allocations.find(address);
  if (found == context.allocations.end())
    throw ApiError(CUDA_ERROR_INVALID_VALUE, "dptr: expected an address that cuMemAlloc has given");
  state.drain(context);
  context.allocated_bytes -= context.machine->global().find(address)->bytes;
  context.machine->global().unmap(address);
  context.allocations.erase(found);
}

void memcpy_htod_async(ShimState& state, CUdeviceptr destination, const void* source,
                       std::size_t bytes, CUstream stream) {
  if (bytes != 0) require(source, "srcHost");
  state.submit(state.stream_of(stream), CopyOperation{CopyOperation::to_device, destination, 0,
                                                      const_cast<void*>(source), bytes});
}

void memcpy_dtoh_async(ShimState& state, void* destination, CUdeviceptr source, std::size_t bytes,
                       CUstream stream) {
  if (bytes != 0) require(destination, "dstHost");
  state.submit(state.stream_of(stream),
               CopyOperation{CopyOperation::to_host, source, 0, destination, bytes});
}

void memcpy_dtod_async(ShimState& state, CUdeviceptr destination, CUdeviceptr source,
                       std::size_t bytes, CUstream stream) {
  state.submit(state.stream_of(stream),
               CopyOperation{CopyOperation::on_device, destination, source, nullptr, bytes});
}

void memcpy_htod(ShimState& state, CUdeviceptr destination, const void* source, std::size_t bytes) {
  state.forbid_during_capture("cuMemcpyHtoD");
  memcpy_htod_async(state, destination, source, bytes, nullptr);
}

void memcpy_dtoh(ShimState& state, void* destination, CUdeviceptr source, std::size_t bytes) {
  state.forbid_during_capture("cuMemcpyDtoH");
  memcpy_dtoh_async(state, destination, source, bytes, nullptr);
}

void memset_d8_async(ShimState& state, CUdeviceptr destination, unsigned char value,
                     std::size_t bytes, CUstream stream) {
  state.submit(state.stream_of(stream), FillOperation{destination, value, bytes});
}

void tensor_map_encode_tiled(ShimState& state, CUtensorMap* map, CUtensorMapDataType data_type,
                             unsigned int rank, void* address, const unsigned long long* dims,
                             const unsigned long long* strides, const unsigned int* box,
                             const unsigned int* element_strides, CUtensorMapInterleave interleave,
                             CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2_promotion,
                             CUtensorMapFloatOOBfill oob_fill) {
  const std::string& chip = state.chip(state.current().device);
  if (chip_of(chip).number < 90)
    throw ApiError(CUDA_ERROR_NOT_SUPPORTED, "sm_" + chip + " has no tensor maps; they need sm_90");
  require(map, "tensorMap");
  require(dims, "globalDim");
  require(box, "boxDim");
  require(element_strides, "elementStrides");
  if (rank > 1) require(strides, "globalStrides");
  if (reinterpret_cast<u64>(map) % kTensorMapAlign != 0)
    throw ApiError(CUDA_ERROR_INVALID_VALUE,
                   "tensorMap: expected an address that is a multiple of 64");
  TensorMap tensor;
  tensor.data_type = data_type;
  tensor.rank = rank;
  tensor.address = reinterpret_cast<u64>(address);
  for (unsigned d = 0; d < rank && d < kMaxTensorRank; ++d) {
    tensor.dims[d] = dims[d];
    tensor.strides[d] = d > 0 ? strides[d - 1] : element_bits(data_type) / 8;
    tensor.box[d] = box[d];
    tensor.element_strides[d] = element_strides[d];
  }
  tensor.interleave = interleave;
  tensor.swizzle = swizzle;
  tensor.l2_promotion = l2_promotion;
  tensor.oob_fill = oob_fill;
  if (const std::string wrong = check(tensor); !wrong.empty())
    throw ApiError(CUDA_ERROR_INVALID_VALUE, wrong);
  u8 bytes[kTensorMapBytes];
  encode(tensor, bytes);
  static_assert(sizeof *map == sizeof bytes);
  std::memcpy(map, bytes, sizeof bytes);
}

}  // namespace

void fill_work_api(ShimApi& api) {
  fill<stream_create>(api.cuStreamCreate, "cuStreamCreate");
  fill<stream_destroy>(api.cuStreamDestroy, "cuStreamDestroy");
  fill<stream_synchronize>(api.cuStreamSynchronize, "cuStreamSynchronize");
  fill<stream_get_ctx>(api.cuStreamGetCtx, "cuStreamGetCtx");
  fill<stream_is_capturing>(api.cuStreamIsCapturing, "cuStreamIsCapturing");
  fill<stream_begin_capture>(api.cuStreamBeginCapture, "cuStreamBeginCapture");
  fill<stream_end_capture>(api.cuStreamEndCapture, "cuStreamEndCapture");
  fill<graph_destroy>(api.cuGraphDestroy, "cuGraphDestroy");
  fill<graph_instantiate>(api.cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags");
  fill<graph_launch>(api.cuGraphLaunch, "cuGraphLaunch");
  fill<graph_exec_destroy>(api.cuGraphExecDestroy, "cuGraphExecDestroy");
  fill<mem_alloc>(api.cuMemAlloc, "cuMemAlloc");
  fill<mem_free>(api.cuMemFree, "cuMemFree");
  fill<memcpy_htod_async>(api.cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync");
  fill<memcpy_dtoh_async>(api.cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync");
  fill<memcpy_dtod_async>(api.cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync");
  fill<memcpy_htod>(api.cuMemcpyHtoD, "cuMemcpyHtoD");
  fill<memcpy_dtoh>(api.cuMemcpyDtoH, "cuMemcpyDtoH");
  fill<memset_d8_async>(api.cuMemsetD8Async, "cuMemsetD8Async");
  fill<tensor_map_encode_tiled>(api.cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled");
}

}  // namespace jax_fp4::sim

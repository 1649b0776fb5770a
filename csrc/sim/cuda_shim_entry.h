// How the simulated driver's functions enter its table: a body that throws ApiError becomes a function
// that returns its code. Only the cuda_shim_*.cc files include it.
#pragma once

#include "sim/cuda_shim_state.h"

namespace jax_fp4::sim {

template <class T>
void require(T* pointer, const char* argument) {
  if (!pointer)
    throw ApiError(CUDA_ERROR_INVALID_VALUE, std::string(argument) + ": got a null pointer");
}

template <auto body>
struct Entry;
template <class... Args, void (*body)(ShimState&, Args...)>
struct Entry<body> {
  static inline const char* name = nullptr;
  static inline bool needs_init = true;
  static CUresult call(Args... args) {
    ShimState& state = CudaShim::instance().state();
    return state.call(name, needs_init, [&] { body(state, args...); });
  }
};

template <auto body, class Pointer>
void fill(Pointer& pointer, const char* name, bool needs_init = true) {
  Entry<body>::name = name;
  Entry<body>::needs_init = needs_init;
  pointer = &Entry<body>::call;
}

// The parts of fill_api: streams, graphs, memory, tensor maps (cuda_shim_work.cc).
void fill_work_api(ShimApi& api);

}  // namespace jax_fp4::sim

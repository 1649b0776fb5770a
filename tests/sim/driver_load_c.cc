// csrc/driver/load.h as C functions for tests/sim/test_cuda_api.py.
#include "driver/load.h"

using jax_fp4::cuda::Driver;

// Why a library cannot serve as the driver; empty: it can.
extern "C" const char* load_problem(const char* library) {
  static thread_local Driver loaded;
  loaded = jax_fp4::cuda::load_driver(library);
  return loaded.problem.c_str();
}

// Devices of a library that can.
extern "C" int load_and_count(const char* library, int* version) {
  const Driver loaded = jax_fp4::cuda::load_driver(library);
  *version = loaded.version;
  int count = 0;
  return loaded.problem.empty() && loaded.api.cuDeviceGetCount(&count) == 0 ? count : -1;
}

extern "C" const void* the_driver() { return &jax_fp4::cuda::driver(); }

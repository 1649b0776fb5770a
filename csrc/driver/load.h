// The CUDA driver of this machine, opened at first use: importing the package needs no driver.
#pragma once

#include <string>

#include "driver/cuda_api.h"

namespace jax_fp4::cuda {

// CUDA version of the oldest driver that has every function of the table (tensor maps: 12.0).
inline constexpr int kLeastDriverVersion = 12000;

// "CUDA_ERROR_INVALID_VALUE (1): invalid argument"
std::string error_text(const CudaApi& api, CUresult status);

struct Driver {
  CudaApi api = {};
  int version = 0;      // 12090: CUDA 12.9; 0 where the driver was not asked
  std::string problem;  // empty, or why the driver cannot be used and what to do
};

// Opens `library`, finds every function, checks the version, initialises the driver. Never throws for
// what is missing: that is in `problem`, and the table must then not be used.
Driver load_driver(const char* library);

// libcuda.so.1, loaded once for the process by whichever thread comes first.
const Driver& driver();

}  // namespace jax_fp4::cuda

// Opens libcuda with dlopen and says in words what is missing.
#include "driver/load.h"

#include <dlfcn.h>

#include <type_traits>

namespace jax_fp4::cuda {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

std::string error_text(const CudaApi& api, CUresult status) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (api.cuGetErrorName(status, &name) != CUDA_SUCCESS || !name) name = "unknown error";
  if (api.cuGetErrorString(status, &text) != CUDA_SUCCESS || !text) text = "no description";
  return std::string(name) + " (" + std::to_string(status) + "): " + text;
}

Driver load_driver(const char* library) {
  Driver driver;
  // The driver stays loaded: its threads and handlers outlive any use of ours.
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* reason = dlerror();
    driver.problem =
        std::string(library) + " was not found (" + (reason ? reason : "no reason given") +
        "). It comes with the NVIDIA driver, not with CUDA or jax: install the driver, or "
        "run on the CPU.";
    return driver;
  }
  std::string missing;
  for_each_function(driver.api, [&](const char* symbol, auto& pointer) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(dlsym(handle, symbol));
    if (!pointer) missing += (missing.empty() ? "" : ", ") + std::string(symbol);
  });
  // An old driver lacks functions too, so its version is the better explanation.
  if (driver.api.cuDriverGetVersion &&
      driver.api.cuDriverGetVersion(&driver.version) != CUDA_SUCCESS)
    driver.version = 0;
  if (driver.version != 0 && driver.version < kLeastDriverVersion) {
    driver.problem = "the NVIDIA driver is too old: it supports CUDA " +
                     version_text(driver.version) + ", and CUDA " +
                     version_text(kLeastDriverVersion) +
                     " or newer is needed. Update the driver, or run on the CPU.";
  } else if (!missing.empty()) {
    driver.problem =
        std::string(library) + " has no " + missing +
        "; it is no complete CUDA driver. Reinstall the NVIDIA driver, or run on the CPU.";
  } else if (const CUresult status = driver.api.cuInit(0); status != CUDA_SUCCESS) {
    driver.problem =
        "cuInit failed with " + error_text(driver.api, status) +
        ". nvidia-smi shows whether the driver sees a GPU; without one, run on the CPU.";
  }
  return driver;
}

const Driver& driver() {
  static const Driver loaded = load_driver("libcuda.so.1");
  return loaded;
}

}  // namespace jax_fp4::cuda

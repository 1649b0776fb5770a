// PTX text to a Module.
#pragma once

#include <memory>
#include <string>

#include "sim/ptx/ir.h"

namespace jax_fp4::sim {

// Throws PtxError at the first thing that is not PTX as NVRTC, nvcc, Triton and CuTe-DSL print it.
std::unique_ptr<Module> parse(std::string source);

}  // namespace jax_fp4::sim

// The XLA FFI handlers of GPUs: operands.h checks, csrc/plan decides, csrc/driver launches.
//
// The same handlers serve two platforms: CUDA, where XLA gives device pointers and a stream, and the
// CPU with JAX_FP4_DRIVER=sim, where the driver is the PTX machine and host memory is mapped into it
// for the time of a call.
#pragma once

#include <string>
#include <vector>

#include "ffi/registration.h"

namespace jax_fp4::ffi {

// Each with the handler of XLA's initialize stage, which loads the kernels before any capture.
const std::vector<Registration>& cuda_registrations();

// For the CPU platform; there is no initialize stage there.
const std::vector<Registration>& sim_registrations();

// A new simulated driver with these devices ("100a,120a") and schedule, and no errors ordered.
void reset_sim_driver(const std::string& devices, unsigned long long seed);

// What sim/cuda_shim.h says: the nth call of a driver function fails with this CUresult.
void fail_sim_driver(const std::string& function, unsigned nth, int error);

// The machine's reports of faults and warnings since the last reset.
std::vector<std::string> sim_driver_reports();

// Launches since the process began, by kernel: what `verify` and tests look at to know that the kernels ran.
std::vector<std::pair<std::string, unsigned long long>> launch_counts();

}  // namespace jax_fp4::ffi

// The CPU's XLA FFI handlers, by call target name.
#pragma once

#include <vector>

#include "ffi/registration.h"

namespace jax_fp4::ffi {

const std::vector<Registration>& cpu_registrations();

}  // namespace jax_fp4::ffi

// The CPU's XLA FFI handlers, by call target name.
#pragma once

#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_fp4::ffi {

struct Registration {
  const char* target;
  XLA_FFI_Handler* handler;
};

const std::vector<Registration>& cpu_registrations();

}  // namespace jax_fp4::ffi

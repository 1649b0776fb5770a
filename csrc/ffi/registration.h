// What Python registers with XLA.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_fp4::ffi {

struct Registration {
  const char* target;  // the custom call's name
  XLA_FFI_Handler* execute;
  XLA_FFI_Handler* initialize = nullptr;
};

}  // namespace jax_fp4::ffi

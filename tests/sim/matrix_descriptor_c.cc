// csrc/sim/ops/matrix_descriptor.h for ctypes.
#include <cstring>

#include "sim/ops/matrix_descriptor.h"

using namespace jax_fp4::sim;

extern "C" {

// Addresses of all chunks, [mn_count, k_count]; or the error's text, and 1 (argument) or 2 (misaligned).
int c_chunks(unsigned long long descriptor, int mn_major, unsigned mn_count, unsigned k_count,
             unsigned* addresses, char* error, int error_bytes) {
  try {
    const SharedMatrix matrix(descriptor, mn_major ? Major::mn : Major::k, mn_count, k_count);
    for (unsigned mn = 0; mn < mn_count; ++mn)
      for (unsigned k = 0; k < k_count; ++k) addresses[mn * k_count + k] = matrix.address(mn, k);
    return 0;
  } catch (const MatrixDescriptorError& e) {
    std::strncpy(error, e.what(), static_cast<std::size_t>(error_bytes) - 1);
    return e.kind == FaultKind::misaligned ? 2 : 1;
  }
}
}

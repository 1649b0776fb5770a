// The table of a build without device kernels (JAX_FP4_ARCHS=none, or no device compilers).
#include "compile/images.h"

namespace jax_fp4 {

ImageTable images() { return {nullptr, 0, nullptr}; }

}  // namespace jax_fp4

// GEMM kernels for AVX2.
#if defined(__x86_64__)

#include "cpu/gemm_kernels.h"

namespace jax_fp4::cpu {

const PanelKernels& avx2_panel_kernels() { return portable_panel_kernels(); }

}  // namespace jax_fp4::cpu

#endif  // __x86_64__

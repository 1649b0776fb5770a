// Quantizer kernels for AVX2.
#include "cpu/quantize_kernels.h"

namespace jax_fp4::cpu {

const QuantizeKernels& avx2_quantize_kernels() { return portable_quantize_kernels(); }

}  // namespace jax_fp4::cpu

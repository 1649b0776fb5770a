#include "cpu/gemm_kernels.h"
namespace jax_fp4::cpu { 
#if defined(__x86_64__)
const PanelKernels& amx_kernels() { return portable_kernels(); }
#endif
}

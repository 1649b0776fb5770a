#include "cpu/quantize_kernels.h"
namespace jax_fp4::cpu { const Kernels& avx512_kernels(){ return portable_kernels(); } }

// Adds the parts of a product that was split along K: D = cvt(fl(fl(alpha sum) + bias) + C).
//
//   sum = (((part 0 + part 1) + part 2) + ...), in f32, each addition rounded to nearest: the order
//   depends on nothing, so the same problem gives the same bits every time.
//
// Without parts (K is 0) the sum is 0. A thread takes an element at a time, neighbouring threads neighbouring elements; parts are read once.
#include "kernels/parts/elements.h"
#include "ptx/cluster.h"

namespace jax_fp4 {

extern "C" __global__ void __launch_bounds__(kGemmReduceThreads)
    JAX_FP4_KERNEL(const __grid_constant__ GemmReduceParams p) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  for (u32 batch = blockIdx.y; batch < p.batch; batch += gridDim.y) {
    const float alpha = __fmul_rn(p.global_scale_a[batch * p.batch_scale_a],
                                  p.global_scale_b[batch * p.batch_scale_b]);
    const i64 first = batch * p.elements;
    const i64 first_bias = static_cast<i64>(batch * p.batch_bias) * p.columns;
    for (i64 i = static_cast<i64>(blockIdx.x) * kGemmReduceThreads + threadIdx.x; i < p.elements;
         i += static_cast<i64>(gridDim.x) * kGemmReduceThreads) {
      const float* part = p.parts + first * p.splits + i;
      float sum = p.splits == 0 ? 0.0f : *part;
      for (u32 split = 1; split < p.splits; ++split) sum = __fadd_rn(sum, *(part += p.elements));
      float x = __fmul_rn(alpha, sum);
      if (p.bias != nullptr)
        x = __fadd_rn(x, load_element(p.bias_type, p.bias, first_bias + i % p.columns));
      if (p.c != nullptr) x = __fadd_rn(x, load_element(p.c_type, p.c, first + i));
      store_element(p.out_type, p.out, first + i, x);
    }
  }
}

}  // namespace jax_fp4

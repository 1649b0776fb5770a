#include "sim/ops/mma_warp.h"

#include "sim/ops/mma_tile.h"

namespace jax_fp4::sim {
namespace {

#define JAX_FP4_LEVEL(name, ...)                                                      \
  __VA_ARGS__ void groups_##name(const WarpGroups& x, MmaColumns& d) {                \
    for (int n = 0; n < kMmaColumns; ++n) group_row(x.b[n], x.a, d[n]);               \
  }                                                                                   \
  __VA_ARGS__ void products_##name(const WarpProducts& x, const ProductParameters& p, \
                                   MmaColumns& d) {                                   \
    for (int n = 0; n < kMmaColumns; ++n) product_row_f32(x.b[n], x.a, p, d[n]);      \
  }
JAX_FP4_LEVEL(portable, )
#if defined(__x86_64__)
JAX_FP4_LEVEL(avx2, [[gnu::target("avx2")]])
JAX_FP4_LEVEL(avx512, [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]])
#endif
#undef JAX_FP4_LEVEL

}  // namespace

void add_groups(const WarpGroups& operands, MmaColumns& d) {
#if defined(__x86_64__)
  if (best_vector_level() == VectorLevel::avx512) return groups_avx512(operands, d);
  if (best_vector_level() == VectorLevel::avx2) return groups_avx2(operands, d);
#endif
  groups_portable(operands, d);
}

void add_products(const WarpProducts& operands, const ProductParameters& parameters,
                  MmaColumns& d) {
#if defined(__x86_64__)
  if (best_vector_level() == VectorLevel::avx512) return products_avx512(operands, parameters, d);
  if (best_vector_level() == VectorLevel::avx2) return products_avx2(operands, parameters, d);
#endif
  products_portable(operands, parameters, d);
}

}  // namespace jax_fp4::sim

// Copies of operands into a stage, by one CTA or for a pair (kGroup = 2). `barrier` gets the bytes; of a pair it is the
// leader's, as an address of the cluster. Coordinates: of the maps in gemm_params.h.
#pragma once

#include "kernels/gemm_params.h"
#include "ptx/cp_async_bulk.h"

namespace jax_fp4 {

// Rows of codes.
template <u32 kGroup>
__device__ void copy_rows(u32 to, const TensorMap& map, u32 c0, u32 row, u32 batch, u32 barrier) {
  if constexpr (kGroup == 2)
    ptx::cp_async_bulk_tensor_3d_shared_global_cta_group_2(to, &map, c0, row, batch, barrier);
  else
    ptx::cp_async_bulk_tensor_3d_shared_global(to, &map, c0, row, batch, barrier);
}

// Tiles of scales.
template <u32 kGroup>
__device__ void copy_scales(u32 to, const TensorMap& map, u32 group, u32 tile, u32 batch,
                            u32 barrier) {
  if constexpr (kGroup == 2)
    ptx::cp_async_bulk_tensor_4d_shared_global_cta_group_2(to, &map, 0, group, tile, batch,
                                                           barrier);
  else
    ptx::cp_async_bulk_tensor_4d_shared_global(to, &map, 0, group, tile, batch, barrier);
}

// The same to every CTA of the group: L2 reads them once.
template <u32 kGroup>
__device__ void copy_scales_to_all(u32 to, const TensorMap& map, u32 group, u32 tile, u32 batch,
                                   u32 barrier) {
  if constexpr (kGroup == 2)
    ptx::cp_async_bulk_tensor_4d_shared_global_multicast_cta_group_2(to, &map, 0, group, tile,
                                                                     batch, barrier, 0b11);
  else
    copy_scales<kGroup>(to, map, group, tile, batch, barrier);
}

}  // namespace jax_fp4

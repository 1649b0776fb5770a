// csrc/sim/tensor_map.h as C functions for tests/sim/test_tensor_map.py.
#include <cstring>

#include "sim/tensor_map.h"

using namespace jax_fp4;
using namespace jax_fp4::sim;

// Writes the fields of a map, 5 numbers for each array; 0: the bytes are no tensor map.
extern "C" int tensor_map_fields(const u8* bytes, u64* out) {
  const std::optional<TensorMap> map = decode(bytes);
  if (!map) return 0;
  *out++ = map->data_type;
  *out++ = map->rank;
  *out++ = map->address;
  for (u64 dim : map->dims) *out++ = dim;
  for (u64 stride : map->strides) *out++ = stride;
  for (u32 box : map->box) *out++ = box;
  for (u32 stride : map->element_strides) *out++ = stride;
  *out++ = map->interleave;
  *out++ = map->swizzle;
  *out++ = map->l2_promotion;
  *out++ = map->oob_fill;
  return 1;
}

// bits of an element, has gaps, swizzle span; bytes: row copied, row in shared memory, box likewise.
extern "C" void tensor_map_sizes(const u8* bytes, u64* out) {
  const TensorMap map = *decode(bytes);
  const u64 sizes[] = {element_bits(map.data_type), is_padded(map.data_type),
                       swizzle_span(map.swizzle),   inner_copied_bytes(map),
                       inner_shared_bytes(map),     box_copied_bytes(map),
                       box_shared_bytes(map)};
  std::memcpy(out, sizes, sizeof sizes);
}

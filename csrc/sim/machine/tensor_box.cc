// Boxes of tensor maps: coordinates become addresses, packed rows become swizzled ones.
#include "sim/machine/tensor_box.h"

#include <algorithm>
#include <cstring>

namespace jax_fp4::sim {

TensorBox::TensorBox(const TensorMap& map, const TensorPlace& place) : map_(map), place_(place) {
  row_bytes = inner_copied_bytes(map);
  pitch = inner_shared_bytes(map);
  rows = place.rows4 ? 4 : 1;
  for (u32 d = 1; d < map.rank; ++d) rows *= copied_elements(map, d);
  group_ = is_padded(map.data_type) ? 2 * element_bits(map.data_type) : 16;
}

BoxRow TensorBox::row(u32 number) const {
  u64 address = map_.address;
  const BoxRow outside{0, row_bytes, 0};
  if (place_.rows4) {
    const i64 at = place_.coordinates[1 + number];
    if (at < 0 || static_cast<u64>(at) >= map_.dims[1]) return outside;
    address += static_cast<u64>(at) * map_.strides[1];
  } else {
    for (u32 d = 1; d < map_.rank; ++d) {
      const u32 count = copied_elements(map_, d);
      const i64 at = place_.coordinates[d] + i64{number % count} * map_.element_strides[d];
      number /= count;
      if (at < 0 || static_cast<u64>(at) >= map_.dims[d]) return outside;
      address += static_cast<u64>(at) * map_.strides[d];
    }
  }
  const i64 first = place_.coordinates[0], size = static_cast<i64>(map_.dims[0]);
  const i64 box = copied_elements(map_, 0);
  const i64 lead = std::clamp<i64>(-first, 0, box);
  const i64 inside = std::clamp<i64>(size - first, lead, box) - lead;
  if (inside == 0) return outside;
  const u32 bits = element_bits(map_.data_type);
  address += static_cast<u64>(first + lead) * bits / 8;
  return {address, static_cast<u32>(lead) * bits / 8, static_cast<u32>(inside) * bits / 8};
}

void TensorBox::scatter(u32 number, u32 begin, u32 end, const u8* packed, u8* base,
                        u64 address) const {
  each_piece(number, begin, end, address, [&](u32 offset, u32 at, u32 bytes) {
    if (bytes == 16) {
      std::memcpy(base + offset, packed + at, 16);
    } else {
      std::memcpy(base + offset, packed + at, bytes);
    }
  });
}

void TensorBox::gather(u32 number, u32 begin, u32 end, u8* packed, const u8* base,
                       u64 address) const {
  each_piece(number, begin, end, address, [&](u32 offset, u32 at, u32 bytes) {
    std::memcpy(packed + at, base + offset, bytes);
  });
}

void TensorBox::fill(u8* packed, u32 bytes) const {
  std::memset(packed, 0, bytes);
  if (map_.oob_fill == 0) return;
  // The arithmetic's NaN (docs/simulator.md, S6 and S22): all bits set but the sign, little-endian.
  std::memset(packed, 0xFF, bytes);
  const u32 element = element_bits(map_.data_type) / 8;
  for (u32 at = element - 1; at < bytes; at += element) packed[at] = 0x7F;
}

u64 swizzled(u32 mode, u64 address) {
  const u64 line = address >> 7;
  switch (mode) {
    case kSwizzle32B: return address ^ (line & 1) << 4;
    case kSwizzle64B: return address ^ (line & 3) << 4;
    case kSwizzle128B: return address ^ (line & 7) << 4;
    case kSwizzle128BAtom32B:
    case kSwizzle128BAtom32BFlip8B: return address ^ (line & 3) << 5;
    case kSwizzle128BAtom64B: return address ^ (line & 1) << 6;
    default: return address;
  }
}

}  // namespace jax_fp4::sim

// The bit fields that tell a tcgen05 instruction what its operands are (PTX ISA 9.7.16.4 and
// 9.7.16.10), and where a swizzled byte lies.
//
// Matrix descriptors are made for one layout, the only one the kernels use: K-major rows, one
// swizzle span wide, in groups of eight.
#pragma once

#include "formats.h"

namespace jax_fp4 {

// With the 128-byte swizzle of TMA and tensor cores (PTX ISA 5.5.7), the 16-byte chunks of the row
// of 128 bytes that starts at a multiple of 128 are permuted by bits 9:7 of the address.
JAX_FP4_FN u32 swizzle_128b(u32 address) { return address ^ (((address >> 7) & 7) << 4); }
// With the 64-byte swizzle, those of rows of 64 bytes by bits 8:7.
JAX_FP4_FN u32 swizzle_64b(u32 address) { return address ^ (((address >> 7) & 3) << 4); }

enum class Swizzle : u8 { none = 0, span_128b = 2 };

// A matrix descriptor is 64 bits. The low word says where rows start: bits 13:0 are an address of shared
// memory divided by 16; the distance along K (29:16) is not used by these layouts. To start further, also
// inside of a swizzled row, one adds to the low word: nothing is carried over, since addresses end at 2^18.
JAX_FP4_FN u32 descriptor_address(u32 bytes) { return bytes >> 4; }
// The high word: from eight rows to the next eight, divided by 16, at 13:0; a 1 at 14; the swizzle at 31:29.
JAX_FP4_FN u32 descriptor_layout(u32 group_bytes, Swizzle swizzle) {
  return group_bytes >> 4 | 1u << 14 | static_cast<u32>(swizzle) << 29;
}

// Element types as kind mxf8f6f4 numbers them; kinds mxf4 and mxf4nvf4 know E2M1 only, as 1.
JAX_FP4_FN u32 mma_element_code(Element element) {
  switch (element) {
    case Element::e4m3: return 0;
    case Element::e5m2: return 1;
    case Element::e2m3: return 3;
    case Element::e3m2: return 4;
    case Element::e2m1: return 5;
  }
  return 0;
}

// The instruction descriptor of a block-scaled product of m x n, both operands K-major. Types at
// bits 9:7 and 12:10, N / 8 at 22:17, scale type at 23, M / 128 at 28:27.
JAX_FP4_FN u32 instruction_descriptor_fp4(u32 m, u32 n, BlockScale scale) {
  return 1u << 7 | 1u << 10 | (n >> 3) << 17 | (scale == BlockScale::ue8m0 ? 1u << 23 : 0u) |
         (m >> 7) << 27;
}
JAX_FP4_FN u32 instruction_descriptor_mxf8f6f4(u32 m, u32 n, Element a, Element b) {
  return mma_element_code(a) << 7 | mma_element_code(b) << 10 | (n >> 3) << 17 | 1u << 23 |
         (m >> 7) << 27;
}
// Which byte of the scale words an instruction starts at, for A (30:29) and B (5:4).
JAX_FP4_FN u32 scale_bytes_at(u32 byte) { return byte << 4 | byte << 29; }

}  // namespace jax_fp4

// The block formats as data: which elements, which scales, how many elements share one, and how
// rows are packed. Nothing else may derive these properties.
#pragma once

#include "minifloat.h"

namespace jax_fp4 {

enum class Element : u8 { e2m1, e2m3, e3m2, e4m3, e5m2 };

enum class BlockScale : u8 {
  ue4m3,  // NVFP4: an unsigned E4M3 per block and an f32 per tensor
  ue8m0,  // MX: a power of two per block
  unit,   // FP8: an f32 per tensor only; every scale byte is 127 (2^0), or 255 for a NaN block
};

struct Format {
  Element element;
  BlockScale scale;
  int block;  // elements of the contraction axis that share a scale byte

  bool operator==(const Format&) const = default;
};

inline constexpr Format kNVFP4{Element::e2m1, BlockScale::ue4m3, 16};
inline constexpr Format kMXFP4{Element::e2m1, BlockScale::ue8m0, 32};
inline constexpr Format kMXFP6E2M3{Element::e2m3, BlockScale::ue8m0, 32};
inline constexpr Format kMXFP6E3M2{Element::e3m2, BlockScale::ue8m0, 32};
inline constexpr Format kMXFP8E4M3{Element::e4m3, BlockScale::ue8m0, 32};
inline constexpr Format kMXFP8E5M2{Element::e5m2, BlockScale::ue8m0, 32};
inline constexpr Format kFP8E4M3{Element::e4m3, BlockScale::unit, 32};
inline constexpr Format kFP8E5M2{Element::e5m2, BlockScale::unit, 32};

JAX_FP4_FN Minifloat minifloat(Element element) {
  switch (element) {
    case Element::e2m1: return kE2M1;
    case Element::e2m3: return kE2M3;
    case Element::e3m2: return kE3M2;
    case Element::e4m3: return kE4M3;
    case Element::e5m2: return kE5M2;
  }
  return kE2M1;
}

// Bytes of one packed row of k codes. Rows are padded with zero codes to 16 bytes (4- and 8-bit
// codes) or 96 bytes (6-bit codes, four in three bytes): the pitch that a TMA tensor map needs.
JAX_FP4_FN i64 row_bytes(Element element, i64 k) {
  switch (minifloat(element).bits()) {
    case 4: return round_up(k, 32) / 2;
    case 6: return round_up(k, 128) / 4 * 3;
    default: return round_up(k, 16);
  }
}

// Code number k of a packed row. 4-bit: even k in the low nibble. 6-bit: code k of four occupies
// bits 6k .. 6k+5 of a little-endian group of three bytes. 8-bit: one byte each.
JAX_FP4_FN u32 load_code(Element element, const u8* row, i64 k) {
  switch (minifloat(element).bits()) {
    case 4: return (row[k / 2] >> (4 * (k % 2))) & 0xFu;
    case 6: {
      const u8* group = row + k / 4 * 3;
      const u32 word = group[0] | group[1] << 8 | static_cast<u32>(group[2]) << 16;
      return (word >> (6 * (k % 4))) & 0x3Fu;
    }
    default: return row[k];
  }
}

// Stores a code into a row whose bits at that place are zero.
JAX_FP4_FN void store_code(Element element, u8* row, i64 k, u32 code) {
  switch (minifloat(element).bits()) {
    case 4: row[k / 2] = static_cast<u8>(row[k / 2] | code << (4 * (k % 2))); break;
    case 6: {
      u8* group = row + k / 4 * 3;
      const u32 word = code << (6 * (k % 4));
      group[0] = static_cast<u8>(group[0] | (word & 0xFFu));
      group[1] = static_cast<u8>(group[1] | ((word >> 8) & 0xFFu));
      group[2] = static_cast<u8>(group[2] | ((word >> 16) & 0xFFu));
      break;
    }
    default: row[k] = static_cast<u8>(code);
  }
}

JAX_FP4_FN float decode_scale(BlockScale scale, u32 byte) {
  return scale == BlockScale::ue4m3 ? decode_ue4m3(byte) : decode_ue8m0(byte);
}

JAX_FP4_FN u32 nan_scale(BlockScale scale) {
  return scale == BlockScale::ue4m3 ? kUE4M3NaN : kUE8M0NaN;
}

}  // namespace jax_fp4

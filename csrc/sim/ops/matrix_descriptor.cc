// Matrix descriptors: fields, reserved bits, alignment.
#include "sim/ops/matrix_descriptor.h"

#include <cstdio>

namespace jax_fp4::sim {
namespace {

std::string hex(u64 value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", value);
  return text;
}

[[noreturn]] void refuse(const std::string& text) {
  throw MatrixDescriptorError(FaultKind::argument, text);
}
[[noreturn]] void misaligned(const std::string& text) {
  throw MatrixDescriptorError(FaultKind::misaligned, text);
}

u32 field(u64 bits, int low, int count) {
  return static_cast<u32>(bits >> low & ((u64{1} << count) - 1));
}

struct SwizzleMode {
  u32 code, width, mask, atom;  // mask and atom: bits XORed, and from which bit on
};
constexpr SwizzleMode kSwizzleModes[] = {
    {0, 16, 0, 4}, {1, 128, 3, 5}, {2, 128, 7, 4}, {4, 64, 3, 4}, {6, 32, 1, 4}};
constexpr u32 kAtomsOf32 = 1;

const SwizzleMode& swizzle_mode(u32 code) {
  for (const SwizzleMode& mode : kSwizzleModes)
    if (mode.code == code) return mode;
  refuse("swizzle (bits 63:61) is " + std::to_string(code) + "; expected 0, 1, 2, 4 or 6");
}

constexpr int kBaseOffsetBit = 49;

void check_constant_bits(u64 bits) {
  struct Constant {
    int low, count;
    u32 value;
    std::string_view why;
  };
  constexpr Constant kConstants[] = {
      {14, 2, 0, "reserved"},
      {30, 2, 0, "reserved"},
      {46, 3, 1, "a constant of descriptors for tcgen05"},
      {kBaseOffsetBit, 3, 0,
       "the matrix base offset: no swizzle pattern off its natural boundary is modelled"},
      {52, 1, 0, "the absolute leading dimension, which only K = 96 uses, is not modelled"},
      {53, 8, 0, "reserved"},
  };
  for (const Constant& c : kConstants) {
    const u32 got = field(bits, c.low, c.count);
    if (got == c.value) continue;
    // The base offset is not valid without a swizzle; compilers leave address bits there.
    if (c.low == kBaseOffsetBit && field(bits, 61, 3) == 0) continue;
    refuse("bits " + std::to_string(c.low + c.count - 1) + ":" + std::to_string(c.low) + " are " +
           std::to_string(got) + ", expected " + std::to_string(c.value) + " (" +
           std::string(c.why) + ")");
  }
}

}  // namespace

SharedMatrix::SharedMatrix(u64 bits, Major major, u32 mn_count, u32 k_count) {
  check_constant_bits(bits);
  start_ = field(bits, 0, 14) << 4;
  const u32 leading = field(bits, 16, 14) << 4, stride = field(bits, 32, 14) << 4;
  const SwizzleMode& mode = swizzle_mode(field(bits, 61, 3));
  const bool swizzled = mode.code != 0, wide_atoms = mode.code == kAtomsOf32;
  if (wide_atoms && major == Major::k)
    refuse("swizzle (bits 63:61) is 1, atoms of 32 bytes, which K-major matrices do not have");
  swizzle_mask_ = mode.mask;
  swizzle_atom_ = mode.atom;
  const u32 chunks = mode.width / 16;
  if (major == Major::k) {
    mn_ = {8, mode.width, stride};
    k_ = swizzled ? Index{chunks, 16, 0} : Index{1, 0, leading};
  } else {
    mn_ = swizzled ? Index{chunks, 16, leading} : Index{1, 0, stride};
    k_ = swizzled ? Index{wide_atoms ? 4u : 8u, mode.width, stride} : Index{8, 16, leading};
  }
  if (swizzled) check_alignment(major, mode.width, mn_count, k_count);
}

// Bits 9:7 (fewer for narrower swizzles) of the start address are 0, and so are those of every outer step
// that is taken: else the pattern of a group would not start at its boundary.
void SharedMatrix::check_alignment(Major major, u32 width, u32 mn_count, u32 k_count) const {
  const u32 pattern = 128 * (swizzle_mask_ + 1);
  const u32 in_row = start_ % pattern;
  if (in_row >= width) {
    misaligned("the start address " + hex(start_) +
               " is not in the first row of a swizzle pattern, which "
               "starts at a multiple of " +
               std::to_string(pattern) + " bytes");
  }
  const bool k_major = major == Major::k;
  const u32 row_bytes = 16 * (k_major ? k_count : mn_count);
  if (in_row + row_bytes > width && (k_major || in_row != 0)) {
    misaligned("the start address " + hex(start_) + " is " + std::to_string(in_row) +
               " bytes into a row of " + std::to_string(width) +
               " bytes, and the instruction reads " + std::to_string(row_bytes) + " bytes of it");
  }
  const auto check = [&](const Index& index, u32 count, const char* name) {
    if (count <= index.inner || index.outer % pattern == 0) return;
    misaligned(std::string("the ") + name + " dimension byte offset " +
               std::to_string(index.outer) + " is not a multiple of " + std::to_string(pattern) +
               ", the bytes of this swizzle's pattern");
  };
  check(mn_, mn_count, k_major ? "stride" : "leading");
  check(k_, k_count, k_major ? "leading" : "stride");
}

}  // namespace jax_fp4::sim

// The shared-memory matrix descriptor of tcgen05.mma and tcgen05.cp (PTX ISA 9.7.16.4.1), and where the
// canonical layouts (9.7.16.3) put the 16-byte chunks of a matrix.
//
//   bits  13:0   start address >> 4, relative to the CTA's shared memory (18 bits of address)
//         29:16  leading dimension byte offset >> 4
//         45:32  stride dimension byte offset >> 4
//         48:46  0b001
//         51:49  matrix base offset: must be 0 here (docs/simulator.md, assumption S70)
//         52     leading dimension mode: must be 0 (1 goes with K = 96)
//         63:61  swizzle: 0 none, 1 128 bytes in atoms of 32, 2 128 bytes, 4 64 bytes, 6 32 bytes
//   all other bits are 0
//
// A chunk has two indices, `mn` along M or N and `k` along K. In a K-major matrix `mn` counts rows and `k`
// chunks of a row; in an MN-major one `mn` counts chunks (16 bytes of elements that follow each other in
// M or N) and `k` single k. Each index runs over an inner part with a fixed step and an outer part:
//
//                      mn: inner x step, outer        k: inner x step, outer
//   K-major, none      8 x 16,        stride          1,                leading
//   K-major, swizzled  8 x width,     stride          width / 16 x 16,  -
//   MN-major, none     1,             stride          8 x 16,           leading
//   MN-major, swizzled width/16 x 16, leading         8 x width,        stride   (atoms of 32: 4 x 128)
//
// The sum of both and the start address is then XORed: its bits from 4 (atoms of 32 bytes: 5) up with its
// bits from 7 up. The pattern starts where these are 0, so a step along K inside a swizzled row is an
// addition to the start address.
#pragma once

#include <stdexcept>
#include <string>

#include "sim/machine/core.h"

namespace jax_fp4::sim {

enum class Major : u8 { k, mn };

// What is wrong with a descriptor.
struct MatrixDescriptorError : std::runtime_error {
  MatrixDescriptorError(FaultKind kind, const std::string& text)
      : std::runtime_error(text), kind(kind) {}
  FaultKind kind;
};

class SharedMatrix {
 public:
  // A matrix of mn_count x k_count chunks. Throws MatrixDescriptorError.
  SharedMatrix(u64 descriptor, Major major, u32 mn_count, u32 k_count);

  // Shared address of a chunk, relative to the CTA.
  u32 address(u32 mn, u32 k) const {
    u32 at = start_ + offset(mn_, mn) + offset(k_, k);
    return at ^ ((at >> 7 & swizzle_mask_) << swizzle_atom_);
  }

 private:
  struct Index {
    u32 inner, step, outer;
  };
  static u32 offset(const Index& index, u32 i) {
    return i % index.inner * index.step + i / index.inner * index.outer;
  }
  void check_alignment(Major major, u32 width, u32 mn_count, u32 k_count) const;

  u32 start_;
  Index mn_, k_;
  u32 swizzle_mask_, swizzle_atom_;
};

}  // namespace jax_fp4::sim

// The instruction descriptor of tcgen05.mma (PTX ISA 9.7.16.4.2): shape, formats and scale-factor ids.
//
//   bits     f16, tf32, f8f6f4, i8             mxf8f6f4                    mxf4, mxf4nvf4
//   2:0      0 (sparsity)                      0                           0
//   3        saturate (i8)                     0                           0
//   5:4      type of D: 0 f16, 1 f32, 2 s32    SFB id, 0 to 3              SFB id, 0 or 2 (block16: 0)
//   9:7      type of A                         type of A                   1
//   12:10    type of B                         type of B                   1 (bits 11:10)
//   13, 14   negate A, B (not i8)              negate A, B                 negate A, B
//   15, 16   transpose A, B                    transpose A, B              0
//   22:17    N / 8                             N / 8                       N / 8
//   23       0                                 1 (UE8M0)                   0 UE4M3, 1 UE8M0
//   28:24    M / 16                            M / 128 in 28:27            M / 128 in 28:27
//   30:29    0 (31:30: .ws only)               SFA id                      SFA id
//   31       0                                 0                           0 (1: K = 96)
#pragma once

#include <stdexcept>
#include <string>

#include "sim/ops/mma_tile.h"

namespace jax_fp4::sim {

struct InstructionDescriptorError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The modifiers of the instruction that decide what its descriptor may hold.
struct MmaForm {
  enum class Kind : u8 { f16, tf32, f8f6f4, i8, mxf8f6f4, mxf4, mxf4nvf4 };
  Kind kind;
  bool pair;     // .cta_group::2
  bool block16;  // 16 elements share a scale
};

// How the elements of an operand fill 16 bytes.
struct ElementPacking {
  int bits;   // of an element
  int bytes;  // that hold elements; padding follows
  int count;  // elements
};

struct MmaInstruction {
  int m = 0, n = 0;
  MmaKind kind;
  ElementPacking a{}, b{};
  bool transpose_a = false, transpose_b = false;
  int sfa_id = 0, sfb_id = 0;  // first byte of the scale words that is used
};

// Throws InstructionDescriptorError.
MmaInstruction decode_instruction_descriptor(const MmaForm& form, u32 bits);

}  // namespace jax_fp4::sim

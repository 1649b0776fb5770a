// Numbers in memory, and the operations of atom, red and the bulk reductions on them.
#pragma once

#include <cstring>

#include "sim/isa.h"

namespace jax_fp4::sim {

// Little-endian numbers of 1, 2, 4 or 8 bytes. (A copy of variable length through a zeroed word costs a
// store-forwarding stall for each lane.)
inline u64 get_bytes(const u8* from, u32 bytes) {
  u16 half;
  u32 word;
  u64 value;
  switch (bytes) {
    case 1: return *from;
    case 2: std::memcpy(&half, from, 2); return half;
    case 4: std::memcpy(&word, from, 4); return word;
    default: std::memcpy(&value, from, 8); return value;
  }
}
inline void put_bytes(u8* to, u64 value, u32 bytes) {
  const u16 half = static_cast<u16>(value);
  const u32 word = static_cast<u32>(value);
  switch (bytes) {
    case 1: *to = static_cast<u8>(value); break;
    case 2: std::memcpy(to, &half, 2); break;
    case 4: std::memcpy(to, &word, 4); break;
    default: std::memcpy(to, &value, 8);
  }
}

enum class AtomicOp : u16 { add, min, max, inc, dec, bit_and, bit_or, bit_xor, exchange, compare };
// The operation that a form names.
AtomicOp atomic_op_of(const Form& form);

u64 apply_atomic(AtomicOp op, Type type, u64 old, u64 b, u64 c);

// Reduces an array of elements into another one, as bulk copies do (PTX ISA 9.7.9.25.4.2): add.f32
// flushes subnormals; min and max of f16 and bf16 exist, and prefer a number to a NaN.
void reduce_elements(AtomicOp op, Type type, u8* into, const u8* from, u32 bytes);

}  // namespace jax_fp4::sim

// The operations of atom, red, red.async and the bulk reductions.
#pragma once

#include "sim/isa.h"

namespace jax_fp4::sim {

enum class AtomicOp : u16 { add, min, max, inc, dec, bit_and, bit_or, bit_xor, exchange, compare };

AtomicOp atomic_op_of(const Form& form);

// The new value of a cell of the type. `c`: of compare, what is stored where the cell equals b.
u64 apply_atomic(AtomicOp op, Type type, u64 old, u64 b, u64 c);

// Reduces an array of elements into another one, as bulk copies do (PTX ISA 9.7.9.25.4.2): add.f32
// flushes subnormals; min and max of f16 and bf16 exist.
void reduce_elements(AtomicOp op, Type type, u8* into, const u8* from, u32 bytes);

}  // namespace jax_fp4::sim

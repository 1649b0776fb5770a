// atom and red (PTX ISA 9.7.13.5 and 9.7.13.7).
#include "sim/ops/atomic.h"

#include <algorithm>
#include <cmath>

#include "numerics/minifloat.h"
#include "sim/ops/memory_forms.h"
#include "sim/ops/rounding.h"

namespace jax_fp4::sim {
namespace {

constexpr int kOrderShift = 8;  // of variant: 1 acquire, 2 release

// A sum of two f16 or bf16 numbers, rounded once.
u16 add_half(u16 a, u16 b, bool brain) {
  const double x = brain ? decode_bf16(a) : decode_f16(a);
  const double y = brain ? decode_bf16(b) : decode_f16(b);
  const BinaryFormat format = brain ? kBF16 : kF16;
  const double sum = x + y;
  if (sum != sum) return kCanonicalNaN16;
  if (std::isinf(sum)) return static_cast<u16>((sum < 0 ? 0x8000 : 0) | format.infinity());
  if (sum == 0) return std::signbit(sum) ? 0x8000 : 0;
  return static_cast<u16>(round_exact(exact_of_product_sum(x, 1.0, y), format, Rounding::nearest));
}

// min and max as min.f16 and max.f16 have them: a number is preferred to a NaN, -0 is less than +0.
u16 extreme_half(u16 a, u16 b, bool brain, bool largest) {
  const double x = brain ? decode_bf16(a) : decode_f16(a);
  const double y = brain ? decode_bf16(b) : decode_f16(b);
  if (x != x) return y != y ? kCanonicalNaN16 : b;
  if (y != y) return a;
  if (x == y) return std::signbit(x) == largest ? b : a;
  return (x < y) == largest ? b : a;
}

u16 apply_half(AtomicOp op, u16 a, u16 b, bool brain) {
  return op == AtomicOp::add ? add_half(a, b, brain)
                             : extreme_half(a, b, brain, op == AtomicOp::max);
}

template <class T>
u64 apply_typed(AtomicOp op, u64 old_bits, u64 b_bits, u64 c_bits) {
  const T old = static_cast<T>(old_bits), b = static_cast<T>(b_bits);
  const auto wrap = [](T x) { return static_cast<u64>(static_cast<std::make_unsigned_t<T>>(x)); };
  switch (op) {
    case AtomicOp::add: return wrap(static_cast<T>(old_bits + b_bits));
    case AtomicOp::min: return wrap(std::min(old, b));
    case AtomicOp::max: return wrap(std::max(old, b));
    case AtomicOp::inc: return old >= b ? 0 : wrap(static_cast<T>(old_bits + 1));
    case AtomicOp::dec: return old == 0 || old > b ? wrap(b) : wrap(static_cast<T>(old_bits - 1));
    case AtomicOp::bit_and: return wrap(static_cast<T>(old_bits & b_bits));
    case AtomicOp::bit_or: return wrap(static_cast<T>(old_bits | b_bits));
    case AtomicOp::bit_xor: return wrap(static_cast<T>(old_bits ^ b_bits));
    case AtomicOp::exchange: return wrap(b);
    case AtomicOp::compare: return old == b ? wrap(static_cast<T>(c_bits)) : wrap(old);
  }
  return 0;
}

}  // namespace

u64 apply_atomic(AtomicOp op, Type type, u64 old, u64 b, u64 c) {
  switch (type) {
    case Type::f32: {
      const float sum = f32_of(static_cast<u32>(old)) + f32_of(static_cast<u32>(b));
      return sum != sum ? kCanonicalNaN32 : bits_of(sum);
    }
    case Type::f64:
      return std::bit_cast<u64>(std::bit_cast<double>(old) + std::bit_cast<double>(b));
    case Type::f16:
    case Type::bf16:
      return apply_half(op, static_cast<u16>(old), static_cast<u16>(b), type == Type::bf16);
    case Type::f16x2:
    case Type::bf16x2: {
      const bool brain = type == Type::bf16x2;
      return apply_half(op, static_cast<u16>(old), static_cast<u16>(b), brain) |
             static_cast<u64>(
                 apply_half(op, static_cast<u16>(old >> 16), static_cast<u16>(b >> 16), brain))
                 << 16;
    }
    case Type::s32: return apply_typed<i32>(op, old, b, c);
    case Type::s64: return apply_typed<i64>(op, old, b, c);
    case Type::b16: return apply_typed<u16>(op, old, b, c);
    case Type::u64:
    case Type::b64: return apply_typed<u64>(op, old, b, c);
    default: return apply_typed<u32>(op, old, b, c);
  }
}

AtomicOp atomic_op_of(const Form& form) {
  constexpr std::string_view kNames[] = {"add", "min", "max", "inc",  "dec",
                                         "and", "or",  "xor", "exch", "cas"};
  u16 op = 0;
  while (!form.has(kNames[op])) ++op;
  return static_cast<AtomicOp>(op);
}

namespace {

float flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

}  // namespace

void reduce_elements(AtomicOp op, Type type, u8* into, const u8* from, u32 bytes) {
  const u32 size = static_cast<u32>(bits_of_type(type)) / 8;
  for (u32 at = 0; at < bytes; at += size) {
    const u64 a = get_bytes(into + at, size), b = get_bytes(from + at, size);
    u64 result = apply_atomic(op, type, a, b, 0);
    if (type == Type::f32) {
      const float sum =
          flush(flush(f32_of(static_cast<u32>(a))) + flush(f32_of(static_cast<u32>(b))));
      result = sum != sum ? kCanonicalNaN32 : bits_of(sum);
    }
    put_bytes(into + at, result, size);
  }
}

namespace {

// Lanes act one after the other, in lane order (the PTX ISA leaves the order open).
void atomic_lanes(Warp& w, const Code& c, u32 mask) {
  const Type type = w.launch->program->forms[c.form].types[0];
  const u32 bytes = static_cast<u32>(bits_of_type(type)) / 8;
  const AtomicOp op = static_cast<AtomicOp>(c.variant & 0xFF);
  const bool acquire = c.variant >> kOrderShift & 1, release = c.variant >> kOrderShift & 2;
  const auto read = [&](u32 slot, int lane) -> u64 {
    if (slot == kNoSlot) return 0;
    return bytes == 8 ? w.in64(slot)[lane] : w.in(slot)[lane];
  };
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const u64 address = address_of(w, c, lane, c.src[0], 0);
    if (acquire || release) synchronize_through(w, address, acquire, release);
    u8* data = access(w, c, lane, c.space, address, bytes, AccessKind::atomic);
    const u64 old = get_bytes(data, bytes);
    const u64 result = apply_atomic(op, type, old, read(c.src[1], lane), read(c.src[2], lane));
    put_bytes(data, result, bytes);
    if (c.dst[0] == kNoSlot) continue;
    if (bytes == 8) {
      w.out64(c.dst[0])[lane] = old;
    } else {
      w.out(c.dst[0])[lane] = static_cast<u32>(old);
    }
  }
}

// Each element of the vector is one atomic operation.
void atomic_vectors(Warp& w, const Code& c, u32 mask) {
  const Program& program = *w.launch->program;
  const Type type = program.forms[c.form].types[0];
  const u32 bytes = static_cast<u32>(bits_of_type(type)) / 8;
  const AtomicOp op = static_cast<AtomicOp>(c.variant & 0xFF);
  const bool returns = program.forms[c.form].row->opcode == "atom";
  const u32 count = c.counts[0];
  const u32* operands = program.slots.data() + c.vectors[returns ? 1 : 0];
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const u64 address = address_of(w, c, lane, c.src[0], 0);
    synchronize_through(w, address, true, true);
    u8* data = access(w, c, lane, c.space, address, bytes * count, AccessKind::atomic);
    for (u32 k = 0; k < count; ++k, data += bytes) {
      const u64 old = get_bytes(data, bytes);
      put_bytes(data, apply_atomic(op, type, old, w.in(operands[k])[lane], 0), bytes);
      if (returns) w.out(program.slots[c.vectors[0] + k])[lane] = static_cast<u32>(old);
    }
  }
}

}  // namespace

Exec atom(const Form& form, Code& code) {
  code.space = space_of(form);
  code.variant = static_cast<u16>(atomic_op_of(form));
  // Programs that fence and then use a relaxed atomic are ordered by it too: the race checker treats
  // every atomic as ordering rather than report them (assumption S4).
  code.variant |= 3 << kOrderShift;
  return atomic_lanes;
}
Exec atom_vector(const Form& form, Code& code) {
  code.space = space_of(form);
  code.variant = static_cast<u16>(atomic_op_of(form));
  const bool returns = form.row->opcode == "atom";
  const int vector = vector_of(form);
  return code.counts[0] == vector && (!returns || code.counts[1] == vector) ? atomic_vectors
                                                                            : nullptr;
}

}  // namespace jax_fp4::sim

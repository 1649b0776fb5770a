// Read-modify-write operations on single numbers.
#include "sim/ops/atomic.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "numerics/minifloat.h"
#include "sim/ops/lanes.h"
#include "sim/ops/rounding.h"

namespace jax_fp4::sim {
namespace {

constexpr std::string_view kAtomicNames[] = {"add", "min", "max", "inc",  "dec",
                                             "and", "or",  "xor", "exch", "cas"};

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

// The smaller or larger of two f16 or bf16 numbers; -0 is smaller than +0.
u16 choose_half(u16 a, u16 b, bool larger, bool brain) {
  const u16 infinity = brain ? kBF16.infinity() : kF16.infinity();
  const auto is_nan = [&](u16 x) { return (x & 0x7FFF) > infinity; };
  if (is_nan(a)) return is_nan(b) ? kCanonicalNaN16 : b;
  if (is_nan(b)) return a;
  // As integers, negative numbers are in reverse order.
  const auto key = [](u16 x) { return x & 0x8000 ? -(x & 0x7FFF) - 1 : static_cast<int>(x); };
  return (key(a) < key(b)) != larger ? a : b;
}

float flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

}  // namespace

AtomicOp atomic_op_of(const Form& form) {
  u16 op = 0;
  for (u16 i = 0; i < std::size(kAtomicNames); ++i)
    if (form.has(kAtomicNames[i])) op = i;
  return static_cast<AtomicOp>(op);
}

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
      return add_half(static_cast<u16>(old), static_cast<u16>(b), type == Type::bf16);
    case Type::f16x2:
    case Type::bf16x2: {
      const bool brain = type == Type::bf16x2;
      return add_half(static_cast<u16>(old), static_cast<u16>(b), brain) |
             static_cast<u64>(
                 add_half(static_cast<u16>(old >> 16), static_cast<u16>(b >> 16), brain))
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

void reduce_elements(AtomicOp op, Type type, u8* into, const u8* from, u32 bytes) {
  const u32 size = static_cast<u32>(bits_of_type(type)) / 8;
  const bool half = type == Type::f16 || type == Type::bf16;
  for (u32 at = 0; at < bytes; at += size) {
    const u64 a = get_bytes(into + at, size), b = get_bytes(from + at, size);
    u64 result;
    if (half && op != AtomicOp::add) {
      result = choose_half(static_cast<u16>(a), static_cast<u16>(b), op == AtomicOp::max,
                           type == Type::bf16);
    } else if (type == Type::f32) {
      const float sum =
          flush(flush(f32_of(static_cast<u32>(a))) + flush(f32_of(static_cast<u32>(b))));
      result = sum != sum ? kCanonicalNaN32 : bits_of(sum);
    } else {
      result = apply_atomic(op, type, a, b, 0);
    }
    put_bytes(into + at, result, size);
  }
}

}  // namespace jax_fp4::sim

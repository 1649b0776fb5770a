// The fundamental types of PTX and the state spaces (PTX ISA 5.1, 5.2), as data.
#pragma once

#include <string_view>

#include "numerics/base.h"

namespace jax_fp4::sim {

enum class Type : u8 {
  none,
  pred,
  b8,
  b16,
  b32,
  b64,
  b128,
  u8,
  u16,
  u32,
  u64,
  s8,
  s16,
  s32,
  s64,
  f16,
  f32,
  f64,
  bf16,
  tf32,
  u16x2,
  s16x2,
  f16x2,
  bf16x2,
  f32x2,
  e4m3,
  e5m2,
  e2m3,
  e3m2,
  e2m1,
  ue8m0,
  ue4m3,
  e4m3x2,
  e5m2x2,
  e2m3x2,
  e3m2x2,
  e2m1x2,
  ue8m0x2,
  e4m3x4,
  e5m2x4,
  e2m3x4,
  e3m2x4,
  e2m1x4,
  b1,
  u4,
  s4,
  b8x16,
};  // clang-format off above: one family a line

enum class TypeKind : u8 { none, pred, bits, unsigned_int, signed_int, floating };

// Width of a value in bits; vectors of small numbers count as a whole (e2m1x2: 8).
int bits_of_type(Type type);
TypeKind kind_of_type(Type type);
std::string_view name_of_type(Type type);
// The type written ".name" in PTX; Type::none if there is no such type.
Type type_of_name(std::string_view name);

inline bool is_signed(Type type) { return kind_of_type(type) == TypeKind::signed_int; }

enum class Space : u8 { generic, reg, global, shared, shared_cluster, local, param, constant };

std::string_view name_of_space(Space space);

}  // namespace jax_fp4::sim

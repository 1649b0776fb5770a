// Names, widths and kinds of the PTX types; the order is that of enum class Type.
#include "sim/ptx/types.h"

#include <iterator>

namespace jax_fp4::sim {
namespace {

struct TypeInfo {
  std::string_view name;
  int bits;
  TypeKind kind;
};

constexpr TypeKind kBits = TypeKind::bits;
constexpr TypeKind kUnsigned = TypeKind::unsigned_int;
constexpr TypeKind kSigned = TypeKind::signed_int;
constexpr TypeKind kFloat = TypeKind::floating;

// clang-format off
constexpr TypeInfo kTypes[] = {
    {"", 0, TypeKind::none}, {"pred", 1, TypeKind::pred},
    {"b8", 8, kBits}, {"b16", 16, kBits}, {"b32", 32, kBits}, {"b64", 64, kBits}, {"b128", 128, kBits},
    {"u8", 8, kUnsigned}, {"u16", 16, kUnsigned}, {"u32", 32, kUnsigned}, {"u64", 64, kUnsigned},
    {"s8", 8, kSigned}, {"s16", 16, kSigned}, {"s32", 32, kSigned}, {"s64", 64, kSigned},
    {"f16", 16, kFloat}, {"f32", 32, kFloat}, {"f64", 64, kFloat}, {"bf16", 16, kFloat}, {"tf32", 32, kFloat},
    {"u16x2", 32, kUnsigned}, {"s16x2", 32, kSigned}, {"f16x2", 32, kFloat}, {"bf16x2", 32, kFloat},
    {"f32x2", 64, kFloat},
    {"e4m3", 8, kFloat}, {"e5m2", 8, kFloat}, {"e2m3", 8, kFloat}, {"e3m2", 8, kFloat},
    {"e2m1", 8, kFloat}, {"ue8m0", 8, kFloat}, {"ue4m3", 8, kFloat},
    {"e4m3x2", 16, kFloat}, {"e5m2x2", 16, kFloat}, {"e2m3x2", 16, kFloat}, {"e3m2x2", 16, kFloat},
    {"e2m1x2", 8, kFloat}, {"ue8m0x2", 16, kFloat},
    {"e4m3x4", 32, kFloat}, {"e5m2x4", 32, kFloat}, {"e2m3x4", 32, kFloat}, {"e3m2x4", 32, kFloat},
    {"e2m1x4", 16, kFloat},
    {"b1", 1, kBits}, {"u4", 4, kUnsigned}, {"s4", 4, kSigned}, {"b8x16", 128, kBits},
};
// clang-format on
static_assert(std::size(kTypes) == static_cast<std::size_t>(Type::b8x16) + 1);

constexpr std::string_view kSpaces[] = {"generic",         "reg",   "global", "shared",
                                        "shared::cluster", "local", "param",  "const"};

const TypeInfo& info(Type type) { return kTypes[static_cast<int>(type)]; }

}  // namespace

int bits_of_type(Type type) { return info(type).bits; }
TypeKind kind_of_type(Type type) { return info(type).kind; }
std::string_view name_of_type(Type type) { return info(type).name; }

Type type_of_name(std::string_view name) {
  for (std::size_t i = 1; i < std::size(kTypes); ++i)
    if (kTypes[i].name == name) return static_cast<Type>(i);
  return Type::none;
}

std::string_view name_of_space(Space space) { return kSpaces[static_cast<int>(space)]; }

}  // namespace jax_fp4::sim

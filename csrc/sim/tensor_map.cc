// Tensor maps: the requirements of cuTensorMapEncodeTiled, and the machine's 128-byte form.
#include "sim/tensor_map.h"

#include <cstddef>
#include <cstdio>
#include <cstring>

namespace jax_fp4::sim {
namespace {

constexpr u64 kMaxDim = u64{1} << 32;
constexpr u64 kStrideLimit = u64{1} << 40;
constexpr u32 kMaxBox = 256;
constexpr u32 kMaxElementStride = 8;
constexpr u32 kPaddedInnerElements = 128;  // of a box, and what dims[0] must be a multiple of
constexpr u32 kL2Promotions = 4;

const char* name_of_data_type(u32 type) {
  constexpr const char* kNames[kTensorDataTypes] = {
      "UINT8",        "UINT16",       "UINT32",        "INT32",        "UINT64",      "INT64",
      "FLOAT16",      "FLOAT32",      "FLOAT64",       "BFLOAT16",     "FLOAT32_FTZ", "TFLOAT32",
      "TFLOAT32_FTZ", "16U4_ALIGN8B", "16U4_ALIGN16B", "16U6_ALIGN16B"};
  return kNames[type];
}

const char* name_of_swizzle(u32 swizzle) {
  constexpr const char* kNames[kSwizzles] = {
      "NONE", "32B", "64B", "128B", "128B_ATOM_32B", "128B_ATOM_32B_FLIP_8B", "128B_ATOM_64B"};
  return kNames[swizzle];
}

bool is_floating(u32 type) { return type >= kTensorFloat16 && type <= kTensorTfloat32Ftz; }

std::string hex(u64 value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", value);
  return text;
}

std::string got(const std::string& argument, const std::string& expected, u64 value) {
  return argument + ": expected " + expected + ", got " + std::to_string(value);
}

std::string at(const char* name, u32 i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

std::string check_enumerations(const TensorMap& map) {
  if (map.data_type >= kTensorDataTypes)
    return got("tensorDataType", "a value of 0 to 15", map.data_type);
  if (map.interleave >= kInterleaves) return got("interleave", "a value of 0 to 2", map.interleave);
  if (map.swizzle >= kSwizzles) return got("swizzle", "a value of 0 to 6", map.swizzle);
  if (map.l2_promotion >= kL2Promotions)
    return got("l2Promotion", "a value of 0 to 3", map.l2_promotion);
  if (map.oob_fill > 1) return got("oobFill", "a value of 0 or 1", map.oob_fill);
  if (map.rank < 1 || map.rank > kMaxTensorRank) return got("tensorRank", "1 to 5", map.rank);
  if (map.interleave != kInterleaveNone && map.rank < 3)
    return got("tensorRank", "3 to 5 for an interleaved layout", map.rank);
  return "";
}

std::string check_tensor(const TensorMap& map) {
  const bool wide = is_padded(map.data_type) || map.interleave == kInterleave32B;
  const u32 align = wide ? 32 : 16;
  const std::string multiple =
      "a multiple of " + std::to_string(align) +
      (is_padded(map.data_type) ? std::string(" for ") + name_of_data_type(map.data_type)
       : wide                   ? std::string(" for interleave 32B")
                                : std::string());
  if (map.address % align != 0)
    return "globalAddress: expected " + multiple + ", got " + hex(map.address);
  for (u32 i = 0; i < map.rank; ++i)
    if (map.dims[i] < 1 || map.dims[i] > kMaxDim)
      return got(at("globalDim", i), "1 to 2^32", map.dims[i]);
  if (is_padded(map.data_type) && map.dims[0] % kPaddedInnerElements != 0)
    return got("globalDim[0]",
               std::string("a multiple of 128 for ") + name_of_data_type(map.data_type),
               map.dims[0]);
  if (map.data_type == kTensor16U4Align8B && map.dims[0] % 2 != 0)
    return got("globalDim[0]", "a multiple of 2 for 16U4_ALIGN8B", map.dims[0]);
  // The driver's array starts at dimension 1.
  for (u32 i = 1; i < map.rank; ++i) {
    if (map.strides[i] % align != 0)
      return got(at("globalStrides", i - 1), multiple, map.strides[i]);
    if (map.strides[i] >= kStrideLimit)
      return got(at("globalStrides", i - 1), "less than 2^40", map.strides[i]);
    if (map.strides[i] == 0 && map.dims[i] != 1)
      return got(at("globalStrides", i - 1),
                 "more than 0, since " + at("globalDim", i) + " is not 1", map.strides[i]);
  }
  return "";
}

std::string check_box(const TensorMap& map) {
  for (u32 i = 0; i < map.rank; ++i)
    if (map.box[i] < 1 || map.box[i] > kMaxBox) return got(at("boxDim", i), "1 to 256", map.box[i]);
  if (is_padded(map.data_type) && map.box[0] != kPaddedInnerElements)
    return got("boxDim[0]", std::string("128 for ") + name_of_data_type(map.data_type), map.box[0]);
  const u32 inner_bits = map.box[0] * element_bits(map.data_type);
  if (map.interleave == kInterleaveNone && inner_bits % 128 != 0)
    return got("boxDim[0]",
               "a multiple of " + std::to_string(128 / element_bits(map.data_type)) +
                   " (16 bytes of " + name_of_data_type(map.data_type) + ")",
               map.box[0]);
  for (u32 i = 0; i < map.rank; ++i)
    if (map.element_strides[i] < 1 || map.element_strides[i] > kMaxElementStride)
      return got(at("elementStrides", i), "1 to 8", map.element_strides[i]);
  const u32 span = swizzle_span(map.swizzle);
  if (map.interleave == kInterleaveNone && span != 0 && inner_bits > span * 8)
    return "boxDim[0]: expected at most " + std::to_string(span) + " bytes for swizzle " +
           name_of_swizzle(map.swizzle) + ", got " + std::to_string(map.box[0]) + " elements of " +
           std::to_string(inner_bits / 8) + " bytes together";
  return "";
}

std::string check_modes(const TensorMap& map) {
  const std::string type = name_of_data_type(map.data_type);
  const std::string swizzle = name_of_swizzle(map.swizzle);
  if (map.interleave == kInterleave32B && map.swizzle != kSwizzle32B)
    return "swizzle: expected 32B for interleave 32B, got " + swizzle;
  if (map.data_type == kTensor16U6Align16B && map.interleave != kInterleaveNone)
    return "interleave: expected NONE for " + type + ", got " + std::to_string(map.interleave);
  // 128B_ATOM_64B is for stores of 6-bit elements; 4-bit ones with gaps cannot be stored.
  const bool common = map.swizzle == kSwizzleNone || map.swizzle == kSwizzle128B ||
                      map.swizzle == kSwizzle128BAtom32B;
  if (map.data_type == kTensor16U6Align16B && !common && map.swizzle != kSwizzle128BAtom64B)
    return "swizzle: expected NONE, 128B, 128B_ATOM_32B or 128B_ATOM_64B for " + type + ", got " +
           swizzle;
  if (map.data_type == kTensor16U4Align16B && !common)
    return "swizzle: expected NONE, 128B or 128B_ATOM_32B for " + type + ", got " + swizzle;
  if (map.oob_fill == 1 && !is_floating(map.data_type))
    return "oobFill: expected NONE, since " + type + " is no floating-point type, got NaN";
  return "";
}

// The encoded form. Multi-byte fields are little-endian, as on every host that the project builds on.
constexpr u64 kMagic = 0x7061'4D72'6F73'6E54;
struct Encoded {
  u64 magic;
  u64 address;
  u64 dims[kMaxTensorRank];
  u64 strides[kMaxTensorRank - 1];  // of dimensions 1 to 4
  u16 box[kMaxTensorRank];
  u8 element_strides[kMaxTensorRank];
  u8 data_type, rank, interleave, swizzle, l2_promotion, oob_fill;
  u8 reserved[11];
  u64 hash;
};
static_assert(sizeof(Encoded) == kTensorMapBytes);

// FNV-1a over everything before it.
u64 hash_of(const Encoded& e) {
  u8 bytes[offsetof(Encoded, hash)];
  std::memcpy(bytes, &e, sizeof bytes);
  u64 hash = 0xCBF2'9CE4'8422'2325;
  for (const u8 byte : bytes) hash = (hash ^ byte) * 0x100'0000'01B3;
  return hash;
}

u64 element_bytes(u32 type) {
  const u32 bits = element_bits(type);
  return bits % 8 == 0 ? bits / 8 : 0;
}

u64 outer_elements(const TensorMap& map) {
  u64 count = 1;
  for (u32 d = 1; d < map.rank; ++d) count *= copied_elements(map, d);
  return count;
}

}  // namespace

u32 element_bits(u32 data_type) {
  constexpr u32 kBits[kTensorDataTypes] = {8,  16, 32, 32, 64, 64, 16, 32,
                                           64, 16, 32, 32, 32, 4,  4,  6};
  return data_type < kTensorDataTypes ? kBits[data_type] : 0;
}

bool is_padded(u32 data_type) {
  return data_type == kTensor16U4Align16B || data_type == kTensor16U6Align16B;
}

u32 swizzle_span(u32 swizzle) {
  constexpr u32 kSpans[kSwizzles] = {0, 32, 64, 128, 128, 128, 128};
  return swizzle < kSwizzles ? kSpans[swizzle] : 0;
}

u32 copied_elements(const TensorMap& map, u32 d) {
  if (d == 0 && map.interleave == kInterleaveNone) return map.box[0];
  return (map.box[d] + map.element_strides[d] - 1) / map.element_strides[d];
}

u32 inner_copied_bytes(const TensorMap& map) {
  return copied_elements(map, 0) * element_bits(map.data_type) / 8;
}

u32 inner_shared_bytes(const TensorMap& map) {
  // 16 elements in 16 bytes.
  return is_padded(map.data_type) ? copied_elements(map, 0) : inner_copied_bytes(map);
}

u64 box_copied_bytes(const TensorMap& map) { return inner_copied_bytes(map) * outer_elements(map); }
u64 box_shared_bytes(const TensorMap& map) { return inner_shared_bytes(map) * outer_elements(map); }

std::string check(const TensorMap& map) {
  for (const auto part : {check_enumerations, check_tensor, check_box, check_modes})
    if (std::string wrong = part(map); !wrong.empty()) return wrong;
  return "";
}

void encode(const TensorMap& map, u8 (&bytes)[kTensorMapBytes]) {
  Encoded e = {};
  e.magic = kMagic;
  e.address = map.address;
  for (u32 d = 0; d < kMaxTensorRank; ++d) {
    e.dims[d] = map.dims[d];
    if (d > 0) e.strides[d - 1] = map.strides[d];
    e.box[d] = static_cast<u16>(map.box[d]);
    e.element_strides[d] = static_cast<u8>(map.element_strides[d]);
  }
  e.data_type = static_cast<u8>(map.data_type);
  e.rank = static_cast<u8>(map.rank);
  e.interleave = static_cast<u8>(map.interleave);
  e.swizzle = static_cast<u8>(map.swizzle);
  e.l2_promotion = static_cast<u8>(map.l2_promotion);
  e.oob_fill = static_cast<u8>(map.oob_fill);
  e.hash = hash_of(e);
  std::memcpy(bytes, &e, sizeof e);
}

std::optional<TensorMap> decode(const u8* bytes) {
  Encoded e;
  std::memcpy(&e, bytes, sizeof e);
  if (e.magic != kMagic || e.hash != hash_of(e)) return std::nullopt;
  TensorMap map;
  map.data_type = e.data_type;
  map.rank = e.rank;
  map.address = e.address;
  for (u32 d = 0; d < kMaxTensorRank; ++d) {
    map.dims[d] = e.dims[d];
    map.strides[d] = d > 0 ? e.strides[d - 1] : element_bytes(e.data_type);
    map.box[d] = e.box[d];
    map.element_strides[d] = e.element_strides[d];
  }
  map.interleave = e.interleave;
  map.swizzle = e.swizzle;
  map.l2_promotion = e.l2_promotion;
  map.oob_fill = e.oob_fill;
  return map;
}

}  // namespace jax_fp4::sim

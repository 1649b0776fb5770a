// Tensor maps: what a bulk tensor copy knows about a tensor in global memory and its box in shared
// memory (cuda.h of CUDA 12.9, cuTensorMapEncodeTiled; PTX ISA 5.5).
//
// Programs never look into the 128 bytes that cuTensorMapEncodeTiled writes, so the machine has a format
// of its own for them; NVIDIA's is not public. Dimension 0 is the innermost.
#pragma once

#include <optional>
#include <string>

#include "numerics/base.h"

namespace jax_fp4::sim {

// Values of CUtensorMapDataType.
enum TensorDataType : u32 {
  kTensorUint8,
  kTensorUint16,
  kTensorUint32,
  kTensorInt32,
  kTensorUint64,
  kTensorInt64,
  kTensorFloat16,
  kTensorFloat32,
  kTensorFloat64,
  kTensorBfloat16,
  kTensorFloat32Ftz,
  kTensorTfloat32,
  kTensorTfloat32Ftz,
  kTensor16U4Align8B,   // 16 elements of 4 bits in 8 bytes, in global and in shared memory
  kTensor16U4Align16B,  // the same in global memory; in shared memory 8 bytes of gap follow
  kTensor16U6Align16B,  // 16 elements of 6 bits in 12 bytes; in shared memory 4 bytes of gap follow
  kTensorDataTypes,
};

// Values of CUtensorMapInterleave.
enum TensorInterleave : u32 { kInterleaveNone, kInterleave16B, kInterleave32B, kInterleaves };

// Values of CUtensorMapSwizzle.
enum TensorSwizzle : u32 {
  kSwizzleNone,
  kSwizzle32B,
  kSwizzle64B,
  kSwizzle128B,
  kSwizzle128BAtom32B,
  kSwizzle128BAtom32BFlip8B,
  kSwizzle128BAtom64B,
  kSwizzles,
};

inline constexpr u32 kTensorMapBytes = 128;
inline constexpr u32 kTensorMapAlign = 64;  // of the object, as cuTensorMapEncodeTiled demands
inline constexpr u32 kMaxTensorRank = 5;

struct TensorMap {
  u32 data_type = kTensorUint8;
  u32 rank = 0;
  u64 address = 0;
  u64 dims[kMaxTensorRank] = {};     // elements
  u64 strides[kMaxTensorRank] = {};  // bytes; [0]: of an element, 0 where that is no whole number
  u32 box[kMaxTensorRank] = {};      // elements of the tensor that the box spans
  u32 element_strides[kMaxTensorRank] = {};
  u32 interleave = kInterleaveNone;
  u32 swizzle = kSwizzleNone;
  u32 l2_promotion = 0;  // CUtensorMapL2promotion: a hint
  u32 oob_fill = 0;      // CUtensorMapFloatOOBfill: 0 zeros, 1 NaN

  bool operator==(const TensorMap&) const = default;
};

u32 element_bits(u32 data_type);
// The types with gaps in shared memory.
bool is_padded(u32 data_type);
// Bytes within which a swizzle moves data; 0 without one.
u32 swizzle_span(u32 swizzle);
// Elements that are copied along dimension `d`: the box, thinned by its element stride. Dimension 0 has
// no stride unless the layout is interleaved.
u32 copied_elements(const TensorMap& map, u32 d);
// Bytes of an innermost row of the box: as copied and counted by mbarriers, and as it lies in shared
// memory, gaps included.
u32 inner_copied_bytes(const TensorMap& map);
u32 inner_shared_bytes(const TensorMap& map);
// The same of the whole box.
u64 box_copied_bytes(const TensorMap& map);
u64 box_shared_bytes(const TensorMap& map);

// Every requirement that cuda.h states for cuTensorMapEncodeTiled. Empty, or which argument is wrong,
// what was expected and what it is.
std::string check(const TensorMap& map);

// Of a map that check() accepts.
void encode(const TensorMap& map, u8 (&bytes)[kTensorMapBytes]);
// Nothing where the bytes are no tensor map, or one that was changed after it had been encoded.
std::optional<TensorMap> decode(const u8* bytes);

}  // namespace jax_fp4::sim

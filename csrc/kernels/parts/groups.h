// Groups of 16 elements in registers: loading, widening, the tile in shared memory.
//
// A group is kWords words: 8 of 16-bit elements, the earlier one in the low half, or 16 of f32.
#pragma once

#include "kernels/params.h"
#include "kernels/parts/codes.h"
#include "numerics/hadamard.h"
#include "ptx/memory.h"

namespace jax_fp4 {

template <int kInputBits>
struct Group {
  static constexpr int kBytes = kGroup * kInputBits / 8;
  static constexpr int kWords = kBytes / 4;
  u32 word[kWords];
};

__device__ inline float low_of(u32 word, InputType input) {
  return input == InputType::bf16 ? decode_bf16(word) : ptx::cvt_f32_f16(static_cast<u16>(word));
}
__device__ inline float high_of(u32 word, InputType input) {
  return input == InputType::bf16 ? f32_of(word & 0xFFFF'0000u)
                                  : ptx::cvt_f32_f16(static_cast<u16>(word >> 16));
}

// 16 consecutive elements of a row. Those from `count` on are zero and are not read; `aligned`:
// `from` is a multiple of the group's bytes, at most 32.
template <int kInputBits>
__device__ Group<kInputBits> load_group(const void* from, i64 element, int count, bool aligned) {
  using G = Group<kInputBits>;
  G group;
  const u8* at = static_cast<const u8*>(from) + element * (kInputBits / 8);
  if (aligned && count >= kGroup) {
#if __CUDA_ARCH__ >= 1000
#pragma unroll
    for (int i = 0; i < G::kWords; i += 8) ptx::ld_global_nc_v8_b32(group.word + i, at + 4 * i);
#else
#pragma unroll
    for (int i = 0; i < G::kWords; i += 4)
      *reinterpret_cast<uint4*>(group.word + i) = __ldg(reinterpret_cast<const uint4*>(at + 4 * i));
#endif
    return group;
  }
#pragma unroll
  for (int i = 0; i < G::kWords; ++i) {
    if constexpr (kInputBits == 32) {
      group.word[i] = i < count ? __ldg(reinterpret_cast<const u32*>(at) + i) : 0;
    } else {
      const u16* half = reinterpret_cast<const u16*>(at) + 2 * i;
      const u32 low = 2 * i < count ? __ldg(half) : 0;
      const u32 high = 2 * i + 1 < count ? __ldg(half + 1) : 0;
      group.word[i] = low | high << 16;
    }
  }
  return group;
}

template <int kInputBits>
__device__ void widen(const Group<kInputBits>& group, InputType input, float (&v)[kGroup]) {
  if constexpr (kInputBits == 32) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = f32_of(group.word[i]);
  } else if (input == InputType::bf16) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      v[i] = i % 2 ? high_of(group.word[i / 2], InputType::bf16)
                   : low_of(group.word[i / 2], InputType::bf16);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      v[i] = i % 2 ? high_of(group.word[i / 2], InputType::f16)
                   : low_of(group.word[i / 2], InputType::f16);
  }
}

// The bits of the largest magnitude; at least kF32InfBits if there is an Inf or a NaN.
__device__ inline u32 largest(const float (&v)[kGroup]) {
  float m = v[0];
#pragma unroll
  for (int i = 1; i < kGroup; ++i) {
    if constexpr (ptx::kHasXorSign) {
      m = ptx::max_nan_xorsign_abs_f32(m, v[i]);
    } else {
      m = ptx::max_nan_f32(absolute(m), absolute(v[i]));
    }
  }
  return bits_of(m) & kF32AbsMask;
}

// numerics/hadamard.h, with the bf16 rounding in one instruction for two values. A NaN gets other
// bits than there, in a block whose codes are zero anyway.
__device__ inline void rotate_group(float (&v)[kGroup], u32 signs) {
#pragma unroll
  for (int i = 0; i < kGroup; ++i)
    v[i] = f32_of(bits_of(v[i]) ^ ((signs << (31 - i)) & kF32SignMask));
#pragma unroll
  for (int stride = 1; stride < kGroup; stride *= 2)
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      if ((i & stride) == 0) {
        const float a = v[i], b = v[i + stride];
        v[i] = a + b;
        v[i + stride] = a - b;
      }
#pragma unroll
  for (int i = 0; i < kGroup; i += 2) {
    const u32 pair = ptx::cvt_rn_bf16x2_f32(v[i] * 0.25f, v[i + 1] * 0.25f);
    v[i] = low_of(pair, InputType::bf16);
    v[i + 1] = high_of(pair, InputType::bf16);
  }
}

}  // namespace jax_fp4

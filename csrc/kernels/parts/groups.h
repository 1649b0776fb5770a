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

// 16 consecutive elements of a row, aligned to 32 bytes.
template <int kInputBits>
__device__ Group<kInputBits> load_whole_group(const u8* at) {
  using G = Group<kInputBits>;
  G group;
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

// 16 consecutive elements of a row. Those from `count` on are zero and are not read; `aligned`:
// `from` is a multiple of the group's bytes, at most 32.
template <int kInputBits>
__device__ Group<kInputBits> load_group(const void* from, i64 element, int count, bool aligned) {
  using G = Group<kInputBits>;
  const u8* at = static_cast<const u8*>(from) + element * (kInputBits / 8);
  if (aligned && count >= kGroup) return load_whole_group<kInputBits>(at);
  G group;
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

// The larger magnitudes of two words of 16-bit elements, half by half, with any sign; NaN where
// there is one.
template <InputType kInput>
__device__ u32 larger_halves(u32 a, u32 b) {
  constexpr bool kBf16 = kInput == InputType::bf16;
  if constexpr (ptx::kHasXorSign)
    return kBf16 ? ptx::max_nan_xorsign_abs_bf16x2(a, b) : ptx::max_nan_xorsign_abs_f16x2(a, b);
  a &= 0x7FFF'7FFFu;
  b &= 0x7FFF'7FFFu;
  return kBf16 ? ptx::max_nan_bf16x2(a, b) : ptx::max_nan_f16x2(a, b);
}
template <InputType kInput, int kCount>
__device__ u32 largest_halves(const u32 (&word)[kCount]) {
  u32 m = word[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) m = larger_halves<kInput>(m, word[i]);
  return m;
}

// numerics/hadamard.h for two groups at a time, with the bf16 rounding in one instruction for two
// values. A NaN gets other bits than there, in a block whose codes are zero anyway.
__device__ inline void rotate_groups(float (&v)[2][kGroup], u32 signs) {
  using ptx::F32x2;
  F32x2 x[kGroup];
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const u32 sign = (signs << (31 - i)) & kF32SignMask;
    x[i] = {f32_of(bits_of(v[0][i]) ^ sign), f32_of(bits_of(v[1][i]) ^ sign)};
  }
#pragma unroll
  for (int stride = 1; stride < kGroup; stride *= 2)
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      if ((i & stride) == 0) {
        const F32x2 a = x[i], b = x[i + stride];
        x[i] = ptx::add_rn_f32x2(a, b);
        x[i + stride] = ptx::sub_rn_f32x2(a, b);
      }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const F32x2 scaled = ptx::mul_rn_f32x2(x[i], {0.25f, 0.25f});
    const u32 pair = ptx::cvt_rn_bf16x2_f32(scaled.x, scaled.y);
    v[0][i] = low_of(pair, InputType::bf16);
    v[1][i] = high_of(pair, InputType::bf16);
  }
}

}  // namespace jax_fp4

// x[matrices, rows, k] = cvt(fl(fl(code * scale) * global_scale)), each step rounded once.
//
// CTA: 256 threads for 16 rows of 256 codes; a thread decodes 16 codes, which lie in one block: it
// loads 8, 12 or 16 bytes of codes and one scale byte, and stores 32 or 64 bytes. A NaN becomes the
// positive quiet NaN, as on the CPU.
//
// Compiled with JAX_FP4_BITS, JAX_FP4_ELEMENT and JAX_FP4_SECOND, the elements of that many bits.
#include "kernels/parts/groups.h"

namespace jax_fp4 {
namespace {

constexpr int kBits = JAX_FP4_BITS;

// The value of a code: its exponent and mantissa fields in an f32, times a power of two, are exact
// for subnormal codes too. Codes above the largest finite one are looked at separately.
template <Element kElement>
__device__ float value_of(u32 code) {
  constexpr Minifloat kKind = minifloat(kElement);
  constexpr float kBias = f32_of(static_cast<u32>(127 + 127 - kKind.bias) << 23);
  const u32 magnitude = code & (kKind.sign_code() - 1);
  float value = f32_of(magnitude << (23 - kKind.mantissa_bits)) * kBias;
  if constexpr (kBits == 8)
    if (magnitude > kKind.max_code) value = decode(kKind, magnitude);
  return (code & kKind.sign_code()) ? -value : value;
}

__device__ u32 code_at(const u32 (&word)[kBits / 2], int i) {
  const int bit = i * kBits;
  u32 code = word[bit / 32] >> (bit % 32);
  if (bit % 32 + kBits > 32) code |= word[bit / 32 + 1] << (32 - bit % 32);
  return code & ((1u << kBits) - 1);
}

__device__ u32 narrow(float x, InputType type) {
  const bool nan = x != x;
  switch (type) {
    case InputType::f32: return nan ? bits_of(kF32NaN) : bits_of(x);
    case InputType::bf16: return nan ? bits_of(kF32NaN) >> 16 : encode_bf16(x);
    default: return nan ? 0x7E00u : ptx::cvt_rn_f16_f32(x);
  }
}

template <Element kElement>
__device__ void decode_group(const u32 (&word)[kBits / 2], float scale, float global,
                             float (&v)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; ++i) v[i] = value_of<kElement>(code_at(word, i)) * scale * global;
}

__device__ void store_group(const DequantizeParams& p, i64 at, u32 count,
                            const float (&v)[kGroup]) {
  u32 bits[kGroup];
#pragma unroll
  for (int i = 0; i < kGroup; ++i) bits[i] = narrow(v[i], p.output);
  if (p.output == InputType::f32) {
    u32* out = static_cast<u32*>(p.out) + at;
    if (count >= kGroup && reinterpret_cast<u64>(out) % 16 == 0) {
#pragma unroll
      for (int i = 0; i < kGroup; i += 4)
        *reinterpret_cast<uint4*>(out + i) =
            make_uint4(bits[i], bits[i + 1], bits[i + 2], bits[i + 3]);
    } else {
#pragma unroll
      for (u32 i = 0; i < kGroup; ++i)
        if (i < count) out[i] = bits[i];
    }
    return;
  }
  u16* out = static_cast<u16*>(p.out) + at;
  if (count >= kGroup && reinterpret_cast<u64>(out) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kGroup; i += 8)
      *reinterpret_cast<uint4*>(out + i) =
          make_uint4(bits[i] | bits[i + 1] << 16, bits[i + 2] | bits[i + 3] << 16,
                     bits[i + 4] | bits[i + 5] << 16, bits[i + 6] | bits[i + 7] << 16);
  } else {
#pragma unroll
    for (u32 i = 0; i < kGroup; ++i)
      if (i < count) out[i] = static_cast<u16>(bits[i]);
  }
}

__device__ void dequantize_group(const DequantizeParams& p, u32 matrix, u32 row, u32 k) {
  const u32 blocks = (p.k + p.format.block - 1) / p.format.block;
  const i64 pitch = row_bytes(p.format.element, p.k);
  const i64 line = static_cast<i64>(matrix) * p.rows + row;
  const u32* from =
      reinterpret_cast<const u32*>(p.values + line * pitch + static_cast<i64>(k) * kBits / 8);
  u32 word[kBits / 2];
#pragma unroll
  for (int i = 0; i < kBits / 2; ++i) word[i] = __ldg(from + i);
  const u8* scales = p.scales + matrix * scale_bytes(p.layout, p.rows, blocks);
  const u32 byte = __ldg(scales + scale_offset(p.layout, row, k / p.format.block, blocks));
  const float scale = decode_scale(p.format.scale, byte);
  const float global = __ldg(p.global_scale + matrix);
  float v[kGroup];
  if (p.format.element == Element::JAX_FP4_ELEMENT) {
    decode_group<Element::JAX_FP4_ELEMENT>(word, scale, global, v);
  } else {
    decode_group<Element::JAX_FP4_SECOND>(word, scale, global, v);
  }
  store_group(p, line * p.k + k, p.k - k, v);
}

}  // namespace
}  // namespace jax_fp4

extern "C" __global__ void __launch_bounds__(jax_fp4::kDequantizeThreads)
    JAX_FP4_KERNEL(const __grid_constant__ jax_fp4::DequantizeParams p) {
  using namespace jax_fp4;
  constexpr u32 kGroups = kDequantizeTileCodes / kGroup;
  const u32 k = blockIdx.x * kDequantizeTileCodes + threadIdx.x % kGroups * kGroup;
  if (k >= p.k) return;
  for (u32 matrix = blockIdx.z; matrix < p.matrices; matrix += gridDim.z)
    for (u32 row = blockIdx.y * kDequantizeTileRows + threadIdx.x / kGroups; row < p.rows;
         row += gridDim.y * kDequantizeTileRows)
      dequantize_group(p, matrix, row, k);
}

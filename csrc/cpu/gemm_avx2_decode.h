// Decoding packed rows with AVX2, for the kernels of gemm_avx2.cc and gemm_stream_avx2.cc.
// Everything here lies in an anonymous namespace and is compiled for AVX2: include it last, and
// only into those files.
//
//   scale_lanes     eight scale bytes -> f32
//   load_codes      32 codes of one row as bytes (4-bit codes: still packed), zeros beyond the row
//   e2m1_words, even_words, odd_words    E2M1 codes -> f32
//   half_words, low_half, high_half      other codes -> f32
//
// Codes other than E2M1 are decoded through f16, whose exponent field is wide enough for each of
// them: shifted to its place, a code is its value times 2^(bias - 15), also where it is subnormal.
// The factor that is missing goes elsewhere (element_factor).
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "cpu/gemm_kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace jax_fp4::cpu {
namespace {

constexpr i64 kMaxDepthBlocks = kDepth / 16;
constexpr int kLanes = 8;  // f32 of a vector

constexpr float element_factor(Element element) {
  return element == Element::e2m1 ? 1.0f : power_of_two(15 - minifloat(element).bias);
}

// log2 of the block size: kernels divide by it once per step.
inline int block_shift(const Format& format) {
  return __builtin_ctz(static_cast<u32>(format.block));
}

inline __m128i load_128(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}
inline __m256i load_256(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
inline __m256i pair(__m128i low, __m128i high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

inline __m256 low_half(__m256i bits) { return _mm256_cvtph_ps(_mm256_castsi256_si128(bits)); }
inline __m256 high_half(__m256i bits) { return _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1)); }

// The low eight bytes as scales times `factor`, without the bases of their rows.
template <BlockScale kind>
inline __m256 scale_lanes(__m128i bytes, __m256i base, float factor) {
  if constexpr (kind == BlockScale::ue4m3) {
    // E4M3 is f16 with four exponent bits and a bias of 7 instead of 15.
    const __m128i magnitude = _mm_and_si128(_mm_cvtepu8_epi16(bytes), _mm_set1_epi16(0x7F));
    const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(kUE4M3NaN));
    const __m128i half =
        _mm_or_si128(_mm_slli_epi16(magnitude, 7), _mm_and_si128(nan, _mm_set1_epi16(0x7E00)));
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f * factor));
  } else {
    const __m256i byte = _mm256_cvtepu8_epi32(bytes);
    // The f32 exponent field. Blocks of zeros may lie outside of the row's span: any finite scale
    // will do for them.
    __m256i field = _mm256_sub_epi32(byte, base);
    field = _mm256_max_epi32(field, _mm256_set1_epi32(1));
    field = _mm256_min_epi32(field, _mm256_set1_epi32(127 + 64));
    const __m256 value =
        _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(field, 23)), _mm256_set1_ps(factor));
    const __m256i nan = _mm256_cmpeq_epi32(byte, _mm256_set1_epi32(kUE8M0NaN));
    return _mm256_or_ps(value, _mm256_castsi256_ps(nan));  // all bits set: a NaN
  }
}

// 16 six-bit codes in 12 bytes from byte `skip` on -> the upper six bits of bytes.
template <int skip>
inline __m128i unpack_6bit(__m128i packed) {
  // Four codes are three bytes: give them a 32-bit lane, then move each code to its byte.
  constexpr auto at = [](int byte) { return static_cast<char>(skip + byte); };
  const __m128i lanes =
      _mm_shuffle_epi8(packed, _mm_set_epi8(at(11), at(10), at(9), -1, at(8), at(7), at(6), -1,  //
                                            at(5), at(4), at(3), -1, at(2), at(1), at(0), -1));
  const auto byte = [](__m128i moved, u32 mask) {
    return _mm_and_si128(moved, _mm_set1_epi32(static_cast<int>(mask)));
  };
  return _mm_or_si128(
      _mm_or_si128(byte(_mm_srli_epi32(lanes, 6), 0xFC), byte(_mm_srli_epi32(lanes, 4), 0xFC00)),
      _mm_or_si128(byte(_mm_srli_epi32(lanes, 2), 0xFC'0000), byte(lanes, 0xFC00'0000)));
}

// Codes k .. k + 31 of a row of `bytes` bytes. Rows end at whole steps, but for 8-bit codes, which
// are padded to 16. 4-bit codes: 16 bytes, still packed; others: the upper bits of bytes.
template <Element element>
inline __m256i load_codes(const u8* codes, i64 k, i64 bytes) {
  constexpr int kBits = minifloat(element).bits();
  const i64 offset = k * kBits / 8;
  if constexpr (kBits == 4) {
    return _mm256_castsi128_si256(load_128(codes + offset));
  } else if constexpr (kBits == 6) {
    // 24 bytes: nothing beyond them is read.
    return pair(unpack_6bit<0>(load_128(codes + offset)),
                unpack_6bit<4>(load_128(codes + offset + 8)));
  } else {
    if (bytes - offset >= kStep) return load_256(codes + offset);
    return pair(load_128(codes + offset), _mm_setzero_si128());
  }
}

inline __m256i low_nibbles(__m256i bytes) {
  return _mm256_and_si256(bytes, _mm256_set1_epi8(0x0F));
}
inline __m256i high_nibbles(__m256i bytes) { return low_nibbles(_mm256_srli_epi16(bytes, 4)); }

// The bf16 of 32 E2M1 codes, one per byte: of the low and of the high eight bytes of each 128 bits.
// An f32 is its bf16 and 16 zeros, so that no conversion is needed.
struct E2M1Words {
  __m256i low, high;
};

inline E2M1Words e2m1_words(__m256i nibbles) {
  // 0, 0.5, 1, 1.5, 2, 3, 4, 6: the bytes of their bf16, and the sign bit of the negative ones.
  const __m128i high_bytes =
      _mm_set_epi64x(static_cast<i64>(0xC0C0'C0C0'BFBF'BF80u), 0x4040'4040'3F3F'3F00);
  const __m128i low_bytes = _mm_set_epi64x(static_cast<i64>(0xC080'4000'C080'0000u),
                                           static_cast<i64>(0xC080'4000'C080'0000u));
  const __m256i high = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(high_bytes), nibbles);
  const __m256i low = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(low_bytes), nibbles);
  return {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
}

// bf16 lanes 0 2 4 .. and 1 3 5 .. as f32.
inline __m256 even_words(__m256i words) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}
inline __m256 odd_words(__m256i words) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xFFFF'0000))));
}

// Codes in the upper bits of 16-bit lanes -> f16 bits of value / element_factor: the sign stays,
// exponent and mantissa move down to where f16 has them.
template <Element element>
inline __m256i half_words(__m256i codes) {
  constexpr int kShift = 5 - minifloat(element).exponent_bits;
  if constexpr (kShift == 0) return codes;
  constexpr u32 kSignCopies = 0x8000u - (0x8000u >> kShift);
  const __m256i mask = _mm256_set1_epi16(static_cast<short>(0xFFFF - kSignCopies));
  __m256i bits = _mm256_and_si256(_mm256_srai_epi16(codes, kShift), mask);
  if constexpr (element == Element::e4m3) {
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi16(0x7FFF));
    const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7F << 7));
    bits = _mm256_or_si256(bits, _mm256_and_si256(nan, _mm256_set1_epi16(0x7E00)));
  }
  return bits;
}

}  // namespace
}  // namespace jax_fp4::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

// Decoding packed rows with AVX-512, for the kernels of gemm_avx512.cc, gemm_amx.cc and
// gemm_stream_avx512.cc. Everything here lies in an anonymous namespace and is compiled for
// AVX-512: include it last, and only into those files.
//
//   group_scales    scale bytes of 16 rows -> f32, one lane per row
//   stage_step      32 codes of 16 rows as bytes that can be loaded without conditions
//   decode_columns  32 codes of 16 rows -> f32, one lane per row (the transpose of what is stored)
//   bf16_pairs      two f32 vectors -> bf16 pairs
//
// Codes other than E2M1 are decoded through f16, whose exponent field is wide enough for each of
// them: shifted to its place, a code is its value times 2^(bias - 15), also where it is subnormal.
// The factor that is missing is part of the scale (element_factor).
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the "undefined" operands inside its own intrinsics for mistakes (GCC PR 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif

#include <algorithm>

#include "cpu/gemm_kernels.h"

#if defined(__clang__)
#pragma clang attribute push(                                                                     \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,fma,f16c")
#endif

namespace jax_fp4::cpu {
namespace {

constexpr i64 kMaxDepthBlocks = kDepth / 16;

// Scales of one block of k: [block][row of the group].
struct alignas(64) GroupScales {
  float value[kMaxDepthBlocks][kGroup];

  __m512 operator[](i64 block) const { return _mm512_load_ps(value[block]); }
};

constexpr float element_factor(Element element) {
  return element == Element::e2m1 ? 1.0f : power_of_two(15 - minifloat(element).bias);
}

// Lanes of scale bytes -> scales times `factor`.
template <BlockScale kind>
inline __m512 scale_lanes(__m512i bytes, __m512i base, __m512 factor) {
  __m512 value;
  __mmask16 nan;
  if constexpr (kind == BlockScale::ue4m3) {
    const __m512i magnitude = _mm512_and_si512(bytes, _mm512_set1_epi32(0x7F));
    // E4M3 is f16 with four exponent bits and a bias of 7 instead of 15.
    const __m256i half = _mm512_cvtepi32_epi16(_mm512_slli_epi32(magnitude, 7));
    value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_mul_ps(factor, _mm512_set1_ps(256.0f)));
    nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(kUE4M3NaN));
  } else {
    // The f32 exponent field. Blocks of zeros may lie outside of the row's span: any finite scale
    // will do for them.
    __m512i field = _mm512_sub_epi32(bytes, base);
    field = _mm512_max_epi32(field, _mm512_set1_epi32(1));
    field = _mm512_min_epi32(field, _mm512_set1_epi32(127 + 64));
    value = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(field, 23)), factor);
    nan = _mm512_cmpeq_epi32_mask(bytes, _mm512_set1_epi32(kUE8M0NaN));
  }
  return _mm512_mask_mov_ps(value, nan, _mm512_set1_ps(kF32NaN));
}

// Scale bytes `block` .. `block + 3` (block % 4 == 0) of the 16 rows of a group, four to a lane;
// rows and blocks that do not exist give 0.
inline __m512i scale_quads(const Rows& x, i64 group, i64 block) {
  const i64 row = group * kGroup;
  const int rows = static_cast<int>(std::min(kGroup, x.rows - row));
  const i64 blocks = x.blocks();
  const ScaleRow first = scale_row(x, row);
  // 16 rows of a tile share row / 32, so that they are 16 bytes apart.
  const i64 pitch = x.layout == ScaleLayout::linear ? blocks : 16;
  const u8* address = first.at(block);
  const i64 here = std::min<i64>(4, blocks - block);
  if (here == 4) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i offset = _mm512_mullo_epi32(lane, _mm512_set1_epi32(static_cast<int>(pitch)));
    const __mmask16 mask = static_cast<__mmask16>((1u << rows) - 1);
    return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), mask, offset, address, 1);
  }
  alignas(64) u32 quads[kGroup] = {};
  for (int r = 0; r < rows; ++r)
    for (i64 b = 0; b < here; ++b) quads[r] |= static_cast<u32>(address[r * pitch + b]) << (8 * b);
  return _mm512_load_si512(quads);
}

template <BlockScale kind>
void group_scales_of(const Rows& x, const i32* base, i64 group, i64 block0, i64 count, float factor,
                     GroupScales& scales) {
  const i64 row = group * kGroup;
  const __mmask16 rows = static_cast<__mmask16>((1u << std::min(kGroup, x.rows - row)) - 1);
  const __m512i bases = _mm512_maskz_loadu_epi32(rows, base + row);
  const __m512 factors = _mm512_set1_ps(factor);
  for (i64 b = 0; b < count; b += 4) {
    __m512i quads =
        block0 + b < x.blocks() ? scale_quads(x, group, block0 + b) : _mm512_setzero_si512();
    for (i64 i = 0; i < 4 && b + i < kMaxDepthBlocks; ++i) {
      const __m512i bytes = _mm512_and_si512(quads, _mm512_set1_epi32(0xFF));
      _mm512_store_ps(scales.value[b + i], scale_lanes<kind>(bytes, bases, factors));
      quads = _mm512_srli_epi32(quads, 8);
    }
  }
}

// log2 of the block size: kernels divide by it once per step.
inline int block_shift(const Format& format) {
  return __builtin_ctz(static_cast<u32>(format.block));
}

// Scales of blocks block0 .. block0 + count - 1 (block0 % 4 == 0) of a group's rows.
inline void group_scales(const Rows& x, const i32* base, i64 group, i64 block0, i64 count,
                         GroupScales& scales) {
  const float factor = element_factor(x.format.element);
  if (x.format.scale == BlockScale::ue4m3)
    group_scales_of<BlockScale::ue4m3>(x, base, group, block0, count, factor, scales);
  else
    group_scales_of<BlockScale::ue8m0>(x, base, group, block0, count, factor, scales);
}

// 32 six-bit codes (24 bytes) as bytes.
inline __m256i unpack_6bit(__m256i packed) {
  // Eight codes are six bytes: spread them over eight, then cut out eight fields of six bits.
  const __m256i spread =
      _mm256_set_epi8(0, 0, 23, 22, 21, 20, 19, 18, 0, 0, 17, 16, 15, 14, 13, 12,  //
                      0, 0, 11, 10, 9, 8, 7, 6, 0, 0, 5, 4, 3, 2, 1, 0);
  const __m256i fields = _mm256_set1_epi64x(0x2A24'1E18'120C'0600);
  const __m256i groups = _mm256_permutexvar_epi8(spread, packed);
  return _mm256_and_si256(_mm256_multishift_epi64_epi8(fields, groups), _mm256_set1_epi8(0x3F));
}

// Where one step's codes of a group lie: 4-bit codes packed (16 bytes a row), others one per byte.
struct Step {
  const u8* bytes;
  i64 pitch;
};

struct alignas(64) StepBuffer {
  u8 bytes[kGroup * kStep];
};

// Codes k .. k + 31 of the 16 rows of a group. In place where all of it exists, else through a
// buffer with zeros for what does not.
template <Element element>
inline Step stage_step(const Rows& x, i64 group, i64 k, StepBuffer& buffer) {
  constexpr int kBits = minifloat(element).bits();
  const i64 row = group * kGroup;
  const i64 rows = std::min(kGroup, x.rows - row);
  const i64 pitch = row_bytes(element, x.k);
  const i64 first = k * kBits / 8;
  // Rows end at whole steps, but for 8-bit codes, which are padded to 16.
  const i64 count = std::min<i64>(kStep * kBits / 8, pitch - first);
  const u8* source = x.codes(row) + first;
  if (kBits != 6 && rows == kGroup && count == kStep * kBits / 8) return {source, pitch};
  const __mmask32 mask = static_cast<__mmask32>((u64{1} << count) - 1);
  constexpr i64 kPitch = kBits == 4 ? 16 : 32;
  for (i64 r = 0; r < kGroup; ++r) {
    __m256i codes = _mm256_setzero_si256();
    if (r < rows) codes = _mm256_maskz_loadu_epi8(mask, source + r * pitch);
    if constexpr (kBits == 6) codes = unpack_6bit(codes);
    if constexpr (kBits == 4)
      _mm_store_si128(reinterpret_cast<__m128i*>(buffer.bytes + r * kPitch),
                      _mm256_castsi256_si128(codes));
    else
      _mm256_store_si256(reinterpret_cast<__m256i*>(buffer.bytes + r * kPitch), codes);
  }
  return {buffer.bytes, kPitch};
}

// The transpose of 16 rows of 16 bytes: column j goes to 16 bytes at out + column_offset(j).
constexpr i64 column_offset(i64 j) { return j % 4 * 64 + j / 4 * 16; }

inline void transpose_bytes(const u8* rows, i64 pitch, u8* out) {
  // Within four rows: byte (row, column) to (column, row), so that a 32-bit lane is one column.
  const __m512i columns = _mm512_set_epi8(
      63, 47, 31, 15, 62, 46, 30, 14, 61, 45, 29, 13, 60, 44, 28, 12, 59, 43, 27, 11, 58, 42, 26,
      10, 57, 41, 25, 9, 56, 40, 24, 8, 55, 39, 23, 7, 54, 38, 22, 6, 53, 37, 21, 5, 52, 36, 20, 4,
      51, 35, 19, 3, 50, 34, 18, 2, 49, 33, 17, 1, 48, 32, 16, 0);
  __m512i quad[4];
  for (int q = 0; q < 4; ++q) {
    const auto row = [&](int r) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + (4 * q + r) * pitch));
    };
    __m512i four = _mm512_castsi128_si512(row(0));
    four = _mm512_inserti32x4(four, row(1), 1);
    four = _mm512_inserti32x4(four, row(2), 2);
    four = _mm512_inserti32x4(four, row(3), 3);
    quad[q] = _mm512_permutexvar_epi8(columns, four);
  }
  const __m512i low01 = _mm512_unpacklo_epi32(quad[0], quad[1]);
  const __m512i high01 = _mm512_unpackhi_epi32(quad[0], quad[1]);
  const __m512i low23 = _mm512_unpacklo_epi32(quad[2], quad[3]);
  const __m512i high23 = _mm512_unpackhi_epi32(quad[2], quad[3]);
  _mm512_store_si512(out, _mm512_unpacklo_epi64(low01, low23));
  _mm512_store_si512(out + 64, _mm512_unpackhi_epi64(low01, low23));
  _mm512_store_si512(out + 128, _mm512_unpacklo_epi64(high01, high23));
  _mm512_store_si512(out + 192, _mm512_unpackhi_epi64(high01, high23));
}

// Codes in 16-bit lanes -> f16 bits of value / element_factor.
template <Element element>
inline __m512i half_bits(__m512i codes) {
  constexpr Minifloat kind = minifloat(element);
  if constexpr (element == Element::e5m2) return _mm512_slli_epi16(codes, 8);
  constexpr int kSignShift = 15 - (kind.bits() - 1);
  const __m512i magnitude =
      _mm512_and_si512(codes, _mm512_set1_epi16(static_cast<short>(kind.sign_code() - 1)));
  const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(codes, kSignShift),
                                        _mm512_set1_epi16(static_cast<short>(0x8000)));
  __m512i bits = _mm512_or_si512(sign, _mm512_slli_epi16(magnitude, 10 - kind.mantissa_bits));
  if constexpr (element == Element::e4m3) {
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7F));
    bits = _mm512_mask_mov_epi16(bits, nan, _mm512_set1_epi16(0x7E00));
  }
  return bits;
}

inline __m512 low_half(__m512i bits) { return _mm512_cvtph_ps(_mm512_castsi512_si256(bits)); }
inline __m512 high_half(__m512i bits) {
  return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
}

// A lookup by the low four bits of a lane.
inline __m512 e2m1_values(__m512i codes) {
  const __m512 values =
      _mm512_set_ps(-6, -4, -3, -2, -1.5f, -1, -0.5f, -0.0f, 6, 4, 3, 2, 1.5f, 1, 0.5f, 0);
  return _mm512_permutexvar_ps(codes, values);
}

// Calls sink(j, even, odd) for j = 0 .. 15: the decoded codes 2j and 2j + 1 of a step, one lane per
// row. `low` and `high` are the scales of the first and the second 16 codes.
template <Element element, typename Sink>
inline void decode_columns(const Step& step, __m512 low, __m512 high, Sink&& sink) {
  alignas(64) u8 columns[kStep * kGroup];
  transpose_bytes(step.bytes, step.pitch, columns);
  const auto column = [&](i64 j) {
    return reinterpret_cast<const __m128i*>(columns + j / 16 * 256 + column_offset(j % 16));
  };
  if constexpr (element == Element::e2m1) {
    for (int j = 0; j < 16; ++j) {
      const __m512i codes = _mm512_cvtepu8_epi32(_mm_load_si128(column(j)));
      const __m512 scale = j < 8 ? low : high;
      sink(j, _mm512_mul_ps(e2m1_values(codes), scale),
           _mm512_mul_ps(e2m1_values(_mm512_srli_epi32(codes, 4)), scale));
    }
  } else {
    transpose_bytes(step.bytes + 16, step.pitch, columns + 256);
    for (int j = 0; j < 16; ++j) {
      const __m256i both =
          _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_load_si128(column(2 * j))),
                                  _mm_load_si128(column(2 * j + 1)), 1);
      const __m512i bits = half_bits<element>(_mm512_cvtepu8_epi16(both));
      const __m512 scale = j < 8 ? low : high;
      sink(j, _mm512_mul_ps(low_half(bits), scale), _mm512_mul_ps(high_half(bits), scale));
    }
  }
}

// Decodes `steps` steps of a group from code k0 on, calling sink(step, j, even, odd).
template <typename Sink>
inline void decode_group(const Rows& x, const i32* base, i64 group, i64 k0, i64 steps,
                         Sink&& sink) {
  GroupScales scales;
  const int shift = block_shift(x.format);
  group_scales(x, base, group, k0 >> shift, (steps * kStep) >> shift, scales);
  with_element(x.format.element, [&]<Element element>() {
    StepBuffer buffer;
    for (i64 s = 0; s < steps; ++s) {
      const Step step = stage_step<element>(x, group, k0 + s * kStep, buffer);
      decode_columns<element>(step, scales[(s * kStep) >> shift], scales[(s * kStep + 16) >> shift],
                              [&](int j, __m512 even, __m512 odd) { sink(s, j, even, odd); });
    }
  });
}

// Values that bf16 holds exactly, even ones in the low halves.
inline __m512i bf16_pairs(__m512 even, __m512 odd) {
  return _mm512_mask_blend_epi16(0xAAAA'AAAA, _mm512_srli_epi32(_mm512_castps_si512(even), 16),
                                 _mm512_castps_si512(odd));
}

}  // namespace
}  // namespace jax_fp4::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

// NVFP4 with rounding to nearest and one scale per block, of bf16 and f32: the fast path.
//
// Only finite values are encoded here. Functions return false, having written nothing, where there
// are others; the general kernels then take over.
//
// To be included like quantize_avx512_unit.h, after it and quantize_avx512_scale.h.
#pragma once

namespace jax_fp4::cpu {
namespace {

inline bool is_plain_nvfp4(const Encoding& e) {
  return e.format.element == Element::e2m1 && e.format.scale == BlockScale::ue4m3 &&
         e.format.block == 16 && e.dtype != Dtype::f16 && !e.stochastic && !e.four_over_six &&
         !e.hadamard;
}

// The E2M1 codes of 8 vectors of numbers, nibble j of every lane from scaled[j].
//
// As in Rounding, adding a power of two whose last place is one step of the code rounds to whole
// steps. Here it comes from a table, together with what is missing to the code: that of 2^e is
// 2 (e + 1), 2 of which are the steps in 2^e, and bit 3 is the sign. The last four bits of the sum
// then are the code. The table is indexed by floor(y) mod 16, the lowest bit of y being set first,
// so that -0 is found among the negative numbers. At 2 and 4 either neighbor gives the code.
inline I e2m1_codes(const V (&scaled)[8]) {
  constexpr uint32_t kStep0 = (127 + 22) << 23, kStep1 = (128 + 22) << 23 | 2,
                     kStep2 = (129 + 22) << 23 | 4, kNegative = 0x8000'0008;
  const auto entry = [](uint32_t positive, bool negative) {
    return static_cast<int>(negative ? positive | kNegative : positive);
  };
  const V table = as_float(_mm512_setr_epi32(
      entry(kStep0, false), entry(kStep0, false), entry(kStep1, false), entry(kStep1, false),
      entry(kStep2, false), entry(kStep2, false), entry(kStep2, false), entry(kStep2, false),
      entry(kStep2, true), entry(kStep2, true), entry(kStep2, true), entry(kStep2, true),
      entry(kStep1, true), entry(kStep1, true), entry(kStep0, true), entry(kStep0, true)));
  I codes{};
#pragma GCC unroll 8
  for (int j = 7; j >= 0; --j) {
    constexpr int kSmallerMagnitude = 0b0010;
    const V y = _mm512_range_ps(scaled[j], _mm512_set1_ps(6.0f), kSmallerMagnitude);
    const V nonzero = as_float(_mm512_or_si512(as_int(y), set1(1)));
    const I floor = _mm512_cvt_roundps_epi32(nonzero, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const I sum = as_int(_mm512_add_ps(y, _mm512_permutexvar_ps(floor, table)));
    constexpr int kSelect = 0xD8;  // c ? b : a
    codes = j == 7
                ? sum
                : _mm512_ternarylogic_epi32(_mm512_slli_epi32(codes, 4), sum, set1(0xF), kSelect);
  }
  return codes;
}

inline bool is_finite(I amax) { return _mm512_cmplt_epu32_mask(amax, set1(kF32InfBits)) == 0xFFFF; }

// bf16 elements in pairs, one in each half of a 32-bit lane.
inline V low_bf16(I pair) { return as_float(_mm512_slli_epi32(pair, 16)); }
inline V high_bf16(I pair) { return as_float(_mm512_and_si512(pair, set1(0xFFFF'0000u))); }
template <int kCount>
inline I amax_bf16(const I* pairs) {
  I amax = _mm512_and_si512(pairs[0], set1(0x7FFF'7FFF));
#pragma GCC unroll 16
  for (int i = 1; i < kCount; ++i)
    amax = _mm512_max_epu16(amax, _mm512_and_si512(pairs[i], set1(0x7FFF'7FFF)));
  return amax;
}

// Maxima of the 128-bit parts 0 and 1, 2 and 3 of a, then of b.
template <int kBytes>
inline I fold_parts(I a, I b) {
  const I even = _mm512_shuffle_i32x4(a, b, 0x88), odd = _mm512_shuffle_i32x4(a, b, 0xDD);
  return kBytes == 2 ? _mm512_max_epu16(even, odd) : _mm512_max_epu32(even, odd);
}

inline void load_transposed(I (&quad)[4], const uint8_t* x) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) quad[i] = _mm512_loadu_si512(x + 64 * i);
  transpose4(quad);
}

// 16 blocks of a row, transposed within parts of 128 bits, and their scales.
//
//   bf16  a part is half a block: lane 4 p + i of group g belongs to half p % 2 of block
//         8 g + 2 i + p / 2
//   f32   a part is a quarter of a block: lane 4 p + i of group g belongs to quarter p of block
//         4 g + i
template <Dtype kDtype>
struct RowUnit;

template <>
struct RowUnit<Dtype::bf16> {
  I pairs[2][4];
  I amax;  // of blocks 0 2 4 6  1 3 5 7  8 10 12 14  9 11 13 15
  Scales found;

  void load(const uint8_t* x) {
    load_transposed(pairs[0], x);
    load_transposed(pairs[1], x + 256);
    const I halves = fold_parts<2>(amax_bf16<4>(pairs[0]), amax_bf16<4>(pairs[1]));
    amax = _mm512_max_epu32(as_int(low_bf16(halves)), as_int(high_bf16(halves)));
  }
  void store(uint8_t* values, uint8_t* scales) const {
    const I block_order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    store128(scales, _mm512_cvtepi32_epi8(_mm512_permutexvar_epi32(block_order, found.bytes)));
    const V m = found.multipliers;
    const V multipliers[2] = {_mm512_shuffle_f32x4(m, m, 0x50), _mm512_shuffle_f32x4(m, m, 0xFA)};
    const I part_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g) {
      V y[8];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        y[2 * i] = _mm512_mul_ps(low_bf16(pairs[g][i]), multipliers[g]);
        y[2 * i + 1] = _mm512_mul_ps(high_bf16(pairs[g][i]), multipliers[g]);
      }
      _mm512_storeu_si512(values + 64 * g, _mm512_permutexvar_epi32(part_order, e2m1_codes(y)));
    }
  }
};

template <>
struct RowUnit<Dtype::f32> {
  I quads[4][4];
  I amax;
  Scales found;

  void load(const uint8_t* x) {
    I group[4];
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      load_transposed(quads[g], x + 256 * g);
      group[g] = abs_bits(as_float(quads[g][0]));
#pragma GCC unroll 3
      for (int i = 1; i < 4; ++i)
        group[g] = _mm512_max_epu32(group[g], abs_bits(as_float(quads[g][i])));
    }
    amax = fold_parts<4>(fold_parts<4>(group[0], group[1]), fold_parts<4>(group[2], group[3]));
  }
  void store(uint8_t* values, uint8_t* scales) const {
    store128(scales, _mm512_cvtepi32_epi8(found.bytes));
    const V m = found.multipliers;
    const V multipliers[4] = {_mm512_shuffle_f32x4(m, m, 0x00), _mm512_shuffle_f32x4(m, m, 0x55),
                              _mm512_shuffle_f32x4(m, m, 0xAA), _mm512_shuffle_f32x4(m, m, 0xFF)};
    // Four codes of two groups in each lane: 16-bit word 2 (4 p + i) + g goes to 16 g + 4 i + p.
    alignas(64) static constexpr uint16_t kWordOrder[32] = {
        0, 8, 16, 24, 2, 10, 18, 26, 4, 12, 20, 28, 6, 14, 22, 30,
        1, 9, 17, 25, 3, 11, 19, 27, 5, 13, 21, 29, 7, 15, 23, 31};
#pragma GCC unroll 2
    for (int g = 0; g < 4; g += 2) {
      V y[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i)
        y[i] = _mm512_mul_ps(as_float(quads[g + i / 4][i % 4]), multipliers[g + i / 4]);
      _mm512_storeu_si512(values + 32 * g,
                          _mm512_permutexvar_epi16(_mm512_load_si512(kWordOrder), e2m1_codes(y)));
    }
  }
};

// Work is done in batches: the divisions of one unit hide behind those of the others.
constexpr int kBatch = 4;

// `units` <= kBatch times 256 elements.
template <Dtype kDtype>
bool encode_finite_of(const Encoding& e, const uint8_t* x, int units, uint8_t* values,
                      uint8_t* scales) {
  constexpr int64_t kBytes = 256 * dtype_bytes(kDtype);
  RowUnit<kDtype> unit[kBatch];
  for (int u = 0; u < units; ++u) {
    // Past the page where the hardware stops looking ahead.
    for (int64_t line = 0; line < kBytes; line += 64)
      _mm_prefetch(x + (u + kBatch) * kBytes + line, _MM_HINT_T0);
    unit[u].load(x + u * kBytes);
  }
  bool finite = true;
  for (int u = 0; u < units; ++u) {
    unit[u].found = block_scales(e, unit[u].amax);
    finite &= is_finite(unit[u].amax);
  }
  if (!finite) return false;
  for (int u = 0; u < units; ++u) unit[u].store(values + 128 * u, scales + 16 * u);
  return true;
}

inline bool encode_finite(const Encoding& e, const uint8_t* x, int units, uint8_t* values,
                          uint8_t* scales) {
  return e.dtype == Dtype::bf16 ? encode_finite_of<Dtype::bf16>(e, x, units, values, scales)
                                : encode_finite_of<Dtype::f32>(e, x, units, values, scales);
}

// 16 rows of a strip of bf16: 32 blocks, column 2 i + h in half h of lane i.
struct ColumnUnit {
  I pairs[16];
  I amax[2];
  Scales found[2];

  void load(const uint8_t* x, int64_t pitch) {
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      _mm_prefetch(x + 2 * (j * pitch + kStripCols), _MM_HINT_T1);  // as load_columns
      pairs[j] = _mm512_loadu_si512(x + 2 * j * pitch);
    }
    const I halves = amax_bf16<16>(pairs);
    amax[0] = as_int(low_bf16(halves));
    amax[1] = as_int(high_bf16(halves));
  }
  // Two words of each column; lane i of codes[h] is column 2 i + h.
  void encode(Words (&codes)[2], uint8_t* scales) const {
    const I bytes = _mm512_or_si512(found[0].bytes, _mm512_slli_epi32(found[1].bytes, 8));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(scales), _mm512_cvtepi32_epi16(bytes));
#pragma GCC unroll 2
    for (int w = 0; w < 2; ++w) {
      V y[2][8];
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        y[0][j] = _mm512_mul_ps(low_bf16(pairs[8 * w + j]), found[0].multipliers);
        y[1][j] = _mm512_mul_ps(high_bf16(pairs[8 * w + j]), found[1].multipliers);
      }
      codes[0].word[w] = e2m1_codes(y[0]);
      codes[1].word[w] = e2m1_codes(y[1]);
    }
  }
};

// A whole strip of bf16, `blocks` times 16 rows.
bool encode_finite_strip(const Encoding& e, const uint8_t* x, int64_t pitch, int blocks,
                         uint8_t* values, uint8_t (*scales)[kStripCols]) {
  ColumnUnit unit[kStripRows / 16];
  bool finite = true;
  for (int b = 0; b < blocks; ++b) unit[b].load(x + 32 * b * pitch, pitch);
  for (int b = 0; b < blocks; ++b)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      unit[b].found[h] = block_scales(e, unit[b].amax[h]);
      finite &= is_finite(unit[b].amax[h]);
    }
  if (!finite) return false;
  Words codes[2];
  for (int b = 0; b < blocks; ++b) {
    unit[b].encode(codes, scales[b]);
    for (int h = 0; h < 2; ++h)
      store_words(codes[h], 2, values + h * kStripPitch + 8 * b, 2 * kStripPitch);
  }
  return true;
}

}  // namespace
}  // namespace jax_fp4::cpu

// NVFP4 and MXFP4 with rounding to nearest, of bf16 and f32: the fast path.
//
// Only finite values are encoded here. Functions return false where there are others; the general
// kernels then write everything again.
//
// To be included like quantize_avx2_unit.h, after it and quantize_avx2_scale.h.
#pragma once

namespace jax_fp4::cpu {
namespace {

inline bool is_plain_e2m1(const Encoding& e) {
  return e.format.element == Element::e2m1 && e.dtype != Dtype::f16 && !e.stochastic &&
         !e.four_over_six && !e.hadamard;
}

// 16 elements, two in each 32-bit lane: magnitudes of one and of the other, and the upper halves of
// both in 16-bit lanes, whose signs are theirs.
struct Sixteen {
  V first, second;
  I upper;
};

inline Sixteen bf16_pairs(I x) {
  const I magnitudes = _mm256_and_si256(x, set1(0x7FFF'7FFF));
  return {as_float(_mm256_slli_epi32(magnitudes, 16)),
          as_float(_mm256_and_si256(magnitudes, set1(0xFFFF'0000u))), x};
}
inline Sixteen f32_pairs(V first, V second) {
  const I upper = _mm256_blend_epi16(_mm256_srli_epi32(as_int(first), 16), as_int(second), 0xAA);
  return {as_float(abs_bits(first)), as_float(abs_bits(second)), upper};
}

// Codes in 16-bit lanes.
inline I e2m1_codes(const Sixteen& x, V first_multipliers, V second_multipliers) {
  const I first = as_int(e2m1_sum(_mm256_mul_ps(x.first, first_multipliers)));
  const I second = as_int(e2m1_sum(_mm256_mul_ps(x.second, second_multipliers)));
  const I magnitudes = _mm256_blend_epi16(first, _mm256_slli_epi32(second, 16), 0xAA);
  const I signs = _mm256_and_si256(_mm256_srli_epi16(x.upper, 12), _mm256_set1_epi16(8));
  return _mm256_or_si256(magnitudes, signs);
}

// ---- Rows ---------------------------------------------------------------------------------------

// Groups of 16 consecutive elements. Lane p holds elements 2 p and 2 p + 1, but for f32 pairs lie
// in the order 0 1 4 5  2 3 6 7.
template <Dtype kDtype>
inline Sixteen load_group(const uint8_t* x) {
  if constexpr (kDtype == Dtype::bf16) return bf16_pairs(load256(x));
  const V low = as_float(load256(x)), high = as_float(load256(x + 32));
  return f32_pairs(_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xDD));
}

// abs bits of the largest element of each of 8 groups: maxima of vectors that are interleaved, so
// that the groups end side by side.
template <Dtype kDtype>
inline I amax_of_groups(const uint8_t* x) {
  I a[8];
  if constexpr (kDtype == Dtype::bf16) {
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) a[g] = _mm256_and_si256(load256(x + 32 * g), set1(0x7FFF'7FFF));
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g)
      a[g] = _mm256_max_epi16(_mm256_unpacklo_epi16(a[2 * g], a[2 * g + 1]),
                              _mm256_unpackhi_epi16(a[2 * g], a[2 * g + 1]));
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g)
      a[g] = _mm256_max_epi16(_mm256_unpacklo_epi32(a[2 * g], a[2 * g + 1]),
                              _mm256_unpackhi_epi32(a[2 * g], a[2 * g + 1]));
    a[0] = _mm256_max_epi16(_mm256_unpacklo_epi64(a[0], a[1]), _mm256_unpackhi_epi64(a[0], a[1]));
    const __m128i amax = _mm_max_epi16(low128(a[0]), high128(a[0]));
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(amax), 16);
  } else {
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g)
      a[g] = _mm256_max_epi32(abs_bits(as_float(load256(x + 64 * g))),
                              abs_bits(as_float(load256(x + 64 * g + 32))));
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g)
      a[g] = _mm256_max_epi32(_mm256_unpacklo_epi32(a[2 * g], a[2 * g + 1]),
                              _mm256_unpackhi_epi32(a[2 * g], a[2 * g + 1]));
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g)
      a[g] = _mm256_max_epi32(_mm256_unpacklo_epi64(a[2 * g], a[2 * g + 1]),
                              _mm256_unpackhi_epi64(a[2 * g], a[2 * g + 1]));
    return _mm256_max_epi32(_mm256_permute2x128_si256(a[0], a[1], 0x20),
                            _mm256_permute2x128_si256(a[0], a[1], 0x31));
  }
}

// Four groups to 32 bytes.
template <Dtype kDtype>
inline void encode_groups(const uint8_t* x, const float* multipliers, uint8_t* values) {
  const auto codes = [&](int g) {
    const V multiplier = _mm256_set1_ps(multipliers[g]);
    return e2m1_codes(load_group<kDtype>(x + 16 * g * dtype_bytes(kDtype)), multiplier, multiplier);
  };
  const I sixteens = _mm256_set1_epi16(0x1001);  // low nibble + 16 * high nibble
  const I bytes01 = _mm256_maddubs_epi16(_mm256_packus_epi16(codes(0), codes(1)), sixteens);
  const I bytes23 = _mm256_maddubs_epi16(_mm256_packus_epi16(codes(2), codes(3)), sixteens);
  // Pairs 0-3 (f32: 0 1 4 5) of the four groups, and the others.
  const I packed = _mm256_packus_epi16(bytes01, bytes23);
  const __m128i low = low128(packed), high = high128(packed);
  if constexpr (kDtype == Dtype::bf16) {
    store128(values, _mm_unpacklo_epi32(low, high));
    store128(values + 16, _mm_unpackhi_epi32(low, high));
  } else {
    store128(values, _mm_unpacklo_epi16(low, high));
    store128(values + 16, _mm_unpackhi_epi16(low, high));
  }
}

// A run in batches, in each of which divisions overlap.
constexpr int kGroupsPerBatch = 32;
constexpr int64_t kBatch = 16 * kGroupsPerBatch;

// Scale bytes of blocks, and the multiplier of each group.
template <Dtype kDtype>
bool find_scales(const Encoding& e, const uint8_t* x, uint8_t* scales, float* multipliers) {
  constexpr int64_t kGroupBytes = 16 * dtype_bytes(kDtype);
  I bad = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int g = 0; g < kGroupsPerBatch; g += 8) {
    // Past the page where the hardware stops looking ahead.
    for (int64_t line = 0; line < 8 * kGroupBytes; line += 64)
      _mm_prefetch(x + (g + kGroupsPerBatch) * kGroupBytes + line, _MM_HINT_T0);
    I amax = amax_of_groups<kDtype>(x + g * kGroupBytes);
    bad = _mm256_or_si256(bad, not_finite(amax));
    if (e.format.block == 16) {
      const Scales s = block_scales(e, amax);
      store_bytes(scales + g, s.bytes);
      _mm256_storeu_ps(multipliers + g, s.multipliers);
    } else {
      // Both groups of a block get its scale.
      amax = _mm256_max_epi32(amax, _mm256_shuffle_epi32(amax, 0b10'11'00'01));
      const Scales s = block_scales(e, amax);
      const I even = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
      uint8_t bytes[kLanes];
      store_bytes(bytes, _mm256_permutevar8x32_epi32(s.bytes, even));
      std::memcpy(scales + g / 2, bytes, 4);
      _mm256_storeu_ps(multipliers + g, s.multipliers);
    }
  }
  return !any(bad);
}

inline bool take_scales(const Encoding& e, GivenScales given, uint8_t* scales, float* multipliers) {
  const int groups = e.format.block / 16, blocks = kGroupsPerBatch / groups;
  bool finite = true;
  for (int b = 0; b < blocks; ++b) finite &= given.scales[b] != nan_scale(e.format.scale);
  std::memcpy(scales, given.scales, static_cast<std::size_t>(blocks));
  for (int g = 0; g < kGroupsPerBatch; ++g) multipliers[g] = given.multipliers[g / groups];
  return finite;
}

template <Dtype kDtype>
bool encode_batch_of(const Encoding& e, const uint8_t* x, GivenScales given, uint8_t* values,
                     uint8_t* scales) {
  float multipliers[kGroupsPerBatch];
  const bool finite = given.scales ? take_scales(e, given, scales, multipliers)
                                   : find_scales<kDtype>(e, x, scales, multipliers);
  if (!finite) return false;
  for (int g = 0; g < kGroupsPerBatch; g += 4)
    encode_groups<kDtype>(x + 16 * g * dtype_bytes(kDtype), multipliers + g, values + 8 * g);
  return true;
}

// kBatch elements.
inline bool encode_batch(const Encoding& e, const uint8_t* x, GivenScales given, uint8_t* values,
                         uint8_t* scales) {
  return e.dtype == Dtype::bf16 ? encode_batch_of<Dtype::bf16>(e, x, given, values, scales)
                                : encode_batch_of<Dtype::f32>(e, x, given, values, scales);
}

// ---- Columns ------------------------------------------------------------------------------------

// 16 columns of a strip of rows, in lanes: those of bf16 as they lie, those of f32 in two vectors,
// so that lane i holds columns i and 8 + i.
template <Dtype kDtype>
struct Columns {
  static constexpr int kVectors = kDtype == Dtype::bf16 ? 1 : 2;
  struct Row {
    I x[kVectors];
  };

  static inline Row load(const uint8_t* x) {
    if constexpr (kDtype == Dtype::bf16)
      return {{load256(x)}};
    else
      return {{load256(x), load256(x + 32)}};
  }
  static inline Sixteen pairs(const Row& row) {
    if constexpr (kDtype == Dtype::bf16)
      return bf16_pairs(row.x[0]);
    else
      return f32_pairs(as_float(row.x[0]), as_float(row.x[1]));
  }
  // Of the pair's first and second column.
  static inline void amax(const Row* row, int rows, I (&bits)[2]) {
    I most[kVectors] = {};
    for (int j = 0; j < rows; ++j)
      for (int v = 0; v < kVectors; ++v)
        if constexpr (kDtype == Dtype::bf16)
          most[v] = _mm256_max_epi16(most[v], _mm256_and_si256(row[j].x[v], set1(0x7FFF'7FFF)));
        else
          most[v] = _mm256_max_epi32(most[v], abs_bits(as_float(row[j].x[v])));
    if constexpr (kDtype == Dtype::bf16) {
      bits[0] = _mm256_slli_epi32(most[0], 16);
      bits[1] = _mm256_and_si256(most[0], set1(0xFFFF'0000u));
    } else {
      bits[0] = most[0];
      bits[1] = most[1];
    }
  }
  static inline void store_scales(uint8_t* scales, const I (&bytes)[2]) {
    if constexpr (kDtype == Dtype::bf16) {
      const I words = _mm256_or_si256(bytes[0], _mm256_slli_epi32(bytes[1], 16));
      store128(scales, _mm_packus_epi16(low128(words), high128(words)));
    } else {
      store_bytes(scales, bytes[0]);
      store_bytes(scales + 8, bytes[1]);
    }
  }
  // The column of 16-bit lane i.
  static constexpr int column(int i) { return kDtype == Dtype::bf16 ? i : i / 2 + i % 2 * 8; }
};

// 16 rows and 16 columns, one byte pair of codes after the other.
template <Dtype kDtype>
inline void encode_square(const typename Columns<kDtype>::Row* row, const V (&multipliers)[2],
                          uint8_t* values) {
  I words[4];
#pragma GCC unroll 4
  for (int w = 0; w < 4; ++w) {
    words[w] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const I codes =
          e2m1_codes(Columns<kDtype>::pairs(row[4 * w + j]), multipliers[0], multipliers[1]);
      words[w] = _mm256_or_si256(words[w], _mm256_slli_epi16(codes, 4 * j));
    }
  }
  const I low01 = _mm256_unpacklo_epi16(words[0], words[1]);
  const I high01 = _mm256_unpackhi_epi16(words[0], words[1]);
  const I low23 = _mm256_unpacklo_epi16(words[2], words[3]);
  const I high23 = _mm256_unpackhi_epi16(words[2], words[3]);
  // Lanes 2 i, 2 i + 1 and 8 + 2 i, 9 + 2 i.
  const I codes[4] = {_mm256_unpacklo_epi32(low01, low23), _mm256_unpackhi_epi32(low01, low23),
                      _mm256_unpacklo_epi32(high01, high23), _mm256_unpackhi_epi32(high01, high23)};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m128i pair = half == 0 ? low128(codes[i]) : high128(codes[i]);
      const int lane = 8 * half + 2 * i;
      store64(values + Columns<kDtype>::column(lane) * kStripPitch, pair);
      store64(values + Columns<kDtype>::column(lane + 1) * kStripPitch,
              _mm_unpackhi_epi64(pair, pair));
    }
}

template <Dtype kDtype>
bool encode_finite_strip_of(const Encoding& e, const uint8_t* x, int64_t pitch, int rows, int cols,
                            GivenScales given, uint8_t* values, uint8_t (*scales)[kStripCols]) {
  using Side = Columns<kDtype>;
  const int block = e.format.block;
  const int64_t step = pitch * dtype_bytes(kDtype);
  constexpr int64_t kHalf = 16 * dtype_bytes(kDtype);
  for (int b = 0; b * block < rows; ++b) {
    // Copied, so that a cache line is read once: rows are often a power of two apart, and then fall
    // into few sets of the L1 cache.
    typename Side::Row row[2][kMaxBlock];
    for (int j = 0; j < block; ++j, x += step) {
      // The strip that comes next. Whether that address exists does not matter.
      _mm_prefetch(x + 2 * kHalf, _MM_HINT_T1);
      row[0][j] = Side::load(x);
      row[1][j] = Side::load(x + kHalf);
    }
    Scales found[2][2];
    I bad = _mm256_setzero_si256();
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      if (given.scales) {
        const int64_t tile = b + std::min(16 * half, cols - 1) / block * given.pitch;
        const I byte = set1(given.scales[tile]);
        bad = _mm256_or_si256(bad, _mm256_cmpeq_epi32(byte, set1(nan_scale(e.format.scale))));
        found[half][0] = found[half][1] = {byte, _mm256_set1_ps(given.multipliers[tile])};
        continue;
      }
      I amax[2];
      Side::amax(row[half], block, amax);
      bad = _mm256_or_si256(bad, _mm256_or_si256(not_finite(amax[0]), not_finite(amax[1])));
      found[half][0] = block_scales(e, amax[0]);
      found[half][1] = block_scales(e, amax[1]);
    }
    if (any(bad)) return false;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Side::store_scales(scales[b] + 16 * half, {found[half][0].bytes, found[half][1].bytes});
      for (int j = 0; j < block; j += 16)
        encode_square<kDtype>(row[half] + j,
                              {found[half][0].multipliers, found[half][1].multipliers},
                              values + 16 * half * kStripPitch + (b * block + j) / 2);
    }
  }
  return true;
}

// A whole strip of a multiple of `block` rows, of which the first `cols` columns have given scales.
inline bool encode_finite_strip(const Encoding& e, const uint8_t* x, int64_t pitch, int rows,
                                int cols, GivenScales given, uint8_t* values,
                                uint8_t (*scales)[kStripCols]) {
  return e.dtype == Dtype::bf16
             ? encode_finite_strip_of<Dtype::bf16>(e, x, pitch, rows, cols, given, values, scales)
             : encode_finite_strip_of<Dtype::f32>(e, x, pitch, rows, cols, given, values, scales);
}

}  // namespace
}  // namespace jax_fp4::cpu

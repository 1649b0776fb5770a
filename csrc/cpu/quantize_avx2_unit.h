// Units: what the AVX2 kernels of quantize.h work on, and how they are loaded.
//
// A Unit is 8 blocks side by side, one in each 32-bit lane, element j of all of them in vector j:
// quantize_avx512_unit.h with half as many lanes. Where that uses masks, edges are copied into
// buffers here, followed by zeros, so that everything else sees whole units only.
//
// To be included after every other header and below `#pragma GCC target`, as it says there.
#pragma once

namespace jax_fp4::cpu {
namespace {

using std::int64_t, std::uint16_t, std::uint32_t, std::uint64_t, std::uint8_t;
using V = __m256;
using I = __m256i;

constexpr int kLanes = 8;

struct alignas(32) Unit {
  V x[kMaxBlock];
};

inline I set1(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline I as_int(V x) { return _mm256_castps_si256(x); }
inline V as_float(I x) { return _mm256_castsi256_ps(x); }
inline I abs_bits(V x) { return _mm256_and_si256(as_int(x), set1(kF32AbsMask)); }
// b where the mask is set, all bits of a lane, otherwise a.
inline I select(I a, I b, I mask) { return _mm256_blendv_epi8(a, b, mask); }
inline V select(V a, V b, I mask) { return _mm256_blendv_ps(a, b, as_float(mask)); }
// Of abs bits.
inline I not_finite(I bits) { return _mm256_cmpgt_epi32(bits, set1(kF32InfBits - 1)); }
inline bool any(I mask) { return _mm256_movemask_epi8(mask) != 0; }

inline I load256(const void* p) { return _mm256_loadu_si256(static_cast<const I*>(p)); }
inline void store256(void* p, I x) { _mm256_storeu_si256(static_cast<I*>(p), x); }
inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline void store128(void* p, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
inline void store64(void* p, __m128i x) { _mm_storel_epi64(static_cast<__m128i*>(p), x); }
inline __m128i low128(I x) { return _mm256_castsi256_si128(x); }
inline __m128i high128(I x) { return _mm256_extracti128_si256(x, 1); }

inline const uint8_t* at(Dtype dtype, const void* x, int64_t i) {
  return static_cast<const uint8_t*>(x) + i * dtype_bytes(dtype);
}

// The largest lane of numbers below 2^31.
inline uint32_t largest(I x) {
  alignas(32) uint32_t lanes[kLanes];
  store256(lanes, x);
  return *std::max_element(lanes, lanes + kLanes);
}

// ---- Loading ------------------------------------------------------------------------------------

// 8 consecutive elements.
template <Dtype kDtype>
inline V load8(const uint8_t* x) {
  if constexpr (kDtype == Dtype::f32) return as_float(load256(x));
  if constexpr (kDtype == Dtype::f16) return _mm256_cvtph_ps(load128(x));
  return as_float(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(x)), 16));
}

// A strip of kStripCols columns: units side by side, so that a cache line is read once.
constexpr int kStripUnits = kStripCols / kLanes;
struct Strip {
  Unit unit[kStripUnits];
};

template <Dtype kDtype>
void load_columns_of(Strip& strip, const uint8_t* x, int64_t pitch, int rows) {
  const int64_t step = pitch * dtype_bytes(kDtype);
  for (int j = 0; j < rows; ++j, x += step) {
    // The strip that comes next. Whether that address exists does not matter.
    _mm_prefetch(x + kStripCols * dtype_bytes(kDtype), _MM_HINT_T1);
#pragma GCC unroll 4
    for (int u = 0; u < kStripUnits; ++u)
      strip.unit[u].x[j] = load8<kDtype>(x + u * kLanes * dtype_bytes(kDtype));
  }
}

// `rows` rows of a whole strip; lane i of unit u is column 8 * u + i.
inline void load_columns(Dtype dtype, Strip& strip, const uint8_t* x, int64_t pitch, int rows) {
  switch (dtype) {
    case Dtype::f32: return load_columns_of<Dtype::f32>(strip, x, pitch, rows);
    case Dtype::bf16: return load_columns_of<Dtype::bf16>(strip, x, pitch, rows);
    case Dtype::f16: return load_columns_of<Dtype::f16>(strip, x, pitch, rows);
  }
}

// A strip of x with kStripCols columns and a multiple of `block` rows: x itself, or a copy of it
// followed by zeros.
class WholeStrip {
 public:
  WholeStrip(Dtype dtype, const void* x, int64_t pitch, int rows, int cols, int block)
      : dtype_(dtype), data_(static_cast<const uint8_t*>(x)), pitch_(pitch) {
    const auto whole = static_cast<int>(round_up(rows, block));
    if (cols == kStripCols && rows == whole) return;
    const int64_t row_bytes = kStripCols * dtype_bytes(dtype), used = cols * dtype_bytes(dtype);
    std::memset(copy_, 0, static_cast<std::size_t>(whole * row_bytes));
    for (int r = 0; r < rows; ++r)
      std::memcpy(copy_ + r * row_bytes, at(dtype, x, r * pitch), static_cast<std::size_t>(used));
    data_ = copy_;
    pitch_ = kStripCols;
  }
  WholeStrip(const WholeStrip&) = delete;
  WholeStrip& operator=(const WholeStrip&) = delete;

  int64_t pitch() const { return pitch_; }
  const uint8_t* row(int r) const { return at(dtype_, data_, r * pitch_); }

 private:
  Dtype dtype_;
  const uint8_t* data_;
  int64_t pitch_;
  alignas(32) uint8_t copy_[kStripRows * kStripCols * sizeof(float)];
};

// 4x4 transposes inside both 128-bit parts.
inline void transpose4(I (&a)[4]) {
  const I low01 = _mm256_unpacklo_epi32(a[0], a[1]), high01 = _mm256_unpackhi_epi32(a[0], a[1]);
  const I low23 = _mm256_unpacklo_epi32(a[2], a[3]), high23 = _mm256_unpackhi_epi32(a[2], a[3]);
  a[0] = _mm256_unpacklo_epi64(low01, low23);
  a[1] = _mm256_unpackhi_epi64(low01, low23);
  a[2] = _mm256_unpacklo_epi64(high01, high23);
  a[3] = _mm256_unpackhi_epi64(high01, high23);
}

// The f16 in the lower half of each lane; the upper one is 0.
inline V widen_f16(I words) {
  const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0b1000);
  return _mm256_cvtph_ps(low128(packed));
}

// 8 * block consecutive elements; lane i is block i.
template <Dtype kDtype>
inline void load_blocks_of(Unit& unit, const uint8_t* x, int block) {
  constexpr int kPerQuad = 16 / static_cast<int>(dtype_bytes(kDtype));
  const int64_t bytes = block * dtype_bytes(kDtype);
  for (int quad = 0; quad < block / kPerQuad; ++quad, x += 16) {
    I word[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      word[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load128(x + i * bytes)),
                                        load128(x + (i + 4) * bytes), 1);
    transpose4(word);
    V* out = unit.x + quad * kPerQuad;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      if constexpr (kDtype == Dtype::f32) {
        out[i] = as_float(word[i]);
      } else if constexpr (kDtype == Dtype::bf16) {
        out[2 * i] = as_float(_mm256_slli_epi32(word[i], 16));
        out[2 * i + 1] = as_float(_mm256_and_si256(word[i], set1(0xFFFF'0000u)));
      } else {
        out[2 * i] = widen_f16(_mm256_and_si256(word[i], set1(0xFFFF)));
        out[2 * i + 1] = widen_f16(_mm256_srli_epi32(word[i], 16));
      }
    }
  }
}

inline void load_blocks(Dtype dtype, Unit& unit, const uint8_t* x, int block) {
  switch (dtype) {
    case Dtype::f32: return load_blocks_of<Dtype::f32>(unit, x, block);
    case Dtype::bf16: return load_blocks_of<Dtype::bf16>(unit, x, block);
    case Dtype::f16: return load_blocks_of<Dtype::f16>(unit, x, block);
  }
}

// The last n < 8 * block elements of a run, followed by zeros.
class LastBlocks {
 public:
  LastBlocks(Dtype dtype, const uint8_t* x, int64_t n, int block) {
    const int64_t bytes = n * dtype_bytes(dtype), whole = kLanes * block * dtype_bytes(dtype);
    std::memcpy(copy_, x, static_cast<std::size_t>(bytes));
    std::memset(copy_ + bytes, 0, static_cast<std::size_t>(whole - bytes));
  }
  const uint8_t* data() const { return copy_; }

 private:
  alignas(32) uint8_t copy_[kLanes * kMaxBlock * sizeof(float)];
};

// ---- Rotation and amax --------------------------------------------------------------------------

inline V round_to_bf16(V x) {
  const I bits = as_int(x);
  const I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), set1(1));
  const I sum = _mm256_add_epi32(_mm256_add_epi32(bits, set1(0x7FFF)), odd);
  // Adding to the bits of a NaN could carry into its sign and leave a zero.
  const V number = _mm256_cmp_ps(x, x, _CMP_ORD_Q);
  const V rounded = _mm256_blendv_ps(x, as_float(sum), number);
  return _mm256_and_ps(rounded, as_float(set1(0xFFFF'0000u)));
}

// rotate16 of vectors 0..15 of 8 blocks at once. In two halves, since 16 vectors are all the
// registers there are: the strides 1, 2 and 4 stay within 8 elements.
inline void rotate(V* x, uint16_t signs) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    V v[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const uint32_t sign = (signs >> (8 * half + i) & 1u) << 31;
      v[i] = as_float(_mm256_xor_si256(as_int(x[8 * half + i]), set1(sign)));
    }
#pragma GCC unroll 3
    for (int stride = 1; stride < 8; stride *= 2)
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i)
        if ((i & stride) == 0) {
          const V a = v[i], b = v[i + stride];
          v[i] = _mm256_add_ps(a, b);
          v[i + stride] = _mm256_sub_ps(a, b);
        }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) x[8 * half + i] = v[i];
  }
  const V quarter = _mm256_set1_ps(0.25f);
  for (int i = 0; i < 8; ++i) {
    const V a = x[i], b = x[i + 8];
    x[i] = round_to_bf16(_mm256_mul_ps(_mm256_add_ps(a, b), quarter));
    x[i + 8] = round_to_bf16(_mm256_mul_ps(_mm256_sub_ps(a, b), quarter));
  }
}

// The largest abs bits of every lane over the first n vectors, not-finite ones included.
inline I lane_amax(const Unit& unit, int n) {
  I amax[2] = {};
  int j = 0;
  for (; j + 2 <= n; j += 2)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) amax[i] = _mm256_max_epi32(amax[i], abs_bits(unit.x[j + i]));
  if (j < n) amax[0] = _mm256_max_epi32(amax[0], abs_bits(unit.x[j]));
  return _mm256_max_epi32(amax[0], amax[1]);
}

inline I finite_lane_amax(const Unit& unit, I amax) {
  for (int j = 0; j < kHadamardSize; ++j) {
    const I bits = abs_bits(unit.x[j]);
    amax = _mm256_max_epi32(amax, _mm256_andnot_si256(not_finite(bits), bits));
  }
  return amax;
}

}  // namespace
}  // namespace jax_fp4::cpu

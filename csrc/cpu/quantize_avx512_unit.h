// Units: what the AVX-512 kernels of quantize.h work on, and how they are loaded.
//
// A Unit is 16 blocks side by side, one in each 32-bit lane, element j of all of them in vector j.
// Amax, rotation, scales, random bits, codes and packing are then plain vertical arithmetic, the
// same for both orientations:
//
//   blocks of a row  lanes are 16 consecutive blocks: 4x4 transposes of 32-bit words on the way in
//                    (a word is an f32 or a pair of 16-bit elements)
//   columns          lanes are 16 columns of x, vector j is row j: nothing to transpose
//
// To be included after every other header and below `#pragma GCC target`: only code there may use
// AVX-512. A file-wide -m flag would reach the inline functions of other headers, of which the
// linker keeps one version for the whole program.
#pragma once

namespace jax_fp4::cpu {
namespace {

using std::int64_t, std::uint16_t, std::uint32_t, std::uint64_t, std::uint8_t;
using V = __m512;
using I = __m512i;
using Mask = __mmask16;

constexpr int kLanes = 16;

struct alignas(64) Unit {
  V x[kMaxBlock];
};

inline I set1(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline I as_int(V x) { return _mm512_castps_si512(x); }
inline V as_float(I x) { return _mm512_castsi512_ps(x); }
inline I abs_bits(V x) { return _mm512_and_si512(as_int(x), set1(kF32AbsMask)); }
inline I lane_numbers() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
inline Mask first_lanes(int64_t n) {
  return static_cast<Mask>(n >= kLanes ? 0xFFFF : (1u << n) - 1);
}

inline const uint8_t* at(Dtype dtype, const void* x, int64_t i) {
  return static_cast<const uint8_t*>(x) + i * dtype_bytes(dtype);
}

// ---- Loading ------------------------------------------------------------------------------------

// 16 consecutive elements.
template <Dtype kDtype>
inline V load16(const uint8_t* x, Mask mask) {
  if constexpr (kDtype == Dtype::f32) {
    return _mm512_maskz_loadu_ps(mask, x);
  } else {
    const __m256i half = _mm256_maskz_loadu_epi16(mask, x);
    if constexpr (kDtype == Dtype::f16) return _mm512_cvtph_ps(half);
    return as_float(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
}

// A strip: two units side by side, so that a cache line is read once. (Rows are often a power of two
// apart; 16 of them then fall into one set of the L1 cache, which keeps 12.)
struct Strip {
  Unit unit[2];
};

template <Dtype kDtype>
void load_columns_of(Strip& strip, const uint8_t* x, int64_t pitch, int rows, int block, int cols) {
  const int64_t step = pitch * dtype_bytes(kDtype);
  const Mask left = first_lanes(cols), right = first_lanes(std::max(cols - kLanes, 0));
  for (int j = 0; j < rows; ++j, x += step) {
    // The strip that comes next. Whether that address exists does not matter.
    _mm_prefetch(x + kStripCols * dtype_bytes(kDtype), _MM_HINT_T1);
    strip.unit[0].x[j] = load16<kDtype>(x, left);
    strip.unit[1].x[j] = load16<kDtype>(x + kLanes * dtype_bytes(kDtype), right);
  }
  for (int j = rows; j < block; ++j) strip.unit[0].x[j] = strip.unit[1].x[j] = V{};
}

// rows <= block and cols <= kStripCols elements, followed by zeros; lane i of unit u is column
// 16 * u + i.
inline void load_columns(Dtype dtype, Strip& strip, const uint8_t* x, int64_t pitch, int rows,
                         int block, int cols) {
  switch (dtype) {
    case Dtype::f32: return load_columns_of<Dtype::f32>(strip, x, pitch, rows, block, cols);
    case Dtype::bf16: return load_columns_of<Dtype::bf16>(strip, x, pitch, rows, block, cols);
    case Dtype::f16: return load_columns_of<Dtype::f16>(strip, x, pitch, rows, block, cols);
  }
}

// 4x4 transposes inside the four 128-bit parts.
inline void transpose4(I (&a)[4]) {
  const I low01 = _mm512_unpacklo_epi32(a[0], a[1]), high01 = _mm512_unpackhi_epi32(a[0], a[1]);
  const I low23 = _mm512_unpacklo_epi32(a[2], a[3]), high23 = _mm512_unpackhi_epi32(a[2], a[3]);
  a[0] = _mm512_unpacklo_epi64(low01, low23);
  a[1] = _mm512_unpackhi_epi64(low01, low23);
  a[2] = _mm512_unpacklo_epi64(high01, high23);
  a[3] = _mm512_unpackhi_epi64(high01, high23);
}

inline __m128i load128(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

inline V widen_f16(I words) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)); }

// 16 * block consecutive elements; lane i is block i.
template <Dtype kDtype>
inline void load_blocks_of(Unit& unit, const uint8_t* x, int block) {
  constexpr int kPerQuad = 16 / static_cast<int>(dtype_bytes(kDtype));
  const int64_t bytes = block * dtype_bytes(kDtype);
  for (int quad = 0; quad < block / kPerQuad; ++quad, x += 16) {
    I word[4];
    for (int i = 0; i < 4; ++i) {
      const uint8_t* p = x + i * bytes;
      word[i] = _mm512_castsi128_si512(load128(p));
      word[i] = _mm512_inserti32x4(word[i], load128(p + 4 * bytes), 1);
      word[i] = _mm512_inserti32x4(word[i], load128(p + 8 * bytes), 2);
      word[i] = _mm512_inserti32x4(word[i], load128(p + 12 * bytes), 3);
    }
    transpose4(word);
    V* out = unit.x + quad * kPerQuad;
    for (int i = 0; i < 4; ++i) {
      if constexpr (kDtype == Dtype::f32) {
        out[i] = as_float(word[i]);
      } else if constexpr (kDtype == Dtype::bf16) {
        out[2 * i] = as_float(_mm512_slli_epi32(word[i], 16));
        out[2 * i + 1] = as_float(_mm512_and_si512(word[i], set1(0xFFFF'0000u)));
      } else {
        out[2 * i] = widen_f16(word[i]);
        out[2 * i + 1] = widen_f16(_mm512_srli_epi32(word[i], 16));
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

// The last n < 16 * block elements of a run, followed by zeros.
inline void load_last_blocks(Dtype dtype, Unit& unit, const uint8_t* x, int64_t n, int block) {
  alignas(64) uint8_t padded[kLanes * kMaxBlock * sizeof(float)];
  const int64_t bytes = n * dtype_bytes(dtype);
  std::memcpy(padded, x, static_cast<std::size_t>(bytes));
  std::memset(padded + bytes, 0,
              static_cast<std::size_t>(kLanes * block * dtype_bytes(dtype) - bytes));
  load_blocks(dtype, unit, padded, block);
}

// ---- Rotation and amax --------------------------------------------------------------------------

inline V round_to_bf16(V x) {
  const I bits = as_int(x);
  const Mask odd = _mm512_test_epi32_mask(bits, set1(0x1'0000u));
  // Adding to the bits of a NaN could carry into its sign and leave a zero.
  const Mask number = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
  I sum = _mm512_add_epi32(bits, set1(0x7FFF));
  sum = _mm512_mask_add_epi32(sum, odd, sum, set1(1));
  return as_float(_mm512_mask_and_epi32(bits, number, sum, set1(0xFFFF'0000u)));
}

// rotate16 of vectors 0..15 of 16 blocks at once.
inline void rotate(V* x, uint16_t signs) {
  V v[kHadamardSize];
#pragma GCC unroll 16
  for (int i = 0; i < kHadamardSize; ++i) {
    const I sign = set1(((signs >> i) & 1u) << 31);
    v[i] = as_float(_mm512_xor_si512(as_int(x[i]), sign));
  }
#pragma GCC unroll 4
  for (int stride = 1; stride < kHadamardSize; stride *= 2)
#pragma GCC unroll 16
    for (int i = 0; i < kHadamardSize; ++i)
      if ((i & stride) == 0) {
        const V a = v[i], b = v[i + stride];
        v[i] = _mm512_add_ps(a, b);
        v[i + stride] = _mm512_sub_ps(a, b);
      }
#pragma GCC unroll 16
  for (int i = 0; i < kHadamardSize; ++i)
    x[i] = round_to_bf16(_mm512_mul_ps(v[i], _mm512_set1_ps(0.25f)));
}

// The largest abs bits of every lane over the first n vectors, not-finite ones included.
inline I lane_amax(const Unit& unit, int n) {
  I amax[4] = {};  // four chains, since everything else waits for the result
  int j = 0;
  for (; j + 4 <= n; j += 4)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) amax[i] = _mm512_max_epu32(amax[i], abs_bits(unit.x[j + i]));
  for (; j < n; ++j) amax[0] = _mm512_max_epu32(amax[0], abs_bits(unit.x[j]));
  return _mm512_max_epu32(_mm512_max_epu32(amax[0], amax[1]), _mm512_max_epu32(amax[2], amax[3]));
}

inline I finite_lane_amax(const Unit& unit, I amax) {
  for (int j = 0; j < kHadamardSize; ++j) {
    const I bits = abs_bits(unit.x[j]);
    const Mask finite = _mm512_cmplt_epu32_mask(bits, set1(kF32InfBits));
    amax = _mm512_mask_max_epu32(amax, finite, amax, bits);
  }
  return amax;
}

}  // namespace
}  // namespace jax_fp4::cpu

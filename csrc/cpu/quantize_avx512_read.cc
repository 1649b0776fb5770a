// The AVX-512 kernels that read: amax, fingerprints, and decoding.
#include <algorithm>
#include <array>
#include <cstring>

#include "cpu/quantize_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

// GCC 12's own intrinsics read undefined vectors on purpose.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#endif

#include "cpu/quantize_avx512_unit.h"

namespace jax_fp4::cpu {
namespace {

uint32_t rotated_amax_run(Dtype dtype, const void* x, int64_t n, uint16_t signs) {
  constexpr int64_t kUnit = kLanes * kHadamardSize;
  Unit unit;
  I amax = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += kUnit) {
    if (n - i >= kUnit)
      load_blocks(dtype, unit, at(dtype, x, i), kHadamardSize);
    else
      load_last_blocks(dtype, unit, at(dtype, x, i), n - i, kHadamardSize);
    rotate(unit.x, signs);
    amax = finite_lane_amax(unit, amax);
  }
  return static_cast<uint32_t>(_mm512_reduce_max_epu32(amax));
}

uint32_t rotated_amax_columns(Dtype dtype, const void* x, int64_t pitch, int rows, int cols,
                              uint16_t signs) {
  Strip strip;
  I amax = _mm512_setzero_si512();
  for (int r = 0; r < rows; r += kHadamardSize) {
    load_columns(dtype, strip, at(dtype, x, r * pitch), pitch, std::min(kHadamardSize, rows - r),
                 kHadamardSize, cols);
    for (Unit& unit : strip.unit) {
      rotate(unit.x, signs);
      amax = finite_lane_amax(unit, amax);
    }
  }
  return static_cast<uint32_t>(_mm512_reduce_max_epu32(amax));
}

void tile_amax(Dtype dtype, const void* x, int64_t pitch, int rows, int64_t cols, int block,
               uint32_t* amax) {
  Strip strip;
  std::fill(amax, amax + ceil_div(cols, block), 0u);
  for (int64_t c = 0; c < cols; c += kStripCols) {
    const int width = static_cast<int>(std::min<int64_t>(kStripCols, cols - c));
    load_columns(dtype, strip, at(dtype, x, c), pitch, rows, rows, width);
    for (int u = 0; u * kLanes < width; ++u) {
      const I lanes = lane_amax(strip.unit[u], rows);
      uint32_t& tile = amax[(c + u * kLanes) / block];
      tile = std::max(tile, static_cast<uint32_t>(_mm512_reduce_max_epu32(lanes)));
    }
  }
}

// _mm512_reduce_add_epi32 ends in an addition of int, which may not overflow.
inline uint32_t wrapping_sum(I x) {
  alignas(64) uint32_t lanes[kLanes];
  _mm512_store_si512(lanes, x);
  uint32_t sum = 0;
  for (const uint32_t lane : lanes) sum += lane;
  return sum;
}

// One pass; the sums come from running sums instead of products: after N vectors,
// behind = sum of (N - 1 - v) * vector v, so sum of v * vector v = (N - 1) * sum - behind.
struct RunningSum {
  I sum, behind;

  void add(I x) {
    behind = _mm512_add_epi32(behind, sum);
    sum = _mm512_add_epi32(sum, x);
  }
  // Lane l of vector v is element v * step + l * lane_step + offset.
  void finish(Scan& scan, int64_t vectors, uint32_t step, uint32_t lane_step,
              uint32_t offset) const {
    const I before = _mm512_mullo_epi32(sum, set1(static_cast<uint32_t>(vectors - 1)));
    const I whole = _mm512_mullo_epi32(_mm512_sub_epi32(before, behind), set1(step));
    const I within =
        _mm512_add_epi32(_mm512_mullo_epi32(lane_numbers(), set1(lane_step)), set1(offset));
    const I weighted = _mm512_add_epi32(whole, _mm512_mullo_epi32(sum, within));
    scan.sum += wrapping_sum(sum);
    scan.weighted += wrapping_sum(weighted);
  }
};

// The hardware looks ahead inside a page only.
constexpr int64_t kAhead = 2048;

template <bool kFingerprint>
Scan scan_f32(const uint8_t* x, int64_t n) {
  I amax = _mm512_setzero_si512();
  RunningSum all{};
  for (int64_t i = 0; i < n; i += 16) {
    _mm_prefetch(x + 4 * i + kAhead, _MM_HINT_T0);
    const I bits = _mm512_maskz_loadu_epi32(first_lanes(n - i), x + 4 * i);
    const I magnitude = _mm512_and_si512(bits, set1(kF32AbsMask));
    const Mask finite = _mm512_cmplt_epu32_mask(magnitude, set1(kF32InfBits));
    amax = _mm512_mask_max_epu32(amax, finite, amax, magnitude);
    if (kFingerprint) all.add(bits);
  }
  Scan result;
  result.amax = static_cast<uint32_t>(_mm512_reduce_max_epu32(amax));
  if (kFingerprint) all.finish(result, ceil_div(n, 16), 16, 1, 0);
  return result;
}

template <bool kFingerprint>
Scan scan_16bit(Dtype dtype, const uint8_t* x, int64_t n) {
  const I inf = _mm512_set1_epi16(dtype == Dtype::bf16 ? 0x7F80 : 0x7C00);
  I amax = _mm512_setzero_si512();
  RunningSum even{}, odd{};
  for (int64_t i = 0; i < n; i += 32) {
    const __mmask32 mask = n - i >= 32 ? ~0u : (1u << (n - i)) - 1;
    _mm_prefetch(x + 2 * i + kAhead, _MM_HINT_T0);
    const I bits = _mm512_maskz_loadu_epi16(mask, x + 2 * i);
    const I magnitude = _mm512_and_si512(bits, _mm512_set1_epi16(0x7FFF));
    const __mmask32 finite = _mm512_cmplt_epu16_mask(magnitude, inf);
    amax = _mm512_mask_max_epu16(amax, finite, amax, magnitude);
    if (kFingerprint) {
      even.add(_mm512_and_si512(bits, set1(0xFFFF)));
      odd.add(_mm512_srli_epi32(bits, 16));
    }
  }
  Scan result;
  const I pairs = _mm512_max_epu16(amax, _mm512_srli_epi32(amax, 16));
  const auto largest =
      static_cast<uint32_t>(_mm512_reduce_max_epu32(_mm512_and_si512(pairs, set1(0xFFFF))));
  result.amax = dtype == Dtype::bf16 ? largest << 16 : bits_of(decode_f16(largest));
  if (kFingerprint) {
    even.finish(result, ceil_div(n, 32), 32, 2, 0);
    odd.finish(result, ceil_div(n, 32), 32, 2, 1);
  }
  return result;
}

Scan scan(Dtype dtype, const void* x, int64_t n, bool fingerprint) {
  const auto* bytes = static_cast<const uint8_t*>(x);
  if (dtype == Dtype::f32)
    return fingerprint ? scan_f32<true>(bytes, n) : scan_f32<false>(bytes, n);
  return fingerprint ? scan_16bit<true>(dtype, bytes, n) : scan_16bit<false>(dtype, bytes, n);
}

// ---- Decoding -----------------------------------------------------------------------------------

template <class Function>
constexpr auto table(Function function) {
  std::array<float, 256> values{};
  for (u32 i = 0; i < 256; ++i) values[i] = function(i);
  return values;
}

alignas(64) constexpr auto kUE4M3Values = table(decode_ue4m3);
alignas(64) constexpr auto kUE8M0Values = table(decode_ue8m0);
alignas(64) constexpr auto kE2M1Values = table([](u32 i) { return decode(kE2M1, i); });
alignas(64) constexpr auto kE2M3Values = table([](u32 i) { return decode(kE2M3, i); });
alignas(64) constexpr auto kE3M2Values = table([](u32 i) { return decode(kE3M2, i); });

inline V lookup64(const std::array<float, 256>& values, I index) {
  const float* t = values.data();
  const V positive = _mm512_permutex2var_ps(_mm512_load_ps(t), index, _mm512_load_ps(t + 16));
  const V negative = _mm512_permutex2var_ps(_mm512_load_ps(t + 32), index, _mm512_load_ps(t + 48));
  const Mask sign = _mm512_test_epi32_mask(index, set1(32));
  return _mm512_mask_mov_ps(positive, sign, negative);
}

// The values of 16 packed codes, which every row has room for.
template <Element kElement>
inline V decode16(const uint8_t* p) {
  constexpr Minifloat kKind = minifloat(kElement);
  if constexpr (kKind.bits() == 4) {
    uint64_t packed;
    std::memcpy(&packed, p, sizeof packed);
    const I shifts = _mm512_setr_epi64(0, 4, 8, 12, 16, 20, 24, 28);
    // 64-bit lane i: nibble i in the low word, nibble 8 + i in the high one.
    const I words = _mm512_srlv_epi64(_mm512_set1_epi64(static_cast<long long>(packed)), shifts);
    const I ordered = _mm512_permutexvar_epi32(
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15), words);
    return _mm512_permutexvar_ps(ordered, _mm512_load_ps(kE2M1Values.data()));
  } else if constexpr (kKind.bits() == 6) {
    // Lane i: the three bytes of its group of four codes, shifted to its own.
    const __m128i packed = _mm_maskz_loadu_epi8(0x0FFF, p);
    const I from =
        _mm512_setr_epi32(0x80020100, 0x80020100, 0x80020100, 0x80020100, 0x80050403, 0x80050403,
                          0x80050403, 0x80050403, 0x80080706, 0x80080706, 0x80080706, 0x80080706,
                          0x800B0A09, 0x800B0A09, 0x800B0A09, 0x800B0A09);
    const I bytes = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(packed), from);
    const I shifts = _mm512_setr_epi32(0, 6, 12, 18, 0, 6, 12, 18, 0, 6, 12, 18, 0, 6, 12, 18);
    const I codes = _mm512_and_si512(_mm512_srlv_epi32(bytes, shifts), set1(0x3F));
    return lookup64(kElement == Element::e2m3 ? kE2M3Values : kE3M2Values, codes);
  } else {
    const __m256i codes = _mm256_cvtepu8_epi16(load128(p));
    // E5M2 is the high byte of an f16. E4M3 fits below its sign with an exponent that is 8 less.
    if constexpr (kElement == Element::e5m2) return _mm512_cvtph_ps(_mm256_slli_epi16(codes, 8));
    const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7F));
    const __m256i sign = _mm256_slli_epi16(_mm256_sub_epi16(codes, magnitude), 8);
    const __m256i half = _mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7));
    const V value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
    const Mask nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7F));
    return _mm512_mask_mov_ps(value, nan, _mm512_set1_ps(kF32NaN));
  }
}

inline void store16(Dtype dtype, uint8_t* out, V value, Mask mask) {
  value = _mm512_mask_mov_ps(value, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q),
                             _mm512_set1_ps(kF32NaN));
  switch (dtype) {
    case Dtype::f32: _mm512_mask_storeu_ps(out, mask, value); break;
    case Dtype::bf16: {
      const I rounded = _mm512_srli_epi32(as_int(round_to_bf16(value)), 16);
      _mm256_mask_storeu_epi16(out, mask, _mm512_cvtepi32_epi16(rounded));
      break;
    }
    case Dtype::f16:
      _mm256_mask_storeu_epi16(out, mask, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
      break;
  }
}

template <Element kElement>
void decode_run_of(const Format& format, const uint8_t* values, const uint8_t* scales, float global,
                   int64_t n, Dtype dtype, uint8_t* out) {
  constexpr int kGroupBytes = minifloat(kElement).bits() * 2;
  const float* scale_values =
      (format.scale == BlockScale::ue4m3 ? kUE4M3Values : kUE8M0Values).data();
  const int groups_per_block = format.block / 16;
  for (int64_t g = 0; g * 16 < n; ++g) {
    const V scale = _mm512_set1_ps(scale_values[scales[g / groups_per_block]]);
    const V scaled = _mm512_mul_ps(decode16<kElement>(values + g * kGroupBytes), scale);
    store16(dtype, out + g * 16 * dtype_bytes(dtype), _mm512_mul_ps(scaled, _mm512_set1_ps(global)),
            first_lanes(n - g * 16));
  }
}

void decode_run(const Format& format, const uint8_t* values, const uint8_t* scales, float global,
                int64_t n, Dtype dtype, void* out) {
  auto* bytes = static_cast<uint8_t*>(out);
  const auto run = [&](auto decode) { decode(format, values, scales, global, n, dtype, bytes); };
  switch (format.element) {
    case Element::e2m1: return run(decode_run_of<Element::e2m1>);
    case Element::e2m3: return run(decode_run_of<Element::e2m3>);
    case Element::e3m2: return run(decode_run_of<Element::e3m2>);
    case Element::e4m3: return run(decode_run_of<Element::e4m3>);
    case Element::e5m2: return run(decode_run_of<Element::e5m2>);
  }
}

}  // namespace

QuantizeKernels avx512_reading_quantize_kernels() {
  QuantizeKernels k{};
  k.scan = scan;
  k.rotated_amax_run = rotated_amax_run;
  k.rotated_amax_columns = rotated_amax_columns;
  k.tile_amax = tile_amax;
  k.decode_run = decode_run;
  return k;
}

}  // namespace jax_fp4::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#pragma GCC diagnostic pop

#endif

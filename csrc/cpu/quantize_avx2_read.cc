// The AVX2 kernels that read: amax, fingerprints, and decoding.
#include <algorithm>
#include <array>
#include <cstring>

#include "cpu/quantize_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "cpu/quantize_avx2_unit.h"

namespace jax_fp4::cpu {
namespace {

uint32_t rotated_amax_run(Dtype dtype, const void* x, int64_t n, uint16_t signs) {
  constexpr int64_t kUnit = kLanes * kHadamardSize;
  Unit unit;
  I amax = _mm256_setzero_si256();
  const auto add = [&](const uint8_t* blocks) {
    load_blocks(dtype, unit, blocks, kHadamardSize);
    rotate(unit.x, signs);
    amax = finite_lane_amax(unit, amax);
  };
  int64_t i = 0;
  for (; n - i >= kUnit; i += kUnit) add(at(dtype, x, i));
  if (i < n) add(LastBlocks(dtype, at(dtype, x, i), n - i, kHadamardSize).data());
  return largest(amax);
}

uint32_t rotated_amax_columns(Dtype dtype, const void* x, int64_t pitch, int rows, int cols,
                              uint16_t signs) {
  const WholeStrip whole(dtype, x, pitch, rows, cols, kHadamardSize);
  Strip strip;
  I amax = _mm256_setzero_si256();
  for (int r = 0; r < rows; r += kHadamardSize) {
    load_columns(dtype, strip, whole.row(r), whole.pitch(), kHadamardSize);
    for (Unit& unit : strip.unit) {
      rotate(unit.x, signs);
      amax = finite_lane_amax(unit, amax);
    }
  }
  return largest(amax);
}

void tile_amax(Dtype dtype, const void* x, int64_t pitch, int rows, int64_t cols, int block,
               uint32_t* amax) {
  Strip strip;
  std::fill(amax, amax + ceil_div(cols, block), 0u);
  for (int64_t c = 0; c < cols; c += kStripCols) {
    const int width = static_cast<int>(std::min<int64_t>(kStripCols, cols - c));
    const WholeStrip whole(dtype, at(dtype, x, c), pitch, rows, width, 1);
    load_columns(dtype, strip, whole.row(0), whole.pitch(), rows);
    for (int u = 0; u * kLanes < width; ++u) {
      uint32_t& tile = amax[(c + u * kLanes) / block];
      tile = std::max(tile, largest(lane_amax(strip.unit[u], rows)));
    }
  }
}

inline I lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

inline uint32_t wrapping_sum(I x) {
  alignas(32) uint32_t lanes[kLanes];
  store256(lanes, x);
  uint32_t sum = 0;
  for (const uint32_t lane : lanes) sum += lane;
  return sum;
}

// One pass; the sums come from running sums instead of products: after N vectors,
// behind = sum of (N - 1 - v) * vector v, so sum of v * vector v = (N - 1) * sum - behind.
struct RunningSum {
  I sum, behind;

  void add(I x) {
    behind = _mm256_add_epi32(behind, sum);
    sum = _mm256_add_epi32(sum, x);
  }
  // Lane l of vector v is element v * step + l * lane_step + offset.
  void finish(Scan& scan, int64_t vectors, uint32_t step, uint32_t lane_step,
              uint32_t offset) const {
    const I before = _mm256_mullo_epi32(sum, set1(static_cast<uint32_t>(vectors - 1)));
    const I whole = _mm256_mullo_epi32(_mm256_sub_epi32(before, behind), set1(step));
    const I within =
        _mm256_add_epi32(_mm256_mullo_epi32(lane_numbers(), set1(lane_step)), set1(offset));
    const I weighted = _mm256_add_epi32(whole, _mm256_mullo_epi32(sum, within));
    scan.sum += wrapping_sum(sum);
    scan.weighted += wrapping_sum(weighted);
  }
};

// Calls add(vector) for every 32 bytes of x, the last one followed by zeros.
template <class Add>
inline void for_each_vector(const uint8_t* x, int64_t bytes, const Add& add) {
  // The hardware looks ahead inside a page only.
  constexpr int64_t kAhead = 2048;
  int64_t i = 0;
  for (; i + 32 <= bytes; i += 32) {
    if (i % 64 == 0) _mm_prefetch(x + i + kAhead, _MM_HINT_T0);
    add(load256(x + i));
  }
  if (i == bytes) return;
  alignas(32) uint8_t last[32] = {};
  std::memcpy(last, x + i, static_cast<std::size_t>(bytes - i));
  add(load256(last));
}

template <bool kFingerprint>
Scan scan_f32(const uint8_t* x, int64_t n) {
  I amax = _mm256_setzero_si256();
  RunningSum all{};
  for_each_vector(x, 4 * n, [&](I bits) {
    const I magnitude = abs_bits(as_float(bits));
    amax = _mm256_max_epi32(amax, _mm256_andnot_si256(not_finite(magnitude), magnitude));
    if (kFingerprint) all.add(bits);
  });
  Scan result;
  result.amax = largest(amax);
  if (kFingerprint) all.finish(result, ceil_div(n, 8), 8, 1, 0);
  return result;
}

template <bool kFingerprint>
Scan scan_16bit(Dtype dtype, const uint8_t* x, int64_t n) {
  const I inf = _mm256_set1_epi16(dtype == Dtype::bf16 ? 0x7F80 : 0x7C00);
  I amax = _mm256_setzero_si256();
  RunningSum even{}, odd{};
  for_each_vector(x, 2 * n, [&](I bits) {
    const I magnitude = _mm256_and_si256(bits, _mm256_set1_epi16(0x7FFF));
    const I finite = _mm256_cmpgt_epi16(inf, magnitude);
    amax = _mm256_max_epi16(amax, _mm256_and_si256(finite, magnitude));
    if (kFingerprint) {
      even.add(_mm256_and_si256(bits, set1(0xFFFF)));
      odd.add(_mm256_srli_epi32(bits, 16));
    }
  });
  Scan result;
  const I pairs = _mm256_max_epi16(amax, _mm256_srli_epi32(amax, 16));
  const uint32_t most = largest(_mm256_and_si256(pairs, set1(0xFFFF)));
  result.amax = dtype == Dtype::bf16 ? most << 16 : bits_of(decode_f16(most));
  if (kFingerprint) {
    even.finish(result, ceil_div(n, 16), 16, 2, 0);
    odd.finish(result, ceil_div(n, 16), 16, 2, 1);
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

constexpr auto kUE4M3Values = table(decode_ue4m3);
constexpr auto kUE8M0Values = table(decode_ue8m0);

// 16 packed codes, which every row has room for, one in each 16-bit lane.
template <int kBits>
inline I unpack16(const uint8_t* p) {
  if constexpr (kBits == 4) {
    const I bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_and_si256(_mm256_or_si256(bytes, _mm256_slli_epi32(bytes, 12)), set1(0xF'000F));
  } else if constexpr (kBits == 6) {
    // Code j of four begins at bit 0, 6, 4 or 2 of the two bytes that it lies in; a product moves
    // it to the top.
    alignas(16) uint8_t packed[16] = {};
    std::memcpy(packed, p, 12);
    const I both = _mm256_broadcastsi128_si256(load128(packed));
    const I from =
        _mm256_setr_epi16(0x0100, 0x0100, 0x0201, 0x0302, 0x0403, 0x0403, 0x0504, 0x0605, 0x0706,
                          0x0706, 0x0807, 0x0908, 0x0A09, 0x0A09, 0x0B0A, 0x0C0B);
    const I shifts = _mm256_set1_epi64x(0x0100'0040'0010'0400);  // by 8, 6, 4, 10
    const I top = _mm256_mullo_epi16(_mm256_shuffle_epi8(both, from), shifts);
    return _mm256_srli_epi16(top, 10);
  } else {
    return _mm256_cvtepu8_epi16(load128(p));
  }
}

struct Sixteen {
  V low, high;
};

// The values of 16 packed codes. Every format is an f16 with fewer bits: its exponent field and
// mantissa in the places of that give a number that is too small by a power of two, subnormal ones
// included.
template <Element kElement>
inline Sixteen decode16(const uint8_t* p) {
  constexpr Minifloat kKind = minifloat(kElement);
  constexpr int kHalfBias = 15, kHalfMantissa = 10;
  const I codes = unpack16<kKind.bits()>(p);
  const I magnitude =
      _mm256_and_si256(codes, _mm256_set1_epi16(static_cast<short>(kKind.sign_code() - 1)));
  const I sign = _mm256_slli_epi16(_mm256_xor_si256(codes, magnitude), 16 - kKind.bits());
  const I half =
      _mm256_or_si256(sign, _mm256_slli_epi16(magnitude, kHalfMantissa - kKind.mantissa_bits));
  const V factor = _mm256_set1_ps(power_of_two(kHalfBias - kKind.bias));
  Sixteen value{_mm256_mul_ps(_mm256_cvtph_ps(low128(half)), factor),
                _mm256_mul_ps(_mm256_cvtph_ps(high128(half)), factor)};
  if constexpr (kElement == Element::e4m3) {  // whose NaN is an ordinary number there
    const I nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(kKind.nan_code));
    const V quiet = _mm256_set1_ps(kF32NaN);
    value.low = select(value.low, quiet, _mm256_cvtepi16_epi32(low128(nan)));
    value.high = select(value.high, quiet, _mm256_cvtepi16_epi32(high128(nan)));
  }
  return value;
}

inline void store16(Dtype dtype, uint8_t* out, Sixteen value) {
  switch (dtype) {
    case Dtype::f32:
      store256(out, as_int(value.low));
      store256(out + 32, as_int(value.high));
      break;
    case Dtype::bf16: {
      const I packed =
          _mm256_packus_epi32(_mm256_srli_epi32(as_int(round_to_bf16(value.low)), 16),
                              _mm256_srli_epi32(as_int(round_to_bf16(value.high)), 16));
      store256(out, _mm256_permute4x64_epi64(packed, 0b11'01'10'00));
      break;
    }
    case Dtype::f16:
      store128(out, _mm256_cvtps_ph(value.low, _MM_FROUND_TO_NEAREST_INT));
      store128(out + 16, _mm256_cvtps_ph(value.high, _MM_FROUND_TO_NEAREST_INT));
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
  const V tensor = _mm256_set1_ps(global);
  const auto rescale = [&](V code, V scale) {
    const V value = _mm256_mul_ps(_mm256_mul_ps(code, scale), tensor);
    const I nan = as_int(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return select(value, _mm256_set1_ps(kF32NaN), nan);
  };
  for (int64_t g = 0; g * 16 < n; ++g) {
    const V scale = _mm256_set1_ps(scale_values[scales[g / groups_per_block]]);
    const Sixteen code = decode16<kElement>(values + g * kGroupBytes);
    const Sixteen value{rescale(code.low, scale), rescale(code.high, scale)};
    uint8_t* to = out + g * 16 * dtype_bytes(dtype);
    if (n - g * 16 >= 16) {
      store16(dtype, to, value);
    } else {
      alignas(32) uint8_t last[16 * sizeof(float)];
      store16(dtype, last, value);
      std::memcpy(to, last, static_cast<std::size_t>((n - g * 16) * dtype_bytes(dtype)));
    }
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

QuantizeKernels avx2_reading_quantize_kernels() {
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

#endif

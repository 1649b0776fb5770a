// The AVX2 kernels that encode. Results are bit for bit those of quantize_portable.cc: no operation
// below may be replaced by a fused or approximate one.
#include <algorithm>
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

// In this order: each uses what the ones before it define.
// clang-format off
#include "cpu/quantize_avx2_unit.h"
#include "cpu/quantize_avx2_scale.h"
#include "cpu/quantize_avx2_e2m1.h"
// clang-format on

namespace jax_fp4::cpu {
namespace {

// ---- Tiles --------------------------------------------------------------------------------------

void encode_tiles(const Encoding& e, const uint32_t* amax, int64_t n, uint8_t* scales,
                  float* multipliers) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const auto count = static_cast<std::size_t>(std::min<int64_t>(kLanes, n - i));
    alignas(32) uint32_t lanes[kLanes] = {};
    std::memcpy(lanes, amax + i, count * sizeof(uint32_t));
    const I bits = load256(lanes);
    const I bad = not_finite(bits);
    const Scales s = block_scales(e, _mm256_andnot_si256(bad, bits));
    uint8_t bytes[kLanes];
    store_bytes(bytes, select(s.bytes, set1(nan_scale(e.format.scale)), bad));
    std::memcpy(scales + i, bytes, count);
    store256(lanes, as_int(s.multipliers));
    std::memcpy(multipliers + i, lanes, count * sizeof(float));
  }
}

// ---- Codes --------------------------------------------------------------------------------------

// The scales of a unit, from its values or given; lanes that are not finite get the NaN scale and
// are set to zero.
inline Scales unit_scales(const Encoding& e, Unit& unit, const Scales* given) {
  const I nan = set1(nan_scale(e.format.scale));
  const int block = e.format.block;
  const I amax = given ? I{} : lane_amax(unit, block);
  const I bad = given ? _mm256_cmpeq_epi32(given->bytes, nan) : not_finite(amax);
  if (any(bad))
    for (int j = 0; j < block; ++j) unit.x[j] = _mm256_andnot_ps(as_float(bad), unit.x[j]);
  if (given) return *given;
  const I finite = _mm256_andnot_si256(bad, amax);
  Scales s = e.four_over_six ? four_over_six_scales(e, unit, finite) : block_scales(e, finite);
  s.bytes = select(s.bytes, nan, bad);
  return s;
}

template <Element kElement, bool kStochastic>
void encode_codes(const Encoding& e, const Unit& unit, V multipliers, Groups groups, Words& out) {
  constexpr Minifloat kKind = minifloat(kElement);
  constexpr int kBits = kKind.bits();
  constexpr int kWordsPerGroup = 16 * kBits / 32;
  for (int half = 0; half < e.format.block / 16; ++half) {
    I random[4];
    if constexpr (kStochastic)
      philox({groups.first + static_cast<uint64_t>(half), groups.pitch}, e.stream, e.seed, random);
    I words[kWordsPerGroup] = {};
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      const V x = unit.x[half * 16 + j];
      const V y = _mm256_mul_ps(x, multipliers);
      I magnitude;
      if constexpr (kStochastic) {
        const I byte = _mm256_and_si256(_mm256_srli_epi32(random[j / 4], 8 * (j % 4)), set1(0xFF));
        magnitude = Rounding<kElement>::stochastic(y, byte);
      } else {
        magnitude = nearest_code<kElement>(y);
      }
      const I sign =
          _mm256_and_si256(_mm256_srli_epi32(as_int(x), 32 - kBits), set1(kKind.sign_code()));
      const I code = _mm256_or_si256(sign, magnitude);
      const int bit = j * kBits % 32;
      I& word = words[j * kBits / 32];
      word = _mm256_or_si256(word, _mm256_slli_epi32(code, bit));
      if (bit + kBits > 32)  // a 6-bit code that begins in one word and ends in the next
        words[j * kBits / 32 + 1] = _mm256_srli_epi32(code, 32 - bit);
    }
    for (int w = 0; w < kWordsPerGroup; ++w) out.word[half * kWordsPerGroup + w] = words[w];
  }
}

template <Element kElement>
inline void encode_codes(const Encoding& e, const Unit& unit, V multipliers, Groups groups,
                         Words& out) {
  e.stochastic ? encode_codes<kElement, true>(e, unit, multipliers, groups, out)
               : encode_codes<kElement, false>(e, unit, multipliers, groups, out);
}

void encode_codes(const Encoding& e, const Unit& unit, V multipliers, Groups groups, Words& out) {
  switch (e.format.element) {
    case Element::e2m1: return encode_codes<Element::e2m1>(e, unit, multipliers, groups, out);
    case Element::e2m3: return encode_codes<Element::e2m3>(e, unit, multipliers, groups, out);
    case Element::e3m2: return encode_codes<Element::e3m2>(e, unit, multipliers, groups, out);
    case Element::e4m3: return encode_codes<Element::e4m3>(e, unit, multipliers, groups, out);
    case Element::e5m2: return encode_codes<Element::e5m2>(e, unit, multipliers, groups, out);
  }
}

int element_bits(const Format& format) { return minifloat(format.element).bits(); }
int block_bytes(const Format& format) { return format.block * element_bits(format) / 8; }

// Rotates a loaded unit, finds its scales and encodes it, block i to values + i * pitch.
void encode_unit(const Encoding& e, Unit& unit, const Scales* given, Groups groups, uint8_t* values,
                 int64_t pitch, uint8_t* scales) {
  if (e.hadamard)
    for (int j = 0; j < e.format.block; j += kHadamardSize) rotate(unit.x + j, e.signs);
  const Scales found = unit_scales(e, unit, given);
  store_bytes(scales, found.bytes);
  Words words;
  encode_codes(e, unit, found.multipliers, groups, words);
  store_words(words, block_bytes(e.format) / 4, values, pitch);
}

// 8 blocks in a row.
void encode_blocks(const Encoding& e, const uint8_t* x, uint64_t group, GivenScales given,
                   uint8_t* values, uint8_t* scales) {
  Unit unit;
  load_blocks(e.dtype, unit, x, e.format.block);
  Scales known;
  if (given.scales)
    known = {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(given.scales))),
             _mm256_loadu_ps(given.multipliers)};
  const Groups groups{group, static_cast<uint64_t>(e.format.block / 16)};
  encode_unit(e, unit, given.scales ? &known : nullptr, groups, values, block_bytes(e.format),
              scales);
}

void encode_run(const Encoding& e, const void* x, int64_t n, uint64_t group, GivenScales given,
                uint8_t* values, uint8_t* scales) {
  const int64_t in_unit = int64_t{kLanes} * e.format.block;
  const int64_t unit_bytes = int64_t{kLanes} * block_bytes(e.format);
  const bool plain = is_plain_e2m1(e);
  while (n >= in_unit) {
    const auto* data = static_cast<const uint8_t*>(x);
    int units = static_cast<int>(kBatch / in_unit);
    if (!plain || n < kBatch || !encode_batch(e, data, given, values, scales)) {
      encode_blocks(e, data, group, given, values, scales);
      units = 1;
    }
    n -= units * in_unit;
    x = at(e.dtype, x, units * in_unit);
    group += static_cast<uint64_t>(units * in_unit / 16);
    values += units * unit_bytes;
    scales += units * kLanes;
    if (given.scales)
      given = {given.scales + units * kLanes, given.multipliers + units * kLanes, given.pitch};
  }
  if (n == 0) return;
  // Whole groups of 16, then the padding of the row.
  const LastBlocks last(e.dtype, static_cast<const uint8_t*>(x), n, e.format.block);
  const auto blocks = static_cast<std::size_t>(ceil_div(n, e.format.block));
  uint8_t last_values[kLanes * kMaxBlock], last_scales[kLanes], given_scales[kLanes] = {};
  float given_multipliers[kLanes] = {};
  if (given.scales) {
    std::memcpy(given_scales, given.scales, blocks);
    std::memcpy(given_multipliers, given.multipliers, blocks * sizeof(float));
    given = {given_scales, given_multipliers, given.pitch};
  }
  encode_blocks(e, last.data(), group, given, last_values, last_scales);
  const int64_t used = round_up(n, 16) * element_bits(e.format) / 8;
  const int64_t end = row_bytes(e.format.element, n);
  std::memcpy(values, last_values, static_cast<std::size_t>(used));
  std::memset(values + used, 0, static_cast<std::size_t>(end - used));
  std::memcpy(scales, last_scales, blocks);
}

void encode_columns(const Encoding& e, const void* x, int64_t pitch, int rows, int cols,
                    uint64_t group, uint64_t group_pitch, GivenScales given, uint8_t* values,
                    uint8_t (*scales)[kStripCols]) {
  const int block = e.format.block;
  const WholeStrip whole(e.dtype, x, pitch, rows, cols, block);
  if (is_plain_e2m1(e) &&
      encode_finite_strip(e, whole.row(0), whole.pitch(), rows, cols, given, values, scales))
    return;
  Strip strip;
  for (int b = 0; b * block < rows; ++b) {
    load_columns(e.dtype, strip, whole.row(b * block), whole.pitch(), block);
    for (int c = 0, u = 0; c < cols; c += kLanes, ++u) {
      const int64_t tile = b + c / block * given.pitch;
      Scales known;
      if (given.scales) known = {set1(given.scales[tile]), _mm256_set1_ps(given.multipliers[tile])};
      const uint64_t first = group + static_cast<uint64_t>(c) * group_pitch;
      encode_unit(e, strip.unit[u], given.scales ? &known : nullptr,
                  {first + static_cast<uint64_t>(b * block / 16), group_pitch},
                  values + c * kStripPitch + b * block_bytes(e.format), kStripPitch, scales[b] + c);
    }
  }
}

}  // namespace

const QuantizeKernels& avx2_quantize_kernels() {
  static const QuantizeKernels kernels = [] {
    QuantizeKernels k = avx2_reading_quantize_kernels();
    k.encode_run = encode_run;
    k.encode_columns = encode_columns;
    k.encode_tiles = encode_tiles;
    return k;
  }();
  return kernels;
}

}  // namespace jax_fp4::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace jax_fp4::cpu {
const QuantizeKernels& avx2_quantize_kernels() { return portable_quantize_kernels(); }
}  // namespace jax_fp4::cpu

#endif

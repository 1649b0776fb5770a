// The AVX-512 kernels that encode. Results are bit for bit those of quantize_portable.cc: no
// operation below may be replaced by a fused or approximate one.
#include <algorithm>
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

// In this order: each uses what the ones before it define.
// clang-format off
#include "cpu/quantize_avx512_unit.h"
#include "cpu/quantize_avx512_scale.h"
#include "cpu/quantize_avx512_nvfp4.h"
// clang-format on

namespace jax_fp4::cpu {
namespace {

// ---- Tiles --------------------------------------------------------------------------------------

void encode_tiles(const Encoding& e, const uint32_t* amax, int64_t n, uint8_t* scales,
                  float* multipliers) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const Mask mask = first_lanes(n - i);
    const I bits = _mm512_maskz_loadu_epi32(mask, amax + i);
    const Mask finite = _mm512_cmplt_epu32_mask(bits, set1(kF32InfBits));
    const Scales s = block_scales(e, _mm512_maskz_mov_epi32(finite, bits));
    const I bytes = _mm512_mask_mov_epi32(set1(nan_scale(e.format.scale)), finite, s.bytes);
    _mm_mask_storeu_epi8(scales + i, mask, _mm512_cvtepi32_epi8(bytes));
    _mm512_mask_storeu_ps(multipliers + i, mask, s.multipliers);
  }
}

// ---- Codes --------------------------------------------------------------------------------------

// The scales of a unit, from its values or given; lanes that are not finite get the NaN scale and
// are set to zero.
inline Scales unit_scales(const Encoding& e, Unit& unit, const Scales* given) {
  const I nan = set1(nan_scale(e.format.scale));
  const int block = e.format.block;
  const I amax = given ? I{} : lane_amax(unit, block);
  const Mask bad = given ? _mm512_cmpeq_epi32_mask(given->bytes, nan)
                         : _mm512_cmpge_epu32_mask(amax, set1(kF32InfBits));
  if (bad)
    for (int j = 0; j < block; ++j) unit.x[j] = _mm512_mask_mov_ps(unit.x[j], bad, V{});
  if (given) return *given;
  const I finite = _mm512_mask_mov_epi32(amax, bad, I{});
  Scales s = e.four_over_six ? four_over_six_scales(e, unit, finite) : block_scales(e, finite);
  s.bytes = _mm512_mask_mov_epi32(s.bytes, bad, nan);
  return s;
}

// Group numbers of lanes: group + lane * pitch, the first of each block.
struct Groups {
  uint64_t first, pitch;
};

template <Element kElement, bool kStochastic>
void encode_codes(const Encoding& e, const Unit& unit, V multipliers, Groups groups, Words& out) {
  constexpr Minifloat kKind = minifloat(kElement);
  constexpr int kBits = kKind.bits();
  constexpr int kWordsPerGroup = 16 * kBits / 32;
  for (int half = 0; half < e.format.block / 16; ++half) {
    I random[4];
    if constexpr (kStochastic) {
      I low, high;
      group_numbers(groups.first + static_cast<uint64_t>(half), groups.pitch, low, high);
      philox(low, high, e.stream, e.seed, random);
    }
    I words[kWordsPerGroup] = {};
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      const V x = unit.x[half * 16 + j];
      const V y = _mm512_mul_ps(x, multipliers);
      I magnitude;
      if constexpr (kStochastic) {
        const I byte = _mm512_and_si512(_mm512_srli_epi32(random[j / 4], 8 * (j % 4)), set1(0xFF));
        magnitude = Rounding<kElement>::stochastic(y, byte);
      } else {
        magnitude = Rounding<kElement>::nearest(y).code;
      }
      constexpr int kMergeMasked = 0xEA;  // (a & b) | c
      const I code = _mm512_ternarylogic_epi32(_mm512_srli_epi32(as_int(x), 32 - kBits),
                                               set1(kKind.sign_code()), magnitude, kMergeMasked);
      const int bit = j * kBits % 32;
      I& word = words[j * kBits / 32];
      word = _mm512_or_si512(word, _mm512_slli_epi32(code, static_cast<unsigned>(bit)));
      if (bit + kBits > 32)  // a 6-bit code that begins in one word and ends in the next
        words[j * kBits / 32 + 1] = _mm512_srli_epi32(code, static_cast<unsigned>(32 - bit));
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

// Rotates a loaded unit and finds its scales.
Scales prepare(const Encoding& e, Unit& unit, const Scales* given) {
  if (e.hadamard)
    for (int j = 0; j < e.format.block; j += kHadamardSize) rotate(unit.x + j, e.signs);
  return unit_scales(e, unit, given);
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

// Both of the following take two units at a time: the divisions of one hide behind the other.

void encode_run(const Encoding& e, const void* x, int64_t n, uint64_t group, GivenScales given,
                uint8_t* values, uint8_t* scales) {
  const int block = e.format.block;
  const int bits = element_bits(e.format);
  const int block_bytes = block * bits / 8;
  const int64_t in_unit = int64_t{kLanes} * block;
  const auto groups_per_block = static_cast<uint64_t>(block / 16);
  Strip strip;
  Words words;
  Scales found[2];
  const bool plain = is_plain_nvfp4(e) && !given.scales;
  for (int64_t pair = 0; pair < n; pair += 2 * in_unit) {
    while (plain && n - pair >= in_unit) {
      const int units = static_cast<int>(std::min<int64_t>(kBatch, (n - pair) / in_unit));
      if (!encode_finite(e, at(e.dtype, x, pair), units, values + pair / 2, scales + pair / 16))
        break;
      pair += units * in_unit;
    }
    for (int u = 0; u < 2 && pair + u * in_unit < n; ++u) {
      const int64_t i = pair + u * in_unit, b = i / block;
      const Mask lanes = first_lanes(ceil_div(n - i, block));
      if (n - i >= in_unit)
        load_blocks(e.dtype, strip.unit[u], at(e.dtype, x, i), block);
      else
        load_last_blocks(e.dtype, strip.unit[u], at(e.dtype, x, i), n - i, block);
      // Past the page where the hardware stops looking ahead.
      for (int64_t line = 0; line < in_unit * dtype_bytes(e.dtype); line += 64)
        _mm_prefetch(at(e.dtype, x, i + 4 * in_unit) + line, _MM_HINT_T0);
      Scales known;
      if (given.scales)
        known = {_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes, given.scales + b)),
                 _mm512_maskz_loadu_ps(lanes, given.multipliers + b)};
      found[u] = prepare(e, strip.unit[u], given.scales ? &known : nullptr);
      _mm_mask_storeu_epi8(scales + b, lanes, _mm512_cvtepi32_epi8(found[u].bytes));
    }
    for (int u = 0; u < 2 && pair + u * in_unit < n; ++u) {
      const int64_t left = n - pair - u * in_unit, b = (n - left) / block;
      const Groups groups{group + static_cast<uint64_t>(b) * groups_per_block, groups_per_block};
      encode_codes(e, strip.unit[u], found[u].multipliers, groups, words);
      uint8_t* out = values + b * block_bytes;
      if (left >= in_unit) {
        store_words(words, block_bytes / 4, out, block_bytes);
        continue;
      }
      // Whole groups of 16, then the padding of the row.
      alignas(64) uint8_t last[kLanes * kMaxBlock];
      store_words(words, block_bytes / 4, last, block_bytes);
      const int64_t used = round_up(left, 16) * bits / 8;
      const int64_t end = row_bytes(e.format.element, left);
      std::memcpy(out, last, static_cast<std::size_t>(used));
      std::memset(out + used, 0, static_cast<std::size_t>(end - used));
    }
  }
}

void encode_columns(const Encoding& e, const void* x, int64_t pitch, int rows, int cols,
                    uint64_t group, uint64_t group_pitch, GivenScales given, uint8_t* values,
                    uint8_t (*scales)[kStripCols]) {
  const int block = e.format.block;
  const int block_bytes = block * element_bits(e.format) / 8;
  if (is_plain_nvfp4(e) && e.dtype == Dtype::bf16 && !given.scales && cols == kStripCols &&
      rows % 16 == 0 &&
      encode_finite_strip(e, static_cast<const uint8_t*>(x), pitch, rows / 16, values, scales))
    return;
  Strip strip;
  Words words;
  Scales found[2];
  for (int b = 0; b * block < rows; ++b) {
    const int row = b * block;
    load_columns(e.dtype, strip, at(e.dtype, x, row * pitch), pitch, std::min(block, rows - row),
                 block, cols);
    for (int c = 0, u = 0; c < cols; c += kLanes, ++u) {
      const int64_t tile = b + c / block * given.pitch;
      Scales known;
      if (given.scales) known = {set1(given.scales[tile]), _mm512_set1_ps(given.multipliers[tile])};
      found[u] = prepare(e, strip.unit[u], given.scales ? &known : nullptr);
      store128(scales[b] + c, _mm512_cvtepi32_epi8(found[u].bytes));
    }
    for (int c = 0, u = 0; c < cols; c += kLanes, ++u) {
      const uint64_t first = group + static_cast<uint64_t>(c) * group_pitch;
      const Groups groups{first + static_cast<uint64_t>(row / 16), group_pitch};
      encode_codes(e, strip.unit[u], found[u].multipliers, groups, words);
      store_words(words, block_bytes / 4, values + c * kStripPitch + b * block_bytes, kStripPitch);
    }
  }
}

}  // namespace

const QuantizeKernels& avx512_quantize_kernels() {
  static const QuantizeKernels kernels = [] {
    QuantizeKernels k = avx512_reading_quantize_kernels();
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
#pragma GCC diagnostic pop

#else

namespace jax_fp4::cpu {
const QuantizeKernels& avx512_quantize_kernels() { return portable_quantize_kernels(); }
}  // namespace jax_fp4::cpu

#endif

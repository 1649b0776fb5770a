// Rounding to small elements, random bits, scales and stores of 16 blocks at a time: what the
// AVX-512 kernels that encode share.
//
// To be included like quantize_avx512_unit.h, after it.
#pragma once

namespace jax_fp4::cpu {
namespace {

// ---- Rounding -----------------------------------------------------------------------------------

// Magnitudes as codes of `kElement`. With p = 2^e the power of two at or below |y| (that of the
// smallest normal number at least), a step of the code is 2^(e - mantissa_bits). Adding the power
// of two whose last place is one step rounds |y| to whole steps, which then are the low bits of the
// sum.
template <Element kElement>
struct Rounding {
  static constexpr Minifloat kKind = minifloat(kElement);
  static constexpr int kShift = 23 - kKind.mantissa_bits;
  static constexpr uint32_t kLowest = static_cast<uint32_t>(127 + kKind.min_exponent()) << 23;

  struct Parts {
    V magnitude;  // min(|y|, max)
    I power;      // bits of p
  };
  static inline Parts parts(V y) {
    constexpr int kSmallerMagnitudeSignCleared = 0b1010;
    const V a = _mm512_range_ps(y, _mm512_set1_ps(kKind.max), kSmallerMagnitudeSignCleared);
    const V normal = _mm512_max_ps(a, as_float(set1(kLowest)));
    return {a, _mm512_and_si512(as_int(normal), set1(kF32InfBits))};
  }
  static inline I base(I power) {
    return _mm512_srli_epi32(_mm512_sub_epi32(power, set1(kLowest)), kShift);
  }

  struct Nearest {
    I code;
    V value;  // of the code
  };
  static inline Nearest nearest(V y) {
    const Parts p = parts(y);
    const I magic = _mm512_add_epi32(p.power, set1(static_cast<uint32_t>(kShift) << 23));
    const V sum = _mm512_add_ps(p.magnitude, as_float(magic));
    const I steps = _mm512_sub_epi32(as_int(sum), magic);
    return {_mm512_add_epi32(steps, base(p.power)), _mm512_sub_ps(sum, as_float(magic))};
  }
  // The same with steps 256 times smaller, truncated; random bytes decide about the last 8 bits.
  static inline I stochastic(V y, I random) {
    const Parts p = parts(y);
    const I magic = _mm512_add_epi32(p.power, set1(static_cast<uint32_t>(kShift - 8) << 23));
    const V sum =
        _mm512_add_round_ps(p.magnitude, as_float(magic), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    const I fine = _mm512_add_epi32(_mm512_sub_epi32(as_int(sum), magic), random);
    return _mm512_add_epi32(_mm512_srli_epi32(fine, 8), base(p.power));
  }
};

// Philox4x32-10 of 16 counters (low, high, stream, 0).
void philox(I low, I high, uint32_t stream, uint64_t seed, I (&word)[4]) {
  constexpr Mask kOdd = 0xAAAA, kEven = 0x5555;
  word[0] = low;
  word[1] = high;
  word[2] = set1(stream);
  word[3] = _mm512_setzero_si512();
  auto key_low = static_cast<uint32_t>(seed), key_high = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    I product_low[2], product_high[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const I factor = set1(i == 0 ? 0xD251'1F53u : 0xCD9E'8D57u);
      const I even = _mm512_mul_epu32(word[2 * i], factor);
      const I odd = _mm512_mul_epu32(_mm512_srli_epi64(word[2 * i], 32), factor);
      product_low[i] = _mm512_mask_shuffle_epi32(even, kOdd, odd, _MM_PERM_CDAB);
      product_high[i] = _mm512_mask_shuffle_epi32(odd, kEven, even, _MM_PERM_CDAB);
    }
    constexpr int kXor3 = 0x96;
    word[0] = _mm512_ternarylogic_epi32(product_high[1], word[1], set1(key_low), kXor3);
    word[2] = _mm512_ternarylogic_epi32(product_high[0], word[3], set1(key_high), kXor3);
    word[1] = product_low[1];
    word[3] = product_low[0];
    key_low += 0x9E37'79B9u;
    key_high += 0xBB67'AE85u;
  }
}

// group + lane * pitch as low and high words.
inline void group_numbers(uint64_t group, uint64_t pitch, I& low, I& high) {
  const I lanes = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  const I step = _mm512_set1_epi64(static_cast<long long>(pitch));
  const I first = _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(group)),
                                   _mm512_mullo_epi64(lanes, step));
  const I second = _mm512_add_epi64(first, _mm512_slli_epi64(step, 3));
  const I even = _mm512_slli_epi32(lane_numbers(), 1);
  low = _mm512_permutex2var_epi32(first, even, second);
  high = _mm512_permutex2var_epi32(first, _mm512_or_si512(even, set1(1)), second);
}

// ---- Scales -------------------------------------------------------------------------------------

struct Scales {
  I bytes;
  V multipliers;
};

// minimum() of numerics/base.h: the second operand where either is NaN.
inline V minimum(V a, float b) { return _mm512_min_ps(a, _mm512_set1_ps(b)); }

inline V nvfp4_multipliers(V scale, float encode) {
  const V decoded = _mm512_mul_ps(scale, _mm512_set1_ps(1.0f / encode));
  return minimum(_mm512_div_ps(_mm512_set1_ps(1.0f), decoded), kF32Max);
}

// The largest element is at least 6, so that bytes end at 253: nothing saturates, and multipliers
// are normal numbers.
inline Scales mx_scales(const Encoding& e, I amax) {
  const float max = minifloat(e.format.element).max;
  I bytes;
  if (e.rule == ScaleRule::rceil) {
    const I bits = as_int(_mm512_mul_ps(as_float(amax), _mm512_set1_ps(1.0f / max)));
    const Mask above_lowest = _mm512_cmpgt_epu32_mask(bits, set1(0x40'0000u));  // 2^-127
    bytes = _mm512_maskz_srli_epi32(above_lowest, _mm512_add_epi32(bits, set1(0x7F'FFFFu)), 23);
  } else {
    // A subnormal amax lies below every scale but the lowest.
    const I exponent =
        _mm512_sub_epi32(_mm512_srli_epi32(amax, 23), set1(static_cast<uint32_t>(floor_log2(max))));
    bytes = _mm512_max_epi32(exponent, _mm512_setzero_si512());
  }
  return {bytes, as_float(_mm512_slli_epi32(_mm512_sub_epi32(set1(254), bytes), 23))};
}

// encode_block of 16 blocks with finite amax bits.
inline Scales block_scales(const Encoding& e, I amax) {
  switch (e.format.scale) {
    case BlockScale::ue4m3: {
      constexpr float kSixth = 1.0f / 6.0f;
      const V target = _mm512_mul_ps(as_float(amax), _mm512_set1_ps(e.encode * kSixth));
      const auto scale = Rounding<Element::e4m3>::nearest(minimum(target, kF32Max));
      return {scale.code, nvfp4_multipliers(scale.value, e.encode)};
    }
    case BlockScale::ue8m0: return mx_scales(e, amax);
    case BlockScale::unit: break;
  }
  return {set1(kUE8M0One), _mm512_set1_ps(e.encode)};
}

struct Candidate {
  Scales scales;
  V errors;
};

// One of the two scales of four-over-six, and the sum of errors it makes.
Candidate four_over_six_candidate(const Encoding& e, const Unit& unit, V target) {
  const auto scale = Rounding<Element::e4m3>::nearest(minimum(target, 448.0f));
  Candidate c{{scale.code, nvfp4_multipliers(scale.value, e.encode)}, _mm512_setzero_ps()};
  for (int j = 0; j < 16; ++j) {
    const V y = _mm512_mul_ps(unit.x[j], c.scales.multipliers);
    const V product = _mm512_mul_ps(Rounding<Element::e2m1>::nearest(y).value, scale.value);
    const V decoded = _mm512_div_ps(_mm512_mul_ps(product, _mm512_set1_ps(e.amax)),
                                    _mm512_set1_ps(kFourOverSixTensorMax));
    // Both are magnitudes here; their signs agree.
    const V error = _mm512_sub_ps(decoded, as_float(abs_bits(unit.x[j])));
    c.errors = _mm512_add_ps(c.errors, as_float(abs_bits(error)));
  }
  return c;
}

Scales four_over_six_scales(const Encoding& e, const Unit& unit, I amax) {
  const V sixth = _mm512_div_ps(as_float(amax), _mm512_set1_ps(6.0f));
  const V base = minimum(_mm512_mul_ps(sixth, _mm512_set1_ps(e.encode)), kF32Max);
  const Candidate six = four_over_six_candidate(e, unit, base);
  const Candidate four =
      four_over_six_candidate(e, unit, _mm512_mul_ps(base, _mm512_set1_ps(1.5f)));
  const Mask take_four = _mm512_cmp_ps_mask(four.errors, six.errors, _CMP_LT_OQ);
  return {_mm512_mask_mov_epi32(six.scales.bytes, take_four, four.scales.bytes),
          _mm512_mask_mov_ps(six.scales.multipliers, take_four, four.scales.multipliers)};
}

// ---- Storing ------------------------------------------------------------------------------------

// Packed codes of a unit: word w of every block. A block of 16 4-bit codes has 2 words, one of 32
// 8-bit codes has 8.
struct alignas(64) Words {
  I word[8];
};

inline void store128(uint8_t* p, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x); }

// The words of lane i to out + i * pitch.
void store_words(const Words& words, int count, uint8_t* out, int64_t pitch) {
  int w = 0;
  for (; w + 4 <= count; w += 4) {
    I quad[4] = {words.word[w], words.word[w + 1], words.word[w + 2], words.word[w + 3]};
    transpose4(quad);
    for (int i = 0; i < 4; ++i) {
      uint8_t* p = out + 4 * w + i * pitch;
      store128(p, _mm512_castsi512_si128(quad[i]));
      store128(p + 4 * pitch, _mm512_extracti32x4_epi32(quad[i], 1));
      store128(p + 8 * pitch, _mm512_extracti32x4_epi32(quad[i], 2));
      store128(p + 12 * pitch, _mm512_extracti32x4_epi32(quad[i], 3));
    }
  }
  if (w == count) return;
  // Two words remain: lanes 0-7 and 8-15 as 64-bit pairs.
  const I even = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const I first = _mm512_permutex2var_epi32(words.word[w], even, words.word[w + 1]);
  const I second =
      _mm512_permutex2var_epi32(words.word[w], _mm512_add_epi32(even, set1(8)), words.word[w + 1]);
  out += 4 * w;
  if (pitch == 8) {
    _mm512_storeu_si512(out, first);
    _mm512_storeu_si512(out + 64, second);
    return;
  }
  alignas(64) uint64_t pairs[kLanes];
  _mm512_store_si512(pairs, first);
  _mm512_store_si512(pairs + 8, second);
  for (int i = 0; i < kLanes; ++i) std::memcpy(out + i * pitch, &pairs[i], 8);
}

}  // namespace
}  // namespace jax_fp4::cpu

// Rounding to small elements, random bits, scales and stores of 8 blocks at a time: what the AVX2
// kernels that encode share.
//
// To be included like quantize_avx2_unit.h, after it.
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
    const V a = _mm256_min_ps(as_float(abs_bits(y)), _mm256_set1_ps(kKind.max));
    const V normal = _mm256_max_ps(a, as_float(set1(kLowest)));
    return {a, _mm256_and_si256(as_int(normal), set1(kF32InfBits))};
  }
  static inline I base(I power) {
    return _mm256_srli_epi32(_mm256_sub_epi32(power, set1(kLowest)), kShift);
  }

  struct Nearest {
    I code;
    V value;  // of the code
  };
  static inline Nearest nearest(V y) {
    const Parts p = parts(y);
    const I magic = _mm256_add_epi32(p.power, set1(static_cast<uint32_t>(kShift) << 23));
    const V sum = _mm256_add_ps(p.magnitude, as_float(magic));
    const I steps = _mm256_sub_epi32(as_int(sum), magic);
    return {_mm256_add_epi32(steps, base(p.power)), _mm256_sub_ps(sum, as_float(magic))};
  }
  // |y| in steps 256 times smaller, truncated; random bytes decide about the last 8 bits. The
  // factor that makes steps of |y| is a power of two, so that the product is exact.
  static inline I stochastic(V y, I random) {
    const Parts p = parts(y);
    constexpr uint32_t kPowers = static_cast<uint32_t>(2 * 127 + kKind.mantissa_bits + 8) << 23;
    const V factor = as_float(_mm256_sub_epi32(set1(kPowers), p.power));
    const I fine = _mm256_cvttps_epi32(_mm256_mul_ps(p.magnitude, factor));
    return _mm256_add_epi32(_mm256_srli_epi32(_mm256_add_epi32(fine, random), 8), base(p.power));
  }
};

// E2M1 needs no power of two: as a function of its value the code is concave and piecewise linear,
// min(2a, a + 2, a / 2 + 4), and at most 7. Each of these lines is rounded once, by the addition of
// 2^23, whose last place is 1; ties go to even codes. (A constant that were exact by itself would
// not do: a + 2 rounds before it is rounded to a whole number.) The code is the low bits of the
// sum.
inline constexpr float kE2M1Magic = 0x1p23f;
inline V e2m1_sum(V a) {
  const V half = _mm256_set1_ps(0.5f), two = _mm256_set1_ps(2.0f);
  const V below2 = _mm256_fmadd_ps(a, two, _mm256_set1_ps(kE2M1Magic));
  const V below4 = _mm256_add_ps(a, _mm256_set1_ps(kE2M1Magic + 2));
  const V above4 = _mm256_fmadd_ps(a, half, _mm256_set1_ps(kE2M1Magic + 4));
  const V most = _mm256_set1_ps(kE2M1Magic + 7);
  return _mm256_min_ps(_mm256_min_ps(below2, below4), _mm256_min_ps(above4, most));
}

template <Element kElement>
inline I nearest_code(V y) {
  if constexpr (kElement == Element::e2m1)
    return _mm256_and_si256(as_int(e2m1_sum(as_float(abs_bits(y)))), set1(7));
  return Rounding<kElement>::nearest(y).code;
}

// Group numbers of lanes: first + lane * pitch.
struct Groups {
  uint64_t first, pitch;
};

// Philox4x32-10 of the counters (group, stream, 0) of 8 groups. The groups with even and with odd
// numbers are computed apart, one word in the low half of each 64-bit lane: a product of these
// leaves both of its words where the next round wants them. High halves hold anything.
inline void philox(Groups groups, uint32_t stream, uint64_t seed, I (&random)[4]) {
  I word[2][4];
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd) {
    const auto group = [&](uint64_t lane) {
      return static_cast<long long>(groups.first + lane * groups.pitch);
    };
    const auto first = static_cast<uint64_t>(odd);
    word[odd][0] =
        _mm256_setr_epi64x(group(first), group(first + 2), group(first + 4), group(first + 6));
    word[odd][1] = _mm256_srli_epi64(word[odd][0], 32);
    word[odd][2] = set1(stream);
    word[odd][3] = _mm256_setzero_si256();
  }
  auto key_low = static_cast<uint32_t>(seed), key_high = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      I(&w)[4] = word[odd];
      const I product0 = _mm256_mul_epu32(w[0], set1(0xD251'1F53u));
      const I product1 = _mm256_mul_epu32(w[2], set1(0xCD9E'8D57u));
      const I key0 = _mm256_xor_si256(w[1], set1(key_low));
      const I key1 = _mm256_xor_si256(w[3], set1(key_high));
      w[0] = _mm256_xor_si256(_mm256_srli_epi64(product1, 32), key0);
      w[2] = _mm256_xor_si256(_mm256_srli_epi64(product0, 32), key1);
      w[1] = product1;
      w[3] = product0;
    }
    key_low += 0x9E37'79B9u;
    key_high += 0xBB67'AE85u;
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    random[i] = _mm256_blend_epi32(word[0][i], _mm256_slli_epi64(word[1][i], 32), 0b1010'1010);
}

// ---- Scales -------------------------------------------------------------------------------------

struct Scales {
  I bytes;
  V multipliers;
};

// minimum() of numerics/base.h: the second operand where either is NaN.
inline V minimum(V a, float b) { return _mm256_min_ps(a, _mm256_set1_ps(b)); }

inline V nvfp4_multipliers(V scale, float encode) {
  const V decoded = _mm256_mul_ps(scale, _mm256_set1_ps(1.0f / encode));
  return minimum(_mm256_div_ps(_mm256_set1_ps(1.0f), decoded), kF32Max);
}

// The largest element is at least 6, so that bytes end at 253: nothing saturates, and multipliers
// are normal numbers.
inline Scales mx_scales(const Encoding& e, I amax) {
  const float max = minifloat(e.format.element).max;
  I bytes;
  if (e.rule == ScaleRule::rceil) {
    const I bits = as_int(_mm256_mul_ps(as_float(amax), _mm256_set1_ps(1.0f / max)));
    const I above_lowest = _mm256_cmpgt_epi32(bits, set1(0x40'0000u));  // 2^-127
    const I up = _mm256_srli_epi32(_mm256_add_epi32(bits, set1(0x7F'FFFFu)), 23);
    bytes = _mm256_and_si256(above_lowest, up);
  } else {
    // A subnormal amax lies below every scale but the lowest.
    const I exponent =
        _mm256_sub_epi32(_mm256_srli_epi32(amax, 23), set1(static_cast<uint32_t>(floor_log2(max))));
    bytes = _mm256_max_epi32(exponent, _mm256_setzero_si256());
  }
  return {bytes, as_float(_mm256_slli_epi32(_mm256_sub_epi32(set1(254), bytes), 23))};
}

// encode_block of 8 blocks with finite amax bits.
inline Scales block_scales(const Encoding& e, I amax) {
  switch (e.format.scale) {
    case BlockScale::ue4m3: {
      constexpr float kSixth = 1.0f / 6.0f;
      const V target = _mm256_mul_ps(as_float(amax), _mm256_set1_ps(e.encode * kSixth));
      const auto scale = Rounding<Element::e4m3>::nearest(minimum(target, kF32Max));
      return {scale.code, nvfp4_multipliers(scale.value, e.encode)};
    }
    case BlockScale::ue8m0: return mx_scales(e, amax);
    case BlockScale::unit: break;
  }
  return {set1(kUE8M0One), _mm256_set1_ps(e.encode)};
}

struct Candidate {
  Scales scales;
  V errors;
};

// One of the two scales of four-over-six, and the sum of errors it makes.
inline Candidate four_over_six_candidate(const Encoding& e, const Unit& unit, V target) {
  const auto scale = Rounding<Element::e4m3>::nearest(minimum(target, 448.0f));
  Candidate c{{scale.code, nvfp4_multipliers(scale.value, e.encode)}, _mm256_setzero_ps()};
  for (int j = 0; j < 16; ++j) {
    const V y = _mm256_mul_ps(unit.x[j], c.scales.multipliers);
    const V product = _mm256_mul_ps(Rounding<Element::e2m1>::nearest(y).value, scale.value);
    const V decoded = _mm256_div_ps(_mm256_mul_ps(product, _mm256_set1_ps(e.amax)),
                                    _mm256_set1_ps(kFourOverSixTensorMax));
    // Both are magnitudes here; their signs agree.
    const V error = _mm256_sub_ps(decoded, as_float(abs_bits(unit.x[j])));
    c.errors = _mm256_add_ps(c.errors, as_float(abs_bits(error)));
  }
  return c;
}

inline Scales four_over_six_scales(const Encoding& e, const Unit& unit, I amax) {
  const V sixth = _mm256_div_ps(as_float(amax), _mm256_set1_ps(6.0f));
  const V base = minimum(_mm256_mul_ps(sixth, _mm256_set1_ps(e.encode)), kF32Max);
  const Candidate six = four_over_six_candidate(e, unit, base);
  const Candidate four =
      four_over_six_candidate(e, unit, _mm256_mul_ps(base, _mm256_set1_ps(1.5f)));
  const I take_four = as_int(_mm256_cmp_ps(four.errors, six.errors, _CMP_LT_OQ));
  return {select(six.scales.bytes, four.scales.bytes, take_four),
          select(six.scales.multipliers, four.scales.multipliers, take_four)};
}

// ---- Storing ------------------------------------------------------------------------------------

// The low bytes of 8 lanes that hold nothing else.
inline void store_bytes(uint8_t* p, I lanes) {
  const __m128i halves = _mm_packus_epi32(low128(lanes), high128(lanes));
  store64(p, _mm_packus_epi16(halves, halves));
}

// Packed codes of a unit: word w of every block. A block of 16 4-bit codes has 2 words, one of 32
// 8-bit codes has 8.
struct alignas(32) Words {
  I word[8];
};

// The words of lane i to out + i * pitch.
inline void store_words(const Words& words, int count, uint8_t* out, int64_t pitch) {
  int w = 0;
  for (; w + 4 <= count; w += 4) {
    I quad[4] = {words.word[w], words.word[w + 1], words.word[w + 2], words.word[w + 3]};
    transpose4(quad);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      uint8_t* p = out + 4 * w + i * pitch;
      store128(p, low128(quad[i]));
      store128(p + 4 * pitch, high128(quad[i]));
    }
  }
  if (w == count) return;
  // Two words remain: 64-bit pairs of lanes 0 1 4 5 and 2 3 6 7.
  const I first = _mm256_unpacklo_epi32(words.word[w], words.word[w + 1]);
  const I second = _mm256_unpackhi_epi32(words.word[w], words.word[w + 1]);
  const __m128i pairs[4] = {low128(first), low128(second), high128(first), high128(second)};
  out += 4 * w;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    store64(out + 2 * i * pitch, pairs[i]);
    store64(out + (2 * i + 1) * pitch, _mm_unpackhi_epi64(pairs[i], pairs[i]));
  }
}

}  // namespace
}  // namespace jax_fp4::cpu

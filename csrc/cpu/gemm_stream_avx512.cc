// The product of a few rows with many, without panels: every packed byte of the many rows is read
// once and used at once, so that one token against a weight matrix runs at the speed of memory.
//
//   prepare   the few rows, in the order in which dot() meets codes of the many
//   dot       E2M1 x E2M1     integer: 128 codes (64 bytes) at a time
//             other pairs     f32: 32 codes at a time
//
// Integers: twice an E2M1 value is a whole number up to 12. A byte shuffle turns the codes of the
// many rows into 2 * value + 12 (vpdpbusd wants one unsigned factor), low nibbles and high nibbles
// apart; what the 12 adds is known beforehand and is where the sum starts (`correction`). Four
// bytes of low and four of high nibbles meet in a 32-bit lane: eight consecutive codes, which share
// a scale. The lane's integer times both scales is exact in f32; only adding it rounds.
#if defined(__x86_64__)

#include <cstring>

#include "cpu/gemm_avx512_decode.h"

#if defined(__clang__)
#pragma clang attribute push(                                                                     \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,fma,f16c")
#endif

namespace jax_fp4::cpu {
namespace {

// ---- E2M1 x E2M1

constexpr i64 kChunk = 128;  // codes
constexpr int kBias = 12;
constexpr int kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// 128 codes of one of the few rows.
struct alignas(64) FewChunk {
  std::int8_t even[64], odd[64];  // 2 * value of codes 2i and 2i + 1
  i32 correction[16];             // -kBias * sum, per lane of eight codes
  float scale[16];                // per lane; times 1/4, since both factors are doubled
};

void prepare_fp4(const Rows& few, const RowScales& scales, u8* memory) {
  FewChunk* chunks = reinterpret_cast<FewChunk*>(memory);
  const i64 count = ceil_div(few.k, kChunk);
  std::memset(memory, 0, static_cast<std::size_t>(few.rows * count) * sizeof(FewChunk));
  for (i64 row = 0; row < few.rows; ++row) {
    const u8* codes = few.codes(row);
    const ScaleRow bytes = scale_row(few, row);
    for (i64 k = 0; k < few.k; ++k) {
      FewChunk& chunk = chunks[(k / kChunk) * few.rows + row];
      const i64 place = k % kChunk;
      const int doubled = kDoubled[load_code(Element::e2m1, codes, k)];
      (place % 2 == 0 ? chunk.even : chunk.odd)[place / 2] = static_cast<std::int8_t>(doubled);
      chunk.correction[place / 8] -= kBias * doubled;
      if (place % 8 == 0)
        chunk.scale[place / 8] =
            0.25f * panel_scale(few.format.scale, bytes[k / few.format.block], scales.base[row]);
    }
  }
}

// Scales of chunk after chunk of one of the many rows, one per lane of eight codes.
template <BlockScale kind>
class LaneScales {
 public:
  LaneScales() = default;
  LaneScales(const Rows& x, i64 row, i32 base)
      : first_(scale_row(x, row)),
        tiled_(x.layout == ScaleLayout::tiled),
        blocks_(x.blocks()),
        base_(_mm512_set1_epi32(base)) {}

  __m512 operator()(i64 chunk) const {
    const __m128i spread = kBlocks == 8
                               ? _mm_set_epi8(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0)
                               : _mm_set_epi8(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m128i lanes = _mm_shuffle_epi8(bytes(chunk * kBlocks), spread);
    if constexpr (kind == BlockScale::ue4m3) {
      // As in scale_lanes, on 16-bit lanes.
      const __m256i magnitude =
          _mm256_and_si256(_mm256_cvtepu8_epi16(lanes), _mm256_set1_epi16(0x7F));
      const __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(kUE4M3NaN));
      const __m256i half =
          _mm256_mask_mov_epi16(_mm256_slli_epi16(magnitude, 7), nan, _mm256_set1_epi16(0x7E00));
      return _mm512_cvtph_ps(half);
    } else {
      return scale_lanes<kind>(_mm512_cvtepu8_epi32(lanes), base_, _mm512_set1_ps(1.0f));
    }
  }

  // What is missing in the scales above.
  static constexpr float kFactor = kind == BlockScale::ue4m3 ? 256.0f : 1.0f;

 private:
  static constexpr i64 kBlocks = kind == BlockScale::ue4m3 ? 8 : 4;  // per chunk

  __m128i bytes(i64 block) const {
    const i64 left = blocks_ - block;
    if (tiled_) {
      // Tiles of four blocks; bytes of blocks that do not exist are there.
      const u8* quad = first_.at(block);
      u32 low, high = 0;
      std::memcpy(&low, quad, 4);
      if (kBlocks == 8 && left > 4) std::memcpy(&high, quad + first_.tile, 4);
      return mask(_mm_set_epi32(0, 0, static_cast<int>(high), static_cast<int>(low)), left);
    }
    const u8* address = first_.first + block;
    if (left >= 8) return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(address));
    return _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << left) - 1), address);
  }

  static __m128i mask(__m128i bytes, i64 left) {
    if (left >= kBlocks) return bytes;
    return _mm_maskz_mov_epi8(static_cast<__mmask16>((1u << left) - 1), bytes);
  }

  ScaleRow first_;
  bool tiled_;
  i64 blocks_;
  __m512i base_;
};

// kFew of the few rows with kMany of the many at a time: that many sums in registers.
template <BlockScale kind, int kFew, int kMany>
void dot_fp4_rows(const u8* prepared, i64 few, const Rows& many, const RowScales& scales, i64 row,
                  float* sums, i64 pitch) {
  const __m512i table = _mm512_broadcast_i32x4(_mm_set_epi8(
      kBias - 12, kBias - 8, kBias - 6, kBias - 4, kBias - 3, kBias - 2, kBias - 1, kBias,
      kBias + 12, kBias + 8, kBias + 6, kBias + 4, kBias + 3, kBias + 2, kBias + 1, kBias));
  const __m512i nibble = _mm512_set1_epi8(0x0F);
  const i64 bytes = row_bytes(Element::e2m1, many.k);
  const u8* codes = many.codes(row);
  LaneScales<kind> lane_scales[kMany];
  __m512 acc[kFew][kMany];
  for (int m = 0; m < kMany; ++m) {
    lane_scales[m] = LaneScales<kind>(many, row + m, scales.base[row + m]);
    for (int f = 0; f < kFew; ++f) acc[f][m] = _mm512_setzero_ps();
  }
  const FewChunk* chunk = reinterpret_cast<const FewChunk*>(prepared);
  for (i64 offset = 0; offset < bytes; offset += 64, chunk += few) {
    const i64 left = bytes - offset;
    const __mmask64 exists = left >= 64 ? ~u64{0} : (u64{1} << left) - 1;
    __m512i even[kMany], odd[kMany];
    __m512 scale[kMany];
    for (int m = 0; m < kMany; ++m) {
      const __m512i packed = _mm512_maskz_loadu_epi8(exists, codes + m * bytes + offset);
      even[m] = _mm512_shuffle_epi8(table, _mm512_and_si512(packed, nibble));
      odd[m] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble));
      scale[m] = lane_scales[m](offset / 64);
    }
    for (int f = 0; f < kFew; ++f)
      for (int m = 0; m < kMany; ++m) {
        __m512i sum = _mm512_load_si512(chunk[f].correction);
        sum = _mm512_dpbusd_epi32(sum, even[m], _mm512_load_si512(chunk[f].even));
        sum = _mm512_dpbusd_epi32(sum, odd[m], _mm512_load_si512(chunk[f].odd));
        const __m512 both = _mm512_mul_ps(scale[m], _mm512_load_ps(chunk[f].scale));
        acc[f][m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), both, acc[f][m]);
      }
  }
  for (int f = 0; f < kFew; ++f)
    for (int m = 0; m < kMany; ++m)
      sums[f * pitch + m] = _mm512_reduce_add_ps(acc[f][m]) * LaneScales<kind>::kFactor;
}

template <BlockScale kind, int kFew>
void dot_fp4_few(const u8* prepared, i64 few, const Rows& many, const RowScales& scales, i64 row0,
                 i64 row1, float* sums, i64 pitch) {
  i64 row = row0;
  for (; row + 2 <= row1; row += 2)
    dot_fp4_rows<kind, kFew, 2>(prepared, few, many, scales, row, sums + row - row0, pitch);
  if (row < row1)
    dot_fp4_rows<kind, kFew, 1>(prepared, few, many, scales, row, sums + row - row0, pitch);
}

// ---- Other pairs

i64 padded(i64 k) { return round_up(k, kStep); }

// f32 values in steps of 32, in the order in which f32_step gives those of the many rows.
void prepare_f32(const Rows& few, const RowScales& scales, bool many_e2m1, u8* memory) {
  float* out = reinterpret_cast<float*>(memory);
  std::vector<double> values(few.k);
  std::memset(memory, 0, static_cast<std::size_t>(few.rows * padded(few.k)) * sizeof(float));
  for (i64 row = 0; row < few.rows; ++row) {
    decode_row(few, row, values.data());
    for (i64 k = 0; k < few.k; ++k) {
      const i64 in_step = k % kStep;
      const i64 place = many_e2m1 ? in_step % 2 * 16 + in_step / 2 : in_step;
      out[(k - in_step) * few.rows + row * kStep + place] =
          static_cast<float>(values[k] / scales.power[row]);
    }
  }
}

struct F32Step {
  __m512 first, second;
};

// 32 codes from k on, without their scale: E2M1 codes even ones first, others in order.
template <Element element>
F32Step f32_step(const u8* codes, i64 k, i64 bytes) {
  constexpr int kBits = minifloat(element).bits();
  const i64 offset = k * kBits / 8;
  const i64 count = std::min<i64>(kStep * kBits / 8, bytes - offset);
  const __mmask32 mask = static_cast<__mmask32>((u64{1} << count) - 1);
  const __m256i packed = _mm256_maskz_loadu_epi8(mask, codes + offset);
  if constexpr (element == Element::e2m1) {
    const __m512i pairs = _mm512_cvtepu8_epi32(_mm256_castsi256_si128(packed));
    return {e2m1_values(pairs), e2m1_values(_mm512_srli_epi32(pairs, 4))};
  } else {
    const __m512i bits =
        half_bits<element>(_mm512_cvtepu8_epi16(kBits == 6 ? unpack_6bit(packed) : packed));
    return {low_half(bits), high_half(bits)};
  }
}

// The scales of up to kMaxDepthBlocks blocks of one row (block0 % 4 == 0), times `factor`; 0 where
// there is no block.
template <BlockScale kind>
void row_scales(const Rows& x, i64 row, i32 base, i64 block0, float factor, float* out) {
  u8 bytes[kMaxDepthBlocks] = {};
  const ScaleRow source = scale_row(x, row);
  const i64 count = std::min(kMaxDepthBlocks, x.blocks() - block0);
  if (x.layout == ScaleLayout::linear)
    std::memcpy(bytes, source.first + block0, static_cast<std::size_t>(count));
  else
    for (i64 b = 0; b < count; ++b) bytes[b] = static_cast<u8>(source[block0 + b]);
  for (i64 b = 0; b < kMaxDepthBlocks; b += 16) {
    const __m512i lanes =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + b)));
    _mm512_storeu_ps(out + b,
                     scale_lanes<kind>(lanes, _mm512_set1_epi32(base), _mm512_set1_ps(factor)));
  }
}

template <Element element, int kFew>
void dot_f32_few(const u8* prepared, i64 few, const Rows& many, const RowScales& scales, i64 row0,
                 i64 row1, float* sums, i64 pitch) {
  const i64 bytes = row_bytes(element, many.k);
  const int shift = block_shift(many.format);
  const auto decode_scales = many.format.scale == BlockScale::ue4m3 ? row_scales<BlockScale::ue4m3>
                                                                    : row_scales<BlockScale::ue8m0>;
  for (i64 row = row0; row < row1; ++row) {
    const u8* codes = many.codes(row);
    __m512 acc[kFew][2];
    for (int f = 0; f < kFew; ++f) acc[f][0] = acc[f][1] = _mm512_setzero_ps();
    const float* a = reinterpret_cast<const float*>(prepared);
    float scale[kMaxDepthBlocks];
    for (i64 k = 0; k < many.k; k += kStep, a += few * kStep) {
      if (k % kDepth == 0)
        decode_scales(many, row, scales.base[row], k >> shift, element_factor(element), scale);
      // Two halves of 16 codes may have scales of their own. With E2M1 a half is lanes 0-7 or 8-15
      // of both vectors, else it is one vector.
      __m512 first = _mm512_set1_ps(scale[(k % kDepth) >> shift]);
      __m512 second = _mm512_set1_ps(scale[(k % kDepth + 16) >> shift]);
      if constexpr (element == Element::e2m1)
        first = second = _mm512_mask_mov_ps(first, 0xFF00, second);
      const F32Step step = f32_step<element>(codes, k, bytes);
      const __m512 x = _mm512_mul_ps(step.first, first);
      const __m512 y = _mm512_mul_ps(step.second, second);
      for (int f = 0; f < kFew; ++f) {
        acc[f][0] = _mm512_fmadd_ps(x, _mm512_loadu_ps(a + f * kStep), acc[f][0]);
        acc[f][1] = _mm512_fmadd_ps(y, _mm512_loadu_ps(a + f * kStep + 16), acc[f][1]);
      }
    }
    for (int f = 0; f < kFew; ++f)
      sums[f * pitch + row - row0] = _mm512_reduce_add_ps(_mm512_add_ps(acc[f][0], acc[f][1]));
  }
}

// ---- Both

bool integer_pair(const Format& few, const Format& many) {
  return few == many && (many == kNVFP4 || many == kMXFP4);
}

i64 prepared_bytes(const Rows& few, const Format& many) {
  return few.rows * (integer_pair(few.format, many)
                         ? ceil_div(few.k, kChunk) * static_cast<i64>(sizeof(FewChunk))
                         : padded(few.k) * static_cast<i64>(sizeof(float)));
}

void prepare(const Rows& few, const RowScales& scales, const Format& many, u8* memory) {
  if (integer_pair(few.format, many))
    prepare_fp4(few, scales, memory);
  else
    prepare_f32(few, scales, many.element == Element::e2m1, memory);
}

template <int kFew>
void dot_few(const u8* prepared, const Format& few_format, i64 few, const Rows& many,
             const RowScales& scales, i64 row0, i64 row1, float* sums, i64 pitch) {
  if (!integer_pair(few_format, many.format)) {
    with_element(many.format.element, [&]<Element element>() {
      dot_f32_few<element, kFew>(prepared, few, many, scales, row0, row1, sums, pitch);
    });
  } else if (many.format.scale == BlockScale::ue4m3) {
    dot_fp4_few<BlockScale::ue4m3, kFew>(prepared, few, many, scales, row0, row1, sums, pitch);
  } else {
    dot_fp4_few<BlockScale::ue8m0, kFew>(prepared, few, many, scales, row0, row1, sums, pitch);
  }
}

void dot(const u8* prepared, const Rows& few, const Rows& many, const RowScales& scales, i64 row0,
         i64 row1, float* sums, i64 pitch) {
  // Four rows at a time, then what is left.
  for (i64 f = 0; f < few.rows;) {
    const i64 left = few.rows - f;
    const auto kernel = left >= 4 ? dot_few<4> : left >= 2 ? dot_few<2> : dot_few<1>;
    const i64 bytes = integer_pair(few.format, many.format)
                          ? f * static_cast<i64>(sizeof(FewChunk))
                          : f * kStep * static_cast<i64>(sizeof(float));
    kernel(prepared + bytes, few.format, few.rows, many, scales, row0, row1, sums + f * pitch,
           pitch);
    f += left >= 4 ? 4 : left >= 2 ? 2 : 1;
  }
}

}  // namespace

const StreamKernels& avx512_stream_kernels() {
  static const StreamKernels kernels = {prepared_bytes, prepare, dot};
  return kernels;
}

}  // namespace jax_fp4::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__

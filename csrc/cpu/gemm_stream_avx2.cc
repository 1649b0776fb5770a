// The product of a few rows with many, without panels: every packed byte of the many rows is read
// once and used at once.
//
//   prepare   the few rows, in the order in which dot() meets codes of the many
//   dot       E2M1 x E2M1     integer: 64 codes (32 bytes) at a time
//             other pairs     f32: 32 codes at a time
//
// Integers: twice an E2M1 value is a whole number up to 12. A byte shuffle turns the codes of the
// many rows into 2 * value + 12 (vpmaddubsw wants one unsigned factor), low nibbles and high
// nibbles apart; what the 12 adds is known beforehand and is where the sum starts (`correction`).
// Two bytes of low and two of high nibbles meet in a 16-bit lane (four codes: below 4 * 24 * 12, no
// saturation), two of these in a 32-bit lane: eight consecutive codes, which share a scale. The
// lane's integer times both scales is exact in f32; only adding it rounds.
#if defined(__x86_64__)

#include "cpu/gemm_avx2_decode.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace jax_fp4::cpu {
namespace {

float sum_of(__m256 x) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// ---- E2M1 x E2M1

constexpr i64 kChunk = 128;  // codes
constexpr i64 kChunkBytes = kChunk / 2;
constexpr int kBias = 12;
constexpr int kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// A chunk is two vectors of 64 codes. Their sums of eight codes are added in pairs: 16 codes to a
// 32-bit lane, in this order. Scales of either block size fall into place.
constexpr int kLane[kLanes] = {0, 1, 4, 5, 2, 3, 6, 7};  // of codes 16 i .. 16 i + 15

// 128 codes of one of the few rows.
struct alignas(32) FewChunk {
  std::int8_t even[64], odd[64];  // 2 * value of codes 2i and 2i + 1
  std::int16_t correction[16];    // -kBias * sum, of half a lane's codes
  float scale[kLanes];            // times 1/4: both factors are doubled
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
      const int lane = kLane[place / 16];
      std::int16_t& correction = chunk.correction[2 * lane + place / 4 % 2];
      correction = static_cast<std::int16_t>(correction - kBias * doubled);
      if (place % 16 == 0)
        chunk.scale[lane] =
            0.25f * panel_scale(few.format.scale, bytes[k / few.format.block], scales.base[row]);
    }
  }
}

// Turns the scale bytes of a chunk of one of the many rows into lanes, and sees NaN among them.
template <BlockScale kind>
class ChunkScales {
 public:
  static constexpr i64 kBlocks = kind == BlockScale::ue4m3 ? 8 : 4;  // per chunk

  explicit ChunkScales(i32 base)
      : up_(_mm_set1_epi8(static_cast<char>(std::max(-base, 0)))),
        down_(_mm_set1_epi8(static_cast<char>(std::max(base, 0)))) {}

  // Four bytes, and the next four at `next`.
  __m256 operator()(const u8* quad, const u8* next) {
    const __m128i zero = _mm_setzero_si128();
    int low;
    std::memcpy(&low, quad, 4);
    __m128i bytes = _mm_cvtsi32_si128(low);
    if constexpr (kind == BlockScale::ue4m3) {
      int high;
      std::memcpy(&high, next, 4);
      bytes = _mm_and_si128(_mm_insert_epi32(bytes, high, 1), _mm_set1_epi8(0x7F));
      largest_ = _mm_max_epu8(largest_, bytes);
      // As in scale_lanes: f16, but for a factor, from the high bytes of 16-bit lanes.
      const __m128i order = _mm_set_epi8(7, -1, 6, -1, 3, -1, 2, -1, 5, -1, 4, -1, 1, -1, 0, -1);
      return _mm256_cvtph_ps(_mm_srli_epi16(_mm_shuffle_epi8(bytes, order), 1));
    } else {
      largest_ = _mm_max_epu8(largest_, bytes);
      // The f32 exponent field, as in scale_lanes but in saturating bytes.
      __m128i field = _mm_subs_epu8(_mm_adds_epu8(bytes, up_), down_);
      field = _mm_max_epu8(field, _mm_set1_epi8(1));
      field = _mm_min_epu8(field, _mm_set1_epi8(static_cast<char>(127 + 64)));
      const __m128i order = _mm_set_epi8(3, -1, 3, -1, 1, -1, 1, -1, 2, -1, 2, -1, 0, -1, 0, -1);
      const __m128i high = _mm_srli_epi16(_mm_shuffle_epi8(field, order), 1);
      return _mm256_castsi256_ps(
          pair(_mm_unpacklo_epi16(zero, high), _mm_unpackhi_epi16(zero, high)));
    }
  }

  // What is missing in the lanes so far: a power of two, or NaN.
  float factor() const {
    constexpr u32 kNaN = kind == BlockScale::ue4m3 ? kUE4M3NaN : kUE8M0NaN;
    const __m128i nan = _mm_cmpeq_epi8(largest_, _mm_set1_epi8(static_cast<char>(kNaN)));
    if (_mm_movemask_epi8(nan) != 0) return kF32NaN;
    return kind == BlockScale::ue4m3 ? 256.0f : 1.0f;
  }

 private:
  __m128i up_, down_;  // minus the row's base, and the base: one of them is 0
  __m128i largest_ = _mm_setzero_si128();
};

// kFew of the few rows with one of the many.
template <BlockScale kind, int kFew>
void dot_fp4_row(const u8* prepared, i64 few, const Rows& many, i32 base, i64 row, float* sums,
                 i64 pitch) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_set_epi8(
      kBias - 12, kBias - 8, kBias - 6, kBias - 4, kBias - 3, kBias - 2, kBias - 1, kBias,
      kBias + 12, kBias + 8, kBias + 6, kBias + 4, kBias + 3, kBias + 2, kBias + 1, kBias));
  using Scales = ChunkScales<kind>;
  Scales scales(base);
  const ScaleRow scale_bytes = scale_row(many, row);
  const u8* quad = scale_bytes.first;
  i64 tile = scale_bytes.tile;
  const i64 bytes = row_bytes(Element::e2m1, many.k);
  const u8* codes = many.codes(row);
  __m256 acc[kFew];
#pragma GCC unroll 4
  for (int f = 0; f < kFew; ++f) acc[f] = _mm256_setzero_ps();
  const FewChunk* chunk = reinterpret_cast<const FewChunk*>(prepared);
  alignas(32) u8 last_codes[kChunkBytes], last_scales[Scales::kBlocks];
  for (i64 offset = 0; offset < bytes; offset += kChunkBytes, chunk += few) {
    const u8* at = codes + offset;
    if (bytes - offset < kChunkBytes) {
      std::memset(last_codes, 0, sizeof(last_codes));
      std::memcpy(last_codes, at, static_cast<std::size_t>(bytes - offset));
      at = last_codes;
    }
    const i64 block = offset / kChunkBytes * Scales::kBlocks;
    if (many.blocks() - block < Scales::kBlocks) {
      for (i64 b = 0; b < Scales::kBlocks; ++b)
        last_scales[b] =
            block + b < many.blocks() ? static_cast<u8>(scale_bytes[block + b]) : u8{0};
      quad = last_scales;
      tile = kScaleTileBlocks;
    }
    const __m256 scale = scales(quad, quad + tile);
    quad += Scales::kBlocks / kScaleTileBlocks * tile;
    const __m256i packed[2] = {load_256(at), load_256(at + 32)};
    __m256i even[2], odd[2];
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      even[v] = _mm256_shuffle_epi8(table, low_nibbles(packed[v]));
      odd[v] = _mm256_shuffle_epi8(table, high_nibbles(packed[v]));
    }
#pragma GCC unroll 4
    for (int f = 0; f < kFew; ++f) {
      const FewChunk& x = chunk[f];
      __m256 eights[2];  // pairs of 16-bit sums
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v)
        eights[v] = _mm256_castsi256_ps(
            _mm256_add_epi16(_mm256_maddubs_epi16(even[v], load_256(x.even + v * 32)),
                             _mm256_maddubs_epi16(odd[v], load_256(x.odd + v * 32))));
      const __m256i first = _mm256_castps_si256(_mm256_shuffle_ps(eights[0], eights[1], 0x88));
      const __m256i second = _mm256_castps_si256(_mm256_shuffle_ps(eights[0], eights[1], 0xDD));
      const __m256i sum = _mm256_add_epi16(_mm256_add_epi16(first, second), load_256(x.correction));
      const __m256 whole = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
      acc[f] = _mm256_fmadd_ps(whole, _mm256_mul_ps(scale, _mm256_load_ps(x.scale)), acc[f]);
    }
  }
#pragma GCC unroll 4
  for (int f = 0; f < kFew; ++f) sums[f * pitch] = sum_of(acc[f]) * scales.factor();
}

template <BlockScale kind, int kFew>
void dot_fp4_few(const u8* prepared, i64 few, const Rows& many, const RowScales& scales, i64 row0,
                 i64 row1, float* sums, i64 pitch) {
  for (i64 row = row0; row < row1; ++row)
    dot_fp4_row<kind, kFew>(prepared, few, many, scales.base[row], row, sums + row - row0, pitch);
}

// ---- Other pairs
//
// Operands share a block size, so that NVFP4 meets only itself: here blocks are of kStep codes, and
// scales powers of two. The sum of a block's products is scaled, not its codes.

i64 padded(i64 k) { return round_up(k, kStep); }

// Where f32_step leaves code `k` of a step.
constexpr i64 place(bool e2m1, i64 k) {
  if (!e2m1) return k;
  const i64 in_half = k % 16;
  return k / 16 * 16 + in_half / 2 % 2 * kLanes + in_half % 2 * 4 + in_half / 4;
}

// 32 codes from k on as value / element_factor.
template <Element element>
[[gnu::always_inline]] inline void f32_step(const u8* codes, i64 k, i64 bytes, __m256* values) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256i loaded = load_codes<element>(codes, k, bytes);
  if constexpr (element == Element::e2m1) {
    // Even codes in the low 128 bits, odd ones in the high.
    const __m128i packed = _mm256_castsi256_si128(loaded);
    const E2M1Words words = e2m1_words(low_nibbles(pair(packed, _mm_srli_epi16(packed, 4))));
    values[0] = even_words(words.low), values[1] = odd_words(words.low);
    values[2] = even_words(words.high), values[3] = odd_words(words.high);
  } else {
    const __m256i first = half_words<element>(_mm256_unpacklo_epi8(zero, loaded));
    const __m256i second = half_words<element>(_mm256_unpackhi_epi8(zero, loaded));
    values[0] = low_half(first), values[1] = low_half(second);
    values[2] = high_half(first), values[3] = high_half(second);
  }
}

// f32 values in steps of 32, in the order in which f32_step gives those of the many rows, times
// what is missing there.
void prepare_f32(const Rows& few, const RowScales& scales, Element many, u8* memory) {
  float* out = reinterpret_cast<float*>(memory);
  std::vector<double> values(few.k);
  std::memset(memory, 0, static_cast<std::size_t>(few.rows * padded(few.k)) * sizeof(float));
  for (i64 row = 0; row < few.rows; ++row) {
    const double factor = element_factor(many) / scales.power[row];
    decode_row(few, row, values.data());
    for (i64 k = 0; k < few.k; ++k) {
      float* step = out + k / kStep * kStep * few.rows + row * kStep;
      step[place(many == Element::e2m1, k % kStep)] = static_cast<float>(values[k] * factor);
    }
  }
}

template <Element element, int kFew>
void dot_f32_few(const u8* prepared, i64 few, const Rows& many, const RowScales& scales, i64 row0,
                 i64 row1, float* sums, i64 pitch) {
  const i64 bytes = row_bytes(element, many.k);
  for (i64 row = row0; row < row1; ++row) {
    const u8* codes = many.codes(row);
    const ScaleRow scale_bytes = scale_row(many, row);
    const i32 base = scales.base[row];
    __m256 acc[kFew];
#pragma GCC unroll 4
    for (int f = 0; f < kFew; ++f) acc[f] = _mm256_setzero_ps();
    const float* a = reinterpret_cast<const float*>(prepared);
    for (i64 block = 0; block < many.blocks(); ++block, a += few * kStep) {
      const __m256 scale = _mm256_set1_ps(panel_scale(BlockScale::ue8m0, scale_bytes[block], base));
      __m256 values[4];
      f32_step<element>(codes, block * kStep, bytes, values);
#pragma GCC unroll 4
      for (int f = 0; f < kFew; ++f) {
        __m256 sum = _mm256_mul_ps(values[0], _mm256_loadu_ps(a + f * kStep));
#pragma GCC unroll 3
        for (int v = 1; v < 4; ++v)
          sum = _mm256_fmadd_ps(values[v], _mm256_loadu_ps(a + f * kStep + v * kLanes), sum);
        acc[f] = _mm256_fmadd_ps(sum, scale, acc[f]);
      }
    }
#pragma GCC unroll 4
    for (int f = 0; f < kFew; ++f) sums[f * pitch + row - row0] = sum_of(acc[f]);
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
    prepare_f32(few, scales, many.element, memory);
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

const StreamKernels& avx2_stream_kernels() {
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

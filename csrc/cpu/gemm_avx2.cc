// GEMM kernels for AVX2.
//
//   panel group   f32 [k][16 rows], both sides
//   multiply      6 x 16 or 5 x 16 sums in registers: per k, two loads and six broadcasts feed 12
//                 FMAs, as many independent ones as hide their latency (five cycles, two a cycle)
//   finish        8 outputs at a time
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

// ---- Decoding into panels

// Scales of blocks of k: [block][row of the group].
struct alignas(32) GroupScales {
  float value[kMaxDepthBlocks][kGroup];
};

// Scales of blocks block0 .. block0 + count - 1 (block0 % 4 == 0) of a group's rows.
template <BlockScale kind>
void group_scales(const Rows& x, const i32* base, i64 group, i64 block0, i64 count,
                  GroupScales& scales) {
  const i64 row = group * kGroup;
  const i64 rows = std::min(kGroup, x.rows - row);
  const ScaleRow first = scale_row(x, row);
  // 16 rows of a tile share row / 32, so that they are 16 bytes apart.
  const i64 pitch = x.layout == ScaleLayout::linear ? x.blocks() : 16;
  const float factor = element_factor(x.format.element);
  alignas(32) i32 bases[kGroup] = {};
  std::copy(base + row, base + row + rows, bases);
  // Bytes (row, block) of four rows to (block, row).
  const __m128i transpose = _mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  for (i64 b = 0; b < count; b += 4) {
    alignas(16) u8 quads[kGroup][4] = {};
    const i64 here = std::min<i64>(4, x.blocks() - block0 - b);
    const u8* address = first.at(block0 + b);
    if (here == 4)
      for (i64 r = 0; r < rows; ++r) std::memcpy(quads[r], address + r * pitch, 4);
    else
      for (i64 r = 0; r < rows; ++r)
        for (i64 i = 0; i < here; ++i) quads[r][i] = address[r * pitch + i];
    for (i64 half = 0; half < kGroup; half += kLanes) {
      const __m128i low = _mm_shuffle_epi8(load_128(quads[half]), transpose);
      const __m128i high = _mm_shuffle_epi8(load_128(quads[half + 4]), transpose);
      const __m128i first_two = _mm_unpacklo_epi32(low, high);
      const __m128i last_two = _mm_unpackhi_epi32(low, high);
      const __m128i bytes[4] = {first_two, _mm_unpackhi_epi64(first_two, first_two), last_two,
                                _mm_unpackhi_epi64(last_two, last_two)};
      for (i64 i = 0; i < 4 && b + i < kMaxDepthBlocks; ++i)
        _mm256_store_ps(scales.value[b + i] + half,
                        scale_lanes<kind>(bytes[i], load_256(bases + half), factor));
    }
  }
}

// Where one step's codes of a group lie: 4-bit codes packed (16 bytes a row), others one per byte.
struct Step {
  const u8* bytes;
  i64 pitch;
};

struct alignas(32) StepBuffer {
  u8 bytes[kGroup * kStep];
};

// Codes k .. k + 31 of the 16 rows of a group. In place where all of it exists, else through a
// buffer with zeros for what does not.
template <Element element>
Step stage_step(const Rows& x, i64 group, i64 k, StepBuffer& buffer) {
  constexpr int kBits = minifloat(element).bits();
  const i64 row = group * kGroup;
  const i64 rows = std::min(kGroup, x.rows - row);
  const i64 pitch = row_bytes(element, x.k);
  const i64 first = k * kBits / 8;
  const u8* codes = x.codes(row);
  if (kBits != 6 && rows == kGroup && pitch - first >= kStep * kBits / 8)
    return {codes + first, pitch};
  for (i64 r = 0; r < kGroup; ++r) {
    const __m256i step =
        r < rows ? load_codes<element>(codes + r * pitch, k, pitch) : _mm256_setzero_si256();
    _mm256_store_si256(reinterpret_cast<__m256i*>(buffer.bytes + r * kStep), step);
  }
  return {buffer.bytes, kStep};
}

// The transpose of 16 rows of 16 bytes: columns 2c and 2c + 1 go to `columns[c]`, eight rows to its
// low and eight to its high 128 bits. In order: 0 - 7 and 8 - 15; else as `split` wants them.
template <bool in_order>
void transpose_bytes(const u8* rows, i64 pitch, __m256i* columns) {
  __m256i x[8], y[8];
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) {
    const int low = in_order ? r : r % 2 * 8 + r / 2;
    x[r] = pair(load_128(rows + low * pitch), load_128(rows + (low + (in_order ? 8 : 4)) * pitch));
  }
  // Each round pairs rows whose numbers differ in one bit, and halves the columns of a vector.
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    y[2 * r] = _mm256_unpacklo_epi8(x[r], x[r + 4]);
    y[2 * r + 1] = _mm256_unpackhi_epi8(x[r], x[r + 4]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const int r = i / 2, c = i % 2;  // y[2r + c]: rows r, r + 4
    x[4 * r + 2 * c] = _mm256_unpacklo_epi8(y[2 * r + c], y[2 * (r + 2) + c]);
    x[4 * r + 2 * c + 1] = _mm256_unpackhi_epi8(y[2 * r + c], y[2 * (r + 2) + c]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {  // x[c]: rows 0 2 4 6; x[4 + c]: rows 1 3 5 7
    columns[2 * c] = _mm256_unpacklo_epi8(x[c], x[4 + c]);
    columns[2 * c + 1] = _mm256_unpackhi_epi8(x[c], x[4 + c]);
  }
}

// One code of 16 rows, times the rows' scales.
inline void store_column(float* out, __m256 low, __m256 high, const float* scale) {
  _mm256_storeu_ps(out, _mm256_mul_ps(low, _mm256_load_ps(scale)));
  _mm256_storeu_ps(out + kLanes, _mm256_mul_ps(high, _mm256_load_ps(scale + kLanes)));
}

// Two codes of 16 rows from their nibbles in one vector.
inline void store_e2m1(float* out, i64 pitch, __m256i nibbles, const float* scale) {
  const E2M1Words words = e2m1_words(nibbles);
  store_column(out, even_words(words.low), odd_words(words.low), scale);
  store_column(out + pitch, even_words(words.high), odd_words(words.high), scale);
}

// One step of a group. `low` and `high` are the scales of the first and the second 16 codes.
template <Element element>
void decode_step(const Step& step, const float* low, const float* high, float* out) {
  const __m256i zero = _mm256_setzero_si256();
  __m256i columns[8];
  if constexpr (element == Element::e2m1) {
    transpose_bytes<false>(step.bytes, step.pitch, columns);
    for (int c = 0; c < 8; ++c, out += 4 * kGroup) {
      const float* scale = c < 4 ? low : high;
      store_e2m1(out, 2 * kGroup, low_nibbles(columns[c]), scale);
      store_e2m1(out + kGroup, 2 * kGroup, high_nibbles(columns[c]), scale);
    }
  } else {
    const auto column = [&](float* to, __m256i codes, const float* scale) {
      const __m256i bits = half_words<element>(codes);
      store_column(to, low_half(bits), high_half(bits), scale);
    };
    for (int half = 0; half < 2; ++half) {
      const float* scale = half == 0 ? low : high;
      transpose_bytes<true>(step.bytes + half * 16, step.pitch, columns);
      for (int c = 0; c < 8; ++c, out += 2 * kGroup) {
        column(out, _mm256_unpacklo_epi8(zero, columns[c]), scale);
        column(out + kGroup, _mm256_unpackhi_epi8(zero, columns[c]), scale);
      }
    }
  }
}

void pack(const Rows& x, const i32* base, i64 group, i64 k0, i64 steps, void* panel) {
  GroupScales scales;
  const int shift = block_shift(x.format);
  const auto find_scales = x.format.scale == BlockScale::ue4m3 ? group_scales<BlockScale::ue4m3>
                                                               : group_scales<BlockScale::ue8m0>;
  find_scales(x, base, group, k0 >> shift, (steps * kStep) >> shift, scales);
  with_element(x.format.element, [&]<Element element>() {
    StepBuffer buffer;
    float* out = static_cast<float*>(panel);
    for (i64 k = 0; k < steps * kStep; k += kStep, out += kStep * kGroup)
      decode_step<element>(stage_step<element>(x, group, k0 + k, buffer), scales.value[k >> shift],
                           scales.value[(k + 16) >> shift], out);
  });
}

// ---- Products

// kRows rows of a left group times a right group.
template <int kRows>
void multiply_tile(const float* left, const float* right, i64 depth, bool first, float* sums) {
  __m256 acc[kRows][2];
#pragma GCC unroll 6
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h)
      acc[i][h] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(sums + i * kGroup + h * kLanes);
  for (i64 k = 0; k < depth; ++k, left += kGroup, right += kGroup) {
    const __m256 b0 = _mm256_loadu_ps(right);
    const __m256 b1 = _mm256_loadu_ps(right + kLanes);
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i) {
      const __m256 a = _mm256_broadcast_ss(left + i);
      acc[i][0] = _mm256_fmadd_ps(a, b0, acc[i][0]);
      acc[i][1] = _mm256_fmadd_ps(a, b1, acc[i][1]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) _mm256_storeu_ps(sums + i * kGroup + h * kLanes, acc[i][h]);
}

void multiply(const PanelBlock& block) {
  const i64 depth = block.steps * kStep;
  const i64 pitch = depth * kGroup;  // from group to group
  for (i64 r = 0; r < block.right_groups; ++r) {
    const float* right = static_cast<const float*>(block.right) + r * pitch;
    for (i64 l = 0; l < block.left_groups; ++l) {
      const float* left = static_cast<const float*>(block.left) + l * pitch;
      float* sums = block.sums + (l * block.right_groups + r) * kGroup * kGroup;
      multiply_tile<6>(left, right, depth, block.first, sums);
      multiply_tile<5>(left + 6, right, depth, block.first, sums + 6 * kGroup);
      multiply_tile<5>(left + 11, right, depth, block.first, sums + 11 * kGroup);
    }
  }
}

// ---- Outputs

// Eight elements of an array, of which the first `count` exist.
template <typename T>
const T* staged(const T* from, i64 count, T* buffer) {
  if (count >= kLanes) return from;
  std::copy(from, from + count, buffer);
  std::fill(buffer + count, buffer + kLanes, T{});
  return buffer;
}

__m256 load8(Dtype dtype, const void* array, i64 index, i64 count) {
  if (dtype == Dtype::f32) {
    float buffer[kLanes];
    return _mm256_loadu_ps(staged(static_cast<const float*>(array) + index, count, buffer));
  }
  u16 buffer[kLanes];
  const __m128i bits = load_128(staged(static_cast<const u16*>(array) + index, count, buffer));
  if (dtype == Dtype::f16) return _mm256_cvtph_ps(bits);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// encode_bf16 of numerics/minifloat.h.
__m128i bf16_nearest(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i nearest = _mm256_srli_epi32(
      _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
  const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  const __m256i rounded = _mm256_blendv_epi8(nearest, quiet, nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}

void store8(Dtype dtype, void* array, i64 index, i64 count, __m256 value) {
  alignas(32) u8 buffer[kLanes * sizeof(float)];
  u8* to = static_cast<u8*>(array) + index * dtype_bytes(dtype);
  u8* at = count < kLanes ? buffer : to;
  if (dtype == Dtype::f32) {
    _mm256_storeu_ps(reinterpret_cast<float*>(at), value);
  } else {
    const __m128i bits = dtype == Dtype::bf16 ? bf16_nearest(value)
                                              : _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), bits);
  }
  if (at == buffer) std::memcpy(to, buffer, static_cast<std::size_t>(count * dtype_bytes(dtype)));
}

// sums * row * columns in double, rounded once.
__m256 apply_powers(__m256 sums, double row, const double* columns, i64 count) {
  double buffer[kLanes];
  columns = staged(columns, count, buffer);
  const __m256d rows = _mm256_set1_pd(row);
  const auto half = [&](__m128 part, const double* column) {
    const __m256d power = _mm256_mul_pd(rows, _mm256_loadu_pd(column));
    return _mm256_cvtpd_ps(_mm256_mul_pd(_mm256_cvtps_pd(part), power));
  };
  return _mm256_insertf128_ps(_mm256_castps128_ps256(half(_mm256_castps256_ps128(sums), columns)),
                              half(_mm256_extractf128_ps(sums, 1), columns + 4), 1);
}

void finish(const Epilogue& epilogue, i64 row, i64 col, i64 count, const float* sums, i64 pitch) {
  const __m256 alpha = _mm256_set1_ps(epilogue.alpha);
  for (i64 j = 0; j < count; j += kLanes) {
    const i64 index = row * epilogue.n + col + j;
    const i64 here = count - j;
    float buffer[kLanes];
    const float* from = sums + j / kGroup * pitch + j % kGroup;
    __m256 value = _mm256_loadu_ps(staged(from, here, buffer));
    if (epilogue.power_a != nullptr)
      value = apply_powers(value, epilogue.power_a[row], epilogue.power_b + col + j, here);
    value = _mm256_mul_ps(alpha, value);
    if (epilogue.bias != nullptr)
      value = _mm256_add_ps(value, load8(epilogue.bias_dtype, epilogue.bias, col + j, here));
    if (epilogue.accumulate != nullptr)
      value =
          _mm256_add_ps(value, load8(epilogue.accumulate_dtype, epilogue.accumulate, index, here));
    store8(epilogue.out_dtype, epilogue.out, index, here, value);
  }
}

}  // namespace

const PanelKernels& avx2_panel_kernels() {
  static const PanelKernels kernels = {sizeof(float), pack, pack, multiply, finish};
  return kernels;
}

}  // namespace jax_fp4::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__

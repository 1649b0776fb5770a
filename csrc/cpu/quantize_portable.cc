// The portable kernels: the definitions of csrc/numerics applied block by block, nothing else.
#include <algorithm>
#include <cstring>

#include "cpu/quantize_kernels.h"

namespace jax_fp4::cpu {
namespace {

using std::int64_t, std::uint16_t, std::uint32_t, std::uint64_t, std::uint8_t;

uint32_t abs_bits(float x) { return bits_of(x) & kF32AbsMask; }

uint32_t finite_amax(const float* x, int n, uint32_t amax) {
  for (int i = 0; i < n; ++i)
    if (is_finite(x[i])) amax = std::max(amax, abs_bits(x[i]));
  return amax;
}

struct FourOverSixErrors {
  float six, four;
};

FourOverSixErrors four_over_six_errors(const FourOverSix& candidates, const float* x, float amax) {
  FourOverSixErrors sum{0.0f, 0.0f};
  for (int i = 0; i < 16; ++i) {
    const uint32_t six = encode_nearest(kE2M1, x[i] * candidates.six.multiplier);
    const uint32_t four = encode_nearest(kE2M1, x[i] * candidates.four.multiplier);
    sum.six += four_over_six_error(x[i], six, candidates.six.scale, amax);
    sum.four += four_over_six_error(x[i], four, candidates.four.scale, amax);
  }
  return sum;
}

// Encodes one block, x[0 .. count) followed by zeros up to the block's length; x is used up. Writes
// a code for each of the block's elements.
uint8_t encode_one_block(const Encoding& e, float* x, int count, uint64_t group,
                         const BlockEncoding* given, uint8_t* codes) {
  const int block = e.format.block;
  const Minifloat kind = minifloat(e.format.element);
  std::fill(codes, codes + block, uint8_t{0});
  if (e.hadamard) {
    count = static_cast<int>(round_up(count, kHadamardSize));
    for (int i = 0; i < count; i += kHadamardSize)
      rotate16(*reinterpret_cast<float (*)[kHadamardSize]>(x + i), e.signs);
  }
  BlockEncoding scale;
  if (given) {
    scale = *given;
    if (scale.scale == nan_scale(e.format.scale)) return scale.scale;
  } else {
    uint32_t amax = 0;
    for (int i = 0; i < count; ++i) amax = std::max(amax, abs_bits(x[i]));
    if (amax >= kF32InfBits) return static_cast<uint8_t>(nan_scale(e.format.scale));
    if (e.four_over_six) {
      const FourOverSix candidates = four_over_six_block(f32_of(amax), e.encode);
      const FourOverSixErrors errors = four_over_six_errors(candidates, x, e.amax);
      scale = errors.four < errors.six ? candidates.four : candidates.six;
    } else {
      scale = encode_block(e.format, f32_of(amax), e.encode, e.rule);
    }
  }
  PhiloxBlock random{};
  for (int i = 0; i < count; ++i) {
    const float y = x[i] * scale.multiplier;
    if (e.stochastic && i % 16 == 0) random = rounding_bits(e.seed, group + i / 16, e.stream);
    codes[i] = static_cast<uint8_t>(e.stochastic ? encode_stochastic(kind, y, random.byte(i % 16))
                                                 : encode_nearest(kind, y));
  }
  return scale.scale;
}

int element_bits(const Format& format) { return minifloat(format.element).bits(); }

// Packs the codes of one block; the bytes need not be zero before.
void pack_block(const Format& format, const uint8_t* codes, uint8_t* values) {
  switch (element_bits(format)) {
    case 4:
      for (int i = 0; i < format.block; i += 2)
        values[i / 2] = static_cast<uint8_t>(codes[i] | codes[i + 1] << 4);
      break;
    case 6:
      std::memset(values, 0, static_cast<std::size_t>(format.block / 4 * 3));
      for (int i = 0; i < format.block; ++i) store_code(format.element, values, i, codes[i]);
      break;
    default: std::copy(codes, codes + format.block, values);
  }
}

Scan scan(Dtype dtype, const void* x, int64_t n, bool fingerprint) {
  Scan result;
  for (int64_t i = 0; i < n; ++i) {
    const float value = load(dtype, x, i);
    if (is_finite(value)) result.amax = std::max(result.amax, abs_bits(value));
  }
  if (!fingerprint) return result;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = dtype == Dtype::f32 ? static_cast<const uint32_t*>(x)[i]
                                              : static_cast<const uint16_t*>(x)[i];
    result.sum += bits;
    result.weighted += bits * static_cast<uint32_t>(i);
  }
  return result;
}

uint32_t rotated_amax_run(Dtype dtype, const void* x, int64_t n, uint16_t signs) {
  uint32_t amax = 0;
  for (int64_t begin = 0; begin < n; begin += kHadamardSize) {
    float group[kHadamardSize] = {};
    const int count = static_cast<int>(std::min<int64_t>(kHadamardSize, n - begin));
    for (int i = 0; i < count; ++i) group[i] = load(dtype, x, begin + i);
    rotate16(group, signs);
    amax = finite_amax(group, kHadamardSize, amax);
  }
  return amax;
}

uint32_t rotated_amax_columns(Dtype dtype, const void* x, int64_t pitch, int rows, int cols,
                              uint16_t signs) {
  uint32_t amax = 0;
  for (int begin = 0; begin < rows; begin += kHadamardSize)
    for (int c = 0; c < cols; ++c) {
      float group[kHadamardSize] = {};
      const int count = std::min(kHadamardSize, rows - begin);
      for (int i = 0; i < count; ++i) group[i] = load(dtype, x, (begin + i) * pitch + c);
      rotate16(group, signs);
      amax = finite_amax(group, kHadamardSize, amax);
    }
  return amax;
}

void encode_run(const Encoding& e, const void* x, int64_t n, uint64_t group, GivenScales given,
                uint8_t* values, uint8_t* scales) {
  const int block = e.format.block;
  const int block_bytes = block * element_bits(e.format) / 8;
  const int64_t bytes = row_bytes(e.format.element, n);
  int64_t written = 0;
  for (int64_t b = 0; b * block < n; ++b) {
    float in[kMaxBlock] = {};
    const int count = static_cast<int>(std::min<int64_t>(block, n - b * block));
    for (int i = 0; i < count; ++i) in[i] = load(e.dtype, x, b * block + i);
    BlockEncoding known{};
    if (given.scales) known = {given.scales[b], given.multipliers[b]};
    uint8_t codes[kMaxBlock], packed[kMaxBlock];
    scales[b] = encode_one_block(e, in, count, group + static_cast<uint64_t>(b * block / 16),
                                 given.scales ? &known : nullptr, codes);
    pack_block(e.format, codes, packed);
    // The padding of an 8-bit row may end inside its last block.
    const int64_t part = std::min<int64_t>(block_bytes, bytes - written);
    std::memcpy(values + written, packed, static_cast<std::size_t>(part));
    written += part;
  }
  std::memset(values + written, 0, static_cast<std::size_t>(bytes - written));
}

void encode_columns(const Encoding& e, const void* x, int64_t pitch, int rows, int cols,
                    uint64_t group, uint64_t group_pitch, GivenScales given, uint8_t* values,
                    uint8_t (*scales)[kStripCols]) {
  const int block = e.format.block;
  const int block_bytes = block * element_bits(e.format) / 8;
  for (int b = 0; b * block < rows; ++b)
    for (int c = 0; c < cols; ++c) {
      float in[kMaxBlock] = {};
      const int count = std::min(block, rows - b * block);
      for (int i = 0; i < count; ++i) in[i] = load(e.dtype, x, (b * block + i) * pitch + c);
      BlockEncoding known{};
      const int64_t tile = b + c / block * given.pitch;
      if (given.scales) known = {given.scales[tile], given.multipliers[tile]};
      uint8_t codes[kMaxBlock];
      scales[b][c] = encode_one_block(
          e, in, count, group + static_cast<uint64_t>(c) * group_pitch + b * block / 16,
          given.scales ? &known : nullptr, codes);
      pack_block(e.format, codes, values + c * kStripPitch + b * block_bytes);
    }
}

void tile_amax(Dtype dtype, const void* x, int64_t pitch, int rows, int64_t cols, int block,
               uint32_t* amax) {
  std::fill(amax, amax + ceil_div(cols, block), 0u);
  for (int r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c)
      amax[c / block] = std::max(amax[c / block], abs_bits(load(dtype, x, r * pitch + c)));
}

void encode_tiles(const Encoding& e, const uint32_t* amax, int64_t n, uint8_t* scales,
                  float* multipliers) {
  for (int64_t i = 0; i < n; ++i) {
    BlockEncoding encoding{static_cast<uint8_t>(nan_scale(e.format.scale)), 0.0f};
    if (amax[i] < kF32InfBits) encoding = encode_block(e.format, f32_of(amax[i]), e.encode, e.rule);
    scales[i] = encoding.scale;
    multipliers[i] = encoding.multiplier;
  }
}

void decode_run(const Format& format, const uint8_t* values, const uint8_t* scales, float global,
                int64_t n, Dtype dtype, void* out) {
  const Minifloat kind = minifloat(format.element);
  for (int64_t i = 0; i < n; ++i) {
    const float code = decode(kind, load_code(format.element, values, i));
    const float value = code * decode_scale(format.scale, scales[i / format.block]) * global;
    store(dtype, out, i, value != value ? kF32NaN : value);
  }
}

}  // namespace

BlockEncoding four_over_six_tile(const Encoding& e, uint32_t amax, const float (&x)[16][16]) {
  if (amax >= kF32InfBits) return {static_cast<uint8_t>(kUE4M3NaN), 0.0f};
  const FourOverSix candidates = four_over_six_block(f32_of(amax), e.encode);
  FourOverSixErrors rows[16];
  for (int i = 0; i < 16; ++i) rows[i] = four_over_six_errors(candidates, x[i], e.amax);
  for (int stride = 8; stride > 0; stride /= 2)
    for (int i = 0; i < stride; ++i) {
      rows[i].six += rows[i + stride].six;
      rows[i].four += rows[i + stride].four;
    }
  return rows[0].four < rows[0].six ? candidates.four : candidates.six;
}

const QuantizeKernels& portable_quantize_kernels() {
  static constexpr QuantizeKernels kernels{scan,         rotated_amax_run, rotated_amax_columns,
                                           encode_run,   encode_columns,   tile_amax,
                                           encode_tiles, decode_run};
  return kernels;
}

}  // namespace jax_fp4::cpu

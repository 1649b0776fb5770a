// csrc/numerics as plain C functions over arrays, for the tests of this folder (see conftest.py).
//
// Nothing is computed here: every function calls one function of the headers per element. Elements,
// formats and layouts are passed as their numbers in the enumerations and in kFormats.
#include <cstdint>

#include "kernels/divisor.h"
#include "numerics/block_scale.h"
#include "numerics/hadamard.h"
#include "numerics/mma_accumulate.h"
#include "numerics/philox.h"
#include "numerics/scale_layout.h"

using namespace jax_fp4;

namespace {

constexpr Format kFormats[] = {kNVFP4,     kMXFP4,     kMXFP6E2M3, kMXFP6E3M2,
                               kMXFP8E4M3, kMXFP8E5M2, kFP8E4M3,   kFP8E5M2};

Element element_of(int element) { return static_cast<Element>(element); }

}  // namespace

extern "C" {

void decode_codes(int element, const u8* code, float* value, i64 n) {
  for (i64 i = 0; i < n; ++i) value[i] = decode(minifloat(element_of(element)), code[i]);
}

void encode_codes_nearest(int element, const float* x, u8* code, i64 n) {
  for (i64 i = 0; i < n; ++i)
    code[i] = static_cast<u8>(encode_nearest(minifloat(element_of(element)), x[i]));
}

void encode_codes_stochastic(int element, const float* x, const u8* random, u8* code, i64 n) {
  for (i64 i = 0; i < n; ++i)
    code[i] = static_cast<u8>(encode_stochastic(minifloat(element_of(element)), x[i], random[i]));
}

void decode_scales(int scale, const u8* byte, float* value, i64 n) {
  for (i64 i = 0; i < n; ++i) value[i] = decode_scale(static_cast<BlockScale>(scale), byte[i]);
}

void encode_scales_ue4m3(const float* x, u8* byte, i64 n) {
  for (i64 i = 0; i < n; ++i) byte[i] = static_cast<u8>(encode_ue4m3(x[i]));
}

void encode_scales_ue8m0_up(const float* x, u8* byte, i64 n) {
  for (i64 i = 0; i < n; ++i) byte[i] = static_cast<u8>(encode_ue8m0_up(x[i]));
}

void decode_bf16s(const u16* bits, float* x, i64 n) {
  for (i64 i = 0; i < n; ++i) x[i] = decode_bf16(bits[i]);
}

void encode_bf16s(const float* x, u16* bits, i64 n) {
  for (i64 i = 0; i < n; ++i) bits[i] = static_cast<u16>(encode_bf16(x[i]));
}

void decode_f16s(const u16* bits, float* x, i64 n) {
  for (i64 i = 0; i < n; ++i) x[i] = decode_f16(bits[i]);
}

void encode_f16s(const float* x, u16* bits, i64 n) {
  for (i64 i = 0; i < n; ++i) bits[i] = static_cast<u16>(encode_f16(x[i]));
}

void philox(const u32* counter, u32 key_low, u32 key_high, u32* out) {
  const PhiloxBlock block =
      philox4x32_10({{counter[0], counter[1], counter[2], counter[3]}}, key_low, key_high);
  for (int i = 0; i < 4; ++i) out[i] = block.word[i];
}

void rounding_bytes(u64 seed, const u64* group, u32 stream, u8* bytes, i64 n) {
  for (i64 i = 0; i < n; ++i) {
    const PhiloxBlock block = rounding_bits(seed, group[i], stream);
    for (int j = 0; j < 16; ++j) bytes[16 * i + j] = static_cast<u8>(block.byte(j));
  }
}

unsigned default_signs() { return kDefaultHadamardSigns; }

void rotate_groups(const float* x, unsigned signs, float* y, i64 n) {
  for (i64 i = 0; i < n; ++i) {
    float group[kHadamardSize] = {};
    for (int j = 0; j < kHadamardSize; ++j) group[j] = x[kHadamardSize * i + j];
    rotate16(group, static_cast<u16>(signs));
    for (int j = 0; j < kHadamardSize; ++j) y[kHadamardSize * i + j] = group[j];
  }
}

void tensor_scales(int format, int four_over_six, const float* amax, float* encode, float* global,
                   i64 n) {
  for (i64 i = 0; i < n; ++i) {
    const TensorScale scale = tensor_scale(kFormats[format], amax[i], four_over_six != 0);
    encode[i] = scale.encode;
    global[i] = scale.global;
  }
}

void encode_blocks(int format, int rule, const float* amax, const float* encode, u8* scale,
                   float* multiplier, i64 n) {
  for (i64 i = 0; i < n; ++i) {
    const BlockEncoding block =
        encode_block(kFormats[format], amax[i], encode[i], static_cast<ScaleRule>(rule));
    scale[i] = block.scale;
    multiplier[i] = block.multiplier;
  }
}

void floor_log2s(const float* x, i32* exponent, i64 n) {
  for (i64 i = 0; i < n; ++i) exponent[i] = floor_log2(x[i]);
}

void four_over_six_blocks(const float* amax, const float* encode, u8* six, float* six_multiplier,
                          u8* four, float* four_multiplier, i64 n) {
  for (i64 i = 0; i < n; ++i) {
    const FourOverSix block = four_over_six_block(amax[i], encode[i]);
    six[i] = block.six.scale;
    six_multiplier[i] = block.six.multiplier;
    four[i] = block.four.scale;
    four_multiplier[i] = block.four.multiplier;
  }
}

void four_over_six_errors(const float* x, const u8* code, const u8* scale, float amax, float* error,
                          i64 n) {
  for (i64 i = 0; i < n; ++i) error[i] = four_over_six_error(x[i], code[i], scale[i], amax);
}

int nan_scale_of(int format) { return static_cast<int>(nan_scale(kFormats[format].scale)); }
int block_of(int format) { return kFormats[format].block; }
int element_number_of(int format) { return static_cast<int>(kFormats[format].element); }

i64 packed_row_bytes(int element, i64 k) { return row_bytes(element_of(element), k); }

void pack_row(int element, const u8* code, u8* row, i64 k) {
  for (i64 i = 0; i < k; ++i) store_code(element_of(element), row, i, code[i]);
}

void unpack_row(int element, const u8* row, u8* code, i64 k) {
  for (i64 i = 0; i < k; ++i) code[i] = static_cast<u8>(load_code(element_of(element), row, i));
}

i64 scale_tensor_bytes(int layout, i64 rows, i64 blocks) {
  return scale_bytes(static_cast<ScaleLayout>(layout), rows, blocks);
}

void scale_offsets(int layout, const i64* row, const i64* block, i64 blocks, i64* offset, i64 n) {
  for (i64 i = 0; i < n; ++i)
    offset[i] = scale_offset(static_cast<ScaleLayout>(layout), row[i], block[i], blocks);
}

// a, b: n times 64 codes; scale_a, scale_b: n times 4 bytes.
void mma_fp4_steps(int scale, const u8* a, const u8* b, const u8* scale_a, const u8* scale_b,
                   const u32* c, u32* d, i64 n) {
  for (i64 i = 0; i < n; ++i)
    d[i] = mma_fp4_step(a + kFp4StepK * i, b + kFp4StepK * i, static_cast<BlockScale>(scale),
                        scale_a + 4 * i, scale_b + 4 * i, c[i]);
}

// a, b: n times 32 codes; scale_a, scale_b: n bytes.
void mma_fp8_steps(int element_a, int element_b, const u8* a, const u8* b, const u8* scale_a,
                   const u8* scale_b, const u32* c, u32* d, i64 n) {
  for (i64 i = 0; i < n; ++i)
    d[i] = mma_fp8_step(element_of(element_a), a + kFp8StepK * i, scale_a[i], element_of(element_b),
                        b + kFp8StepK * i, scale_b[i], c[i]);
}

void quotients(u32 d, const u32* x, u32* q, i64 n) {
  for (i64 i = 0; i < n; ++i) q[i] = divisor(d).divide(x[i]);
}

}  // extern "C"

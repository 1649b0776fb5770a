// The inner loops of quantize.h, one set per instruction level. quantize.cc cuts tensors into
// pieces, knows where outputs lie and owns all padding; a kernel sees one piece. Every level gives
// the same bits.
#pragma once

#include <cstdint>

#include "cpu/cpu.h"
#include "numerics/block_scale.h"
#include "numerics/hadamard.h"
#include "numerics/philox.h"

namespace jax_fp4::cpu {

inline constexpr int kStripCols = 32;    // columns of x that a *_columns kernel takes, at most: a
                                         // cache line of 16-bit elements
inline constexpr int kStripRows = 128;   // and rows, at most: a cache line of 4-bit codes
inline constexpr int kMaxBlock = 32;     // elements of the largest block
inline constexpr int kStripPitch = 128;  // bytes of kStripRows codes, at most

// A copy's options as its kernels need them, for one lead.
struct Encoding {
  Dtype dtype;  // of x
  Format format;
  ScaleRule rule;
  bool stochastic, four_over_six, hadamard;
  std::uint16_t signs;
  std::uint32_t stream;
  std::uint64_t seed;
  float amax;    // of the tensor
  float encode;  // TensorScale::encode
};

// Scale bytes and multipliers that were found before (2-D tiles), or nullptrs where a block's own
// values decide: entry b + t * pitch is block b of every row in tile t of a strip's copy. A run has
// one row, and so one t.
struct GivenScales {
  const std::uint8_t* scales = nullptr;
  const float* multipliers = nullptr;
  std::int64_t pitch = 0;
};

// Sums are mod 2^32 and over the 16 or 32 bits of each element; `weighted` counts element i i
// times.
struct Scan {
  std::uint32_t amax = 0;  // f32 bits, over finite values
  std::uint32_t sum = 0;
  std::uint32_t weighted = 0;
};

struct QuantizeKernels {
  // Of n consecutive elements; the sums only where `fingerprint`.
  Scan (*scan)(Dtype dtype, const void* x, std::int64_t n, bool fingerprint);

  // amax bits after the Hadamard transform of groups of 16 consecutive elements (the last one
  // padded with zeros), or of groups of 16 rows of a strip with `pitch` elements between rows.
  std::uint32_t (*rotated_amax_run)(Dtype dtype, const void* x, std::int64_t n,
                                    std::uint16_t signs);
  std::uint32_t (*rotated_amax_columns)(Dtype dtype, const void* x, std::int64_t pitch, int rows,
                                        int cols, std::uint16_t signs);

  // n consecutive elements, the first of which begins a block and group number `group`. Writes
  // row_bytes(n) of values (so n is a multiple of 128 unless the run ends a row) and one scale byte
  // per block.
  void (*encode_run)(const Encoding& encoding, const void* x, std::int64_t n, std::uint64_t group,
                     GivenScales given, std::uint8_t* values, std::uint8_t* scales);

  // A strip of rows <= kStripRows and cols <= kStripCols, blocks along the rows: column c is row c
  // of the copy and begins at group number group + c * group_pitch. Writes whole groups of 16 codes
  // to values + c * kStripPitch and scales[block][c]. Bytes of columns that do not exist are
  // undefined.
  void (*encode_columns)(const Encoding& encoding, const void* x, std::int64_t pitch, int rows,
                         int cols, std::uint64_t group, std::uint64_t group_pitch,
                         GivenScales given, std::uint8_t* values,
                         std::uint8_t (*scales)[kStripCols]);

  // abs bits of the largest element, NaN and Inf included, of each of the ceil(cols / block) tiles
  // of a band of at most `block` rows.
  void (*tile_amax)(Dtype dtype, const void* x, std::int64_t pitch, int rows, std::int64_t cols,
                    int block, std::uint32_t* amax);
  // From these to scale and multiplier; the NaN scale where not finite. Not for four-over-six.
  void (*encode_tiles)(const Encoding& encoding, const std::uint32_t* amax, std::int64_t n,
                       std::uint8_t* scales, float* multipliers);

  // out[i] = cvt(fl(fl(code * scale) * global)); scales linear.
  void (*decode_run)(const Format& format, const std::uint8_t* values, const std::uint8_t* scales,
                     float global, std::int64_t n, Dtype dtype, void* out);
};

const QuantizeKernels& quantize_kernels();  // those of the level in use
const QuantizeKernels& portable_quantize_kernels();
const QuantizeKernels& avx2_quantize_kernels();    // the portable ones on other processors
const QuantizeKernels& avx512_quantize_kernels();  // the portable ones on other processors
// Those of quantize_avx2_read.cc and quantize_avx512_read.cc; the others are nullptr.
QuantizeKernels avx2_reading_quantize_kernels();
QuantizeKernels avx512_reading_quantize_kernels();

// The scale and multiplier of one 16x16 tile whose largest abs bits are `amax`. x(i, k) is element
// k of row i of the *copy*, so that a transposed tensor gives transposed codes. The same at every
// level: it is rare and dominated by division.
BlockEncoding four_over_six_tile(const Encoding& encoding, std::uint32_t amax,
                                 const float (&x)[16][16]);

}  // namespace jax_fp4::cpu

// NVFP4 block scales by search, for quantization after training: of eight candidates for each block
// the one whose codes are closest to its values.
#pragma once

#include <cstdint>

#include "cpu/cpu.h"

namespace jax_fp4::cpu {

// Candidates, as steps of the UE4M3 byte from the one that maps the block's maximum to 6: two steps
// down clip it (a factor of about 0.8; smaller ones were never the best of a million normal
// blocks), five up reach 4 (1.5). Only a smaller error replaces an earlier candidate.
inline constexpr int kSearchSteps[] = {0, -1, 1, -2, 2, 3, 4, 5};

// Rows of x[rows, length], length a multiple of 16, with the scales that quantize() gives them by
// rounding to nearest: replaces these by the best ones, and writes the codes that belong to them.
// Blocks whose scale is 0 (they decode to 0 with any codes) or NaN keep it.
//
// Errors are in units of the block's first scale, so that nothing underflows when it is squared:
// with r = fl(|x| * multiplier of the first scale) and q = candidate / first scale, the sum over
// the 16 elements, in order, of (round(r * fl(1 / q)) * q - r)^2, every operation rounded to f32.
void search_nvfp4(Dtype dtype, const void* x, std::int64_t rows, std::int64_t length, float amax,
                  std::uint8_t* scales,   // [rows, length / 16]
                  std::uint8_t* values);  // [rows, row_bytes(length)]

// The inner loop: scale bytes and multipliers of n blocks that follow one another; `tensor_decode` is
// 1 / TensorScale::encode.
using SearchKernel = void (*)(Dtype dtype, const void* x, std::int64_t n, float tensor_decode,
                              std::uint8_t* scales, float* multipliers);
SearchKernel portable_search();
SearchKernel avx2_search();  // the portable one on other processors

}  // namespace jax_fp4::cpu

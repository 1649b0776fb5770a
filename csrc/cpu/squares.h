// How far quantized rows are from the rows that they were made of.
#pragma once

#include <cstdint>

#include "cpu/cpu.h"
#include "numerics/formats.h"

namespace jax_fp4::cpu {

struct Squares {
  double error = 0;  // sum of (value - x)^2
  double norm = 0;   // sum of x^2
};

// Of x[rows, length], length a multiple of the block, and of its codes without padding,
// [rows, length * bits / 8]. Sums are f32 within 2048 elements of a row, in eight parts, and f64
// from there on: the same at every level.
Squares squares(Dtype dtype, const void* x, std::int64_t rows, std::int64_t length,
                const Format& format, const std::uint8_t* values, const std::uint8_t* scales,
                float global);

}  // namespace jax_fp4::cpu

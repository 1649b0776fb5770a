// Fixed-width names and bit access, the only prerequisites of the other headers of this folder.
//
// csrc/numerics is THE definition of every number and index map of the project. Its headers include
// nothing but each other, so that g++ (CPU backend, PTX machine) and NVRTC (kernels) compile the
// same text; every function is constexpr and free of state.
#pragma once

#if defined(__CUDACC__)
#define JAX_FP4_FN __host__ __device__ constexpr
#else
#define JAX_FP4_FN constexpr
#endif

namespace jax_fp4 {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;
static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8);

JAX_FP4_FN u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
JAX_FP4_FN float f32_of(u32 bits) { return __builtin_bit_cast(float, bits); }

inline constexpr u32 kF32SignMask = 0x8000'0000u;
inline constexpr u32 kF32AbsMask = 0x7FFF'FFFFu;
inline constexpr u32 kF32InfBits = 0x7F80'0000u;
inline constexpr float kF32Max = 0x1.fffffep127f;

// NaN and Inf both have an all-ones exponent field.
JAX_FP4_FN bool is_finite(float x) { return (bits_of(x) & kF32InfBits) != kF32InfBits; }
JAX_FP4_FN float absolute(float x) { return f32_of(bits_of(x) & kF32AbsMask); }
// The smaller of two numbers that are not NaN.
JAX_FP4_FN float minimum(float a, float b) { return a < b ? a : b; }

JAX_FP4_FN i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
JAX_FP4_FN i64 round_up(i64 a, i64 b) { return ceil_div(a, b) * b; }

}  // namespace jax_fp4

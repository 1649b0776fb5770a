// What this core could do at most: the ceiling that `bench` prints beside its figures.
#pragma once

namespace jax_fp4::cpu {

// Multiply-accumulate rate of the calling thread in FLOP/s with all operands in registers: bf16
// products on the tile unit at level amx and on 512-bit vectors at avx512_bf16, f32 FMA on 512-bit
// vectors at avx512 and on 256-bit ones at avx2, 0 below. Takes about `seconds`.
double peak_flops(double seconds);

}  // namespace jax_fp4::cpu

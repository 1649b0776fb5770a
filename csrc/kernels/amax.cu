// amax, amax after the Hadamard transform, and fingerprint of x[V, L, R, C], in one pass.
//
// CTA: 8 warps; tile column blockIdx.x (64 columns) of matrix blockIdx.z, every gridDim.y-th tile of
// 128 rows from blockIdx.y on. Nothing goes through shared memory but the CTA's sums: a thread loads
// what it reduces, as two groups of 16 elements,
//
//   along columns   rows lane / 4 + 16 warp and 8 below; lane % 4 is the group in the row
//   along rows      (rotation of groups of 16 rows) rows 16 warp .. +15 of columns 2 lane, 2 lane + 1
//
// so that a rotation stays in registers. Results go to global memory by one atomic max or add a CTA:
// integers, whose order does not matter.
//
// Compiled with JAX_FP4_INPUT_BITS and JAX_FP4_ROTATE (0: none, 1: along columns, 2: along rows).
#include "kernels/parts/groups.h"

namespace jax_fp4 {
namespace {

constexpr int kInputBits = JAX_FP4_INPUT_BITS;
enum class Rotate { none, cols, rows };
constexpr Rotate kRotate = static_cast<Rotate>(JAX_FP4_ROTATE);
constexpr bool kAlongRows = kRotate == Rotate::rows;
constexpr int kWarps = kAmaxThreads / 32;
constexpr u32 kAllLanes = 0xFFFF'FFFFu;

template <int kBits>
struct Unsigned {
  using Type = u32;
};
template <>
struct Unsigned<16> {
  using Type = u16;
};
using Stored = Unsigned<kInputBits>::Type;

struct Sums {
  u32 amax, rotated, fingerprint;
};

__device__ u32 larger(u32 a, u32 b) { return a > b ? a : b; }

// Bits of the largest finite magnitude; `any` has a NaN or an Inf among it.
__device__ u32 largest_finite(const float (&v)[kGroup]) {
  const u32 any = largest(v);
  if (any < kF32InfBits) return any;
  u32 finite = 0;
#pragma unroll
  for (int i = 0; i < kGroup; ++i)
    if (is_finite(v[i])) finite = larger(finite, bits_of(absolute(v[i])));
  return finite;
}

// A thread's place in the tile, and its elements. Those outside x are zero.
struct Patch {
  u32 row, col;  // of its first element in x
  float v[2][kGroup];
  u32 bits[2][kGroup];  // as stored

  // The distance of element i of a group from the first, and of the groups, in logical indices.
  __device__ static u32 step(u32 logical_cols) { return kAlongRows ? logical_cols : 1; }
  __device__ static u32 group_step(u32 logical_cols) { return kAlongRows ? 1 : 8 * logical_cols; }
};

__device__ void load_patch(const AmaxParams& p, u32 matrix, u32 tile_row, bool aligned,
                           Patch& patch) {
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  patch.row = tile_row + 16 * warp + (kAlongRows ? 0 : lane / 4);
  patch.col = blockIdx.x * kAmaxTileCols + (kAlongRows ? 2 * lane : kGroup * (lane % 4));
  const i64 first = static_cast<i64>(matrix) * p.rows * p.cols;
  if constexpr (!kAlongRows) {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const u32 row = patch.row + 8 * g;
      const int count = row < p.rows ? static_cast<int>(p.cols - patch.col) : 0;
      const Group<kInputBits> group = load_group<kInputBits>(
          p.x, first + static_cast<i64>(row) * p.cols + patch.col, count, aligned);
      widen(group, p.input, patch.v[g]);
#pragma unroll
      for (int i = 0; i < kGroup; ++i)
        patch.bits[g][i] = kInputBits == 32 ? group.word[i % Group<kInputBits>::kWords]
                                            : (group.word[i / 2] >> (16 * (i % 2))) & 0xFFFFu;
    }
  } else {
    // Two columns at a time where they are one aligned word of 16-bit elements, or 8 bytes of f32.
    const bool pairs = aligned && patch.col + 2 <= p.cols;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const u32 row = patch.row + i;
      const i64 at = first + static_cast<i64>(row) * p.cols + patch.col;
      u32 low = 0, high = 0;
      if (row < p.rows && pairs) {
        if constexpr (kInputBits == 32) {
          const uint2 word =
              __ldg(reinterpret_cast<const uint2*>(static_cast<const u32*>(p.x) + at));
          low = word.x;
          high = word.y;
        } else {
          const u32 word = __ldg(reinterpret_cast<const u32*>(static_cast<const u16*>(p.x) + at));
          low = word & 0xFFFFu;
          high = word >> 16;
        }
      } else if (row < p.rows) {
        const Stored* x = static_cast<const Stored*>(p.x) + at;
        low = patch.col < p.cols ? __ldg(x) : 0;
        high = patch.col + 1 < p.cols ? __ldg(x + 1) : 0;
      }
      patch.bits[0][i] = low;
      patch.bits[1][i] = high;
#pragma unroll
      for (int g = 0; g < 2; ++g)
        patch.v[g][i] =
            kInputBits == 32 ? f32_of(patch.bits[g][i]) : low_of(patch.bits[g][i], p.input);
    }
  }
}

__device__ void add_patch(const AmaxParams& p, u32 first_index, Patch& patch, Sums& sums) {
  const u32 logical_cols = static_cast<u32>(p.logical_cols);
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    if (p.fingerprint != nullptr) {
      // sum of bits * (2 * (index + i * step) + 1), all mod 2^32
      u32 sum = 0, weighted = 0;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        sum += patch.bits[g][i];
        weighted += patch.bits[g][i] * i;
      }
      const u32 index = first_index + g * Patch::group_step(logical_cols);
      sums.fingerprint += (2 * index + 1) * sum + 2 * Patch::step(logical_cols) * weighted;
    }
    sums.amax = larger(sums.amax, largest_finite(patch.v[g]));
  }
  if constexpr (kRotate != Rotate::none) {
    rotate_groups(patch.v, p.signs);
#pragma unroll
    for (auto& v : patch.v) sums.rotated = larger(sums.rotated, largest_finite(v));
  }
}

__device__ u32 reduce(u32 x, bool add) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const u32 other = __shfl_xor_sync(kAllLanes, x, mask);
    x = add ? x + other : larger(x, other);
  }
  return x;
}

}  // namespace
}  // namespace jax_fp4

extern "C" __global__ void __launch_bounds__(jax_fp4::kAmaxThreads)
    JAX_FP4_KERNEL(const __grid_constant__ jax_fp4::AmaxParams p) {
  using namespace jax_fp4;
  __shared__ Sums partial[kWarps];
  const u64 pitch_bytes = static_cast<u64>(p.cols) * (kInputBits / 8);
  const bool aligned = (reinterpret_cast<u64>(p.x) | pitch_bytes) % 32 == 0;
  for (u32 matrix = blockIdx.z; matrix < p.matrices; matrix += gridDim.z) {
    const u32 example = p.leads == 1 ? matrix : matrix / p.leads;
    const u32* origin = p.origin + 3 * example;
    const i64 lead = static_cast<i64>(origin[0]) + (matrix - example * p.leads);
    Sums sums{0, 0, 0};
    for (u32 row = blockIdx.y * kAmaxTileRows; row < p.rows; row += gridDim.y * kAmaxTileRows) {
      Patch patch;
      load_patch(p, matrix, row, aligned, patch);
      const u32 first_index = static_cast<u32>(
          (lead * p.logical_rows + origin[1] + patch.row) * p.logical_cols + origin[2] + patch.col);
      add_patch(p, first_index, patch, sums);
    }
    sums = {reduce(sums.amax, false), reduce(sums.rotated, false), reduce(sums.fingerprint, true)};
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sums;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int w = 1; w < kWarps; ++w) {
        sums.amax = larger(sums.amax, partial[w].amax);
        sums.rotated = larger(sums.rotated, partial[w].rotated);
        sums.fingerprint += partial[w].fingerprint;
      }
      atomicMax(p.amax + matrix, sums.amax);
      if (p.rotated != nullptr) atomicMax(p.rotated + matrix, sums.rotated);
      if (p.fingerprint != nullptr) atomicAdd(p.fingerprint + example, sums.fingerprint);
    }
    __syncthreads();
  }
}

// One pass over x[V, L, R, C] that makes a row copy, a column (transposed) copy, or both.
//
//   x tile [128 rows, 64 cols] --ld.global 32 B a lane--> st.shared --> tile
//   row pass      tile --ld.shared 16 B--> registers --> codes, scales --st.global-->
//   column pass   tile --ld.shared, two columns a lane--> registers --> codes, scales
//                 --st.shared--> staging --> st.global 16 B-->
//
// CTA: 8 warps; tile (blockIdx.y, blockIdx.x) of matrix blockIdx.z. A thread encodes two groups of
// 16 elements in each direction:
//
//   block 16   row pass   warp w: rows 16w .. 16w+15, all 64 columns; lane: group lane % 4 of rows
//                         lane / 4 and lane / 4 + 8
//              col pass   warp w: rows 16w .. 16w+15; lane: columns 2 lane and 2 lane + 1
//   block 32   row pass   warp w: rows 32 (w / 2) .. +31, columns 32 (w % 2) .. +31; lane: group
//                         lane % 2 of rows lane / 2 and lane / 2 + 16
//              col pass   warp w: rows 32 (w / 2) .. +31; lane: rows 16 (lane / 16) .. +15 of them,
//                         columns 32 (w % 2) + 2 (lane % 16) and the next
//
// So every block, and every tile of 2-D scaling, lies in one warp, and shuffles are all it needs.
//
// Shared memory: tile 16 KiB (32 KiB of f32) | staged codes of the column copy 4.5, 6.3 or 9 KiB |
// staged scales 512 B | constants. Barriers: after the constants, after the tile, after the
// staging, and at the end where a CTA takes several tiles.
//
// Ragged edges: elements outside x count as zero, which gives zero codes and scales, as padding is
// to be; loads are per element where a group crosses the edge or rows are not aligned to 32 bytes.
//
// Compiled for each of variants.def with JAX_FP4_BITS (of a code), JAX_FP4_BLOCK,
// JAX_FP4_FOUR_OVER_SIX and JAX_FP4_INPUT_BITS; every other option is a branch that all threads take
// alike.
#include "kernels/parts/quantize_tile.h"
#include "kernels/parts/scales.h"

namespace jax_fp4 {
namespace {

// ---- Encoding -----------------------------------------------------------------------------------

// One pass: the row pass encodes along the columns of x, the column pass along its rows.
struct PassState {
  const CopyParams& copy;
  bool columns;  // the column pass
  Format format;
  InputType input;
  TensorConstants constants;
  CopyTile tile;
};

// A thread's two groups: where they begin in the copy's tile, values, scale bytes and codes.
struct Pair {
  u32 row[2], k;
  float v[2][kGroup];
  u8 scale[2];
  Codes<kBits> codes[2];
};

__device__ u32 xor_max(u32 x, int mask) {
  const u32 other = __shfl_xor_sync(kAllLanes, x, mask);
  return x > other ? x : other;
}
__device__ float xor_add(float x, int mask) { return x + __shfl_xor_sync(kAllLanes, x, mask); }

// From the largest magnitudes of a thread's groups to those of their blocks or tiles.
__device__ void combine(u32 (&amax)[2], bool columns, bool tiles) {
  if constexpr (kBlock == 32)
#pragma unroll
    for (u32& a : amax) a = xor_max(a, columns ? 16 : 1);
  if (!tiles) return;
  u32 a = amax[0] > amax[1] ? amax[0] : amax[1];
  // The lanes with the tile's other rows (row pass) or other columns.
  int mask = columns ? 1 : kBlock == 16 ? 4 : 2;
#pragma unroll
  for (int i = 0; i < (kBlock == 16 ? 3 : 4); ++i, mask *= 2) a = xor_max(a, mask);
  amax[0] = amax[1] = a;
}

__device__ float four_over_six_errors(const BlockEncoding& candidate, const float (&v)[kGroup],
                                      float amax) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const u32 code = Software<Element::e2m1>::nearest(v[i] * candidate.multiplier);
    sum = sum + four_over_six_error(v[i], code, candidate.scale, amax);
  }
  return sum;
}

// numerics/block_scale.h: the better of two scales for each block or tile. A bad block has any.
__device__ void four_over_six(const PassState& s, const Pair& pair, const u32 (&amax)[2],
                              BlockEncoding (&block)[2]) {
  float error[2][2];  // [candidate][group]
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const FourOverSix both = four_over_six_block(f32_of(amax[g]), s.constants.encode);
    error[0][g] = four_over_six_errors(both.six, pair.v[g], s.constants.amax);
    error[1][g] = four_over_six_errors(both.four, pair.v[g], s.constants.amax);
  }
  if (s.copy.tiles) {
    // The 16 rows of the copy in a tile pairwise, with strides 8, 4, 2, 1. In the row pass a thread
    // has rows i and i + 8, lanes 4 apart the next ones; in the column pass it has rows 2i, 2i + 1
    // of the copy, the last pair.
#pragma unroll
    for (auto& e : error) {
      if (!s.columns) e[0] = e[1] = e[0] + e[1];
#pragma unroll
      for (int mask = s.columns ? 4 : 16, i = 0; i < 3; ++i, mask /= 2) {
        e[0] = xor_add(e[0], mask);
        e[1] = xor_add(e[1], mask);
      }
      if (s.columns) e[0] = e[1] = e[0] + e[1];
    }
  }
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const FourOverSix both = four_over_six_block(f32_of(amax[g]), s.constants.encode);
    block[g] = error[1][g] < error[0][g] ? both.four : both.six;
  }
}

// From values to scales and codes.
__device__ void encode(const PassState& s, Pair& pair) {
  if (s.copy.hadamard)
#pragma unroll
    for (auto& v : pair.v) rotate_group(v, s.copy.signs);
  u32 amax[2] = {largest(pair.v[0]), largest(pair.v[1])};
  combine(amax, s.columns, s.copy.tiles);
  BlockEncoding block[2];
  if (kFourOverSix && s.copy.four_over_six) {
    if constexpr (kFourOverSix) four_over_six(s, pair, amax, block);
  } else if constexpr (kNVFP4Kernel) {
#pragma unroll
    for (int g = 0; g < 2; ++g) block[g] = fast_nvfp4_block(f32_of(amax[g]), s.constants);
  } else {
#pragma unroll
    for (int g = 0; g < 2; ++g)
      block[g] = encode_block(s.format, f32_of(amax[g]), s.constants.encode, s.copy.rule);
  }
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    pair.scale[g] = amax[g] < kF32InfBits ? block[g].scale
                                          : static_cast<u8>(kNVFP4Kernel ? kUE4M3NaN : kUE8M0NaN);
#pragma unroll
    for (float& x : pair.v[g]) x = x * block[g].multiplier;
  }
  const Element element = s.format.element;
  if (s.copy.stochastic) {
#pragma unroll
    for (int g = 0; g < 2; ++g)
      pair.codes[g] = stochastic_codes<kBits>(
          element, pair.v[g],
          rounding_bits(s.tile.seed, s.tile.number + pair.row[g] * s.tile.groups + pair.k / kGroup,
                        s.copy.stream));
  } else {
#pragma unroll
    for (int g = 0; g < 2; ++g) pair.codes[g] = nearest_codes<kBits>(element, pair.v[g]);
  }
#pragma unroll
  for (int g = 0; g < 2; ++g)
    // The rotation could give a group outside the copy a -0.
    if (amax[g] >= kF32InfBits ||
        (s.copy.hadamard && (pair.row[g] >= s.tile.rows || pair.k >= s.tile.codes)))
#pragma unroll
      for (u32& word : pair.codes[g].word) word = 0;
}

// ---- The kernel ---------------------------------------------------------------------------------

__device__ void store_codes(u8* to, const Codes<kBits>& codes) {
  if constexpr (kBits == 4) {
    *reinterpret_cast<uint2*>(to) = make_uint2(codes.word[0], codes.word[1]);
  } else if constexpr (kBits == 8) {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(codes.word[0], codes.word[1], codes.word[2], codes.word[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 3; ++i) reinterpret_cast<u32*>(to)[i] = codes.word[i];
  }
}

__device__ void read_rows(const PassState& s, const Shared& shared, Pair& pair) {
  const RowLane at = row_lane();
  pair.k = at.col;
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    Group<kInputBits> group;
#pragma unroll
    for (int i = 0; i < Group<kInputBits>::kBytes / 16; ++i) {
      const uint4 words = *reinterpret_cast<const uint4*>(row_chunk(shared.tile, at, g, i));
      group.word[4 * i] = words.x;
      group.word[4 * i + 1] = words.y;
      group.word[4 * i + 2] = words.z;
      group.word[4 * i + 3] = words.w;
    }
    widen(group, s.input, pair.v[g]);
    pair.row[g] = at.row + g * kRowStep;
  }
}

__device__ void store_rows(const CopyTile& t, const Pair& pair) {
  const u32 byte = pair.k / 8 * kBits, block = pair.k / kBlock;
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const u32 row = pair.row[g];
    if (row < t.rows && byte < t.bytes)
      store_codes(t.values + (static_cast<u64>(row) * t.pitch + byte), pair.codes[g]);
    const bool real = row < t.rows && block < t.blocks;
    const bool stored = row < t.scale_rows && block < t.scale_blocks;
    if (stored && pair.k % kBlock == 0) t.scales[t.scale_at(row, block)] = real ? pair.scale[g] : 0;
  }
}

__device__ void write_tile(Shared& shared, const Group<kInputBits> (&in)[2]) {
  const RowLane at = row_lane();
#pragma unroll
  for (int g = 0; g < 2; ++g) {
#pragma unroll
    for (int i = 0; i < Group<kInputBits>::kBytes / 16; ++i) {
      *reinterpret_cast<uint4*>(row_chunk(shared.tile, at, g, i)) = make_uint4(
          in[g].word[4 * i], in[g].word[4 * i + 1], in[g].word[4 * i + 2], in[g].word[4 * i + 3]);
    }
  }
}

__device__ void read_columns(const PassState& s, const Shared& shared, Pair& pair) {
  const ColumnLane at = column_lane();
  pair.k = at.row;
  pair.row[0] = at.col;
  pair.row[1] = at.col + 1;
  if constexpr (kInputBits == 32) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float2 x = *reinterpret_cast<const float2*>(column_word(shared.tile, at, i));
      pair.v[0][i] = x.x;
      pair.v[1][i] = x.y;
    }
  } else {
    u32 word[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      word[i] = *reinterpret_cast<const u32*>(column_word(shared.tile, at, i));
    if (s.input == InputType::bf16) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) pair.v[0][i] = low_of(word[i], InputType::bf16);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) pair.v[1][i] = high_of(word[i], InputType::bf16);
    } else {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) pair.v[0][i] = low_of(word[i], InputType::f16);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) pair.v[1][i] = high_of(word[i], InputType::f16);
    }
  }
}

__device__ void stage_columns(const Pair& pair, Shared& shared) {
  const ColumnLane at = column_lane();
#pragma unroll
  for (int g = 0; g < 2; ++g)
    store_codes(shared.codes + stage_slot(at.col + g) * kStagePitch + at.row / kGroup * kPieceBytes,
                pair.codes[g]);
  if (at.row % kBlock == 0)
    *reinterpret_cast<u16*>(&shared.scales[at.row / kBlock][at.col]) =
        static_cast<u16>(pair.scale[0] | pair.scale[1] << 8);
}

// Copies the staged codes and scales to their rows of the copy: columns of x.
__device__ void store_columns(const CopyTile& t, const Shared& shared) {
  constexpr int kUnit = kBits == 6 ? 4 : 16;  // bytes of a store
  constexpr int kUnits = kRows / 8 * kBits / kUnit;
#pragma unroll
  for (int i = 0; i < kCols * kUnits / kQuantizeThreads; ++i) {
    const u32 unit = i * kQuantizeThreads + threadIdx.x;
    u32 slot = unit / kUnits;
    const u32 byte = unit % kUnits * kUnit;
    // 4-bit codes: a half-warp reads four pieces of four columns as 8 bytes each; columns 8 apart
    // lie 16 banks apart, neighbours 18.
    if constexpr (kBits == 4)
      slot = (slot & 1) | ((slot & 2) << 2) | ((slot & 12) >> 1) | (slot & 48);
    const u32 column = slot % (kCols / 2) * 2 + slot / (kCols / 2);
    if (column >= t.rows || byte >= t.bytes) continue;
    const u8* from = shared.codes + slot * kStagePitch + byte;
    u8* to = t.values + (static_cast<u64>(column) * t.pitch + byte);
    if constexpr (kBits == 6) {
      *reinterpret_cast<u32*>(to) = *reinterpret_cast<const u32*>(from);
    } else if constexpr (kBits == 4) {
      const uint2 low = *reinterpret_cast<const uint2*>(from);
      const uint2 high = *reinterpret_cast<const uint2*>(from + 8);
      *reinterpret_cast<uint4*>(to) = make_uint4(low.x, low.y, high.x, high.y);
    } else {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    }
  }
  // Four blocks of a column lie side by side in both layouts.
  const u32 column = threadIdx.x % kCols, block = threadIdx.x / kCols * 4;
  if (block >= kBlocksDown || column >= t.scale_rows || block >= t.scale_blocks) return;
  u32 word = 0;
#pragma unroll
  for (u32 i = 0; i < 4; ++i)
    if (block + i < t.blocks && column < t.rows)
      word |= static_cast<u32>(shared.scales[block + i][column]) << (8 * i);
  u8* to = t.scales + t.scale_at(column, block);
  if (t.tiled || t.scale_pitch % 4 == 0) {
    *reinterpret_cast<u32*>(to) = word;
  } else {
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
      if (block + i < t.blocks) to[i] = static_cast<u8>(word >> (8 * i));
  }
}

// What all threads need of both copies, by two lanes; the first CTA of a matrix stores the global
// scale.
__device__ void prepare_passes(const QuantizeParams& p, const Place& place, Shared& shared) {
  if (threadIdx.x >= 2) return;
  const bool columns = threadIdx.x == 1;
  const CopyParams& copy = columns ? p.col : p.row;
  if (copy.values == nullptr) return;
  shared.tiles[threadIdx.x] = copy_tile(p, copy, columns, place);
  const bool scaled = tensor_max(p.format, copy.four_over_six) != 0.0f;
  const float amax = scaled ? f32_of(copy.amax[place.matrix]) : 0.0f;
  float global_scale;
  shared.constants[threadIdx.x] =
      tensor_constants(p.format, copy.four_over_six, amax, &global_scale);
  if (blockIdx.x == 0 && blockIdx.y == 0) copy.global_scale[place.matrix] = global_scale;
}

__device__ void quantize_tile(const QuantizeParams& p, const Place& place, bool aligned,
                              Shared& shared) {
  const RowLane at = row_lane();
  const u32 rows = remaining(p.rows, place.row), cols = remaining(p.cols, place.col);
  const u8* const x = static_cast<const u8*>(p.x) +
                      ((static_cast<u64>(place.matrix) * p.rows + place.row) * p.cols + place.col) *
                          (kInputBits / 8);
  Group<kInputBits> in[2];
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const u32 row = at.row + g * kRowStep;
    const int count = row < rows ? static_cast<int>(cols) - at.col : 0;
    in[g] = load_group<kInputBits>(x, static_cast<u64>(row) * p.cols + at.col, count, aligned);
  }
  prepare_passes(p, place, shared);
  write_tile(shared, in);
  __syncthreads();
#pragma unroll 1  // one body for both passes: half of the code, and of the time to compile it
  for (int pass = 0; pass < 2; ++pass) {
    const CopyParams& copy = pass == 0 ? p.row : p.col;
    if (copy.values == nullptr) continue;
    const PassState s{
        copy, pass == 1, p.format, p.input, shared.constants[pass], shared.tiles[pass]};
    // Pointers that were in shared memory have lost their address space.
    __builtin_assume(__isGlobal(s.tile.values));
    __builtin_assume(__isGlobal(s.tile.scales));
    Pair pair;
    if (pass == 0) {
      read_rows(s, shared, pair);
    } else {
      read_columns(s, shared, pair);
    }
    encode(s, pair);
    if (pass == 0) {
      store_rows(s.tile, pair);
    } else {
      stage_columns(pair, shared);
      __syncthreads();
      store_columns(s.tile, shared);
    }
  }
}

}  // namespace
}  // namespace jax_fp4

extern "C" __global__ void __launch_bounds__(jax_fp4::kQuantizeThreads, jax_fp4::kResident)
    JAX_FP4_KERNEL(const __grid_constant__ jax_fp4::QuantizeParams p) {
  using namespace jax_fp4;
  __shared__ Shared shared;
  constexpr int kVectorBytes = 32;
  const u64 pitch_bytes = static_cast<u64>(p.cols) * (kInputBits / 8);
  const bool aligned = (reinterpret_cast<u64>(p.x) | pitch_bytes) % kVectorBytes == 0;
  for (u32 matrix = blockIdx.z; matrix < p.matrices; matrix += gridDim.z) {
    const u32 example = p.leads == 1 ? matrix : matrix / p.leads;
    const u32* origin = p.origin + 3 * example;
    Place place{matrix,
                example,
                0,
                blockIdx.x * kQuantizeTileCols,
                static_cast<i64>(origin[0]) + (matrix - example * p.leads),
                origin[1],
                origin[2]};
    u32 row = blockIdx.y * kQuantizeTileRows;
    do {
      place.row = row;
      quantize_tile(p, place, aligned, shared);
      __syncthreads();
      row += gridDim.y * kQuantizeTileRows;
    } while (row < p.rows);
  }
}

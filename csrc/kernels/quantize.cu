// One pass over x[V, L, R, C] that makes a row copy, a column (transposed) copy, or both.
//
//   x tile [128 rows, 64 cols] --ld.global 32 B a lane--> st.shared --> tile
//   row pass      tile --ld.shared 16 B--> registers --> codes, scales --st.global-->
//   column pass   tile --ld.shared, two columns a lane--> registers --> codes, scales
//                 --st.shared--> staging --> st.global 16 B-->
//
// CTA: 4 warps; tile (blockIdx.y, blockIdx.x) of matrix blockIdx.z. In each pass a thread encodes a
// pair of groups of 16 elements in the upper half of the tile, rows 0 to 63, and the same pair in
// the lower half, 64 rows below. What both need is computed once, and one place differs from the
// other by a constant:
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
// NVFP4: a multiplier is a function of the tensor and of the block's scale byte, with a division in
// it. So each thread divides once a copy, for one of 128 bytes, and blocks look theirs up.
//
// Shared memory: tile 16 KiB (32 KiB of f32) | staged codes of the column copy 4.5, 6.3 or 9 KiB |
// staged scales 1 KiB | multipliers 1 KiB | constants. Barriers: after the constants, after the tile
// and the multipliers, after the staging of each copy, and at the end where a CTA takes several tiles.
//
// `whole`: of a tile that lies within x, nothing is tested against the edges.
// Ragged edges: elements outside x count as zero, which gives zero codes and scales, as padding is
// to be; loads are per element where a group crosses the edge or rows are not aligned to 32 bytes.
//
// Compiled for each of variants.def with JAX_FP4_BITS (of a code), JAX_FP4_BLOCK,
// JAX_FP4_FOUR_OVER_SIX and JAX_FP4_INPUT_BITS; every other option is a branch that all threads take
// alike.
#include "kernels/parts/quantize_scales.h"

namespace jax_fp4 {
namespace {

// ---- Encoding -----------------------------------------------------------------------------------

__device__ void multiply(Pair& pair, float a, float b) {
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const ptx::F32x2 y = ptx::mul_rn_f32x2({pair.v[0][i], pair.v[1][i]}, {a, b});
    pair.v[0][i] = y.x;
    pair.v[1][i] = y.y;
  }
}

// From values and their largest magnitudes to scales and codes.
template <bool kColumns>
__device__ void encode(const PassState& s, Pair& pair) {
  if (s.copy.hadamard) {
    rotate_groups(pair.v, s.copy.signs);
#pragma unroll
    for (int g = 0; g < 2; ++g) pair.amax[g] = largest(pair.v[g]);
  }
  combine<kColumns>(pair.amax, s.copy.tiles);
  float multiplier[2];
  scale_pair<kColumns>(s, pair, multiplier);
  multiply(pair, multiplier[0], multiplier[1]);
  const Element element = s.format.element;
  if (s.copy.stochastic) {
    constexpr float kScale = kStochasticScale<kBits>;
    if constexpr (kScale != 1.0f) multiply(pair, kScale, kScale);
#pragma unroll
    for (int g = 0; g < 2; ++g)
      pair.codes[g] = stochastic_codes<kBits>(
          element, pair.v[g],
          rounding_bits(s.tile.seed, s.tile.number + pair.row[g] * s.tile.groups + pair.k / kGroup,
                        s.copy.stream, ptx::mul_wide_u32));
  } else {
#pragma unroll
    for (int g = 0; g < 2; ++g) pair.codes[g] = nearest_codes<kBits>(element, pair.v[g]);
  }
  // The rotation could give a group outside the copy a -0.
  const bool edge = s.copy.hadamard && !s.tile.whole;
  const u32 worst = pair.amax[0] > pair.amax[1] ? pair.amax[0] : pair.amax[1];
  if (worst >= kF32InfBits || edge)
#pragma unroll
    for (int g = 0; g < 2; ++g)
      if (pair.amax[g] >= kF32InfBits ||
          (edge && (pair.row[g] >= s.tile.rows || pair.k >= s.tile.codes)))
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

// Values and largest magnitudes of 16-bit elements: words of a group each (row pass), or with an
// element of both groups in each word.
template <bool kColumns, InputType kInput>
__device__ void widen_pair(const u32 (&word)[2][kGroup / 2], Pair& pair) {
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const u32 w = word[i / 8][i % 8];
    (kColumns ? pair.v[0][i] : pair.v[i / 8][i % 8 * 2]) = low_of(w, kInput);
    (kColumns ? pair.v[1][i] : pair.v[i / 8][i % 8 * 2 + 1]) = high_of(w, kInput);
  }
  u32 a = largest_halves<kInput>(word[0]), b = largest_halves<kInput>(word[1]);
  if constexpr (!kColumns) {
    const u32 low = ptx::prmt_b32(a, b, 0x5410);
    b = ptx::prmt_b32(a, b, 0x7632);
    a = low;
  }
  const u32 both = larger_halves<kInput>(a, b);
  pair.amax[0] = bits_of(absolute(low_of(both, kInput)));
  pair.amax[1] = bits_of(absolute(high_of(both, kInput)));
}

template <bool kColumns>
__device__ void widen_pair(const u32 (&word)[2][Group<kInputBits>::kWords], InputType input,
                           Pair& pair) {
  if constexpr (kInputBits == 32) {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) pair.v[g][i] = f32_of(word[g][i]);
      pair.amax[g] = largest(pair.v[g]);
    }
  } else if (input == InputType::bf16) {
    widen_pair<kColumns, InputType::bf16>(word, pair);
  } else {
    widen_pair<kColumns, InputType::f16>(word, pair);
  }
}

__device__ void read_rows(const PassState& s, u32 tile, const RowLane& at, Pair& pair) {
  u32 word[2][Group<kInputBits>::kWords];
#pragma unroll
  for (int g = 0; g < 2; ++g)
#pragma unroll
    for (int i = 0; i < Group<kInputBits>::kWords; i += 4)
      ptx::ld_shared_v4_b32(tile + row_chunk(at, g, i / 4), word[g][i], word[g][i + 1],
                            word[g][i + 2], word[g][i + 3]);
  widen_pair<false>(word, s.input, pair);
}

__device__ void read_columns(const PassState& s, u32 tile, const ColumnLane& at, Pair& pair) {
  u32 word[2][Group<kInputBits>::kWords];
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const u32 from = tile + column_word(at, i);
    if constexpr (kInputBits == 16) {
      word[i / 8][i % 8] = ptx::ld_shared_b32(from);
    } else {
      ptx::ld_shared_v2_b32(from, word[0][i], word[1][i]);
    }
  }
  widen_pair<true>(word, s.input, pair);
}

// Pointers that were in shared memory have lost their address space.
__device__ u8* global(u8* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

__device__ void store_rows(const CopyTile& t, const Pair& pair) {
  const u32 byte = pair.k / 8 * kBits, pitch = t.pitch;
  u8* const to = global(t.values) + (static_cast<u64>(pair.row[0]) * pitch + byte);
  if (t.whole) {
    store_codes(to, pair.codes[0]);
    store_codes(to + static_cast<u64>(pitch) * kRowStep, pair.codes[1]);
    return;
  }
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const u32 row = pair.row[g];
    if (row < t.rows && byte < t.bytes)
      store_codes(to + static_cast<u64>(pitch) * (g * kRowStep), pair.codes[g]);
  }
}

// Four or two scales side by side, of a row of the copy from `block` on.
template <int kBlocks>
__device__ void store_scales(const CopyTile& t, u32 word, u32 row, u32 block) {
  if (!t.whole) {
    if (row >= t.scale_rows || block >= t.scale_blocks) return;
    const u32 real = row < t.rows ? remaining(t.blocks, block) : 0;
    if (real < kBlocks) word &= (1u << (8 * real)) - 1;
  }
  u8* const to = global(t.scales) + t.scale_at(row, block);
  if (!t.tiled && t.scale_pitch % kBlocks != 0) {
#pragma unroll
    for (u32 i = 0; i < kBlocks; ++i)
      if (block + i < t.blocks) to[i] = static_cast<u8>(word >> (8 * i));
  } else if constexpr (kBlocks == 4) {
    *reinterpret_cast<u32*>(to) = word;
  } else {
    *reinterpret_cast<u16*>(to) = static_cast<u16>(word);
  }
}

// The row copy's scales are staged as the tiled layout has them: rows 32 apart lie side by side.
__device__ void stage_row_scales(const Pair& pair, u32 scales, const RowLane& at, int half) {
  if (at.col % kBlock != 0) return;
  const u32 first = scales + (at.row % 32 * 4 + at.row / 32) * kRowBlocks + at.col / kBlock;
#pragma unroll
  for (int g = 0; g < 2; ++g)
    ptx::st_shared_u8(first + (g * kRowStep * 4 + half * kHalfRows / 32) * kRowBlocks,
                      pair.scale[g]);
}
__device__ void store_row_scales(const CopyTile& t, const Shared& shared) {
  static_assert(kQuantizeThreads == kRows);
  const u32 from = ptx::shared_address(shared.row_scales) + threadIdx.x * kRowBlocks;
  const u32 word = kRowBlocks == 4 ? ptx::ld_shared_b32(from) : ptx::ld_shared_b16(from);
  store_scales<kRowBlocks>(t, word, threadIdx.x % 4 * 32 + threadIdx.x / 4, 0);
}

__device__ void stage_codes(u32 to, const Codes<kBits>& codes) {
  if constexpr (kBits == 4) {
    ptx::st_shared_v2_b32(to, codes.word[0], codes.word[1]);
  } else if constexpr (kBits == 8) {
    ptx::st_shared_v4_b32(to, codes.word[0], codes.word[1], codes.word[2], codes.word[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 3; ++i) ptx::st_shared_b32(to + 4 * i, codes.word[i]);
  }
}

__device__ void stage_columns(const Pair& pair, u32 codes, u32 scales) {
  const u32 slot = stage_slot(pair.row[0]), block = pair.k / kBlock;
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const u32 s = slot + g * kCols / 2;  // the next column's
    stage_codes(codes + s * kStagePitch + pair.k / kGroup * kPieceBytes, pair.codes[g]);
    if (pair.k % kBlock == 0)
      ptx::st_shared_u8(scales + (block / 4 * kCols + s) * 4 + block % 4, pair.scale[g]);
  }
}

constexpr int kUnit = kBits == 6 ? 4 : 16;  // bytes that are copied at a time
constexpr int kUnits = kRows / 8 * kBits / kUnit;

__device__ void store_piece(u8* to, u32 from) {
  if constexpr (kUnit == 4) {
    *reinterpret_cast<u32*>(to) = ptx::ld_shared_b32(from);
  } else {
    u32 word[4];
    if constexpr (kStagePitch % 16 == 0) {
      ptx::ld_shared_v4_b32(from, word[0], word[1], word[2], word[3]);
    } else {
      ptx::ld_shared_v2_b32(from, word[0], word[1]);
      ptx::ld_shared_v2_b32(from + 8, word[2], word[3]);
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
  }
}

// Copies the staged codes and scales to their rows of the copy: columns of x.
__device__ void store_columns(const CopyTile& t, const Shared& shared) {
  constexpr bool kTwoEach = kBits == 4;
  static_assert(!kTwoEach || kCols / 2 * kUnits == kQuantizeThreads);
  if (kTwoEach && t.whole) {
    // A half-warp reads four pieces of four columns as 8 bytes each; columns 8 slots apart lie 16
    // banks apart, neighbours 18. The second piece is of the column beside the first one's.
    const u32 place = threadIdx.x / kUnits, byte = threadIdx.x % kUnits * kUnit;
    const u32 slot = (place & 1) | ((place & 2) << 2) | ((place & 12) >> 1) | (place & 16);
    const u32 from = ptx::shared_address(shared.codes) + slot * kStagePitch + byte;
    u8* to = global(t.values) + (static_cast<u64>(2 * slot) * t.pitch + byte);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      store_piece(to, from + i * kCols / 2 * kStagePitch);
      to += t.pitch;
    }
  } else {
#pragma unroll 4
    for (int i = 0; i < kCols * kUnits / kQuantizeThreads; ++i) {
      const u32 unit = i * kQuantizeThreads + threadIdx.x;
      const u32 slot = unit / kUnits, byte = unit % kUnits * kUnit;
      const u32 column = column_of(slot);
      if (column < t.rows && byte < t.bytes)
        store_piece(global(t.values) + (static_cast<u64>(column) * t.pitch + byte),
                    ptx::shared_address(shared.codes) + slot * kStagePitch + byte);
    }
  }
  // Neighbouring lanes have columns 32 apart, whose scales lie side by side in the tiled layout.
  if (threadIdx.x >= kScaleWords * kCols) return;
  const u32 word = threadIdx.x / kCols, column = threadIdx.x % kCols / 2 + threadIdx.x % 2 * 32;
  store_scales<4>(t, shared.col_scales[word * kCols + stage_slot(column)], column, 4 * word);
}

// What all threads need of both copies, by two lanes; the first CTA of a matrix stores the global
// scale.
__device__ void prepare_passes(const QuantizeParams& p, const Place& place, Shared& shared) {
  if (threadIdx.x >= 2) return;
  const bool columns = threadIdx.x == 1;
  const CopyParams& copy = columns ? p.col : p.row;
  if (copy.values == nullptr) return;
  shared.tiles[threadIdx.x] = copy_tile(p, copy, columns, place);
  const Format format = kNVFP4Kernel ? kNVFP4 : p.format;
  const bool four_over_six = kFourOverSix && copy.four_over_six;
  const bool scaled = tensor_max(format, four_over_six) != 0.0f;
  const float amax = scaled ? f32_of(copy.amax[place.matrix]) : 0.0f;
  shared.constants[threadIdx.x] = tensor_constants(format, four_over_six, amax);
  if (blockIdx.x == 0 && blockIdx.y == 0)
    copy.global_scale[place.matrix] = tensor_scale(format, amax, four_over_six).global;
}

// Table of multipliers of every scale byte.
__device__ void prepare_multipliers(const QuantizeParams& p, Shared& shared) {
  static_assert(kQuantizeThreads == kUE4M3Codes);
  if constexpr (kNVFP4Kernel)
#pragma unroll
    for (int pass = 0; pass < 2; ++pass)
      if ((pass == 0 ? p.row : p.col).values != nullptr)
        shared.multiplier[pass][threadIdx.x] =
            fast_nvfp4_multiplier(threadIdx.x, shared.constants[pass].inverse);
}

using Loaded = Group<kInputBits>[2][2];  // [half][group]

__device__ void load_tile(const QuantizeParams& p, const Place& place, bool aligned, Loaded& in) {
  const RowLane at = row_lane();
  const u32 rows = remaining(p.rows, place.row), cols = remaining(p.cols, place.col);
  const u8* const x = static_cast<const u8*>(p.x) +
                      ((static_cast<u64>(place.matrix) * p.rows + place.row) * p.cols + place.col) *
                          (kInputBits / 8);
  if (aligned && rows >= kRows && cols >= kCols) {
    const u64 pitch = static_cast<u64>(p.cols) * (kInputBits / 8);
    const u8* from = x + at.row * pitch + at.col * (kInputBits / 8);
#pragma unroll
    for (auto& half : in) {
      half[0] = load_whole_group<kInputBits>(from);
      half[1] = load_whole_group<kInputBits>(from + kRowStep * pitch);
      from += kHalfRows * pitch;
    }
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const u32 row = at.row + half * kHalfRows + g * kRowStep;
      const int count = row < rows ? static_cast<int>(cols) - at.col : 0;
      in[half][g] =
          load_group<kInputBits>(x, static_cast<u64>(row) * p.cols + at.col, count, aligned);
    }
}

__device__ void write_tile(Shared& shared, const Loaded& in) {
  const RowLane at = row_lane();
  const u32 tile = ptx::shared_address(shared.tile);
#pragma unroll
  for (int g = 0; g < 2; ++g)
#pragma unroll
    for (int i = 0; i < Group<kInputBits>::kWords; i += 4)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto& word = in[half][g].word;
        ptx::st_shared_v4_b32(tile + row_chunk(at, g, i / 4) + half * kHalfRows * kTilePitch,
                              word[i], word[i + 1], word[i + 2], word[i + 3]);
      }
}

template <bool kColumns>
__device__ void make_copy(const QuantizeParams& p, Shared& shared) {
  const CopyParams& copy = kColumns ? p.col : p.row;
  if (copy.values == nullptr) return;
  const PassState s{copy,
                    p.format,
                    p.input,
                    shared.constants[kColumns],
                    shared.multiplier[kColumns],
                    shared.tiles[kColumns]};
  const u32 tile = ptx::shared_address(shared.tile);
#pragma unroll kUnrolledHalves
  for (int half = 0; half < 2; ++half) {
    const u32 from = tile + half * kHalfRows * kTilePitch;
    Pair pair;
    if constexpr (kColumns) {
      const ColumnLane at = column_lane();
      pair.k = at.row + half * kHalfRows;
      pair.row[0] = at.col;
      pair.row[1] = at.col + 1;
      read_columns(s, from, at, pair);
    } else {
      const RowLane at = row_lane();
      pair.k = at.col;
      pair.row[0] = at.row + half * kHalfRows;
      pair.row[1] = pair.row[0] + kRowStep;
      read_rows(s, from, at, pair);
    }
    encode<kColumns>(s, pair);
    if constexpr (kColumns) {
      stage_columns(pair, ptx::shared_address(shared.codes),
                    ptx::shared_address(shared.col_scales));
    } else {
      store_rows(s.tile, pair);
      stage_row_scales(pair, ptx::shared_address(shared.row_scales), row_lane(), half);
    }
  }
  __syncthreads();
  if constexpr (kColumns) {
    store_columns(s.tile, shared);
  } else {
    store_row_scales(s.tile, shared);
  }
}

__device__ void quantize_tile(const QuantizeParams& p, const Place& place, bool aligned,
                              Shared& shared) {
  Loaded in;
  load_tile(p, place, aligned, in);
  prepare_passes(p, place, shared);
  __syncthreads();
  prepare_multipliers(p, shared);
  write_tile(shared, in);
  __syncthreads();
  make_copy<false>(p, shared);
  make_copy<true>(p, shared);
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

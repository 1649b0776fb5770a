// Inside the GEMM: what the driver (gemm.cc) and the kernels of one instruction level share.
//
//   Rows            one operand of one batch entry: packed codes and scale bytes
//   RowScales       the power of two that was taken out of each row (MX scales span 254 binades)
//   panel           rows decoded with their scales, in groups of 16 rows and blocks of kDepth codes
//   PanelKernels    pack rows into panels, multiply panels, finish sums: one table per level
//   StreamKernels   the product of a few rows with many, without panels (decode, M = 1)
//   decode_row ...  one row or one dot product by plain code, for rows no panel can hold
#pragma once

#include <array>
#include <vector>

#include "cpu/gemm.h"

namespace jax_fp4::cpu {

inline constexpr i64 kGroup = 16;  // rows of a panel group; a tile of sums is kGroup x kGroup
inline constexpr i64 kStep = 32;   // codes of k that panels are padded to: one AMX bf16 tile
// Codes of k in one panel block; a multiple of kStep and of four blocks of scales.
inline constexpr i64 kDepth = 256;

struct Rows {
  Format format;
  ScaleLayout layout;
  i64 rows, k;
  const u8* values;
  const u8* scales;

  i64 blocks() const { return ceil_div(k, format.block); }
  const u8* codes(i64 row) const { return values + row * row_bytes(format.element, k); }
};

// Scale bytes of one row, in either layout: block b lies at first[b / 4 * tile + b % 4].
struct ScaleRow {
  const u8* first;
  i64 tile;

  const u8* at(i64 block) const { return first + block / 4 * tile + block % 4; }
  u32 operator[](i64 block) const { return *at(block); }
};

inline ScaleRow scale_row(const Rows& x, i64 row) {
  return {x.scales + scale_offset(x.layout, row, 0, x.blocks()),
          x.layout == ScaleLayout::linear ? kScaleTileBlocks : kScaleTileBytes};
}

// Panels hold code * 2^(scale exponent - base[row]); the sum of a row a and a row b is multiplied
// by power[a] * power[b] = 2^(base[a] + base[b]) afterwards. UE4M3 scales need no base.
//
// The largest scale of a row becomes 2^kTopExponent. Elements are below 2^16, so a sum stays below
// 2^(2 * (16 + 24)) * k: finite in f32 for k < 2^47. The smallest scale may be 2^(24 - 71) = 2^-47:
// elements are multiples of 2^-16, so products are multiples of 2^(2 * (-47 - 16)) = 2^-126, and
// neither a factor nor any partial sum is ever subnormal (the bf16 instructions would flush it).
// Rows whose scales span more are `wide`: their outputs are computed by wide_dot.
inline constexpr int kTopExponent = 24;
inline constexpr int kMaxSpan = 71;

struct RowScales {
  std::vector<double> power;
  std::vector<i32> base;
  std::vector<u8> wide;

  explicit RowScales(i64 rows) : power(rows, 1.0), base(rows, 0), wide(rows, 0) {}
};

// Finds base, power and wide of one row. Blocks of zeros and NaN scales do not count.
void scan_row(const Rows& x, i64 row, RowScales& scales);

// What happens to the sums of one batch entry (gemm.h).
struct Epilogue {
  float alpha;
  const double* power_a;  // [m], or nullptr where every power is 1
  const double* power_b;  // [n]
  const void* bias;
  Dtype bias_dtype;
  const void* accumulate;  // [m, n]
  Dtype accumulate_dtype;
  void* out;  // [m, n]
  Dtype out_dtype;
  i64 n;
};

// One output, from a sum to which powers were applied.
void finish_one(const Epilogue& epilogue, i64 row, i64 col, float sum);

inline float apply_powers(const Epilogue& epilogue, i64 row, i64 col, float sum) {
  if (epilogue.power_a == nullptr) return sum;
  return static_cast<float>(sum * (epilogue.power_a[row] * epilogue.power_b[col]));
}

struct PanelBlock {
  const void* left;   // left_groups groups of `steps` steps, one after the other
  const void* right;  // right_groups groups
  i64 left_groups, right_groups, steps;
  bool first;   // sums are written, not added to
  float* sums;  // [left_groups, right_groups, kGroup, kGroup]
};

struct PanelKernels {
  i64 element_bytes;  // of a panel element
  // Decodes codes [k0, k0 + kStep * steps) of rows kGroup * group .. + kGroup - 1 into one group of
  // a panel; what lies beyond rows or k is 0.
  void (*pack_left)(const Rows& x, const i32* base, i64 group, i64 k0, i64 steps, void* panel);
  void (*pack_right)(const Rows& x, const i32* base, i64 group, i64 k0, i64 steps, void* panel);
  // The k order of every sum is the same wherever it lies.
  void (*multiply)(const PanelBlock& block);
  // Outputs (row, col) .. (row, col + count - 1). Sums lie kGroup by kGroup, `pitch` apart.
  void (*finish)(const Epilogue& epilogue, i64 row, i64 col, i64 count, const float* sums,
                 i64 pitch);
};

inline constexpr i64 kFewRows = 8;  // up to which a product goes without panels

struct StreamKernels {
  // Memory for the few rows, in the form in which they meet rows of the format `many`.
  i64 (*prepared_bytes)(const Rows& few, const Format& many);
  void (*prepare)(const Rows& few, const RowScales& scales, const Format& many, u8* memory);
  // sums[f * pitch + r]: few row f times many row row0 + r, r < row1 - row0.
  void (*dot)(const u8* prepared, const Rows& few, const Rows& many, const RowScales& scales,
              i64 row0, i64 row1, float* sums, i64 pitch);
};

const PanelKernels& portable_panel_kernels();

#if defined(__x86_64__)
const PanelKernels& avx2_panel_kernels();
const PanelKernels& avx512_panel_kernels();
const PanelKernels& avx512_bf16_panel_kernels();
const PanelKernels& amx_panel_kernels();
const StreamKernels& avx2_stream_kernels();
const StreamKernels& avx512_stream_kernels();
#endif

// ---- Plain code

// Calls f.operator()<element>() with the element as a constant.
template <typename F>
auto with_element(Element element, F&& f) {
  switch (element) {
    case Element::e2m1: return f.template operator()<Element::e2m1>();
    case Element::e2m3: return f.template operator()<Element::e2m3>();
    case Element::e3m2: return f.template operator()<Element::e3m2>();
    case Element::e4m3: return f.template operator()<Element::e4m3>();
    default: return f.template operator()<Element::e5m2>();
  }
}

// The values of all codes of an element type.
template <Element element>
inline constexpr auto kValues = [] {
  std::array<float, std::size_t{1} << minifloat(element).bits()> values{};
  for (u32 code = 0; code < values.size(); ++code) values[code] = decode(minifloat(element), code);
  return values;
}();

// The values of all UE4M3 bytes.
inline constexpr auto kUE4M3Values = [] {
  std::array<float, 256> values{};
  for (u32 byte = 0; byte < values.size(); ++byte) values[byte] = decode_ue4m3(byte);
  return values;
}();

// The f32 scale of a block of a row that is not wide, without the row's base.
inline float panel_scale(BlockScale kind, u32 byte, i32 base) {
  if (kind == BlockScale::ue4m3) return kUE4M3Values[byte];
  if (byte == kUE8M0NaN) return kF32NaN;
  // Blocks of zeros may lie outside of the row's span: any finite scale will do for them.
  const int field = static_cast<int>(byte) - base;
  return f32_of(static_cast<u32>(field < 1 ? 1 : field > 191 ? 191 : field) << 23);
}

// The values of one row, scales included, exact in double.
void decode_row(const Rows& x, i64 row, double* values);

// sum a[k] * b[k] in double, rounded once. Products are exact; a double sum of k terms is off by at
// most k * 2^-53 * sum |terms|, far below the rounding to f32.
float wide_dot(const double* a, const double* b, i64 k);

// The sum by the tensor-core model (numerics/mma_accumulate.h).
float model_dot(const Rows& a, i64 row_a, const Rows& b, i64 row_b);

}  // namespace jax_fp4::cpu

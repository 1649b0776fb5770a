// Cuts tensors into pieces for the kernels, places what they return, writes all padding.
//
// A piece is a rectangle of x that fits into the L2 cache, so that two copies read memory once.
// Pieces begin at multiples of 128 of both axes where that matters: at no block, packed group or
// scale atom is shared by two of them.
#include "cpu/quantize.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/quantize_kernels.h"

namespace jax_fp4::cpu {
namespace {

using std::int64_t, std::uint16_t, std::uint32_t, std::uint64_t, std::uint8_t;

constexpr int64_t kPieceElements = 1 << 17;
constexpr int64_t kPieceCols = kPieceElements / kStripRows;
constexpr int64_t kMaxPieceBlocks = kPieceElements / 16;

struct Piece {
  int64_t lead, row, col, rows, cols;
};

// All pieces of x[leads, rows, cols], numbered lead by lead.
class Pieces {
 public:
  // `banded`: something runs along the rows (a column copy, tiles), so that pieces are bands of
  // kStripRows rows. Otherwise they are as wide as possible.
  Pieces(const Input& x, bool banded) : x_(x) {
    if (x.rows == 0 || x.cols == 0) return;
    cols_ = std::min(x.cols, banded ? kPieceCols : kPieceElements);
    rows_ = banded ? kStripRows : std::max<int64_t>(1, kPieceElements / round_up(cols_, 32));
    across_ = ceil_div(x.cols, cols_);
    per_lead_ = ceil_div(x.rows, rows_) * across_;
  }

  int64_t count() const { return x_.leads * per_lead_; }
  Piece operator[](int64_t i) const {
    const int64_t row = i % per_lead_ / across_ * rows_;
    const int64_t col = i % across_ * cols_;
    return {i / per_lead_, row, col, std::min(rows_, x_.rows - row),
            std::min(cols_, x_.cols - col)};
  }

 private:
  const Input& x_;
  int64_t rows_ = 1, cols_ = 1, across_ = 1, per_lead_ = 0;
};

// A few tasks per thread, so that many small pieces cost few dispatches.
template <class Body>
void for_each_piece(Parallel& parallel, int64_t pieces, const Body& body) {
  const int64_t tasks = parallel.threads() == 1
                            ? std::min<int64_t>(pieces, 1)
                            : std::min<int64_t>(pieces, 8 * int64_t{parallel.threads()});
  parallel.run(tasks, [&](int64_t task) {
    for (int64_t i = pieces * task / tasks; i < pieces * (task + 1) / tasks; ++i) body(i);
  });
}

const void* element(const Input& x, int64_t lead, int64_t row, int64_t col) {
  return static_cast<const uint8_t*>(x.data) +
         ((lead * x.rows + row) * x.cols + col) * dtype_bytes(x.dtype);
}

// Asks for cache lines that are used a little later. Pieces are short stretches of distant rows,
// which the hardware does not foresee.
template <bool kWrite>
void prefetch(const void* begin, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64)
    __builtin_prefetch(static_cast<const uint8_t*>(begin) + i, kWrite ? 1 : 0);
}

int64_t logical_rows(const Input& x) {
  return x.placement.logical_rows != 0 ? x.placement.logical_rows : x.rows;
}
int64_t logical_cols(const Input& x) {
  return x.placement.logical_cols != 0 ? x.placement.logical_cols : x.cols;
}

// ---- amax ---------------------------------------------------------------------------------------

// The number of element (l, r, c) in the logical tensor, mod 2^32.
uint32_t logical_index(const Input& x, int64_t l, int64_t r, int64_t c) {
  const Placement& p = x.placement;
  return static_cast<uint32_t>(((p.lead + l) * logical_rows(x) + p.row + r) * logical_cols(x) +
                               p.col + c);
}

struct Partial {
  uint32_t amax = 0, amax_rotated = 0, fingerprint = 0;
};

Partial amax_of_piece(const QuantizeKernels& k, const Input& x, const AmaxRequest& request,
                      const Piece& p) {
  Partial result;
  const bool fingerprint = request.fingerprint != nullptr;
  const bool rotate_cols = request.rotate && request.axis == Axis::cols;
  // Whole rows of an unsharded tensor are one run of consecutive elements.
  const bool whole = p.cols == x.cols && (!fingerprint || logical_cols(x) == x.cols);
  const int64_t run = whole ? p.rows * p.cols : p.cols;
  for (int64_t r = 0; r < p.rows; r += whole ? p.rows : 1) {
    const void* data = element(x, p.lead, p.row + r, p.col);
    const Scan scan = k.scan(x.dtype, data, run, fingerprint);
    result.amax = std::max(result.amax, scan.amax);
    // sum of bits * (2 * (first + i) + 1)
    const uint32_t first = logical_index(x, p.lead, p.row + r, p.col);
    result.fingerprint += (2 * first + 1) * scan.sum + 2 * scan.weighted;
  }
  if (rotate_cols) {
    const bool flat = p.cols == x.cols && p.cols % kHadamardSize == 0;
    for (int64_t r = 0; r < p.rows; r += flat ? p.rows : 1)
      result.amax_rotated = std::max(
          result.amax_rotated, k.rotated_amax_run(x.dtype, element(x, p.lead, p.row + r, p.col),
                                                  flat ? p.rows * p.cols : p.cols, request.signs));
  } else if (request.rotate) {
    for (int64_t c = 0; c < p.cols; c += kStripCols)
      result.amax_rotated = std::max(
          result.amax_rotated,
          k.rotated_amax_columns(
              x.dtype, element(x, p.lead, p.row, p.col + c), x.cols, static_cast<int>(p.rows),
              static_cast<int>(std::min<int64_t>(kStripCols, p.cols - c)), request.signs));
  }
  return result;
}

// ---- quantize -----------------------------------------------------------------------------------

int element_bits(const Format& format) { return minifloat(format.element).bits(); }

// A copy together with the dimensions of its logical and physical matrices.
struct Target {
  const Copy& copy;
  int64_t rows, k;        // of this shard's copy
  int64_t blocks, pitch;  // scale bytes and value bytes of a row
  int64_t row0, k0;       // where the shard lies in the logical copy
  int64_t lead0, logical_rows, logical_groups;

  Target(const Input& x, const Copy& c) : copy(c) {
    const bool transposed = c.axis == Axis::rows;
    rows = transposed ? x.cols : x.rows;
    k = transposed ? x.rows : x.cols;
    blocks = ceil_div(k, c.format.block);
    pitch = row_bytes(c.format.element, k);
    row0 = transposed ? x.placement.col : x.placement.row;
    k0 = transposed ? x.placement.row : x.placement.col;
    lead0 = x.placement.lead;
    logical_rows = transposed ? cpu::logical_cols(x) : cpu::logical_rows(x);
    logical_groups = ceil_div(transposed ? cpu::logical_rows(x) : cpu::logical_cols(x), 16);
  }

  uint8_t* values(int64_t lead, int64_t row, int64_t k_) const {
    return copy.values + (lead * rows + row) * pitch + k_ * element_bits(copy.format) / 8;
  }
  uint8_t* scales(int64_t lead) const {
    return copy.scales + lead * scale_bytes(copy.layout, rows, blocks);
  }
  uint8_t* scale(int64_t lead, int64_t row, int64_t block) const {
    return scales(lead) + scale_offset(copy.layout, row, block, blocks);
  }
  uint64_t group(int64_t lead, int64_t row, int64_t k_) const {
    return static_cast<uint64_t>(((lead0 + lead) * logical_rows + row0 + row) * logical_groups +
                                 (k0 + k_) / 16);
  }

  Encoding encoding(const Input& x, int64_t lead) const {
    const float amax = copy.amax ? f32_of(copy.amax[lead]) : 0.0f;
    return {x.dtype,
            copy.format,
            copy.rule,
            copy.stochastic,
            copy.four_over_six,
            copy.hadamard,
            copy.signs,
            copy.stream,
            copy.seed,
            amax,
            tensor_scale(copy.format, amax, copy.four_over_six).encode};
  }
};

// The tiles of one piece: [tile along the copy's rows][block of the contraction axis].
struct TileTable {
  int64_t blocks = 0;
  std::vector<uint8_t> scales;
  std::vector<float> multipliers;

  // From this row of tiles on.
  GivenScales row(int64_t tile_row) const {
    if (blocks == 0) return {};
    return {&scales[static_cast<std::size_t>(tile_row * blocks)],
            &multipliers[static_cast<std::size_t>(tile_row * blocks)], blocks};
  }
};

BlockEncoding four_over_six(const Encoding& e, const Input& x, const Piece& p, bool transposed,
                            int64_t row, int64_t col, uint32_t amax) {
  float tile[16][16] = {};
  const int64_t rows = std::min<int64_t>(16, p.rows - row);
  const int64_t cols = std::min<int64_t>(16, p.cols - col);
  for (int64_t r = 0; r < rows; ++r) {
    const void* data = element(x, p.lead, p.row + row + r, p.col + col);
    for (int64_t c = 0; c < cols; ++c)
      (transposed ? tile[c][r] : tile[r][c]) = load(x.dtype, data, c);
  }
  return four_over_six_tile(e, amax, tile);
}

TileTable tile_table(const QuantizeKernels& k, const Input& x, const Target& t, const Encoding& e,
                     const Piece& p) {
  const int block = t.copy.format.block;
  const bool transposed = t.copy.axis == Axis::rows;
  const int64_t down = ceil_div(p.rows, block), across = ceil_div(p.cols, block);
  std::vector<uint32_t> band(static_cast<std::size_t>(across));
  std::vector<uint32_t> amax(static_cast<std::size_t>(down * across));
  TileTable table;
  table.blocks = transposed ? down : across;
  table.scales.resize(amax.size());
  table.multipliers.resize(amax.size());
  for (int64_t i = 0; i < down; ++i) {
    const int rows = static_cast<int>(std::min<int64_t>(block, p.rows - i * block));
    k.tile_amax(x.dtype, element(x, p.lead, p.row + i * block, p.col), x.cols, rows, p.cols, block,
                band.data());
    for (int64_t j = 0; j < across; ++j) {
      const auto at = static_cast<std::size_t>(transposed ? j * down + i : i * across + j);
      amax[at] = band[static_cast<std::size_t>(j)];
      if (!e.four_over_six) continue;
      const BlockEncoding best = four_over_six(e, x, p, transposed, i * block, j * block, amax[at]);
      table.scales[at] = best.scale;
      table.multipliers[at] = best.multiplier;
    }
  }
  if (!e.four_over_six)
    k.encode_tiles(e, amax.data(), down * across, table.scales.data(), table.multipliers.data());
  return table;
}

// Copies n scale bytes of one row to their place. Pieces begin at multiples of 4 blocks, and 4 lie
// side by side in both layouts.
void place_scales(const Target& t, int64_t lead, int64_t row, int64_t block, const uint8_t* from,
                  int64_t n) {
  if (t.copy.layout == ScaleLayout::linear) {
    std::memcpy(t.scale(lead, row, block), from, static_cast<std::size_t>(n));
    return;
  }
  for (int64_t i = 0; i < n; i += kScaleTileBlocks)
    std::memcpy(t.scale(lead, row, block + i), from + i,
                static_cast<std::size_t>(std::min<int64_t>(kScaleTileBlocks, n - i)));
}

void encode_rows(const QuantizeKernels& k, const Input& x, const Target& t, const Piece& p) {
  const Format& format = t.copy.format;
  const Encoding e = t.encoding(x, p.lead);
  TileTable tiles;
  if (t.copy.tiles) tiles = tile_table(k, x, t, e, p);
  const int64_t blocks = ceil_div(p.cols, format.block);
  const int64_t block0 = p.col / format.block;
  uint8_t scratch[kMaxPieceBlocks];
  const bool linear = t.copy.layout == ScaleLayout::linear;
  uint8_t* scales = linear ? t.scales(p.lead) + p.row * t.blocks + block0 : scratch;
  const int64_t scale_pitch = linear ? t.blocks : blocks;
  // Rows without padding are one run of blocks, if random bits do not say otherwise.
  const bool flat = p.cols == x.cols && p.cols % format.block == 0 && !t.copy.tiles &&
                    t.pitch * 8 == p.cols * element_bits(format) &&
                    (!t.copy.stochastic || t.logical_groups * 16 == p.cols);
  const int64_t run_bytes = p.cols * dtype_bytes(x.dtype);
  for (int64_t r = 0; r < p.rows; r += flat ? p.rows : 1) {
    if (!flat && r + 1 < p.rows) {
      prefetch<false>(element(x, p.lead, p.row + r + 1, p.col), run_bytes);
      prefetch<true>(t.values(p.lead, p.row + r + 1, p.col), row_bytes(format.element, p.cols));
    }
    k.encode_run(e, element(x, p.lead, p.row + r, p.col), flat ? p.rows * p.cols : p.cols,
                 t.group(p.lead, p.row + r, p.col), tiles.row(r / format.block),
                 t.values(p.lead, p.row + r, p.col), scales + r * scale_pitch);
  }
  if (linear) return;
  for (int64_t r = 0; r < p.rows; ++r)
    place_scales(t, p.lead, p.row + r, block0, scratch + r * blocks, blocks);
}

void encode_cols(const QuantizeKernels& k, const Input& x, const Target& t, const Piece& p) {
  const Format& format = t.copy.format;
  const Encoding e = t.encoding(x, p.lead);
  TileTable tiles;
  if (t.copy.tiles) tiles = tile_table(k, x, t, e, p);
  const int bits = element_bits(format);
  const int64_t blocks = ceil_div(p.rows, format.block);
  const int64_t used = round_up(p.rows, 16) * bits / 8;
  const int64_t end = p.row + p.rows == x.rows ? t.pitch - p.row * bits / 8 : used;
  alignas(64) uint8_t values[kStripCols * kStripPitch];
  alignas(64) uint8_t scales[kStripRows / 16][kStripCols];
  for (int64_t c = 0; c < p.cols; c += kStripCols) {
    const int cols = static_cast<int>(std::min<int64_t>(kStripCols, p.cols - c));
    for (int lane = 0; lane < cols; ++lane) {
      prefetch<true>(t.values(p.lead, p.col + c + lane, p.row), end);
      prefetch<true>(t.scale(p.lead, p.col + c + lane, p.row / format.block), 1);
    }
    k.encode_columns(e, element(x, p.lead, p.row, p.col + c), x.cols, static_cast<int>(p.rows),
                     cols, t.group(p.lead, p.col + c, p.row),
                     static_cast<uint64_t>(t.logical_groups), tiles.row(c / format.block), values,
                     scales);
    for (int lane = 0; lane < cols; ++lane) {
      uint8_t* out = t.values(p.lead, p.col + c + lane, p.row);
      const uint8_t* from = values + lane * kStripPitch;
      if (end == 64) {
        std::memcpy(out, from, 64);  // a cache line: 128 rows of 4-bit codes
      } else {
        std::memcpy(out, from, static_cast<std::size_t>(used));
        std::memset(out + used, 0, static_cast<std::size_t>(end - used));
      }
      uint8_t row_scales[kStripRows / 16];
      for (int64_t b = 0; b < blocks; ++b) row_scales[b] = scales[b][lane];
      place_scales(t, p.lead, p.col + c + lane, p.row / format.block, row_scales, blocks);
    }
  }
}

// What pieces do not write: tensor scales, and bytes of the tiled layout that stand for no block.
void prepare(const Input& x, const Target& t) {
  for (int64_t l = 0; l < x.leads; ++l)
    t.copy.global_scale[l] =
        tensor_scale(t.copy.format, t.copy.amax ? f32_of(t.copy.amax[l]) : 0.0f,
                     t.copy.four_over_six)
            .global;
  if (t.copy.layout == ScaleLayout::tiled &&
      (t.rows % kScaleTileRows != 0 || t.blocks % kScaleTileBlocks != 0))
    std::memset(t.copy.scales, 0,
                static_cast<std::size_t>(x.leads * scale_bytes(t.copy.layout, t.rows, t.blocks)));
}

}  // namespace

const QuantizeKernels& quantize_kernels() {
  if (level() >= Level::avx512) return avx512_quantize_kernels();
  if (level() == Level::avx2) return avx2_quantize_kernels();
  return portable_quantize_kernels();
}

void amax(const Input& x, const AmaxRequest& request, Parallel& parallel) {
  const QuantizeKernels& k = quantize_kernels();
  const Pieces pieces(x, request.rotate && request.axis == Axis::rows);
  std::vector<Partial> partials(static_cast<std::size_t>(pieces.count()));
  for_each_piece(parallel, pieces.count(), [&](int64_t i) {
    partials[static_cast<std::size_t>(i)] = amax_of_piece(k, x, request, pieces[i]);
  });
  for (int64_t l = 0; l < x.leads; ++l) {
    if (request.amax) request.amax[l] = 0;
    if (request.rotate) request.amax_rotated[l] = 0;
  }
  uint32_t fingerprint = 0;
  for (int64_t i = 0; i < pieces.count(); ++i) {
    const Partial& partial = partials[static_cast<std::size_t>(i)];
    const int64_t l = pieces[i].lead;
    if (request.amax) request.amax[l] = std::max(request.amax[l], partial.amax);
    if (request.rotate)
      request.amax_rotated[l] = std::max(request.amax_rotated[l], partial.amax_rotated);
    fingerprint += partial.fingerprint;
  }
  if (request.fingerprint) *request.fingerprint = fingerprint;
}

void quantize(const Input& x, const Copy* row, const Copy* col, Parallel& parallel) {
  const IeeeEnvironment ieee;
  const QuantizeKernels& k = quantize_kernels();
  std::vector<Target> targets;
  for (const Copy* copy : {row, col})
    if (copy) targets.emplace_back(x, *copy);
  bool banded = false;
  for (const Target& t : targets) {
    prepare(x, t);
    banded = banded || t.copy.axis == Axis::rows || t.copy.tiles;
  }
  const Pieces pieces(x, banded);
  for_each_piece(parallel, pieces.count(), [&](int64_t i) {
    const Piece piece = pieces[i];
    for (const Target& t : targets)
      t.copy.axis == Axis::cols ? encode_rows(k, x, t, piece) : encode_cols(k, x, t, piece);
  });
}

void dequantize(const Quantized& q, Dtype dtype, void* out, Parallel& parallel) {
  const QuantizeKernels& k = quantize_kernels();
  const int64_t blocks = ceil_div(q.k, q.format.block);
  const int64_t pitch = row_bytes(q.format.element, q.k);
  const int64_t lead_scales = scale_bytes(q.layout, q.rows, blocks);
  const int64_t rows_per_piece = std::max<int64_t>(1, kPieceElements / std::max<int64_t>(1, q.k));
  const int64_t rows = q.leads * q.rows;
  if (q.k == 0) return;
  for_each_piece(parallel, ceil_div(rows, rows_per_piece), [&](int64_t piece) {
    std::vector<uint8_t> scratch(static_cast<std::size_t>(blocks));
    const int64_t end = std::min(rows, (piece + 1) * rows_per_piece);
    for (int64_t i = piece * rows_per_piece; i < end; ++i) {
      const int64_t lead = i / q.rows, r = i % q.rows;
      const uint8_t* scales = q.scales + lead * lead_scales;
      if (q.layout == ScaleLayout::linear) {
        scales += r * blocks;
      } else {
        for (int64_t b = 0; b < blocks; ++b)
          scratch[static_cast<std::size_t>(b)] = scales[scale_offset(q.layout, r, b, blocks)];
        scales = scratch.data();
      }
      k.decode_run(q.format, q.values + i * pitch, scales, q.global_scale[lead], q.k, dtype,
                   static_cast<uint8_t*>(out) + i * q.k * dtype_bytes(dtype));
    }
  });
}

}  // namespace jax_fp4::cpu

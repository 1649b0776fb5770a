// Operands and results of our custom calls, checked: what the handlers of every platform share.
//
// Shapes are checked here although the Python layer has done so: XLA may cut operands apart (a
// partitioner that slices one operand and not the other), and a wrong product is worse than a failed
// one. Names: V examples of a vmap, L leading dimensions, R x C the matrix.
//
//   jax_fp4_amax           x [V,L,R,C], origin u32 [V,3]
//                          -> amax u32 [V,L]; where asked for: amax of the rotated values u32 [V,L],
//                             fingerprint u32 [V]
//   jax_fp4_quantize       x [V,L,R,C], origin u32 [V,3]; then per copy: amax u32 [V,L] (formats with
//                          a tensor scale), seed u32 [V,2] (stochastic)
//                          -> per copy: values u8 [V,L,R',bytes], scales u8 [V,L,...],
//                             global_scale f32 [V,L]
//   jax_fp4_dequantize     values u8 [L,R,bytes], scales u8 [L,...], global_scale f32 [L]
//                          -> x [L,R,K]
//   jax_fp4_scaled_matmul  values, scales, global_scale of A, then of B, each with batch B or 1;
//                          where given: bias [B or 1,N], C [B,M,N]
//                          -> D [B,M,N]
//   jax_fp4_grouped_matmul values and scales of A and B, global_scale of both [G or V*G], u32 groups
//                          -> groups of rows: A [V or 1,M,K], B [G or V*G,N,K], groups [V or 1,M/128],
//                                             D [V,M,N]
//                             groups of K:    A [V or 1,M,K], B [V or 1,N,K], groups [V or 1,G+1],
//                                             D [V*G,M,N]
//
// origin is the (lead, row, col) of x's first element in the logical tensor. Pointers are those of the
// platform: only a handler of the CPU may read what they point at.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/grouped.h"
#include "ffi/attributes.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp4::ffi {

namespace xf = ::xla::ffi;

using Shape = std::vector<std::int64_t>;

inline std::string text(const Shape& shape) {
  std::ostringstream out;
  out << '(';
  for (std::size_t i = 0; i < shape.size(); ++i) out << (i ? ", " : "") << shape[i];
  out << ')';
  return out.str();
}

// An operand or result whose name goes into the error message.
struct Array {
  xf::AnyBuffer buffer;
  std::string name;

  Shape shape() const {
    const auto dims = buffer.dimensions();
    return Shape(dims.begin(), dims.end());
  }
  std::int64_t dim(std::size_t i) const { return buffer.dimensions()[i]; }

  void expect_shape(const Shape& expected) const {
    if (shape() != expected) {
      throw std::invalid_argument("jax_fp4: " + name + " has shape " + text(shape()) +
                                  ", expected " + text(expected));
    }
  }
  void expect_rank(std::size_t rank) const {
    if (buffer.dimensions().size() != rank) {
      throw std::invalid_argument("jax_fp4: " + name + " has shape " + text(shape()) +
                                  ", expected rank " + std::to_string(rank));
    }
  }
  template <typename T>
  T* data(xf::DataType type) const {
    if (buffer.element_type() != type) {
      throw std::invalid_argument("jax_fp4: " + name + " has the wrong element type");
    }
    return static_cast<T*>(buffer.untyped_data());
  }
  std::uint8_t* bytes() const { return data<std::uint8_t>(xf::DataType::U8); }
  std::uint32_t* words() const { return data<std::uint32_t>(xf::DataType::U32); }
  float* floats() const { return data<float>(xf::DataType::F32); }

  cpu::Dtype dtype() const {
    switch (buffer.element_type()) {
      case xf::DataType::F32: return cpu::Dtype::f32;
      case xf::DataType::BF16: return cpu::Dtype::bf16;
      case xf::DataType::F16: return cpu::Dtype::f16;
      default:
        throw std::invalid_argument("jax_fp4: " + name + " must be float32, bfloat16 or float16");
    }
  }
};

// Operands and results in the order of the table above.
class Operands {
 public:
  explicit Operands(const xf::RemainingArgs& args) : args_(args) {}
  Array next(std::string name) {
    if (index_ >= args_.size())
      throw std::invalid_argument("jax_fp4: operand " + name + " is missing");
    const auto buffer = args_.get<xf::AnyBuffer>(index_++);
    if (!buffer) throw std::invalid_argument("jax_fp4: operand " + name + " is not a buffer");
    return {*buffer, std::move(name)};
  }
  void finish() const {
    if (index_ != args_.size()) throw std::invalid_argument("jax_fp4: too many operands");
  }

 private:
  const xf::RemainingArgs& args_;
  std::size_t index_ = 0;
};

class Results {
 public:
  explicit Results(const xf::RemainingRets& rets) : rets_(rets) {}
  Array next(std::string name) {
    if (index_ >= rets_.size())
      throw std::invalid_argument("jax_fp4: result " + name + " is missing");
    auto buffer = rets_.get<xf::AnyBuffer>(index_++);
    if (!buffer) throw std::invalid_argument("jax_fp4: result " + name + " is not a buffer");
    return {**buffer, std::move(name)};
  }
  void finish() const {
    if (index_ != rets_.size()) throw std::invalid_argument("jax_fp4: too many results");
  }

 private:
  const xf::RemainingRets& rets_;
  std::size_t index_ = 0;
};

template <typename Body>
xf::Error guarded(const Body& body) {
  try {
    body();
    return xf::Error::Success();
  } catch (const std::invalid_argument& error) {
    return xf::Error::InvalidArgument(error.what());
  } catch (const std::exception& error) {
    return xf::Error::Internal(error.what());
  }
}

// x [V, L, R, C] and where it lies in its logical tensor.
struct InputArrays {
  Array x, origin;
  std::int64_t logical_rows, logical_cols;

  InputArrays(Operands& operands, std::int64_t rows, std::int64_t cols)
      : x(operands.next("x")),
        origin(operands.next("origin")),
        logical_rows(rows),
        logical_cols(cols) {
    x.expect_rank(4);
    origin.expect_shape({x.dim(0), 3});
  }
  std::int64_t count() const { return x.dim(0); }
  std::int64_t leads() const { return x.dim(1); }
  std::int64_t rows() const { return x.dim(2); }
  std::int64_t cols() const { return x.dim(3); }
};

// What the amax primitive reports, and where.
struct AmaxArrays {
  cpu::AmaxRequest request;  // of the first example

  AmaxArrays(const InputArrays& x, Results& results, bool rotate, std::string_view axis,
             std::int64_t signs, bool fingerprint) {
    Fields fields(axis);
    request.rotate = rotate;
    request.axis = parse_axis(fields);
    fields.finish();
    request.signs = static_cast<std::uint16_t>(signs);
    const auto per_lead = [&](Array array) {
      array.expect_shape({x.count(), x.leads()});
      return array.words();
    };
    request.amax = per_lead(results.next("amax"));
    if (rotate) request.amax_rotated = per_lead(results.next("amax_rotated"));
    if (fingerprint) {
      const Array array = results.next("fingerprint");
      array.expect_shape({x.count()});
      request.fingerprint = array.words();
    }
  }
};

// One copy: how it is made, and its arrays for all examples.
struct CopyArrays {
  cpu::Copy copy;                        // pointers of the first example; no seed
  const std::uint32_t* seeds = nullptr;  // [V, 2], low word first; only where stochastic
  std::int64_t leads, rows, k;           // of the copy, k padded to whole groups of the rotation

  CopyArrays(std::string_view attribute, const InputArrays& x, Operands& operands, Results& results)
      : copy(parse_copy(attribute)), leads(x.leads()) {
    const bool by_cols = copy.axis == cpu::Axis::cols;
    rows = by_cols ? x.rows() : x.cols();
    const std::int64_t length = by_cols ? x.cols() : x.rows();
    k = copy.hadamard ? round_up(length, kHadamardSize) : length;
    const std::int64_t blocks = ceil_div(k, copy.format.block);
    if (tensor_max(copy.format, copy.four_over_six) != 0.0f) {
      const Array amax = operands.next("amax");
      amax.expect_shape({x.count(), leads});
      copy.amax = amax.words();
    }
    if (copy.stochastic) {
      const Array seed = operands.next("seed");
      seed.expect_shape({x.count(), 2});
      seeds = seed.words();
    }
    const Array values = results.next("values"), scales = results.next("scales"),
                global_scale = results.next("global_scale");
    values.expect_shape({x.count(), leads, rows, row_bytes(copy.format.element, k)});
    if (copy.layout == ScaleLayout::linear) {
      scales.expect_shape({x.count(), leads, rows, blocks});
    } else {
      scales.expect_shape({x.count(), leads, ceil_div(rows, kScaleTileRows),
                           ceil_div(blocks, kScaleTileBlocks), 32, 4, 4});
    }
    global_scale.expect_shape({x.count(), leads});
    copy.values = values.bytes();
    copy.scales = scales.bytes();
    copy.global_scale = global_scale.floats();
  }
  // Of an example.
  std::int64_t values_bytes() const { return leads * rows * row_bytes(copy.format.element, k); }
  std::int64_t scales_bytes() const {
    return leads * scale_bytes(copy.layout, rows, ceil_div(k, copy.format.block));
  }
};

// The one or two copies of a quantize call.
inline std::vector<CopyArrays> parse_copies(std::string_view first, std::string_view second,
                                            const InputArrays& x, Operands& operands,
                                            Results& results) {
  std::vector<CopyArrays> copies;
  for (const std::string_view attribute : {first, second})
    if (!attribute.empty()) copies.emplace_back(attribute, x, operands, results);
  if (copies.empty() || (copies.size() == 2 && copies[0].copy.axis == copies[1].copy.axis))
    throw std::invalid_argument("jax_fp4: one copy along an axis, or two along different axes");
  return copies;
}

// values, scales and global_scale of a quantized array [batch, rows, k], checked.
struct QuantizedArrays {
  Format format{};
  ScaleLayout layout{};
  std::int64_t batch = 0, rows = 0;
  std::int64_t tensors = 0;  // with a global scale each: as many as matrices, unless `grouped`
  const std::uint8_t* values = nullptr;
  const std::uint8_t* scales = nullptr;
  const float* global_scale = nullptr;

  QuantizedArrays(const std::string& name, std::string_view attribute, std::int64_t k,
                  Operands& operands, bool grouped = false) {
    Fields fields(attribute);
    format = parse_format(fields);
    layout = parse_layout(fields);
    fields.finish();
    const Array v = operands.next(name + ".values"), s = operands.next(name + ".scales"),
                g = operands.next(name + ".global_scale");
    v.expect_rank(3);
    batch = v.dim(0);
    rows = v.dim(1);
    const std::int64_t blocks = ceil_div(k, format.block);
    v.expect_shape({batch, rows, row_bytes(format.element, k)});
    if (layout == ScaleLayout::linear) {
      s.expect_shape({batch, rows, blocks});
    } else {
      s.expect_shape(
          {batch, ceil_div(rows, kScaleTileRows), ceil_div(blocks, kScaleTileBlocks), 32, 4, 4});
    }
    g.expect_rank(1);
    tensors = grouped ? g.dim(0) : batch;
    g.expect_shape({tensors});
    values = v.bytes();
    scales = s.bytes();
    global_scale = g.floats();
  }
};

// A batched product: what cpu/gemm.h describes, with bias [batch or 1, n].
struct ProductArrays {
  cpu::GemmProblem problem;
  bool shared_bias = true;

  ProductArrays(std::string_view a_attribute, std::string_view b_attribute, std::int64_t k,
                bool has_bias, bool has_accumulate, Operands& operands, Results& results) {
    const QuantizedArrays a("a", a_attribute, k, operands), b("b", b_attribute, k, operands);
    if (a.format.block != b.format.block) {
      throw std::invalid_argument("jax_fp4: a and b have blocks of different sizes");
    }
    const Array out = results.next("out");
    out.expect_rank(3);
    const std::int64_t batch = out.dim(0);
    out.expect_shape({batch, a.rows, b.rows});
    for (const QuantizedArrays* operand : {&a, &b}) {
      if (operand->batch != batch && operand->batch != 1) {
        throw std::invalid_argument("jax_fp4: batch " + std::to_string(operand->batch) +
                                    " of an operand is neither 1 nor that of the result, " +
                                    std::to_string(batch));
      }
    }
    problem = {batch,
               a.rows,
               b.rows,
               k,
               {a.format, a.layout, a.batch, a.values, a.scales, a.global_scale},
               {b.format, b.layout, b.batch, b.values, b.scales, b.global_scale}};
    if (has_bias) {
      const Array bias = operands.next("bias");
      bias.expect_rank(2);
      shared_bias = bias.dim(0) == 1;
      bias.expect_shape({shared_bias ? 1 : batch, b.rows});
      problem.bias = bias.buffer.untyped_data();
      problem.bias_dtype = bias.dtype();
    }
    if (has_accumulate) {
      const Array accumulate = operands.next("accumulate");
      accumulate.expect_shape(out.shape());
      problem.accumulate = accumulate.buffer.untyped_data();
      problem.accumulate_dtype = accumulate.dtype();
    }
    problem.out = out.buffer.untyped_data();
    problem.out_dtype = out.dtype();
  }
};

// A product of groups for each example of a vmap: what cpu/grouped.h describes.
struct GroupedArrays {
  QuantizedArrays a, b;
  Array where, out;
  bool of_rows;
  std::int64_t groups, examples, k;

  GroupedArrays(std::string_view a_attribute, std::string_view b_attribute, std::int64_t k,
                std::int64_t groups, std::string_view grouping, Operands& operands,
                Results& results)
      : a("a", a_attribute, k, operands, true),
        b("b", b_attribute, k, operands, true),
        where(operands.next("groups")),
        out(results.next("out")),
        of_rows(grouping == "rows"),
        groups(groups),
        k(k) {
    if ((!of_rows && grouping != "k") || groups < 1)
      throw std::invalid_argument("jax_fp4: groups of rows or of k, at least one");
    if (a.format.block != b.format.block)
      throw std::invalid_argument("jax_fp4: a and b have blocks of different sizes");
    out.expect_rank(3);
    where.expect_rank(2);
    examples = of_rows ? out.dim(0) : out.dim(0) / groups;
    out.expect_shape({of_rows ? examples : examples * groups, a.rows, b.rows});
    const std::int64_t length = of_rows ? a.rows : k;
    if (length % cpu::kGroupUnit != 0)
      throw std::invalid_argument("jax_fp4: groups have whole tiles of " +
                                  std::to_string(cpu::kGroupUnit) + ", and their axis " +
                                  std::to_string(length) + " elements");
    where.expect_shape({where.dim(0), of_rows ? length / cpu::kGroupUnit : groups + 1});
    expect_shared(a.batch, 1, "matrices of a");
    expect_shared(b.batch, of_rows ? groups : 1, "matrices of b");
    expect_shared(a.tensors, groups, "global scales of a");
    expect_shared(b.tensors, groups, "global scales of b");
    expect_shared(where.dim(0), 1, "groups");
  }

  // Pointers are those of the platform.
  cpu::GroupedProblem example(std::int64_t v) const {
    const auto operand = [&](const QuantizedArrays& q, std::int64_t own) {
      const std::int64_t first = q.batch == own ? 0 : v * own;
      const std::int64_t blocks = ceil_div(k, q.format.block);
      return cpu::Operand{q.format,
                          q.layout,
                          own,
                          q.values + first * q.rows * row_bytes(q.format.element, k),
                          q.scales + first * scale_bytes(q.layout, q.rows, blocks),
                          q.global_scale + (q.tensors == groups ? 0 : v * groups)};
    };
    const std::int64_t out_bytes =
        (of_rows ? 1 : groups) * a.rows * b.rows * cpu::dtype_bytes(out.dtype());
    return {of_rows,
            groups,
            a.rows,
            b.rows,
            k,
            operand(a, 1),
            operand(b, of_rows ? groups : 1),
            where.words() + (where.dim(0) == 1 ? 0 : v * where.dim(1)),
            static_cast<char*>(out.buffer.untyped_data()) + v * out_bytes,
            out.dtype()};
  }

 private:
  // `own` for all examples together, or for each.
  void expect_shared(std::int64_t count, std::int64_t own, const char* what) const {
    if (count != own && count != own * examples)
      throw std::invalid_argument("jax_fp4: " + std::to_string(count) + " " + what + ", expected " +
                                  std::to_string(own) + " or " + std::to_string(own * examples));
  }
};

}  // namespace jax_fp4::ffi

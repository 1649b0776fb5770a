// XLA FFI handlers of the CPU backend: check every shape and type, then call csrc/cpu.
//
// Shapes are checked again here although the Python layer has done so: XLA may cut operands apart
// (a partitioner that slices one operand and not the other), and a wrong product is worse than a
// failed one. Names: V examples of a vmap, L leading dimensions, R x C the matrix.
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
//
// origin is the (lead, row, col) of x's first element in the logical tensor.
#include "ffi/cpu_handlers.h"

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/quantize.h"
#include "ffi/attributes.h"
#include "ffi/xla_parallel.h"

namespace jax_fp4::ffi {
namespace {

namespace xf = ::xla::ffi;
using Shape = std::vector<std::int64_t>;

std::string text(const Shape& shape) {
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

// x and its place in the logical tensor; one cpu::Input an example.
class Examples {
 public:
  Examples(Operands& operands, std::int64_t logical_rows, std::int64_t logical_cols)
      : x_(operands.next("x")), origin_(operands.next("origin")) {
    x_.expect_rank(4);
    origin_.expect_shape({x_.dim(0), 3});
    logical_rows_ = logical_rows;
    logical_cols_ = logical_cols;
  }
  std::int64_t count() const { return x_.dim(0); }
  std::int64_t leads() const { return x_.dim(1); }
  std::int64_t rows() const { return x_.dim(2); }
  std::int64_t cols() const { return x_.dim(3); }

  // Groups and tiles of `size` along an axis are whole, except at the end of the logical tensor.
  void expect_aligned(cpu::Axis axis, std::int64_t size) const {
    const bool by_cols = axis == cpu::Axis::cols;
    const std::int64_t length = by_cols ? cols() : rows();
    const std::int64_t logical = by_cols ? logical_cols_ : logical_rows_;
    for (std::int64_t v = 0; v < count(); ++v) {
      const std::int64_t begin = origin_.words()[3 * v + (by_cols ? 2 : 1)];
      const std::int64_t end = begin + length;
      if (begin % size != 0 || (end % size != 0 && end != logical)) {
        throw std::invalid_argument("jax_fp4: x covers " + std::to_string(begin) + " to " +
                                    std::to_string(end) + " of a logical axis of " +
                                    std::to_string(logical) + " elements, which cuts a group of " +
                                    std::to_string(size));
      }
    }
  }

  cpu::Input example(std::int64_t v) const {
    const std::uint32_t* origin = origin_.words() + 3 * v;
    const std::int64_t bytes = leads() * rows() * cols() * cpu::dtype_bytes(x_.dtype());
    const cpu::Placement placement{origin[0], origin[1], origin[2], logical_rows_, logical_cols_};
    if (placement.row + rows() > logical_rows_ || placement.col + cols() > logical_cols_) {
      throw std::invalid_argument("jax_fp4: x does not lie inside its logical tensor");
    }
    return {static_cast<const char*>(x_.buffer.untyped_data()) + v * bytes,
            x_.dtype(),
            leads(),
            rows(),
            cols(),
            placement};
  }

 private:
  Array x_, origin_;
  std::int64_t logical_rows_, logical_cols_;
};

xf::Error amax(xf::ThreadPool pool, xf::RemainingArgs args, xf::RemainingRets rets, bool rotate,
               std::string_view axis, std::int64_t signs, bool fingerprint,
               std::int64_t logical_rows, std::int64_t logical_cols) {
  return guarded([&] {
    Operands operands(args);
    Results results(rets);
    const Examples x(operands, logical_rows, logical_cols);
    operands.finish();
    Fields fields(axis);
    cpu::AmaxRequest request;
    request.rotate = rotate;
    request.axis = parse_axis(fields);
    request.signs = static_cast<std::uint16_t>(signs);
    const auto per_lead = [&](Array array) {
      array.expect_shape({x.count(), x.leads()});
      return array.words();
    };
    std::uint32_t* const amax = per_lead(results.next("amax"));
    std::uint32_t* const rotated = rotate ? per_lead(results.next("amax_rotated")) : nullptr;
    std::uint32_t* prints = nullptr;
    if (fingerprint) {
      const Array array = results.next("fingerprint");
      array.expect_shape({x.count()});
      prints = array.words();
    }
    results.finish();
    if (rotate) x.expect_aligned(request.axis, kHadamardSize);
    XlaParallel parallel(pool);
    for (std::int64_t v = 0; v < x.count(); ++v) {
      request.amax = amax + v * x.leads();
      request.amax_rotated = rotate ? rotated + v * x.leads() : nullptr;
      request.fingerprint = fingerprint ? prints + v : nullptr;
      cpu::amax(x.example(v), request, parallel);
    }
  });
}

// One copy's operands and results, checked, for all examples.
struct CopyArrays {
  cpu::Copy copy;
  std::int64_t leads = 0, values_bytes = 0, scales_bytes = 0;

  CopyArrays(std::string_view attribute, const Examples& x, Operands& operands, Results& results)
      : copy(parse_copy(attribute)), leads(x.leads()) {
    const bool by_cols = copy.axis == cpu::Axis::cols;
    const std::int64_t rows = by_cols ? x.rows() : x.cols();
    const std::int64_t length = by_cols ? x.cols() : x.rows();
    const std::int64_t k = copy.hadamard ? round_up(length, kHadamardSize) : length;
    const std::int64_t blocks = ceil_div(k, copy.format.block);
    x.expect_aligned(copy.axis, copy.format.block);  // 16 or 32: whole groups of random bytes too
    if (copy.tiles) {
      x.expect_aligned(by_cols ? cpu::Axis::rows : cpu::Axis::cols, copy.format.block);
    }
    if (tensor_max(copy.format, copy.four_over_six) != 0.0f) {
      const Array amax = operands.next("amax");
      amax.expect_shape({x.count(), leads});
      copy.amax = amax.words();
    }
    if (copy.stochastic) {
      const Array seed = operands.next("seed");
      seed.expect_shape({x.count(), 2});
      seeds_ = seed.words();
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
    values_bytes = leads * rows * row_bytes(copy.format.element, k);
    scales_bytes = leads * scale_bytes(copy.layout, rows, blocks);
  }

  cpu::Copy example(std::int64_t v) const {
    cpu::Copy result = copy;
    if (result.amax != nullptr) result.amax += v * leads;
    if (copy.stochastic) {
      result.seed = static_cast<std::uint64_t>(seeds_[2 * v + 1]) << 32 | seeds_[2 * v];
    }
    result.values += v * values_bytes;
    result.scales += v * scales_bytes;
    result.global_scale += v * leads;
    return result;
  }

 private:
  const std::uint32_t* seeds_ = nullptr;
};

xf::Error quantize(xf::ThreadPool pool, xf::RemainingArgs args, xf::RemainingRets rets,
                   std::string_view first, std::string_view second, std::int64_t logical_rows,
                   std::int64_t logical_cols) {
  return guarded([&] {
    Operands operands(args);
    Results results(rets);
    const Examples x(operands, logical_rows, logical_cols);
    std::vector<CopyArrays> copies;
    for (const std::string_view attribute : {first, second}) {
      if (!attribute.empty()) copies.emplace_back(attribute, x, operands, results);
    }
    operands.finish();
    results.finish();
    XlaParallel parallel(pool);
    for (std::int64_t v = 0; v < x.count(); ++v) {
      cpu::Copy made[2];
      const cpu::Copy *row = nullptr, *col = nullptr;
      for (std::size_t i = 0; i < copies.size(); ++i) {
        made[i] = copies[i].example(v);
        (made[i].axis == cpu::Axis::cols ? row : col) = &made[i];
      }
      if (copies.size() != std::size_t{row != nullptr} + std::size_t{col != nullptr}) {
        throw std::invalid_argument("jax_fp4: both copies run along the same axis");
      }
      cpu::quantize(x.example(v), row, col, parallel);
    }
  });
}

// values, scales and global_scale of a quantized array [batch, rows, k], checked.
struct QuantizedArrays {
  Format format{};
  ScaleLayout layout{};
  std::int64_t batch = 0, rows = 0;
  const std::uint8_t* values = nullptr;
  const std::uint8_t* scales = nullptr;
  const float* global_scale = nullptr;

  QuantizedArrays(const std::string& name, std::string_view attribute, std::int64_t k,
                  Operands& operands) {
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
    g.expect_shape({batch});
    values = v.bytes();
    scales = s.bytes();
    global_scale = g.floats();
  }
};

xf::Error dequantize(xf::ThreadPool pool, xf::RemainingArgs args, xf::RemainingRets rets,
                     std::string_view operand, std::int64_t k) {
  return guarded([&] {
    Operands operands(args);
    Results results(rets);
    const QuantizedArrays q("q", operand, k, operands);
    operands.finish();
    const Array out = results.next("x");
    results.finish();
    out.expect_shape({q.batch, q.rows, k});
    XlaParallel parallel(pool);
    cpu::dequantize({q.format, q.layout, q.batch, q.rows, k, q.values, q.scales, q.global_scale},
                    out.dtype(), out.buffer.untyped_data(), parallel);
  });
}

// Element i of a batched problem whose bias is [batch, n].
cpu::GemmProblem element(cpu::GemmProblem problem, std::int64_t i) {
  const auto advance = [i](const void* array, std::int64_t bytes) -> const void* {
    return array == nullptr ? nullptr : static_cast<const char*>(array) + i * bytes;
  };
  const auto operand = [&](cpu::Operand& o, std::int64_t rows) {
    if (o.batch == 1) return;
    const std::int64_t blocks = ceil_div(problem.k, o.format.block);
    o.batch = 1;
    o.values += i * rows * row_bytes(o.format.element, problem.k);
    o.scales += i * scale_bytes(o.layout, rows, blocks);
    o.global_scale += i;
  };
  operand(problem.a, problem.m);
  operand(problem.b, problem.n);
  const std::int64_t mn = problem.m * problem.n;
  problem.bias = advance(problem.bias, problem.n * cpu::dtype_bytes(problem.bias_dtype));
  problem.accumulate = advance(problem.accumulate, mn * cpu::dtype_bytes(problem.accumulate_dtype));
  problem.out = static_cast<char*>(problem.out) + i * mn * cpu::dtype_bytes(problem.out_dtype);
  problem.batch = 1;
  return problem;
}

xf::Error scaled_matmul(xf::ThreadPool pool, xf::RemainingArgs args, xf::RemainingRets rets,
                        std::string_view a_attribute, std::string_view b_attribute, std::int64_t k,
                        bool has_bias, bool has_accumulate) {
  return guarded([&] {
    Operands operands(args);
    Results results(rets);
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
    cpu::GemmProblem problem{batch,
                             a.rows,
                             b.rows,
                             k,
                             {a.format, a.layout, a.batch, a.values, a.scales, a.global_scale},
                             {b.format, b.layout, b.batch, b.values, b.scales, b.global_scale}};
    bool shared_bias = true;
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
    operands.finish();
    results.finish();
    problem.out = out.buffer.untyped_data();
    problem.out_dtype = out.dtype();
    XlaParallel parallel(pool);
    if (shared_bias) {
      cpu::gemm(problem, parallel);
    } else {  // a bias for each example of a vmap
      for (std::int64_t i = 0; i < batch; ++i) cpu::gemm(element(problem, i), parallel);
    }
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kAmax, amax,
                              xf::Ffi::Bind()
                                  .Ctx<xf::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("rotate")
                                  .Attr<std::string_view>("axis")
                                  .Attr<std::int64_t>("signs")
                                  .Attr<bool>("fingerprint")
                                  .Attr<std::int64_t>("logical_rows")
                                  .Attr<std::int64_t>("logical_cols"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kQuantize, quantize,
                              xf::Ffi::Bind()
                                  .Ctx<xf::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("first")
                                  .Attr<std::string_view>("second")
                                  .Attr<std::int64_t>("logical_rows")
                                  .Attr<std::int64_t>("logical_cols"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kDequantize, dequantize,
                              xf::Ffi::Bind()
                                  .Ctx<xf::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("operand")
                                  .Attr<std::int64_t>("k"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(kScaledMatmul, scaled_matmul,
                              xf::Ffi::Bind()
                                  .Ctx<xf::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("a")
                                  .Attr<std::string_view>("b")
                                  .Attr<std::int64_t>("k")
                                  .Attr<bool>("has_bias")
                                  .Attr<bool>("has_accumulate"));

}  // namespace

const std::vector<Registration>& cpu_registrations() {
  static const std::vector<Registration> all = {{"jax_fp4_amax", kAmax},
                                                {"jax_fp4_quantize", kQuantize},
                                                {"jax_fp4_dequantize", kDequantize},
                                                {"jax_fp4_scaled_matmul", kScaledMatmul}};
  return all;
}

}  // namespace jax_fp4::ffi

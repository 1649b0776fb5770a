// XLA FFI handlers of the CPU backend: operands.h checks, csrc/cpu computes.
#include "ffi/cpu_handlers.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/grouped.h"
#include "cpu/quantize.h"
#include "ffi/operands.h"
#include "ffi/xla_parallel.h"

namespace jax_fp4::ffi {
namespace {

// x as one cpu::Input an example; origins can be read here.
struct Examples : InputArrays {
  using InputArrays::InputArrays;

  // Groups and tiles of `size` along an axis are whole, except at the end of the logical tensor.
  void expect_aligned(cpu::Axis axis, std::int64_t size) const {
    const bool by_cols = axis == cpu::Axis::cols;
    const std::int64_t length = by_cols ? cols() : rows();
    const std::int64_t logical = by_cols ? logical_cols : logical_rows;
    for (std::int64_t v = 0; v < count(); ++v) {
      const std::int64_t begin = origin.words()[3 * v + (by_cols ? 2 : 1)];
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
    const std::uint32_t* place = origin.words() + 3 * v;
    const std::int64_t bytes = leads() * rows() * cols() * cpu::dtype_bytes(x.dtype());
    const cpu::Placement placement{place[0], place[1], place[2], logical_rows, logical_cols};
    if (placement.row + rows() > logical_rows || placement.col + cols() > logical_cols) {
      throw std::invalid_argument("jax_fp4: x does not lie inside its logical tensor");
    }
    return {static_cast<const char*>(x.buffer.untyped_data()) + v * bytes,
            x.dtype(),
            leads(),
            rows(),
            cols(),
            placement};
  }
};

xf::Error amax(xf::ThreadPool pool, xf::RemainingArgs args, xf::RemainingRets rets, bool rotate,
               std::string_view axis, std::int64_t signs, bool fingerprint,
               std::int64_t logical_rows, std::int64_t logical_cols) {
  return guarded([&] {
    Operands operands(args);
    Results results(rets);
    const Examples x(operands, logical_rows, logical_cols);
    operands.finish();
    const AmaxArrays arrays(x, results, rotate, axis, signs, fingerprint);
    results.finish();
    cpu::AmaxRequest request = arrays.request;
    if (rotate) x.expect_aligned(request.axis, kHadamardSize);
    XlaParallel parallel(pool);
    for (std::int64_t v = 0; v < x.count(); ++v) {
      cpu::amax(x.example(v), request, parallel);
      request.amax += x.leads();
      if (rotate) request.amax_rotated += x.leads();
      if (fingerprint) ++request.fingerprint;
    }
  });
}

cpu::Copy example(const CopyArrays& arrays, std::int64_t v) {
  cpu::Copy result = arrays.copy;
  if (result.amax != nullptr) result.amax += v * arrays.leads;
  if (result.stochastic) {
    const std::uint32_t* seed = arrays.seeds + 2 * v;
    result.seed = static_cast<std::uint64_t>(seed[1]) << 32 | seed[0];
  }
  result.values += v * arrays.values_bytes();
  result.scales += v * arrays.scales_bytes();
  result.global_scale += v * arrays.leads;
  return result;
}

xf::Error quantize(xf::ThreadPool pool, xf::RemainingArgs args, xf::RemainingRets rets,
                   std::string_view first, std::string_view second, std::int64_t logical_rows,
                   std::int64_t logical_cols) {
  return guarded([&] {
    Operands operands(args);
    Results results(rets);
    const Examples x(operands, logical_rows, logical_cols);
    const std::vector<CopyArrays> copies = parse_copies(first, second, x, operands, results);
    operands.finish();
    results.finish();
    for (const CopyArrays& arrays : copies) {
      const cpu::Copy& copy = arrays.copy;
      x.expect_aligned(copy.axis, copy.format.block);  // 16 or 32: whole groups of random bytes too
      if (copy.tiles) {
        const bool by_cols = copy.axis == cpu::Axis::cols;
        x.expect_aligned(by_cols ? cpu::Axis::rows : cpu::Axis::cols, copy.format.block);
      }
    }
    XlaParallel parallel(pool);
    for (std::int64_t v = 0; v < x.count(); ++v) {
      cpu::Copy made[2];
      const cpu::Copy *row = nullptr, *col = nullptr;
      for (std::size_t i = 0; i < copies.size(); ++i) {
        made[i] = example(copies[i], v);
        (made[i].axis == cpu::Axis::cols ? row : col) = &made[i];
      }
      cpu::quantize(x.example(v), row, col, parallel);
    }
  });
}

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
                        std::string_view a, std::string_view b, std::int64_t k, bool has_bias,
                        bool has_accumulate) {
  return guarded([&] {
    Operands operands(args);
    Results results(rets);
    const ProductArrays product(a, b, k, has_bias, has_accumulate, operands, results);
    operands.finish();
    results.finish();
    XlaParallel parallel(pool);
    if (product.shared_bias) {
      cpu::gemm(product.problem, parallel);
    } else {  // a bias for each example of a vmap
      for (std::int64_t i = 0; i < product.problem.batch; ++i)
        cpu::gemm(element(product.problem, i), parallel);
    }
  });
}

xf::Error grouped_matmul(xf::ThreadPool pool, xf::RemainingArgs args, xf::RemainingRets rets,
                         std::string_view a, std::string_view b, std::int64_t k,
                         std::int64_t groups, std::string_view grouping) {
  return guarded([&] {
    Operands operands(args);
    Results results(rets);
    const GroupedArrays product(a, b, k, groups, grouping, operands, results);
    operands.finish();
    results.finish();
    XlaParallel parallel(pool);
    for (std::int64_t v = 0; v < product.examples; ++v)
      cpu::grouped_gemm(product.example(v), parallel);
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
XLA_FFI_DEFINE_HANDLER_SYMBOL(kGroupedMatmul, grouped_matmul,
                              xf::Ffi::Bind()
                                  .Ctx<xf::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("a")
                                  .Attr<std::string_view>("b")
                                  .Attr<std::int64_t>("k")
                                  .Attr<std::int64_t>("groups")
                                  .Attr<std::string_view>("grouping"));

}  // namespace

const std::vector<Registration>& cpu_registrations() {
  static const std::vector<Registration> all = {{"jax_fp4_amax", kAmax},
                                                {"jax_fp4_quantize", kQuantize},
                                                {"jax_fp4_dequantize", kDequantize},
                                                {"jax_fp4_scaled_matmul", kScaledMatmul},
                                                {"jax_fp4_grouped_matmul", kGroupedMatmul}};
  return all;
}

}  // namespace jax_fp4::ffi

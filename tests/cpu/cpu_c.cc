// Plain C entry points over csrc/cpu/quantize.h for ctypes, so that the kernels can be tested at
// every level without JAX. Built by tests/support/cpu_quantize.py.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "cpu/cpu.h"
#include "cpu/quantize.h"

namespace {

using namespace jax_fp4;
using namespace jax_fp4::cpu;

// Threads that take bodies in a shuffled order: a result that depends on either shows.
class Shuffled final : public Parallel {
 public:
  explicit Shuffled(int threads) : threads_(threads) {}
  int threads() const override { return threads_; }
  void run(std::int64_t n, const std::function<void(std::int64_t)>& body) override {
    std::vector<std::int64_t> order(static_cast<std::size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(n)));
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
      const IeeeEnvironment ieee;
      for (std::size_t i = next++; i < order.size(); i = next++) body(order[i]);
    };
    std::vector<std::thread> helpers;
    for (int i = 1; i < threads_; ++i) helpers.emplace_back(work);
    work();
    for (std::thread& helper : helpers) helper.join();
  }

 private:
  int threads_;
};

template <class Body>
void with_threads(int threads, const Body& body) {
  if (threads == 1) {
    Serial serial;
    body(serial);
  } else {
    Shuffled shuffled(threads);
    body(shuffled);
  }
}

constexpr Format kFormats[] = {kNVFP4,     kMXFP4,     kMXFP6E2M3, kMXFP6E3M2,
                               kMXFP8E4M3, kMXFP8E5M2, kFP8E4M3,   kFP8E5M2};

}  // namespace

extern "C" {

struct CInput {
  const void* data;
  int dtype;
  std::int64_t leads, rows, cols;
  std::int64_t lead0, row0, col0, logical_rows, logical_cols;
};

struct CCopy {
  int axis, format, rule, tiles, stochastic, four_over_six, hadamard, layout;
  std::uint32_t signs, stream;
  std::uint64_t seed;
  const std::uint32_t* amax;
  std::uint8_t* values;
  std::uint8_t* scales;
  float* global_scale;
};

int c_best_level() { return static_cast<int>(best_level()); }
int c_force_level(int value) { return force_level(static_cast<Level>(value)); }
void c_unforce_level() { unforce_level(); }

// The calling thread's MXCSR, as XLA sets it around handlers (flush-to-zero, denormals-are-zero).
#if defined(__x86_64__)
unsigned c_get_mxcsr() { return __builtin_ia32_stmxcsr(); }
void c_set_mxcsr(unsigned value) { __builtin_ia32_ldmxcsr(value); }
#endif

static Input input_of(const CInput& x) {
  return {x.data,  static_cast<Dtype>(x.dtype),
          x.leads, x.rows,
          x.cols,  {x.lead0, x.row0, x.col0, x.logical_rows, x.logical_cols}};
}

static Copy copy_of(const CCopy& c) {
  Copy copy;
  copy.axis = static_cast<Axis>(c.axis);
  copy.format = kFormats[c.format];
  copy.rule = static_cast<ScaleRule>(c.rule);
  copy.tiles = c.tiles != 0;
  copy.stochastic = c.stochastic != 0;
  copy.four_over_six = c.four_over_six != 0;
  copy.hadamard = c.hadamard != 0;
  copy.signs = static_cast<std::uint16_t>(c.signs);
  copy.stream = c.stream;
  copy.layout = static_cast<ScaleLayout>(c.layout);
  copy.amax = c.amax;
  copy.seed = c.seed;
  copy.values = c.values;
  copy.scales = c.scales;
  copy.global_scale = c.global_scale;
  return copy;
}

void c_amax(const CInput* x, int rotate, int axis, unsigned signs, std::uint32_t* amax_bits,
            std::uint32_t* amax_rotated, std::uint32_t* fingerprint, int threads) {
  AmaxRequest request;
  request.rotate = rotate != 0;
  request.axis = static_cast<Axis>(axis);
  request.signs = static_cast<std::uint16_t>(signs);
  request.amax = amax_bits;
  request.amax_rotated = amax_rotated;
  request.fingerprint = fingerprint;
  with_threads(threads, [&](Parallel& parallel) { amax(input_of(*x), request, parallel); });
}

void c_quantize(const CInput* x, const CCopy* row, const CCopy* col, int threads) {
  const Copy row_copy = row ? copy_of(*row) : Copy{};
  const Copy col_copy = col ? copy_of(*col) : Copy{};
  with_threads(threads, [&](Parallel& parallel) {
    quantize(input_of(*x), row ? &row_copy : nullptr, col ? &col_copy : nullptr, parallel);
  });
}

void c_dequantize(int format, int layout, std::int64_t leads, std::int64_t rows, std::int64_t k,
                  const std::uint8_t* values, const std::uint8_t* scales, const float* global_scale,
                  int dtype, void* out, int threads) {
  const Quantized q{
      kFormats[format], static_cast<ScaleLayout>(layout), leads, rows, k, values, scales,
      global_scale};
  with_threads(threads, [&](Parallel& parallel) {
    dequantize(q, static_cast<Dtype>(dtype), out, parallel);
  });
}

}  // extern "C"

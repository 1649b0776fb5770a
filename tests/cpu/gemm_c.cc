// The C++ GEMM behind plain C functions, for tests that load them with ctypes
// (tests/support/gemm_native.py).
#include <atomic>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/gemm.h"

using namespace jax_fp4;

namespace {

class Threads final : public cpu::Parallel {
 public:
  explicit Threads(int count) : count_(count) {}
  int threads() const override { return count_; }
  void run(std::int64_t n, const std::function<void(std::int64_t)>& body) override {
    std::atomic<std::int64_t> next{0};
    const auto work = [&] {
      const cpu::IeeeEnvironment ieee;
      for (std::int64_t i; (i = next.fetch_add(1)) < n;) body(i);
    };
    std::vector<std::thread> others;
    for (int t = 1; t < count_; ++t) others.emplace_back(work);
    work();
    for (std::thread& thread : others) thread.join();
  }

 private:
  int count_;
};

// What a handler finds when XLA calls it: subnormals flushed, inputs and results.
class XlaEnvironment {
#if defined(__x86_64__)
 public:
  XlaEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x9FE2); }
  ~XlaEnvironment() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

}  // namespace

extern "C" {

struct COperand {
  int element, scale, block, layout;
  std::int64_t batch;
  const std::uint8_t* values;
  const std::uint8_t* scales;
  const float* global_scale;
};

struct CProblem {
  std::int64_t batch, m, n, k;
  COperand a, b;
  const void* bias;
  const void* accumulate;
  void* out;
  int bias_dtype, accumulate_dtype, out_dtype;
};

int best_level() { return static_cast<int>(cpu::best_level()); }

// Returns whether the level exists here.
int gemm(const CProblem* p, int level, int threads) {
  if (!cpu::force_level(static_cast<cpu::Level>(level))) return 0;
  const auto operand = [](const COperand& x) {
    return cpu::Operand{
        {static_cast<Element>(x.element), static_cast<BlockScale>(x.scale), x.block},
        static_cast<ScaleLayout>(x.layout),
        x.batch,
        x.values,
        x.scales,
        x.global_scale};
  };
  cpu::GemmProblem problem{p->batch, p->m, p->n, p->k, operand(p->a), operand(p->b)};
  problem.bias = p->bias;
  problem.bias_dtype = static_cast<cpu::Dtype>(p->bias_dtype);
  problem.accumulate = p->accumulate;
  problem.accumulate_dtype = static_cast<cpu::Dtype>(p->accumulate_dtype);
  problem.out = p->out;
  problem.out_dtype = static_cast<cpu::Dtype>(p->out_dtype);
  const XlaEnvironment xla;
  if (threads == 1) {
    cpu::Serial serial;
    cpu::gemm(problem, serial);
  } else {
    Threads pool(threads);
    cpu::gemm(problem, pool);
  }
  cpu::unforce_level();
  return 1;
}

}  // extern "C"

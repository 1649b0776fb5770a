// What all CPU code shares: the instruction level, the threads it may use, the floating-point
// environment it must run in, and the types of arrays.
#pragma once

#include <cstdint>
#include <functional>

#include "numerics/minifloat.h"

namespace jax_fp4::cpu {

// Implementation levels, fastest last. Every level gives the same quantized bytes. `model` computes
// products by the tensor-core model of numerics/mma_accumulate.h and otherwise equals `portable`;
// it is never chosen by itself.
enum class Level { model, portable, avx2, avx512, avx512_bf16, amx };

// The highest level that this processor *and* operating system offer (CPUID, XCR0, AMX permission).
Level best_level();

// The level in use: best_level(), or what force_level() last set. Forcing a level that is not
// available returns false and changes nothing.
Level level();
bool force_level(Level level);
void unforce_level();

enum class Dtype : std::uint8_t { f32, bf16, f16 };

constexpr std::int64_t dtype_bytes(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// Element i of an array, exactly widened.
inline float load(Dtype dtype, const void* array, std::int64_t i) {
  switch (dtype) {
    case Dtype::f32: return static_cast<const float*>(array)[i];
    case Dtype::bf16: return decode_bf16(static_cast<const std::uint16_t*>(array)[i]);
    case Dtype::f16: return decode_f16(static_cast<const std::uint16_t*>(array)[i]);
  }
  return 0.0f;
}

// Stores with one rounding to nearest even.
inline void store(Dtype dtype, void* array, std::int64_t i, float value) {
  switch (dtype) {
    case Dtype::f32: static_cast<float*>(array)[i] = value; break;
    case Dtype::bf16:
      static_cast<std::uint16_t*>(array)[i] = static_cast<std::uint16_t>(encode_bf16(value));
      break;
    case Dtype::f16:
      static_cast<std::uint16_t*>(array)[i] = static_cast<std::uint16_t>(encode_f16(value));
      break;
  }
}

// Runs body(0) .. body(n - 1), each once, in any order and on any thread, and returns when all are
// done. Bodies write disjoint memory and no result may depend on the order: that is how results
// stay independent of the number of threads. Implementations run every body under IeeeEnvironment.
class Parallel {
 public:
  virtual ~Parallel() = default;
  virtual int threads() const = 0;
  virtual void run(std::int64_t n, const std::function<void(std::int64_t)>& body) = 0;
};

// The calling thread only.
class Serial final : public Parallel {
 public:
  int threads() const override { return 1; }
  void run(std::int64_t n, const std::function<void(std::int64_t)>& body) override;
};

// Round to nearest, subnormals kept, all exceptions masked, for the life of the object. XLA calls
// CPU handlers with flush-to-zero and denormals-are-zero set (MXCSR 0x9fe2 was read in a handler
// under jax 0.10.2), which would lose every scale below 2^-126.
class IeeeEnvironment {
 public:
  IeeeEnvironment();
  ~IeeeEnvironment();
  IeeeEnvironment(const IeeeEnvironment&) = delete;
  IeeeEnvironment& operator=(const IeeeEnvironment&) = delete;

 private:
  std::uint64_t saved_;
};

}  // namespace jax_fp4::cpu

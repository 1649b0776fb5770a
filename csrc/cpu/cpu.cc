#include "cpu/cpu.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jax_fp4::cpu {
namespace {

#if defined(__x86_64__)

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf = 0) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

// XCR0 says which registers the operating system saves; a hypervisor can hide AVX-512 there
// although CPUID offers it. Read as bytes of the instruction, so that this file needs no -mxsave.
std::uint64_t enabled_state() {
  if ((cpuid(1).ecx & (1u << 27)) == 0) return 0;  // OSXSAVE
  std::uint32_t low, high;
  __asm__ volatile(".byte 0x0f, 0x01, 0xd0" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<std::uint64_t>(high) << 32 | low;
}

bool has_avx2() {
  constexpr std::uint64_t kYmmState = 0b110;  // SSE, AVX
  constexpr unsigned kAvx2 = 1u << 5;
  constexpr unsigned kFmaF16c = 1u << 12 | 1u << 29;
  return (enabled_state() & kYmmState) == kYmmState && (cpuid(7).ebx & kAvx2) == kAvx2 &&
         (cpuid(1).ecx & kFmaF16c) == kFmaF16c;
}

bool has_avx512() {
  constexpr std::uint64_t kZmmState = 0b1110'0110;  // SSE, AVX, opmask, upper zmm, zmm16-31
  constexpr unsigned kFBwDqVl = 1u << 16 | 1u << 30 | 1u << 17 | 1u << 31;
  constexpr unsigned kVbmiVnni = 1u << 1 | 1u << 11;
  const Registers features = cpuid(7);
  return (enabled_state() & kZmmState) == kZmmState && (features.ebx & kFBwDqVl) == kFBwDqVl &&
         (features.ecx & kVbmiVnni) == kVbmiVnni && has_avx2();
}

bool has_avx512_bf16() {
  constexpr unsigned kBf16 = 1u << 5;
  return (cpuid(7, 1).eax & kBf16) == kBf16 && has_avx512();
}

// Beside AVX512_BF16, which every processor with AMX has.
bool has_amx() {
  constexpr std::uint64_t kTileState = 1u << 17 | 1u << 18;
  constexpr unsigned kTileBf16 = 1u << 24 | 1u << 22;
  if ((cpuid(7).edx & kTileBf16) != kTileBf16 || (enabled_state() & kTileState) != kTileState) {
    return false;
  }
#if defined(__linux__)
  // The kernel gives tile data only to a process that asks; the permission then holds for all of
  // its threads and is inherited by fork.
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

#else

bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_avx512_bf16() { return false; }
bool has_amx() { return false; }

#endif

constexpr int kNotForced = -1;
std::atomic<int> forced{kNotForced};

}  // namespace

Level best_level() {
  static const Level best = !has_avx2()          ? Level::portable
                            : !has_avx512()      ? Level::avx2
                            : !has_avx512_bf16() ? Level::avx512
                            : !has_amx()         ? Level::avx512_bf16
                                                 : Level::amx;
  return best;
}

Level level() {
  const int value = forced.load(std::memory_order_relaxed);
  return value == kNotForced ? best_level() : static_cast<Level>(value);
}

bool force_level(Level level) {
  if (level > best_level()) return false;
  forced.store(static_cast<int>(level), std::memory_order_relaxed);
  return true;
}

void unforce_level() { forced.store(kNotForced, std::memory_order_relaxed); }

void Serial::run(std::int64_t n, const std::function<void(std::int64_t)>& body) {
  const IeeeEnvironment ieee;
  for (std::int64_t i = 0; i < n; ++i) body(i);
}

#if defined(__x86_64__)

IeeeEnvironment::IeeeEnvironment() : saved_(_mm_getcsr()) {
  constexpr unsigned kAllMaskedNearest = 0x1F80;  // the value after reset
  _mm_setcsr(kAllMaskedNearest);
}
IeeeEnvironment::~IeeeEnvironment() { _mm_setcsr(static_cast<unsigned>(saved_)); }

#elif defined(__aarch64__)

IeeeEnvironment::IeeeEnvironment() {
  __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
  __asm__ volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
}
IeeeEnvironment::~IeeeEnvironment() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

#else

IeeeEnvironment::IeeeEnvironment() : saved_(0) {}
IeeeEnvironment::~IeeeEnvironment() = default;

#endif

}  // namespace jax_fp4::cpu

#include "cpu/peak.h"

#include <chrono>
#include <cstdint>

#include "cpu/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jax_fp4::cpu {
namespace {

#if defined(__x86_64__)

#pragma GCC push_options
#pragma GCC target("avx2,fma")

// As many independent chains as hide the FMA's latency of four or five cycles on two ports.
double fma256_flops() {
  constexpr int kRounds = 4096;
  __m256 sum[10];
  for (__m256& s : sum) s = _mm256_setzero_ps();
  const __m256 x = _mm256_set1_ps(0x1p-10f);
  for (int i = 0; i < kRounds; ++i) {
    for (__m256& s : sum) {
      s = _mm256_fmadd_ps(x, x, s);
      __asm__ volatile("" : "+x"(s));  // keeps every addition
    }
  }
  return 10.0 * kRounds * 8 * 2;
}

#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,fma")

// Eight independent chains of 16-wide FMA: enough to hide its latency of four cycles on two ports.
double fma512_flops() {
  constexpr int kRounds = 4096;
  __m512 sum[8];
  for (__m512& s : sum) s = _mm512_setzero_ps();
  const __m512 x = _mm512_set1_ps(0x1p-10f);
  for (int i = 0; i < kRounds; ++i) {
    for (__m512& s : sum) {
      s = _mm512_fmadd_ps(x, x, s);
      __asm__ volatile("" : "+v"(s));  // keeps every addition
    }
  }
  return 8.0 * kRounds * 16 * 2;
}

#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bf16")

// As many chains as hide a latency of six cycles on two ports.
double bf16_flops() {
  constexpr int kRounds = 4096;
  __m512 sum[12];
  for (__m512& s : sum) s = _mm512_setzero_ps();
  const __m512bh x = (__m512bh)_mm512_set1_epi16(0x3A80);  // 2^-10
  for (int i = 0; i < kRounds; ++i) {
    for (__m512& s : sum) {
      s = _mm512_dpbf16_ps(s, x, x);
      __asm__ volatile("" : "+v"(s));  // keeps every addition
    }
  }
  return 12.0 * kRounds * 16 * 2 * 2;
}

#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512f")

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfig kEightFullTiles;

// Six accumulators of 16x16 against two operand tiles: 16 * 16 * 32 multiply-adds an instruction.
double tile_flops() {
  constexpr int kRounds = 1024;
  _tile_loadconfig(&kEightFullTiles);
  _tile_zero(6);
  _tile_zero(7);
  for (int i = 0; i < kRounds; ++i) {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
    _tile_dpbf16ps(4, 6, 7);
    _tile_dpbf16ps(5, 6, 7);
  }
  _tile_release();
  return 6.0 * kRounds * 16 * 16 * 32 * 2;
}

#pragma GCC pop_options

#endif

}  // namespace

double peak_flops(double seconds) {
#if defined(__x86_64__)
  if (best_level() < Level::avx2) return 0;
  double (*const probe)() = best_level() == Level::amx           ? tile_flops
                            : best_level() == Level::avx512_bf16 ? bf16_flops
                            : best_level() == Level::avx512      ? fma512_flops
                                                                 : fma256_flops;
  using Clock = std::chrono::steady_clock;
  const auto elapsed = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  double best = 0;
  for (const auto start = Clock::now(); elapsed(start) < seconds;) {
    const auto begin = Clock::now();
    double work = 0;
    for (int i = 0; i < 16; ++i) work += probe();
    const double rate = work / elapsed(begin);
    best = rate > best ? rate : best;
  }
  return best;
#else
  static_cast<void>(seconds);
  return 0;
#endif
}

}  // namespace jax_fp4::cpu

// Floating-point arithmetic (PTX ISA 9.7.3 to 9.7.6): f32, f64, f16, bf16 and their packed pairs.
//
// Results in round-to-nearest are one operation of the host; other modes set the host's rounding mode
// around it. 16-bit formats go through an exact sum of two doubles. Approximate instructions give the
// correctly rounded result of an infinitely precise function; the table marks them (APPROX).
#include <algorithm>
#include <cfenv>

#include "numerics/minifloat.h"
#include "sim/ops/lanes.h"
#include "sim/ops/rounding.h"

namespace jax_fp4::sim {
namespace {

// What modifiers of a form matter to a result; packed into Code::variant.
enum Flag : u16 { kRoundMask = 3, kFtz = 4, kSat = 8, kRelu = 16, kNanFlag = 32, kXorSign = 64 };

u16 flags_of(const Form& form) {
  u16 flags = 0;
  if (form.has("rz")) flags = 1;
  if (form.has("rm")) flags = 2;
  if (form.has("rp")) flags = 3;
  if (form.has("ftz")) flags |= kFtz;
  if (form.has("sat")) flags |= kSat;
  if (form.has("relu")) flags |= kRelu;
  if (form.has("NaN")) flags |= kNanFlag;
  if (form.has("xorsign")) flags |= kXorSign;
  return flags;
}

// Runs f, whose operands and results lie in memory, in a rounding mode of the host.
template <class F>
void in_rounding_mode(u16 flags, F f) {
  constexpr int kModes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  std::fesetround(kModes[flags & kRoundMask]);
  f();
  std::fesetround(FE_TONEAREST);
}

template <class T>
bool is_subnormal(T x) {
  return std::fpclassify(x) == FP_SUBNORMAL;
}

// Small functions that a loop over lanes must contain to be vectorized.
#define JAX_FP4_INLINE [[gnu::always_inline]] inline

struct F32 {
  using Bits = u32;
  using Value = float;
  JAX_FP4_INLINE static float load(Bits bits, u16 flags) {
    const float x = f32_of(bits);
    return (flags & kFtz) && is_subnormal(x) ? std::copysign(0.0f, x) : x;
  }
  JAX_FP4_INLINE static Bits store(float x, u16 flags) {
    if (x != x) return (flags & kSat) ? 0 : kCanonicalNaN32;
    if ((flags & kFtz) && is_subnormal(x)) x = std::copysign(0.0f, x);
    if (flags & kSat) x = x > 0.0f ? std::min(x, 1.0f) : 0.0f;
    if ((flags & kRelu) && !(x > 0.0f)) x = 0.0f;
    return bits_of(x);
  }
  template <class F>
  JAX_FP4_INLINE static Bits apply(F f, float a, float b, float c, u16 flags) {
    return store(f(a, b, c), flags);
  }
};

struct F64 {
  using Bits = u64;
  using Value = double;
  static double load(Bits bits, u16) { return std::bit_cast<double>(bits); }
  static Bits store(double x, u16 flags) {
    if (flags & kSat) x = x > 0.0 ? std::min(x, 1.0) : 0.0;
    return std::bit_cast<u64>(x);
  }
  template <class F>
  static Bits apply(F f, double a, double b, double c, u16 flags) {
    return store(f(a, b, c), flags);
  }
};

// f16 and bf16: values are doubles, results are exact sums rounded once.
template <bool kBrain>
struct Half {
  using Bits = u16;
  using Value = double;
  static constexpr BinaryFormat kFormat = kBrain ? kBF16 : kF16;
  static double load(Bits bits, u16 flags) {
    const double x = kBrain ? decode_bf16(bits) : decode_f16(bits);
    if ((flags & kFtz) && (bits & kFormat.infinity()) == 0) return std::copysign(0.0, x);
    return x;
  }
  static Bits finish(Bits bits, u16 flags) {
    const Bits magnitude = bits & 0x7FFF;
    if (magnitude > kFormat.infinity()) return (flags & kSat) ? 0 : kCanonicalNaN16;
    if ((flags & kFtz) && magnitude < (1 << kFormat.mantissa_bits)) bits &= 0x8000;
    const Bits one = kBrain ? 0x3F80 : 0x3C00;
    if (flags & kSat) bits = (bits & 0x8000) ? 0 : std::min(bits, one);
    if ((flags & kRelu) && (bits & 0x8000)) bits = 0;
    return bits;
  }
  // a * b + c.
  static Bits multiply_add(double a, double b, double c, u16 flags) {
    const double rough = a * b + c;
    if (!std::isfinite(rough) || rough == 0.0) {
      const Bits sign = std::signbit(rough) ? 0x8000 : 0;
      if (rough != rough) return finish(kCanonicalNaN16, flags);
      return finish(rough == 0.0 ? sign : static_cast<Bits>(sign | kFormat.infinity()), flags);
    }
    return finish(
        static_cast<Bits>(round_exact(exact_of_product_sum(a, b, c), kFormat, Rounding::nearest)),
        flags);
  }
  static Bits store(double x, u16 flags) {
    if (x != x) return finish(kCanonicalNaN16, flags);
    if (std::isinf(x))
      return finish(static_cast<Bits>((x < 0 ? 0x8000 : 0) | kFormat.infinity()), flags);
    return finish(static_cast<Bits>(round_exact(exact_of(x), kFormat, Rounding::nearest)), flags);
  }
};
using F16 = Half<false>;
using BF16 = Half<true>;

template <class T>
constexpr bool kIsHalf = std::is_same_v<T, F16> || std::is_same_v<T, BF16>;

// ---- Operations: on the bits of one element of format T

struct AddOp {
  template <class T>
  JAX_FP4_INLINE static auto run(typename T::Bits x, typename T::Bits y, typename T::Bits,
                                 u16 flags) {
    const auto a = T::load(x, flags), b = T::load(y, flags);
    if constexpr (kIsHalf<T>)
      return T::multiply_add(a, 1.0, b, flags);
    else
      return T::apply([](auto p, auto q, auto) { return p + q; }, a, b, a, flags);
  }
};
struct SubOp {
  template <class T>
  JAX_FP4_INLINE static auto run(typename T::Bits x, typename T::Bits y, typename T::Bits,
                                 u16 flags) {
    const auto a = T::load(x, flags), b = T::load(y, flags);
    if constexpr (kIsHalf<T>)
      return T::multiply_add(a, 1.0, -b, flags);
    else
      return T::apply([](auto p, auto q, auto) { return p - q; }, a, b, a, flags);
  }
};
struct MulOp {
  template <class T>
  JAX_FP4_INLINE static auto run(typename T::Bits x, typename T::Bits y, typename T::Bits,
                                 u16 flags) {
    const auto a = T::load(x, flags), b = T::load(y, flags);
    if constexpr (kIsHalf<T>)
      return T::store(a * b, flags);
    else
      return T::apply([](auto p, auto q, auto) { return p * q; }, a, b, a, flags);
  }
};
struct FmaOp {
  template <class T>
  JAX_FP4_INLINE static auto run(typename T::Bits x, typename T::Bits y, typename T::Bits z,
                                 u16 flags) {
    const auto a = T::load(x, flags), b = T::load(y, flags), c = T::load(z, flags);
    if constexpr (kIsHalf<T>)
      return T::multiply_add(a, b, c, flags);
    else
      return T::apply([](auto p, auto q, auto r) { return std::fma(p, q, r); }, a, b, c, flags);
  }
};
struct DivOp {
  template <class T>
  JAX_FP4_INLINE static auto run(typename T::Bits x, typename T::Bits y, typename T::Bits,
                                 u16 flags) {
    const auto a = T::load(x, flags), b = T::load(y, flags);
    return T::apply([](auto p, auto q, auto) { return p / q; }, a, b, a, flags);
  }
};
struct RcpOp {
  template <class T>
  JAX_FP4_INLINE static auto run(typename T::Bits x, typename T::Bits, typename T::Bits,
                                 u16 flags) {
    const auto a = T::load(x, flags);
    return T::apply([](auto p, auto, auto) { return 1 / p; }, a, a, a, flags);
  }
};
struct SqrtOp {
  template <class T>
  JAX_FP4_INLINE static auto run(typename T::Bits x, typename T::Bits, typename T::Bits,
                                 u16 flags) {
    const auto a = T::load(x, flags);
    return T::apply([](auto p, auto, auto) { return std::sqrt(p); }, a, a, a, flags);
  }
};
// min and max: a NaN loses against a number unless .NaN; -0 is less than +0.
template <bool kMax>
struct ExtremumOp {
  // On integers, which the compiler can vectorize; 16-bit numbers in the upper half.
  JAX_FP4_INLINE static u32 on_integers(u32 x, u32 y, u16 flags, u32 infinity, u32 canonical_nan) {
    // In this order -0 comes before +0.
    const auto order = [](u32 bits) {
      const i32 number = static_cast<i32>(bits);
      return number ^ (number >> 31 & 0x7FFF'FFFF);
    };
    const u32 sign = (flags & kXorSign) ? (x ^ y) & kF32SignMask : 0;
    const u32 keep = (flags & kXorSign) ? kF32AbsMask : ~0u;
    x &= keep;
    y &= keep;
    const bool nan_x = (x & kF32AbsMask) > infinity, nan_y = (y & kF32AbsMask) > infinity;
    const u32 either = (order(x) < order(y)) != kMax ? x : y;
    const u32 number = (nan_x ? y : nan_y ? x : either) ^ sign;
    const bool nan = (flags & kNanFlag) ? nan_x || nan_y : nan_x && nan_y;
    return nan ? canonical_nan : number;
  }
  template <class T>
  JAX_FP4_INLINE static auto run(typename T::Bits x, typename T::Bits y, typename T::Bits,
                                 u16 flags) {
    if constexpr (std::is_same_v<T, F32>) {
      if (!(flags & kFtz)) return on_integers(x, y, flags, kF32InfBits, kCanonicalNaN32);
    } else if constexpr (kIsHalf<T>) {
      constexpr u32 kInfinity = static_cast<u32>(T::kFormat.infinity()) << 16;
      if (!(flags & kFtz))
        return static_cast<u16>(
            on_integers(u32{x} << 16, u32{y} << 16, flags, kInfinity, u32{kCanonicalNaN16} << 16) >>
            16);
    }
    auto a = T::load(x, flags), b = T::load(y, flags);
    const bool negative = std::signbit(a) != std::signbit(b);
    if (flags & kXorSign) a = std::fabs(a), b = std::fabs(b);
    auto result = a;
    if (a != a || b != b) {
      result = (flags & kNanFlag) ? a + b : a != a ? b : a;
    } else if (a == b) {
      result = std::signbit(a) != kMax ? a : b;
    } else {
      result = (a < b) != kMax ? a : b;
    }
    if ((flags & kXorSign) && result == result) result = negative ? -result : result;
    return T::store(result, flags);
  }
};
template <bool kMax>
struct Extremum3Op {
  template <class T>
  static auto run(typename T::Bits x, typename T::Bits y, typename T::Bits z, u16 flags) {
    const auto first = ExtremumOp<kMax>::template run<T>(x, y, x, flags);
    return ExtremumOp<kMax>::template run<T>(first, z, z, flags);
  }
};
// abs and neg touch the sign only; of a NaN too (assumption S6), but .ftz flushes.
struct AbsOp {
  template <class T>
  JAX_FP4_INLINE static auto run(typename T::Bits x, typename T::Bits, typename T::Bits,
                                 u16 flags) {
    constexpr auto sign = static_cast<typename T::Bits>(typename T::Bits{1} << (8 * sizeof(x) - 1));
    if ((flags & kFtz) && T::load(x, flags) == 0) x &= sign;
    return static_cast<typename T::Bits>(x & ~sign);
  }
};
struct NegOp {
  template <class T>
  JAX_FP4_INLINE static auto run(typename T::Bits x, typename T::Bits, typename T::Bits,
                                 u16 flags) {
    constexpr auto sign = static_cast<typename T::Bits>(typename T::Bits{1} << (8 * sizeof(x) - 1));
    if ((flags & kFtz) && T::load(x, flags) == 0) x &= sign;
    return static_cast<typename T::Bits>(x ^ sign);
  }
};
struct CopysignOp {  // the sign of a on b
  template <class T>
  JAX_FP4_INLINE static auto run(typename T::Bits x, typename T::Bits y, typename T::Bits, u16) {
    constexpr auto sign = static_cast<typename T::Bits>(typename T::Bits{1} << (8 * sizeof(x) - 1));
    return static_cast<typename T::Bits>((x & sign) | (y & ~sign));
  }
};

// Functions of the approximate unit, in double and then rounded.
template <double (*F)(double)>
struct ApproxOp {
  template <class T>
  static auto run(typename T::Bits x, typename T::Bits, typename T::Bits, u16 flags) {
    const double result = F(static_cast<double>(T::load(x, flags)));
    return T::store(static_cast<typename T::Value>(result), flags);
  }
};
double rsqrt_exact(double x) { return 1.0 / std::sqrt(x); }
double sin_exact(double x) { return std::sin(x); }
double cos_exact(double x) { return std::cos(x); }
double log2_exact(double x) { return std::log2(x); }
double exp2_exact(double x) { return std::exp2(x); }
double tanh_exact(double x) { return std::tanh(x); }

// ---- Lanes

template <class T, class Op, int kSources, bool kPacked>
void float_lanes(Warp& w, const Code& c, u32 mask) {
  using Bits = typename T::Bits;
  using Register =
      std::conditional_t<kPacked, std::conditional_t<sizeof(Bits) == 4, u64, u32>, Bits>;
  const In<Register> a(w, c.src[0]), b(w, c.src[kSources > 1 ? 1 : 0]),
      e(w, c.src[kSources > 2 ? 2 : 0]);
  const Out<Register> d(w, c.dst[0]);
  const auto run = [&](auto flags) {
    each_lane(mask, [&](int i) {
      if constexpr (kPacked) {
        constexpr int kShift = 8 * sizeof(Bits);
        const Register low = Op::template run<T>(static_cast<Bits>(a[i]), static_cast<Bits>(b[i]),
                                                 static_cast<Bits>(e[i]), flags);
        const Register high = Op::template run<T>(static_cast<Bits>(a[i] >> kShift),
                                                  static_cast<Bits>(b[i] >> kShift),
                                                  static_cast<Bits>(e[i] >> kShift), flags);
        d.set(i, low | high << kShift);
      } else {
        d.set(i, Op::template run<T>(a[i], b[i], e[i], flags));
      }
    });
  };
  // The common case apart, as a constant, so that the compiler can vectorize it.
  const u16 flags = c.variant & ~kRoundMask;
  const auto run_flags = [&] {
    if (flags == 0) {
      run(std::integral_constant<u16, 0>{});
    } else if (flags == kNanFlag) {
      run(std::integral_constant<u16, kNanFlag>{});
    } else {
      run(flags);
    }
  };
  if (c.variant & kRoundMask) {
    in_rounding_mode(c.variant, run_flags);
  } else {
    run_flags();
  }
}

template <class Op, int kSources>
Exec float_exec(const Form& form, Code& code) {
  code.variant = flags_of(form);
  switch (form.type(0)) {
    case Type::f32: return float_lanes<F32, Op, kSources, false>;
    case Type::f64: return float_lanes<F64, Op, kSources, false>;
    case Type::f32x2: return float_lanes<F32, Op, kSources, true>;
    default: return nullptr;
  }
}
template <class Op, int kSources>
Exec half_exec(const Form& form, Code& code) {
  code.variant = flags_of(form);
  switch (form.type(0)) {
    case Type::f16: return float_lanes<F16, Op, kSources, false>;
    case Type::bf16: return float_lanes<BF16, Op, kSources, false>;
    case Type::f16x2: return float_lanes<F16, Op, kSources, true>;
    case Type::bf16x2: return float_lanes<BF16, Op, kSources, true>;
    default: return nullptr;
  }
}
template <class Op, int kSources>
Exec any_exec(const Form& form, Code& code) {
  const Exec wide = float_exec<Op, kSources>(form, code);
  return wide ? wide : half_exec<Op, kSources>(form, code);
}

// Baseline x86-64 has no fused multiply-add, and a library call for each lane costs more than all else.
#if defined(__x86_64__) && defined(__GNUC__)
[[gnu::target("avx2,fma")]] void fma_f32_avx2(Warp& w, const Code& c, u32 mask) {
  const Lane32 *a = w.in(c.src[0]), *b = w.in(c.src[1]), *e = w.in(c.src[2]);
  u32 result[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const float x = __builtin_fmaf(__builtin_bit_cast(float, static_cast<u32>(a[i])),
                                   __builtin_bit_cast(float, static_cast<u32>(b[i])),
                                   __builtin_bit_cast(float, static_cast<u32>(e[i])));
    result[i] = x == x ? __builtin_bit_cast(u32, x) : kCanonicalNaN32;
  }
  Lane32* d = w.out(c.dst[0]);
  for (int i = 0; i < kLanes; ++i) d[i] = (mask >> i & 1) ? result[i] : d[i];
}
bool has_fma() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
constexpr Exec fma_f32_avx2 = nullptr;
constexpr bool has_fma() { return false; }
#endif

}  // namespace

Exec add_float(const Form& form, Code& code) { return any_exec<AddOp, 2>(form, code); }
Exec sub_float(const Form& form, Code& code) { return any_exec<SubOp, 2>(form, code); }
Exec mul_float(const Form& form, Code& code) { return any_exec<MulOp, 2>(form, code); }
Exec fma_float(const Form& form, Code& code) {
  const Exec general = any_exec<FmaOp, 3>(form, code);
  if (form.type(0) != Type::f32 || (code.variant & ~kRoundMask) != 0 || !has_fma()) return general;
  if (code.variant == 0) return fma_f32_avx2;
  return [](Warp& w, const Code& c, u32 mask) {
    in_rounding_mode(c.variant, [&] { fma_f32_avx2(w, c, mask); });
  };
}
Exec div_float(const Form& form, Code& code) { return float_exec<DivOp, 2>(form, code); }
Exec rcp_float(const Form& form, Code& code) { return float_exec<RcpOp, 1>(form, code); }
Exec sqrt_float(const Form& form, Code& code) { return float_exec<SqrtOp, 1>(form, code); }
Exec min_float(const Form& form, Code& code) { return any_exec<ExtremumOp<false>, 2>(form, code); }
Exec max_float(const Form& form, Code& code) { return any_exec<ExtremumOp<true>, 2>(form, code); }
Exec min3_float(const Form& form, Code& code) {
  return float_exec<Extremum3Op<false>, 3>(form, code);
}
Exec max3_float(const Form& form, Code& code) {
  return float_exec<Extremum3Op<true>, 3>(form, code);
}
Exec abs_float(const Form& form, Code& code) { return any_exec<AbsOp, 1>(form, code); }
Exec neg_float(const Form& form, Code& code) { return any_exec<NegOp, 1>(form, code); }
Exec copysign_float(const Form& form, Code& code) { return float_exec<CopysignOp, 2>(form, code); }
Exec rsqrt(const Form& form, Code& code) {
  return float_exec<ApproxOp<rsqrt_exact>, 1>(form, code);
}
Exec sin_approx(const Form& form, Code& code) {
  return float_exec<ApproxOp<sin_exact>, 1>(form, code);
}
Exec cos_approx(const Form& form, Code& code) {
  return float_exec<ApproxOp<cos_exact>, 1>(form, code);
}
Exec lg2(const Form& form, Code& code) { return float_exec<ApproxOp<log2_exact>, 1>(form, code); }
Exec ex2(const Form& form, Code& code) { return any_exec<ApproxOp<exp2_exact>, 1>(form, code); }
Exec tanh_approx(const Form& form, Code& code) {
  return any_exec<ApproxOp<tanh_exact>, 1>(form, code);
}

Exec testp(const Form& form, Code& code) {
  constexpr std::string_view kTests[] = {"finite",     "infinite", "number",
                                         "notanumber", "normal",   "subnormal"};
  for (u16 i = 0; i < std::size(kTests); ++i)
    if (form.has(kTests[i])) code.variant = i;
  const auto run = []<class T>() -> Exec {
    return [](Warp& w, const Code& c, u32 mask) {
      const In<T> a(w, c.src[0]);
      u32 result = 0;
      each_lane(mask, [&](int i) {
        const int kind = std::fpclassify(a[i]);
        // testp counts +0 and -0 as normal (PTX ISA 9.7.3.1).
        const bool answers[] = {kind != FP_NAN && kind != FP_INFINITE,
                                kind == FP_INFINITE,
                                kind != FP_NAN,
                                kind == FP_NAN,
                                kind == FP_NORMAL || kind == FP_ZERO,
                                kind == FP_SUBNORMAL};
        result |= static_cast<u32>(answers[c.variant]) << i;
      });
      w.set_predicate(c.dst[0], mask, result);
    };
  };
  return form.type(0) == Type::f32 ? run.operator()<float>() : run.operator()<double>();
}

}  // namespace jax_fp4::sim

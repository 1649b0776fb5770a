// cvt (PTX ISA 9.7.9.21): between integers, floating-point numbers and the block formats' elements.
//
// A source element becomes an Exact or a NaN or an infinity, and that is rounded once. E2M1, E2M3, E3M2,
// E4M3, E5M2 and UE8M0 go through csrc/numerics.
#include <algorithm>
#include <limits>

#include "numerics/minifloat.h"
#include "sim/ops/convert_common.h"
#include "sim/ops/lanes.h"
#include "sim/ops/rounding.h"

namespace jax_fp4::sim {
namespace {

// Code::variant: rounding mode, then flags.
enum Flag : u16 {
  kModeMask = 7,
  kFtz = 8,
  kSat = 16,
  kRelu = 32,
  kSatFinite = 64,
  kToInteger = 128
};

u16 flags_of(const Form& form) {
  u16 flags = 0;
  if (form.has("rz") || form.has("rzi")) flags = static_cast<u16>(Rounding::zero);
  if (form.has("rm") || form.has("rmi")) flags = static_cast<u16>(Rounding::down);
  if (form.has("rp") || form.has("rpi")) flags = static_cast<u16>(Rounding::up);
  if (form.has("rna")) flags = static_cast<u16>(Rounding::nearest_away);
  if (form.has("ftz")) flags |= kFtz;
  if (form.has("sat")) flags |= kSat;
  if (form.has("relu")) flags |= kRelu;
  if (form.has("satfinite")) flags |= kSatFinite;
  for (std::string_view integral : {"rni", "rzi", "rmi", "rpi"})
    if (form.has(integral)) flags |= kToInteger;
  return flags;
}
Rounding mode_of(u16 flags) { return static_cast<Rounding>(flags & kModeMask); }

BinaryFormat format_of(Type type) {
  switch (type) {
    case Type::f16:
    case Type::f16x2: return kF16;
    case Type::bf16:
    case Type::bf16x2: return kBF16;
    case Type::f64: return kF64;
    default: return kF32;
  }
}

u64 canonical_nan(const BinaryFormat& f) {
  if (f.exponent_bits == 11) return 0x7FFF'FFFF'FFFF'FFFF;
  return f.mantissa_bits == 23 ? kCanonicalNaN32 : kCanonicalNaN16;
}

// ---- Reading a register as a number of a type

double read_float(Type type, u64 bits, u16 flags) {
  switch (type) {
    case Type::f16: return decode_f16(static_cast<u32>(bits) & 0xFFFF);
    case Type::bf16: return decode_bf16(static_cast<u32>(bits) & 0xFFFF);
    case Type::f64: return std::bit_cast<double>(bits);
    default: {
      const u32 b = static_cast<u32>(bits);
      if ((flags & kFtz) && (b & kF32InfBits) == 0) return (b & kF32SignMask) ? -0.0 : 0.0;
      return f32_of(b);
    }
  }
}

Exact read_integer(Type type, u64 bits) {
  const int width = bits_of_type(type);
  if (width < 64) bits &= (u64{1} << width) - 1;
  if (is_signed(type)) {
    const i64 value = static_cast<i64>(bits << (64 - width)) >> (64 - width);
    return {value < 0, value < 0 ? 0 - static_cast<u64>(value) : static_cast<u64>(value), 0, false};
  }
  return {false, bits, 0, false};
}

// ---- Writing

// A double, with what the modifiers ask for, as the bits of the format.
u64 write_float(const BinaryFormat& format, double x, u16 flags) {
  if (x != x) {
    if (flags & kSat) return 0;
    return canonical_nan(format);
  }
  if ((flags & kRelu) && std::signbit(x)) x = 0.0;
  if (flags & kSat) x = x > 0.0 ? std::min(x, 1.0) : 0.0;
  const u64 sign = std::signbit(x) ? format.sign() : 0;
  u64 bits =
      std::isinf(x) ? sign | format.infinity() : round_exact(exact_of(x), format, mode_of(flags));
  if ((flags & kSatFinite) && (bits & (format.sign() - 1)) == format.infinity()) --bits;
  const bool subnormal = (bits & format.infinity()) == 0;
  if ((flags & kFtz) && format.mantissa_bits == 23 && subnormal) bits = sign;
  return bits;
}

double round_to_integer(double x, Rounding mode) {
  switch (mode) {
    case Rounding::zero: return std::trunc(x);
    case Rounding::down: return std::floor(x);
    case Rounding::up: return std::ceil(x);
    default: return std::nearbyint(x);
  }
}

// Out of range clamps. NaN: 0, or the most negative number where a 64-bit type takes part.
u64 write_integer(Type type, double x, Rounding mode, bool from_double) {
  const int width = bits_of_type(type);
  const u64 all = width == 64 ? ~u64{0} : (u64{1} << width) - 1;
  const u64 top = u64{1} << (width - 1);
  if (x != x) return from_double || width == 64 ? top : 0;
  x = round_to_integer(x, mode);
  if (is_signed(type)) {
    const double limit = std::ldexp(1.0, width - 1);
    if (x >= limit) return top - 1;
    if (x < -limit) return top;
    return static_cast<u64>(static_cast<i64>(x)) & all;
  }
  if (x <= 0) return 0;
  return x >= std::ldexp(1.0, width) ? all : static_cast<u64>(x);
}

// A value narrower than its register fills it: by sign for signed types, else by zeros.
u64 widen(Type type, u64 bits, int width) {
  const int have = bits_of_type(type);
  if (!is_signed(type) || have >= width) return bits;
  const u64 extended = static_cast<u64>(static_cast<i64>(bits << (64 - have)) >> (64 - have));
  return width == 64 ? extended : extended & ((u64{1} << width) - 1);
}

// Calls convert(bits) -> bits for every lane; a source may sit in a register wider than its type.
template <class F>
void convert_lanes(Warp& w, const Code& c, u32 mask, Type from, F convert) {
  const bool wide_source = bits_of_type(from) == 64 || c.source_width == 64;
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const u64 source = wide_source ? w.in64(c.src[0])[lane] : w.in(c.src[0])[lane];
    const u64 result = convert(source);
    if (c.width == 64) {
      w.out64(c.dst[0])[lane] = result;
    } else {
      w.out(c.dst[0])[lane] = static_cast<u32>(result);
    }
  }
}

const Form& form_of(const Warp& w, const Code& c) { return w.launch->program->forms[c.form]; }

void integer_to_integer(Warp& w, const Code& c, u32 mask) {
  const Form& form = form_of(w, c);
  const Type to = form.type(0), from = form.type(1);
  const int width = bits_of_type(to);
  const u64 all = width == 64 ? ~u64{0} : (u64{1} << width) - 1;
  convert_lanes(w, c, mask, from, [&](u64 bits) {
    const Exact x = read_integer(from, bits);
    u64 value = x.negative ? 0 - x.significand : x.significand;
    if (c.variant & kSat) {
      const u64 most = is_signed(to) ? all >> 1 : all;
      const u64 least = is_signed(to) ? most + 1 : 0;  // magnitude
      if (x.negative) {
        value = 0 - std::min(x.significand, least);
      } else {
        value = std::min(x.significand, most);
      }
    }
    return widen(to, value & all, c.width);
  });
}

void float_to_integer(Warp& w, const Code& c, u32 mask) {
  const Form& form = form_of(w, c);
  const Type to = form.type(0), from = form.type(1);
  convert_lanes(w, c, mask, from, [&](u64 bits) {
    const double x = read_float(from, bits, c.variant);
    return widen(to, write_integer(to, x, mode_of(c.variant), from == Type::f64), c.width);
  });
}

void integer_to_float(Warp& w, const Code& c, u32 mask) {
  const Form& form = form_of(w, c);
  const BinaryFormat format = format_of(form.type(0));
  const Type from = form.type(1);
  convert_lanes(w, c, mask, from, [&](u64 bits) {
    Exact x = read_integer(from, bits);
    // round_exact takes significands of 63 bits.
    if (x.significand >> 63) {
      x.sticky = x.significand & 1;
      x.significand >>= 1;
      x.exponent = 1;
      // One bit below the kept ones: a half exactly unless more follow.
      x.significand |= x.sticky;
      x.sticky = false;
    }
    u64 result = round_exact(x, format, mode_of(c.variant));
    if (c.variant & kSat) {
      const u64 one = static_cast<u64>((1 << (format.exponent_bits - 1)) - 1)
                      << format.mantissa_bits;
      result = x.negative ? 0 : std::min(result, one);
    }
    return result;
  });
}

void float_to_float(Warp& w, const Code& c, u32 mask) {
  const Form& form = form_of(w, c);
  const BinaryFormat format = format_of(form.type(0));
  const Type from = form.type(1);
  convert_lanes(w, c, mask, from, [&](u64 bits) {
    double x = read_float(from, bits, c.variant);
    if (c.variant & kToInteger) {
      x = std::copysign(round_to_integer(x, mode_of(c.variant)), x);
      return write_float(format, x, static_cast<u16>(c.variant & ~kModeMask));
    }
    return write_float(format, x, c.variant);
  });
}

// Two f32 to a packed pair; the first goes to the upper half.
void pair_from_f32(Warp& w, const Code& c, u32 mask) {
  const BinaryFormat format = format_of(form_of(w, c).type(0));
  const In<u32> a(w, c.src[0]), b(w, c.src[1]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    const u64 high = write_float(format, f32_of(a[i]), c.variant);
    const u64 low = write_float(format, f32_of(b[i]), c.variant);
    d.set(i, static_cast<u32>(high << 16 | low));
  });
}

// Stochastic: the random bits are added below the kept ones; the upper half of `bits` belongs to a.
// f16 has 13 discarded bits and takes the lower 13 of its half, bf16 16.
void pair_from_f32_stochastic(Warp& w, const Code& c, u32 mask) {
  const BinaryFormat format = format_of(form_of(w, c).type(0));
  const In<u32> a(w, c.src[0]), b(w, c.src[1]), random(w, c.src[2]);
  const Out<u32> d(w, c.dst[0]);
  const auto round = [&](u32 bits, u32 noise) {
    const double x = f32_of(bits);
    if (!std::isfinite(x)) return write_float(format, x, c.variant);
    const int discarded = 23 - format.mantissa_bits;
    const u16 truncate =
        static_cast<u16>((c.variant & ~kModeMask) | static_cast<u16>(Rounding::zero));
    const u64 low = write_float(format, x, truncate);
    // Distance to the truncated value, in units of the noise's last bit.
    const int exponent = std::max(std::ilogb(x == 0 ? 1.0 : x), format.min_exponent());
    const double step = std::ldexp(1.0, exponent - format.mantissa_bits);
    const double base = std::trunc(std::fabs(x) / step) * step;
    const double rest = (std::fabs(x) - base) / step;
    const u64 fraction = static_cast<u64>(std::ldexp(rest, discarded));
    const bool up = fraction + (noise & ((1u << discarded) - 1)) >= u64{1} << discarded;
    if (!up || ((c.variant & kRelu) && std::signbit(x))) return low;
    const u64 result = low + 1;
    const bool overflow = (result & (format.sign() - 1)) == format.infinity();
    return overflow && (c.variant & kSatFinite) ? low : result;
  };
  each_lane(mask, [&](int i) {
    d.set(i,
          static_cast<u32>(round(a[i], random[i] >> 16) << 16 | round(b[i], random[i] & 0xFFFF)));
  });
}

void to_tf32(Warp& w, const Code& c, u32 mask) {
  const In<u32> a(w, c.src[0]);
  const Out<u32> d(w, c.dst[0]);
  constexpr BinaryFormat kTF32{8, 10};
  each_lane(mask, [&](int i) {
    const double x = f32_of(a[i]);
    const u64 bits = x != x ? kCanonicalNaN32 >> 13 : write_float(kTF32, x, c.variant);
    d.set(i, x != x ? kCanonicalNaN32 : static_cast<u32>(bits) << 13);
  });
}

// ---- Elements of block formats

Minifloat minifloat_of(Type type) {
  switch (type) {
    case Type::e4m3x2:
    case Type::e4m3x4: return kE4M3;
    case Type::e5m2x2:
    case Type::e5m2x4: return kE5M2;
    case Type::e2m3x2:
    case Type::e2m3x4: return kE2M3;
    case Type::e3m2x2:
    case Type::e3m2x4: return kE3M2;
    default: return kE2M1;
  }
}
int element_bits(const Minifloat& kind) { return kind.bits() == 4 ? 4 : 8; }

u32 encode_element(const Minifloat& kind, float x, u16 flags) {
  if ((flags & kRelu) && x == x && std::signbit(x)) x = 0.0f;
  return encode_nearest(kind, x);
}

void elements_from_f32(Warp& w, const Code& c, u32 mask) {
  const Minifloat kind = minifloat_of(form_of(w, c).type(0));
  const In<u32> a(w, c.src[0]), b(w, c.src[1]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    d.set(i, encode_element(kind, f32_of(a[i]), c.variant) << element_bits(kind) |
                 encode_element(kind, f32_of(b[i]), c.variant));
  });
}

void elements_from_halves(Warp& w, const Code& c, u32 mask) {
  const Minifloat kind = minifloat_of(form_of(w, c).type(0));
  const bool brain = form_of(w, c).type(1) == Type::bf16x2;
  const In<u32> a(w, c.src[0]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    const auto value = [&](u32 bits) { return brain ? decode_bf16(bits) : decode_f16(bits); };
    d.set(i, encode_element(kind, value(a[i] >> 16), c.variant) << element_bits(kind) |
                 encode_element(kind, value(a[i] & 0xFFFF), c.variant));
  });
}

void halves_from_elements(Warp& w, const Code& c, u32 mask) {
  const Minifloat kind = minifloat_of(form_of(w, c).type(1));
  const In<u32> a(w, c.src[0]);
  const Out<u32> d(w, c.dst[0]);
  const int bits = element_bits(kind);
  each_lane(mask, [&](int i) {
    const auto half = [&](u32 code) { return write_float(kF16, decode(kind, code), c.variant); };
    d.set(i, static_cast<u32>(half(a[i] >> bits) << 16 | half(a[i] & ((1u << bits) - 1))));
  });
}

// d = {a, b, e, f} from high to low. Which random byte belongs to which element is known from a figure
// only that no text of the PTX ISA repeats (assumption S7): a 31:24, b 15:8, e 23:16, f 7:0.
void elements_stochastic(Warp& w, const Code& c, u32 mask) {
  const Minifloat kind = minifloat_of(form_of(w, c).type(0));
  const std::vector<u32>& slots = w.launch->program->slots;
  const In<u32> random(w, c.src[0]);
  const Out<u32> d(w, c.dst[0]);
  constexpr int kByteOf[4] = {24, 8, 16, 0};
  each_lane(mask, [&](int i) {
    u32 result = 0;
    for (u32 k = 0; k < 4; ++k) {
      float x = f32_of(w.in(slots[c.vectors[0] + k])[i]);
      if ((c.variant & kRelu) && x == x && std::signbit(x)) x = 0.0f;
      result =
          result << element_bits(kind) | encode_stochastic(kind, x, random[i] >> kByteOf[k] & 0xFF);
    }
    d.set(i, result);
  });
}

// Magnitudes to UE8M0: the sign is ignored (PTX ISA: the type has none; assumption S8).
u32 encode_ue8m0(double x, u16 flags) {
  if (x != x) return kUE8M0NaN;
  const float magnitude = static_cast<float>(std::fabs(x));
  if (mode_of(flags) == Rounding::up) return encode_ue8m0_up(magnitude);
  return std::min(bits_of(magnitude) >> 23, 254u);
}

void scales_from_f32(Warp& w, const Code& c, u32 mask) {
  const In<u32> a(w, c.src[0]), b(w, c.src[1]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    d.set(i, encode_ue8m0(f32_of(a[i]), c.variant) << 8 | encode_ue8m0(f32_of(b[i]), c.variant));
  });
}
void scales_from_bf16(Warp& w, const Code& c, u32 mask) {
  const In<u32> a(w, c.src[0]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    d.set(i, encode_ue8m0(decode_bf16(a[i] >> 16), c.variant) << 8 |
                 encode_ue8m0(decode_bf16(a[i] & 0xFFFF), c.variant));
  });
}
void bf16_from_scales(Warp& w, const Code& c, u32 mask) {
  const In<u32> a(w, c.src[0]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    const auto half = [](u32 byte) { return write_float(kBF16, decode_ue8m0(byte), 0); };
    d.set(i, static_cast<u32>(half(a[i] >> 8) << 16 | half(a[i] & 0xFF)));
  });
}

// The handler, or the one of ops/convert_common.h that does the same.
template <void (*kHandler)(Warp&, const Code&, u32), auto kCommon = nullptr>
Exec with_flags(const Form& form, Code& code) {
  code.variant = flags_of(form);
  // Not a comparison with nullptr: under sanitizers that is no constant expression to g++ 12.
  if constexpr (!std::is_null_pointer_v<decltype(kCommon)>)
    if (const Exec common = kCommon(form, code)) return common;
  return kHandler;
}

// cvt.pack: a and b clamped to a narrow type, b in the low bits, above them a, above it the low bits of
// c. Code::variant: width of the narrow type, and whether it is signed.
constexpr u16 kPackSigned = 1 << 8;
void pack_integers(Warp& w, const Code& c, u32 mask) {
  const int bits = c.variant & 0xFF;
  const bool is_signed = c.variant & kPackSigned;
  const i32 low = is_signed ? -(1 << (bits - 1)) : 0;
  const i32 high = (1 << (is_signed ? bits - 1 : bits)) - 1;
  const u32 cut = (1u << bits) - 1;
  const In<i32> a(w, c.src[0]), b(w, c.src[1]);
  const Lane32* rest = c.src[2] == kNoSlot ? nullptr : w.in(c.src[2]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    const u32 upper = static_cast<u32>(std::clamp(a[i], low, high)) & cut;
    const u32 lower = static_cast<u32>(std::clamp(b[i], low, high)) & cut;
    d.set(i, lower | upper << bits | (rest ? rest[i] << (2 * bits) : 0));
  });
}

}  // namespace

Exec cvt_pack(const Form& form, Code& code) {
  for (u16 bits : {u16{2}, u16{4}, u16{8}, u16{16}}) {
    const std::string width = std::to_string(bits);
    if (form.has("u" + width)) code.variant = bits;
    if (form.has("s" + width)) code.variant = static_cast<u16>(bits | kPackSigned);
  }
  return pack_integers;
}
Exec cvt_int_int(const Form& f, Code& c) {
  return with_flags<integer_to_integer, common_integer_conversion>(f, c);
}
Exec cvt_int_float(const Form& f, Code& c) {
  return with_flags<float_to_integer, common_float_to_integer>(f, c);
}
Exec cvt_float_int(const Form& f, Code& c) {
  return with_flags<integer_to_float, common_integer_to_float>(f, c);
}
Exec cvt_float_float(const Form& f, Code& c) {
  return with_flags<float_to_float, common_float_to_float>(f, c);
}
Exec cvt_pair(const Form& f, Code& c) { return with_flags<pair_from_f32, common_pair>(f, c); }
Exec cvt_pair_rs(const Form& f, Code& c) { return with_flags<pair_from_f32_stochastic>(f, c); }
Exec cvt_tf32(const Form& f, Code& c) { return with_flags<to_tf32>(f, c); }
Exec cvt_elements_f32(const Form& f, Code& c) {
  return with_flags<elements_from_f32, common_elements>(f, c);
}
Exec cvt_elements_half(const Form& f, Code& c) { return with_flags<elements_from_halves>(f, c); }
Exec cvt_half_elements(const Form& f, Code& c) { return with_flags<halves_from_elements>(f, c); }
Exec cvt_elements_rs(const Form& f, Code& c) { return with_flags<elements_stochastic>(f, c); }
Exec cvt_ue8m0_f32(const Form& f, Code& c) { return with_flags<scales_from_f32>(f, c); }
Exec cvt_ue8m0_bf16(const Form& f, Code& c) { return with_flags<scales_from_bf16>(f, c); }
Exec cvt_bf16_ue8m0(const Form& f, Code& c) { return with_flags<bf16_from_scales>(f, c); }

}  // namespace jax_fp4::sim

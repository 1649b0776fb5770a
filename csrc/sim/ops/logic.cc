// Logic, shifts and byte permutation (PTX ISA 9.7.8, 9.7.9.7), and logic on predicates.
#include <algorithm>

#include "sim/ops/lanes.h"

namespace jax_fp4::sim {
namespace {

struct And {
  template <class T>
  T operator()(T a, T b) const {
    return a & b;
  }
};
struct Or {
  template <class T>
  T operator()(T a, T b) const {
    return a | b;
  }
};
struct Xor {
  template <class T>
  T operator()(T a, T b) const {
    return a ^ b;
  }
};
struct Not {
  template <class T>
  T operator()(T a) const {
    return static_cast<T>(~a);
  }
};
struct CNot {
  template <class T>
  T operator()(T a) const {
    return a == 0;
  }
};
struct ShiftLeft {
  template <class T>
  T operator()(T a, u32 n) const {
    return n >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << n);
  }
};
struct ShiftRight {
  template <class T>
  T operator()(T a, u32 n) const {
    const u32 most = 8 * sizeof(T) - 1;
    if (std::is_signed_v<T>) return static_cast<T>(a >> std::min(n, most));
    return n > most ? T{0} : static_cast<T>(a >> n);
  }
};
template <bool kLeft, bool kClamp>
struct Funnel {
  u32 operator()(u32 a, u32 b, u32 count) const {
    const u32 n = kClamp ? std::min(count, 32u) : count & 31;
    const u64 both = static_cast<u64>(b) << 32 | a;
    return static_cast<u32>(kLeft ? both << n >> 32 : both >> n);
  }
};
template <class Op>
Exec binary(const Form& form) {
  return by_integer(form.type(0), []<class T>() -> Exec { return binary_lanes<T, T, Op>; });
}
template <class Op>
Exec unary(const Form& form) {
  return by_integer(form.type(0), []<class T>() -> Exec { return unary_lanes<T, T, Op>; });
}

template <class T, class Op>
void shift_lanes(Warp& w, const Code& c, u32 mask) {
  const In<T> a(w, c.src[0]);
  const In<u32> n(w, c.src[1]);
  const Out<T> d(w, c.dst[0]);
  each_lane(mask, [&](int i) { d.set(i, Op{}(a[i], n[i])); });
}

void lop3_lanes(Warp& w, const Code& c, u32 mask) {
  const In<u32> a(w, c.src[0]), b(w, c.src[1]), e(w, c.src[2]), table(w, c.src[3]);
  const Out<u32> d(w, c.dst[0]);
  // Entry 4a + 2b + c of the table as a word of zeros or ones; then choices by c, b and a.
  u32 t[8];
  for (int k = 0; k < 8; ++k) t[k] = 0 - (table[0] >> k & 1);
  each_lane(mask, [&](int i) {
    const auto choose = [](u32 by, u32 ones, u32 zeros) { return zeros ^ (by & (ones ^ zeros)); };
    const u32 x = a[i], y = b[i], z = e[i];
    const u32 high = choose(y, choose(z, t[7], t[6]), choose(z, t[5], t[4]));
    const u32 low = choose(y, choose(z, t[3], t[2]), choose(z, t[1], t[0]));
    d.set(i, choose(x, high, low));
  });
}

// Bytes of the pair {b, a} by selector nibbles; bit 3 of a nibble replicates the byte's sign.
void prmt_lanes(Warp& w, const Code& c, u32 mask) {
  const In<u32> a(w, c.src[0]), b(w, c.src[1]), selector(w, c.src[2]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    const u64 bytes = static_cast<u64>(b[i]) << 32 | a[i];
    u32 result = 0;
    const u32 s = selector[i] & 3;
    for (u32 k = 0; k < 4; ++k) {
      u32 source = 0;
      bool replicate = false;
      switch (c.variant) {
        case 0:
          source = selector[i] >> (4 * k) & 7;
          replicate = selector[i] >> (4 * k) & 8;
          break;
        case 1: source = s + k; break;                   // f4e
        case 2: source = (s + 8 - k) & 7; break;         // b4e
        case 3: source = s; break;                       // rc8
        case 4: source = std::max(s, k); break;          // ecl
        case 5: source = std::min(s, k); break;          // ecr
        default: source = (s & 1) * 2 + (k & 1); break;  // rc16
      }
      u32 byte = static_cast<u32>(bytes >> (8 * source)) & 0xFF;
      if (replicate) byte = byte & 0x80 ? 0xFF : 0;
      result |= byte << (8 * k);
    }
    d.set(i, result);
  });
}

}  // namespace

Exec and_bits(const Form& form, Code&) { return binary<And>(form); }
Exec or_bits(const Form& form, Code&) { return binary<Or>(form); }
Exec xor_bits(const Form& form, Code&) { return binary<Xor>(form); }
Exec not_bits(const Form& form, Code&) { return unary<Not>(form); }
Exec cnot(const Form& form, Code&) { return unary<CNot>(form); }
Exec lop3(const Form&, Code&) { return lop3_lanes; }
namespace {

// The default mode with a selector known when the program is loaded and no sign replication.
void prmt_fixed(Warp& w, const Code& c, u32 mask) {
  const In<u32> a(w, c.src[0]), b(w, c.src[1]), selector(w, c.src[2]);
  const u32 s = selector[0];
  if ((s & 0x8888) != 0) {
    prmt_lanes(w, c, mask);
    return;
  }
  const Out<u32> d(w, c.dst[0]);
  const u32 shift[4] = {8 * (s & 7), 8 * (s >> 4 & 7), 8 * (s >> 8 & 7), 8 * (s >> 12 & 7)};
  each_lane(mask, [&](int i) {
    const u64 bytes = static_cast<u64>(b[i]) << 32 | a[i];
    d.set(i, static_cast<u32>((bytes >> shift[0] & 0xFF) | (bytes >> shift[1] & 0xFF) << 8 |
                              (bytes >> shift[2] & 0xFF) << 16 | (bytes >> shift[3] & 0xFF) << 24));
  });
}

}  // namespace

Exec prmt(const Form& form, Code& code) {
  constexpr std::string_view kModes[] = {"", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"};
  for (u16 i = 1; i < std::size(kModes); ++i)
    if (form.has(kModes[i])) code.variant = i;
  const bool fixed = code.variant == 0 && code.src[2] != kNoSlot && (code.src[2] & kConstant) != 0;
  return fixed ? prmt_fixed : prmt_lanes;
}
Exec shl(const Form& form, Code&) {
  return by_integer(form.type(0), []<class T>() -> Exec { return shift_lanes<T, ShiftLeft>; });
}
Exec shr(const Form& form, Code&) {
  return by_integer(form.type(0), []<class T>() -> Exec { return shift_lanes<T, ShiftRight>; });
}
Exec shf(const Form& form, Code&) {
  const bool clamp = form.has("clamp");
  if (form.has("l"))
    return clamp ? ternary_lanes<u32, u32, u32, Funnel<true, true>>
                 : ternary_lanes<u32, u32, u32, Funnel<true, false>>;
  return clamp ? ternary_lanes<u32, u32, u32, Funnel<false, true>>
               : ternary_lanes<u32, u32, u32, Funnel<false, false>>;
}

// Logic on predicates.
Exec logic_pred(const Form& form, Code& code) {
  const std::string_view opcode = form.row->opcode;
  code.variant = opcode == "and" ? 0 : opcode == "or" ? 1 : opcode == "xor" ? 2 : 3;
  return [](Warp& w, const Code& c, u32 mask) {
    const u32 a = w.predicate(c.src[0]);
    const u32 b = c.variant == 3 ? 0 : w.predicate(c.src[1]);
    const u32 results[] = {a & b, a | b, a ^ b, ~a};
    w.set_predicate(c.dst[0], mask, results[c.variant]);
  };
}

}  // namespace jax_fp4::sim

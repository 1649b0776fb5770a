// Data movement (PTX ISA 9.7.9): mov, ld, st, cvta, isspacep, mapa, prefetch and discard.
#include <algorithm>

#include "sim/machine/quick.h"
#include "sim/ops/memory_forms.h"

namespace jax_fp4::sim {
namespace {

bool is_strong(const Form& form) {
  for (std::string_view m : {"relaxed", "acquire", "release", "volatile", "mmio"})
    if (form.has(m)) return true;
  return false;
}

// Code::variant of ld and st: strong access, acquires or releases.
constexpr u16 kStrong = 1, kOrders = 2;

// One access serves all lanes: a parameter or a constant at a fixed address.
void load_uniform(Warp& w, const Code& c, u32 mask) {
  const Program& program = *w.launch->program;
  const Type type = program.forms[c.form].types[0];
  const u32 bytes = static_cast<u32>(bits_of_type(type)) / 8;
  const u32* slots = program.slots.data() + c.vectors[0];
  const u8* data = access(w, c, std::countr_zero(mask), c.space, static_cast<u64>(c.offset[0]),
                          bytes * c.counts[0], AccessKind::read);
  for (u32 k = 0; k < c.counts[0]; ++k, data += bytes) {
    u64 value = get_bytes(data, bytes);
    if (is_signed(type))
      value = static_cast<u64>(static_cast<i64>(value << (64 - 8 * bytes)) >> (64 - 8 * bytes));
    if (c.width == 64) {
      const Out<u64> d(w, slots[k]);
      each_lane(mask, [&](int i) { d.set(i, value); });
    } else {
      const u32 cut = c.width < 32 ? (1u << c.width) - 1 : ~0u;
      const Out<u32> d(w, slots[k]);
      each_lane(mask, [&](int i) { d.set(i, static_cast<u32>(value) & cut); });
    }
  }
}

// Any load.
void load_each_lane(Warp& w, const Code& c, u32 mask) {
  const Program& program = *w.launch->program;
  const Type type = program.forms[c.form].types[0];
  const u32 bytes = static_cast<u32>(bits_of_type(type)) / 8;
  const u32* slots = program.slots.data() + c.vectors[0];
  const AccessKind kind = (c.variant & kStrong) ? AccessKind::strong_read : AccessKind::read;
  const bool extend = is_signed(type);
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const u64 address = address_of(w, c, lane, c.src[0], 0);
    const u8* data = access(w, c, lane, c.space, address, bytes * c.counts[0], kind);
    if (c.variant & kOrders) synchronize_through(w, address, true, false);
    for (u32 k = 0; k < c.counts[0]; ++k, data += bytes) {
      if (bytes == 16) {
        std::memcpy(w.out64(slots[k]) + lane, data, 8);
        std::memcpy(w.out64(slots[k] + 2) + lane, data + 8, 8);
        continue;
      }
      u64 value = get_bytes(data, bytes);
      if (extend)
        value = static_cast<u64>(static_cast<i64>(value << (64 - 8 * bytes)) >> (64 - 8 * bytes));
      if (c.width == 64) {
        w.out64(slots[k])[lane] = value;
      } else {
        w.out(slots[k])[lane] = static_cast<u32>(c.width == 16  ? value & 0xFFFF
                                                 : c.width == 8 ? value & 0xFF
                                                                : value);
      }
    }
  }
}

// Elements of type T into registers of type R.
template <class T, class R>
void load_lanes(Warp& w, const Code& c, u32 mask) {
  if (c.src[0] == kNoSlot && (c.space == Space::param || c.space == Space::constant))
    return load_uniform(w, c, mask);
  const QuickAccess quick(w, c, mask, sizeof(T) * c.counts[0], false);
  if (!quick) return load_each_lane(w, c, mask);
  const u32* slots = w.launch->program->slots.data() + c.vectors[0];
  for (u32 k = 0; k < c.counts[0]; ++k) {
    const Out<R> d(w, slots[k]);
    const auto load = [&](int i, const u8* from) {
      T value;
      std::memcpy(&value, from, sizeof value);
      d.set(i, static_cast<R>(value));
    };
    const u8* const first = quick.at(0) + k * sizeof(T);
    if (!quick.contiguous()) {
      each_lane(mask, [&](int i) { load(i, quick.at(i) + k * sizeof(T)); });
    } else if (c.counts[0] == 1) {
      for (int i = 0; i < kLanes; ++i) load(i, first + i * sizeof(T));
    } else {
      for (int i = 0; i < kLanes; ++i) load(i, first + i * sizeof(T) * c.counts[0]);
    }
  }
}

// Any store.
void store_each_lane(Warp& w, const Code& c, u32 mask) {
  const Program& program = *w.launch->program;
  const u32 bytes = static_cast<u32>(bits_of_type(program.forms[c.form].types[0])) / 8;
  const u32 count = c.counts[0];
  const u32* slots = program.slots.data() + c.vectors[0];
  const AccessKind kind = (c.variant & kStrong) ? AccessKind::strong_write : AccessKind::write;
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    u8 data[128];
    for (u32 k = 0; k < count; ++k) {
      if (bytes == 16) {
        std::memcpy(data + 16 * k, w.in64(slots[k]) + lane, 8);
        std::memcpy(data + 16 * k + 8, w.in64(slots[k] + 2) + lane, 8);
      } else {
        // The low bytes of a register that may be wider.
        const bool wide = bytes == 8 || c.width == 64;
        const u64 value = wide ? w.in64(slots[k])[lane] : w.in(slots[k])[lane];
        put_bytes(data + bytes * k, value, bytes);
      }
    }
    const u64 address = address_of(w, c, lane, c.src[0], 0);
    if (c.variant & kOrders) synchronize_through(w, address, false, true);
    u8* to = access(w, c, lane, c.space, address, bytes * count, kind, data);
    std::memcpy(to, data, bytes * count);
  }
}

// Elements of type T from registers of type R, of which they are the low bytes.
template <class T, class R>
void store_lanes(Warp& w, const Code& c, u32 mask) {
  const QuickAccess quick(w, c, mask, sizeof(T) * c.counts[0], true);
  if (!quick) return store_each_lane(w, c, mask);
  const u32* slots = w.launch->program->slots.data() + c.vectors[0];
  for (u32 k = 0; k < c.counts[0]; ++k) {
    const In<R> a(w, slots[k]);
    const auto store = [&](int i, u8* to) {
      const T value = static_cast<T>(a[i]);
      std::memcpy(to, &value, sizeof value);
    };
    u8* const first = quick.at(0) + k * sizeof(T);
    if (quick.contiguous() && c.counts[0] == 1) {
      for (int i = 0; i < kLanes; ++i) store(i, first + i * sizeof(T));
    } else if (quick.contiguous()) {
      for (int i = 0; i < kLanes; ++i) store(i, first + i * sizeof(T) * c.counts[0]);
    } else if (mask == kAllLanes) {
      // Where lanes store to one place, the last one's value stays.
      for (int i = 0; i < kLanes; ++i) store(i, quick.at(i) + k * sizeof(T));
    } else {
      for (u32 rest = mask; rest != 0; rest &= rest - 1) {
        const int i = std::countr_zero(rest);
        store(i, quick.at(i) + k * sizeof(T));
      }
    }
  }
}

// The handler of plain loads (kLoad) or stores of elements of a type, for the width of the registers.
template <bool kLoad>
Exec quick_handler(Type type, int width) {
  const auto of = [width]<class T>() -> Exec {
    const auto with = []<class R>() -> Exec {
      if constexpr (kLoad)
        return load_lanes<T, R>;
      else
        return store_lanes<std::make_unsigned_t<T>, R>;
    };
    if (width == 64 || (!kLoad && sizeof(T) == 8)) return with.template operator()<u64>();
    if (kLoad && width == 16) return with.template operator()<u16>();
    if (kLoad && width == 8) return with.template operator()<u8>();
    return with.template operator()<u32>();
  };
  if (type == Type::f32) return of.template operator()<u32>();
  if (type == Type::f64) return of.template operator()<u64>();
  const Exec handler = by_integer(type, of);
  return handler ? handler : kLoad ? load_each_lane : store_each_lane;
}

// Elements of a mov's vector operand, or the one scalar.
void move_lanes(Warp& w, const Code& c, u32 mask) {
  const Program& program = *w.launch->program;
  const int total = bits_of_type(program.forms[c.form].types[0]);
  const u32* to = program.slots.data() + c.vectors[0];
  const u32* from = program.slots.data() + c.vectors[1];
  if (c.counts[0] == 1 && c.counts[1] == 1) {
    if (total <= 32) {
      const In<u32> a(w, from[0]);
      const Out<u32> d(w, to[0]);
      each_lane(mask, [&](int i) { d.set(i, a[i]); });
    } else {
      for (int part = 0; part < total / 64; ++part) {
        const In<u64> a(w, from[0] + 2 * part);
        const Out<u64> d(w, to[0] + 2 * part);
        each_lane(mask, [&](int i) { d.set(i, a[i]); });
      }
    }
    return;
  }
  const int in_bits = total / c.counts[1], out_bits = total / c.counts[0];
  // Two halves of 16 or 32 bits and their word.
  if (c.counts[0] == 1 && c.counts[1] == 2 && total == 32) {
    const In<u32> low(w, from[0]), high(w, from[1]);
    const Out<u32> d(w, to[0]);
    return each_lane(mask, [&](int i) { d.set(i, low[i] | high[i] << 16); });
  }
  if (c.counts[0] == 2 && c.counts[1] == 1 && total == 32) {
    const In<u32> a(w, from[0]);
    const Out<u32> low(w, to[0]), high(w, to[1]);
    return each_lane(mask, [&](int i) {
      const u32 word = a[i];
      low.set(i, word & 0xFFFF);
      high.set(i, word >> 16);
    });
  }
  if (c.counts[0] == 1 && c.counts[1] == 2 && total == 64) {
    const In<u32> low(w, from[0]), high(w, from[1]);
    const Out<u64> d(w, to[0]);
    return each_lane(mask, [&](int i) { d.set(i, low[i] | u64{high[i]} << 32); });
  }
  if (c.counts[0] == 2 && c.counts[1] == 1 && total == 64) {
    const In<u64> a(w, from[0]);
    const Out<u32> low(w, to[0]), high(w, to[1]);
    return each_lane(mask, [&](int i) {
      const u64 word = a[i];
      low.set(i, static_cast<u32>(word));
      high.set(i, static_cast<u32>(word >> 32));
    });
  }
  each_lane(mask, [&](int i) {
    u64 parts[2] = {0, 0};
    for (int k = 0; k < c.counts[1]; ++k) {
      const int at = k * in_bits;
      if (in_bits == 128) {
        parts[0] = w.in64(from[0])[i];
        parts[1] = w.in64(from[0] + 2)[i];
      } else {
        const u64 value = in_bits == 64 ? w.in64(from[k])[i] : w.in(from[k])[i];
        parts[at / 64] |= value << (at % 64);
      }
    }
    for (int k = 0; k < c.counts[0]; ++k) {
      const int at = k * out_bits;
      const u64 value = parts[at / 64] >> (at % 64);
      if (out_bits == 128) {
        w.out64(to[0])[i] = parts[0];
        w.out64(to[0] + 2)[i] = parts[1];
      } else if (out_bits == 64) {
        w.out64(to[k])[i] = value;
      } else {
        w.out(to[k])[i] = static_cast<u32>(value & ((u64{1} << out_bits) - 1));
      }
    }
  });
}

u64 window_of(Space space) {
  switch (space) {
    case Space::shared:
    case Space::shared_cluster: return kSharedWindow;
    case Space::local: return kLocalWindow;
    case Space::param: return kParamWindow;
    case Space::constant: return kConstantWindow;
    default: return 0;
  }
}

// cvta adds the window, cvta.to takes it away.
void convert_address(Warp& w, const Code& c, u32 mask) {
  const u64 window = window_of(c.space);
  const In<u64> a(w, c.src[0]);
  const Out<u64> d(w, c.dst[0]);
  each_lane(mask, [&](int i) { d.set(i, c.variant ? a[i] - window : a[i] + window); });
}

void is_space(Warp& w, const Code& c, u32 mask) {
  const In<u64> a(w, c.src[0]);
  u32 result = 0;
  each_lane(mask, [&](int i) {
    u64 address = a[i];
    Space space = resolve_generic(address);
    // .shared means this CTA's; a peer's memory is .shared::cluster only.
    if (space == Space::shared_cluster && c.space == Space::shared &&
        address >> kRankShift == w.cta->rank)
      space = Space::shared;
    result |= static_cast<u32>(space == c.space) << i;
  });
  w.set_predicate(c.dst[0], mask, result);
}

// The same offset in the CTA of another rank. Where there is none, an access with this address is the
// fault: CUTLASS's tile scheduler maps an address in all lanes and uses it in those that name a CTA.
template <class T>
void map_address(Warp& w, const Code& c, u32 mask) {
  const In<T> a(w, c.src[0]);
  const In<u32> rank(w, c.src[1]);
  const Out<T> d(w, c.dst[0]);
  each_lane(mask, [&](int i) {
    constexpr u32 kMaxRank = 0xFF;
    const u64 keep = ~(u64{kMaxRank} << kRankShift);
    d.set(i, static_cast<T>((a[i] & keep) | u64{std::min(rank[i], kMaxRank)} << kRankShift));
  });
}

template <class T>
void rank_of_address(Warp& w, const Code& c, u32 mask) {
  const In<T> a(w, c.src[0]);
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) { d.set(i, static_cast<u32>(a[i] >> kRankShift) & 0xFF); });
}

// prefetch, discard and their like: no effect on values; the address must be one.
void touch(Warp& w, const Code& c, u32 mask) {
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    u64 address = address_of(w, c, lane, c.src[0], 0);
    Space space = c.space == Space::generic ? resolve_generic(address) : c.space;
    if (space == Space::global && !w.launch->global->find(address))
      w.fault(c, lane, FaultKind::out_of_bounds, "the address is outside every global buffer");
  }
}

// A cache policy is opaque and has no effect here: one value stands for all.
constexpr u64 kCachePolicy = 0x1000'0000'0000'0000;
void make_policy(Warp& w, const Code& c, u32 mask) {
  const Out<u64> d(w, c.dst[0]);
  each_lane(mask, [&](int i) { d.set(i, kCachePolicy); });
}

// Whether the operand has as many registers as the modifiers say. A row with a choice of one vector
// size is that of 256 bits; the others stop at 128.
bool fits_vector(const Form& form, const Code& code) {
  const int vector = vector_of(form), bits = vector * bits_of_type(form.type(0));
  return code.counts[0] == vector && (bits <= 128 || (bits == 256 && form.row->ptx == 88));
}

}  // namespace

Exec ld(const Form& form, Code& code) {
  code.space = space_of(form);
  code.variant =
      static_cast<u16>((is_strong(form) ? kStrong : 0) | (form.has("acquire") ? kOrders : 0));
  if (!fits_vector(form, code)) return nullptr;
  return code.variant == 0 ? quick_handler<true>(form.type(0), code.width) : load_each_lane;
}
Exec st(const Form& form, Code& code) {
  code.space = space_of(form);
  code.variant =
      static_cast<u16>((is_strong(form) ? kStrong : 0) | (form.has("release") ? kOrders : 0));
  if (!fits_vector(form, code)) return nullptr;
  return code.variant == 0 ? quick_handler<false>(form.type(0), code.width) : store_each_lane;
}
Exec mov(const Form& form, Code& code) {
  const int total = bits_of_type(form.type(0));
  for (int n : {code.counts[0], code.counts[1]})
    if (n > 8 || total % n != 0 || total / n < 8) return nullptr;
  return move_lanes;
}
Exec mov_pred(const Form&, Code&) {
  return [](Warp& w, const Code& c, u32 mask) {
    w.set_predicate(c.dst[0], mask, w.predicate(c.src[0]));
  };
}
Exec cvta(const Form& form, Code& code) {
  code.space = space_of(form);
  code.variant = form.has("to");
  return convert_address;
}
Exec isspacep(const Form& form, Code& code) {
  code.space = space_of(form);
  return is_space;
}
Exec mapa(const Form& form, Code&) {
  return bits_of_type(form.type(0)) == 32 ? map_address<u32> : map_address<u64>;
}
Exec getctarank(const Form& form, Code&) {
  return bits_of_type(form.type(0)) == 32 ? rank_of_address<u32> : rank_of_address<u64>;
}
Exec prefetch(const Form& form, Code& code) {
  code.space = space_of(form);
  return touch;
}
Exec createpolicy(const Form&, Code&) { return make_policy; }

}  // namespace jax_fp4::sim

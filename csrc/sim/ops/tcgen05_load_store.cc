// tcgen05.ld, st and wait (PTX ISA 9.7.16.8): a warp's registers from and to its quarter of tensor memory's lanes.
//
// Thread T holds in register r of shape ... the word at (lane, column), counted from the address:
//   32x32b     T, r
//   16x64b     T / 4 + 8 (T & 1), 2 r + (T >> 1 & 1)
//   16x128b    r = 2 j + h: T / 4 + 8 h, 4 j + T % 4
//   16x256b    r = 4 j + 2 h + i: T / 4 + 8 h, 8 j + 2 (T % 4) + i
//   16x32bx2   T % 16, r; from thread 16 on at columns that start `offset` later
// With .pack::16b and .unpack::16b a register holds the low halves of two adjacent columns.
//
// Words move when the instruction executes. For the race checker loads and stores of a warp are agents of their
// own, and what they did happens before something else only after the warp's tcgen05.wait (PTX ISA 9.7.16.6), or
// once all that a load brought has been stored.
#include "sim/ops/tcgen05.h"

namespace jax_fp4::sim {
namespace {

enum class Shape : u8 { s32x32b, s16x64b, s16x128b, s16x256b, s16x32bx2 };

// Code::variant: the shape in the low byte, then these.
constexpr u16 kHalves = 1 << 8, kStores = 1 << 9;

constexpr u32 kQuarter = kTensorLanes / 4;

struct Place {
  u32 lane, column;
};

Place place_of(Shape shape, u32 thread, u32 r) {
  switch (shape) {
    case Shape::s32x32b: return {thread, r};
    case Shape::s16x64b: return {thread / 4 + 8 * (thread & 1), 2 * r + (thread >> 1 & 1)};
    case Shape::s16x128b: return {thread / 4 + 8 * (r & 1), 4 * (r / 2) + thread % 4};
    case Shape::s16x256b:
      return {thread / 4 + 8 * (r >> 1 & 1), 8 * (r / 4) + 2 * (thread % 4) + (r & 1)};
    case Shape::s16x32bx2: return {thread % 16, r};
  }
  return {};
}

// Registers of a thread for .x1, and columns that they cover.
u32 registers_of(Shape shape) {
  return shape == Shape::s16x128b ? 2 : shape == Shape::s16x256b ? 4 : 1;
}
u32 columns_of(Shape shape) {
  switch (shape) {
    case Shape::s16x64b: return 2;
    case Shape::s16x128b: return 4;
    case Shape::s16x256b: return 8;
    default: return 1;
  }
}

// The first lane of the access. A warp reaches the quarter of the lanes that its number modulo 4 names; an address
// may say so, or leave the two bits of the quarter 0.
u32 first_lane(Warp& w, const Code& c, Shape shape, u32 taddr) {
  const u32 lane = tensor_lane(taddr), own = w.id % 4;
  const u32 quarter = lane / kQuarter;
  const u32 step = shape == Shape::s32x32b ? kQuarter : 16;
  if (lane >= kTensorLanes || lane % step != 0) {
    w.fault(c, -1, FaultKind::argument,
            "lane " + std::to_string(lane) + " of the address; this shape starts at multiples of " +
                std::to_string(step) + " below 128");
  }
  if (quarter != 0 && quarter != own) {
    w.fault(c, -1, FaultKind::argument,
            "lane " + std::to_string(lane) + " of the address; warp " + std::to_string(w.id) +
                " reaches lanes " + std::to_string(own * kQuarter) + "-" +
                std::to_string(own * kQuarter + kQuarter - 1));
  }
  return own * kQuarter + lane % kQuarter;
}

void move_words(Warp& w, const Code& c, u32 mask) {
  if (!w.converged(c, mask)) return;
  if (mask != kAllLanes)
    w.fault(c, -1, FaultKind::divergence, "tcgen05.ld and st take all 32 lanes of a warp");
  const Shape shape = static_cast<Shape>(c.variant & 0xFF);
  const bool stores = c.variant & kStores;
  const u32 per_register = c.variant & kHalves ? 2 : 1;
  const u32 count = c.counts[0];
  const u32 taddr = uniform(w, c, mask, c.src[0], "the address") + static_cast<u32>(c.offset[0]);
  const u32 first = first_lane(w, c, shape, taddr), column = tensor_column(taddr);
  const u32 offset = static_cast<u32>(c.immediate);
  const u32 columns = count / registers_of(shape) * columns_of(shape) * per_register;
  const u32 lanes = shape == Shape::s32x32b ? kQuarter : kQuarter / 2;
  TensorMemory& tensor = *w.cta->tensor;
  const Actor actor{w, c, -1};
  u32& issued = stores ? w.tensor_stores : w.tensor_loads;
  const u32 agent =
      w.place + (stores ? w.launch->first_tensor_store() : w.launch->first_tensor_load());
  const Accessor by{agent, make_epoch(agent, ++issued), w.clocks, w.launch->pc_of(c)};
  const auto use = stores ? TensorMemory::Use::write : TensorMemory::Use::read;
  tensor.access(actor, by, use, first, lanes, column, columns);
  if (shape == Shape::s16x32bx2)
    tensor.access(actor, by, use, first, lanes, column + offset, columns);
  const u32* slots = w.launch->program->slots.data() + c.vectors[0];
  for (u32 r = 0; r < count; ++r) {
    Lane32* d = stores ? nullptr : w.out(slots[r]);
    const Lane32* a = stores ? w.in(slots[r]) : nullptr;
    for (u32 t = 0; t < kLanes; ++t) {
      const Place at = place_of(shape, t, r);
      const u32 start = shape == Shape::s16x32bx2 && t >= 16 ? column + offset : column;
      u32* word = tensor.lane(first + at.lane) + start + at.column * per_register;
      if (per_register == 1) {
        stores ? word[0] = a[t] : d[t] = word[0];
      } else if (stores) {
        word[0] = a[t] & 0xFFFF;
        word[1] = a[t] >> 16;
      } else {
        d[t] = (word[0] & 0xFFFF) | word[1] << 16;
      }
    }
  }
}

// What the warp has loaded and stored has happened before everything later.
void wait(Warp& w, const Code& c, u32 mask) {
  if (!w.converged(c, mask)) return;
  const bool stores = c.variant & kStores;
  const u32 agent =
      w.place + (stores ? w.launch->first_tensor_store() : w.launch->first_tensor_load());
  w.clocks.seen[agent] = w.tensor_ready[agent] = stores ? w.tensor_stores : w.tensor_loads;
}

// What the oldest counts[0] loads brought has been stored (machine/load_uses.h); counts[1] later ones are open.
void loads_over(Warp& w, const Code& c, u32 mask) {
  if (w.launch->spec.checks.strict) return;  // asks for tcgen05.wait::ld
  u32& seen = w.clocks.seen[w.place + w.launch->first_tensor_load()];
  const u32 over = w.tensor_loads - c.counts[1];
  if (mask == kAllLanes && seen < over && seen + c.counts[0] >= over) seen = over;
}

u32 number_of(const Form& form) {
  u32 number = 1;
  while (!form.has("x" + std::to_string(number))) number *= 2;
  return number;
}

Exec with_shape(const Form& form, Code& code, bool stores) {
  const Shape shape = form.has("32x32b")    ? Shape::s32x32b
                      : form.has("16x64b")  ? Shape::s16x64b
                      : form.has("16x128b") ? Shape::s16x128b
                      : form.has("16x256b") ? Shape::s16x256b
                                            : Shape::s16x32bx2;
  const bool halves = form.has("pack::16b") || form.has("unpack::16b");
  code.variant =
      static_cast<u16>(static_cast<u16>(shape) | (halves ? kHalves : 0) | (stores ? kStores : 0));
  // The distance of the halves is a constant.
  if (shape == Shape::s16x32bx2 && (code.src[1] == kNoSlot || !(code.src[1] & kConstant)))
    return nullptr;
  return code.counts[0] == number_of(form) * registers_of(shape) ? move_words : nullptr;
}

}  // namespace

Exec tcgen05_ld(const Form& form, Code& code) { return with_shape(form, code, false); }
Exec tcgen05_st(const Form& form, Code& code) { return with_shape(form, code, true); }
Exec tensor_loads_over(const Form&, Code&) { return loads_over; }
Exec tcgen05_wait(const Form& form, Code& code) {
  code.variant = form.has("wait::st") ? kStores : 0;
  return wait;
}

}  // namespace jax_fp4::sim

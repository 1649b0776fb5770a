// Exchange inside a warp (PTX ISA 9.7.9.6, 9.7.13): shfl, vote, match, redux, elect, activemask,
// bar.warp.sync.
//
// The lanes that a member mask names execute the instruction together, or wait for each other.
#include <algorithm>

#include "numerics/minifloat.h"
#include "sim/ops/lanes.h"
#include "sim/ops/rounding.h"

namespace jax_fp4::sim {
namespace {

// Calls f(lanes) for every group of lanes that gives the same member mask, once all of them are here.
// False: some are not, and the fragment waits.
template <class F>
bool for_members(Warp& w, const Code& c, u32 mask, u32 member_slot, F f) {
  const In<u32> members(w, member_slot);
  for (u32 rest = mask; rest != 0;) {
    const int lane = std::countr_zero(rest);
    const u32 group = members[lane];
    if (!(group >> lane & 1)) {
      w.fault(c, lane, FaultKind::divergence,
              "the member mask does not name the lane that executes the instruction");
    }
    if (!w.converged(c, mask, group)) return false;
    rest &= ~group;
  }
  for (u32 rest = mask; rest != 0;) {
    const int lane = std::countr_zero(rest);
    const u32 group = members[lane] & mask;
    for (u32 others = group; others != 0; others &= others - 1) {
      if (members[std::countr_zero(others)] != members[lane])
        w.fault(c, std::countr_zero(others), FaultKind::divergence,
                "lanes that name each other give different member masks");
    }
    f(group);
    rest &= ~group;
  }
  return true;
}

enum Shuffle : u16 { kUp, kDown, kButterfly, kIndex };

void shuffle_lanes(Warp& w, const Code& c, u32 mask) {
  const In<u32> a(w, c.src[0]), b(w, c.src[1]), control(w, c.src[2]);
  u32 result[kLanes] = {}, valid = 0;
  if (!for_members(w, c, mask, c.src[3], [&](u32 group) {
        for (u32 rest = group; rest != 0; rest &= rest - 1) {
          const int lane = std::countr_zero(rest);
          const int offset = static_cast<int>(b[lane] & 31);
          const int clamp = static_cast<int>(control[lane] & 31);
          const int segment = static_cast<int>(control[lane] >> 8 & 31);
          const int max = (lane & segment) | (clamp & ~segment);
          const int min = lane & segment;
          int from = lane;
          bool inside = false;
          switch (static_cast<Shuffle>(c.variant)) {
            case kUp:
              from = lane - offset;
              inside = from >= max;
              break;
            case kDown:
              from = lane + offset;
              inside = from <= max;
              break;
            case kButterfly:
              from = lane ^ offset;
              inside = from <= max;
              break;
            case kIndex:
              from = min | (offset & ~segment);
              inside = from <= max;
              break;
          }
          if (!inside) from = lane;
          if (!(group >> from & 1)) {
            // A lane that has exited or is not a member has no value to give.
            w.fault(c, lane, FaultKind::divergence,
                    "shfl reads lane " + std::to_string(from) + ", which takes no part");
          }
          result[lane] = a[from];
          valid |= static_cast<u32>(inside) << lane;
        }
      }))
    return;
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) { d.set(i, result[i]); });
  w.set_predicate(c.dst[1], mask, valid);
}

enum Vote : u16 { kAll, kAny, kUniform, kBallot };

void vote_lanes(Warp& w, const Code& c, u32 mask) {
  const u32 values = w.predicate(c.src[0]);
  for_members(w, c, mask, c.src[1], [&](u32 group) {
    const u32 set = values & group;
    if (c.variant == kBallot) {
      const Out<u32> d(w, c.dst[0]);
      each_lane(group, [&](int i) { d.set(i, set); });
      return;
    }
    const bool answers[] = {set == group, set != 0, set == group || set == 0};
    w.set_predicate(c.dst[0], group, answers[c.variant] ? kAllLanes : 0);
  });
}

template <class T>
void match_lanes(Warp& w, const Code& c, u32 mask) {
  const In<T> a(w, c.src[0]);
  const Out<u32> d(w, c.dst[0]);
  for_members(w, c, mask, c.src[1], [&](u32 group) {
    bool all = true;
    for (u32 rest = group; rest != 0; rest &= rest - 1) {
      const int lane = std::countr_zero(rest);
      u32 same = 0;
      for (u32 others = group; others != 0; others &= others - 1) {
        const int other = std::countr_zero(others);
        if (a[other] == a[lane]) same |= 1u << other;
      }
      all = all && same == group;
      if (c.variant == 0) d.set(lane, same);
    }
    if (c.variant == 1) {
      each_lane(group, [&](int i) { d.set(i, all ? group : 0); });
      w.set_predicate(c.dst[1], group, all ? kAllLanes : 0);
    }
  });
}

enum Reduction : u16 { kAdd, kMin, kMax, kAnd, kOr, kXor };

template <class T>
void reduce_lanes(Warp& w, const Code& c, u32 mask) {
  const In<T> a(w, c.src[0]);
  const Out<T> d(w, c.dst[0]);
  for_members(w, c, mask, c.src[1], [&](u32 group) {
    T total = a[std::countr_zero(group)];
    for (u32 rest = group & (group - 1); rest != 0; rest &= rest - 1) {
      const T x = a[std::countr_zero(rest)];
      switch (static_cast<Reduction>(c.variant)) {
        case kAdd: total = static_cast<T>(static_cast<u32>(total) + static_cast<u32>(x)); break;
        case kMin: total = std::min(total, x); break;
        case kMax: total = std::max(total, x); break;
        case kAnd: total = total & x; break;
        case kOr: total = total | x; break;
        case kXor: total = total ^ x; break;
      }
    }
    each_lane(group, [&](int i) { d.set(i, total); });
  });
}

constexpr u16 kAbs = 16, kNan = 32;

void reduce_floats(Warp& w, const Code& c, u32 mask) {
  const In<float> a(w, c.src[0]);
  const Out<u32> d(w, c.dst[0]);
  for_members(w, c, mask, c.src[1], [&](u32 group) {
    bool any_number = false, any_nan = false;
    float best = 0;
    for (u32 rest = group; rest != 0; rest &= rest - 1) {
      float x = a[std::countr_zero(rest)];
      if (c.variant & kAbs) x = absolute(x);
      if (x != x) {
        any_nan = true;
        continue;
      }
      const bool less = x < best || (x == best && std::signbit(x) && !std::signbit(best));
      const bool wanted = (c.variant & 15) == kMin ? less : !less;
      if (!any_number || wanted) best = x;
      any_number = true;
    }
    const bool nan = !any_number || (any_nan && (c.variant & kNan));
    each_lane(group, [&](int i) { d.set(i, nan ? kCanonicalNaN32 : bits_of(best)); });
  });
}

// The elected lane is the first of the members (the PTX ISA: deterministic; which one is assumption S3).
void elect_lanes(Warp& w, const Code& c, u32 mask) {
  for_members(w, c, mask, c.src[0], [&](u32 group) {
    const int leader = std::countr_zero(group);
    const Out<u32> d(w, c.dst[0]);
    each_lane(group, [&](int i) { d.set(i, static_cast<u32>(leader)); });
    w.set_predicate(c.dst[1], group, 1u << leader);
  });
}

void active_mask(Warp& w, const Code& c, u32 mask) {
  const Out<u32> d(w, c.dst[0]);
  each_lane(mask, [&](int i) { d.set(i, mask); });
}

void warp_barrier(Warp& w, const Code& c, u32 mask) {
  for_members(w, c, mask, c.src[0], [&](u32) { w.meet(); });
}

}  // namespace

Exec shfl(const Form& form, Code& code) {
  code.variant = form.has("up")     ? kUp
                 : form.has("down") ? kDown
                 : form.has("bfly") ? kButterfly
                                    : kIndex;
  return shuffle_lanes;
}
Exec vote(const Form& form, Code& code) {
  code.variant = form.has("all")   ? kAll
                 : form.has("any") ? kAny
                 : form.has("uni") ? kUniform
                                   : kBallot;
  return vote_lanes;
}
Exec match(const Form& form, Code& code) {
  code.variant = form.has("all");
  return form.type(0) == Type::b32 ? match_lanes<u32> : match_lanes<u64>;
}
Exec redux(const Form& form, Code& code) {
  constexpr std::string_view kNames[] = {"add", "min", "max", "and", "or", "xor"};
  for (u16 i = 0; i < std::size(kNames); ++i)
    if (form.has(kNames[i])) code.variant = i;
  return form.type(0) == Type::s32 ? reduce_lanes<i32> : reduce_lanes<u32>;
}
Exec redux_f32(const Form& form, Code& code) {
  code.variant = static_cast<u16>((form.has("min") ? kMin : kMax) | (form.has("abs") ? kAbs : 0) |
                                  (form.has("NaN") ? kNan : 0));
  return reduce_floats;
}
Exec elect(const Form&, Code&) { return elect_lanes; }
Exec activemask(const Form&, Code&) { return active_mask; }
Exec bar_warp(const Form&, Code&) { return warp_barrier; }

}  // namespace jax_fp4::sim

// A warp's inner loop, and how its lanes part and meet.
#include <algorithm>
#include <bit>

#include "sim/costs/costs.h"
#include "sim/machine/core.h"
#include "sim/ptx/lexer.h"

namespace jax_fp4::sim {
namespace {

// Leaders that one fragment may pass while others of its warp wait, and what it may then run on
// before order counts again. Long enough for any loop that ends by itself to be rare victims: a
// rotation costs nothing but convergence.
constexpr u32 kPatience = 4096;
constexpr u32 kForcedLeaders = 64;

}  // namespace

std::string describe_lanes(u32 mask) {
  if (mask == kAllLanes) return "all lanes";
  std::string text;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(mask >> lane & 1)) continue;
    int last = lane;
    while (last + 1 < kLanes && (mask >> (last + 1) & 1)) ++last;
    text += (text.empty() ? "" : ",") + std::to_string(lane);
    if (last > lane) text += "-" + std::to_string(last);
    lane = last;
  }
  return (mask & (mask - 1)) == 0 ? "lane " + text : "lanes " + text;
}

std::string Warp::where(const Code& c, int lane) const {
  const u32* index = cta->index;
  std::string text = "in kernel '" + launch->program->entry + "', " + launch->kernel_line(c.line) +
                     "\n  CTA (" + std::to_string(index[0]) + "," + std::to_string(index[1]) + "," +
                     std::to_string(index[2]) + ") warp " + std::to_string(id);
  if (lane >= 0) text += " lane " + std::to_string(lane);
  return text + "; seed " + std::to_string(launch->spec.seed);
}

void Warp::fault(const Code& c, int lane, FaultKind kind, const std::string& message) {
  throw Fault(launch, kind, c.line,
              std::string(name_of_fault(kind)) + ": " + message + "\n  " + where(c, lane));
}

u32& Warp::written_lanes(u32 slot) {
  return (slot & kPredicate) != 0 ? predicates_written[slot & ~kPredicate] : written[slot];
}

void Warp::refuse_unwritten(const Code& c, u32 slot, u32 lanes) {
  const Program& program = *launch->program;
  const auto name = [&](u32 s) {
    return (s & kPredicate) != 0 ? program.predicate_names[s & ~kPredicate]
                                 : program.register_names[s];
  };
  const auto origin = unwritten_origins.find(slot);
  fault(c, std::countr_zero(lanes), FaultKind::uninitialized_register,
        "register " + name(slot) + " is read, and " + describe_lanes(lanes) +
            (origin == unwritten_origins.end()
                 ? " never wrote it"
                 : " computed it from " + name(origin->second) + ", never written"));
}

u32 Warp::check_registers(const Code& c, u32 mask) {
  const Program& program = *launch->program;
  u32 unwritten = 0;
  for (u32 k = c.checks_begin; k < c.checks_end; ++k) {
    const u32 slot = program.checks[k];
    const u32 missing = mask & ~written_lanes(slot);
    if (missing == 0) continue;
    if (!c.computes) refuse_unwritten(c, slot, missing);
    unwritten |= missing;
    const auto origin = unwritten_origins.find(slot);
    const u32 first = origin == unwritten_origins.end() ? slot : origin->second;
    for (u32 m = c.marks_begin; m < c.marks_end; ++m) unwritten_origins[program.checks[m]] = first;
  }
  return unwritten;
}

u64 Warp::run(u64 budget) {
  if (!select()) return 0;
  const Program& program = *launch->program;
  const Code* const code = program.code.data();
  u64* const counts = launch->counts.data();
  u64* const lane_counts = launch->lane_counts.data();
  const bool uninitialized = launch->spec.checks.uninitialized;
  const bool strict = launch->spec.checks.strict;
  costs::Costs* const costs = launch->costs.get();
  executed = 0;
  end_turn = false;
  while (executed < budget && !end_turn) {
    if (fragments.size() > 1 && code[fragment().pc].leader && !select()) break;
    Fragment& f = fragment();
    const u32 pc = f.pc++;
    const Code& c = code[pc];
    u32 mask = f.mask;
    if (c.guard != kNoSlot) {
      if (c.guard_checked && uninitialized && (mask & ~predicates_written[c.guard]) != 0) {
        refuse_unwritten(c, c.guard | kPredicate, mask & ~predicates_written[c.guard]);
      }
      mask &= c.guard_negated ? ~predicates[c.guard] : predicates[c.guard];
    }
    if (costs && !costs->begin(*this, c, pc, mask)) {
      f.pc = pc;
      break;
    }
    ++executed;
    ++counts[pc];
    if (mask != 0) {
      lane_counts[pc] += mask == kAllLanes ? kLanes : static_cast<u64>(std::popcount(mask));
      u32 unwritten = 0;
      if (c.checks_begin != c.checks_end && uninitialized) unwritten = check_registers(c, mask);
      if (strict) act(mask);
      c.exec(*this, c, mask);
      for (u32 k = c.marks_begin; k < c.marks_end; ++k) {
        u32& lanes = written_lanes(program.checks[k]);
        lanes = (lanes | mask) & ~unwritten;
      }
    }
    if (costs) costs->end(*this, c, pc, mask);
    if (yield) {
      yield = false;
      if (!select()) break;
    }
  }
  act(kAllLanes);
  return executed;
}

bool Warp::ready() const {
  return std::any_of(fragments.begin(), fragments.end(),
                     [](const Fragment& f) { return f.state == FragmentState::ready; });
}

bool Warp::precedes(const Fragment& a, const Fragment& b) const {
  const std::vector<u32>& order = launch->program->order;
  const std::size_t depth = std::min(a.stack.size(), b.stack.size());
  for (std::size_t i = 0; i < depth; ++i) {
    const u32 pa = launch->program->calls.empty() ? 0 : a.stack[i];
    const u32 pb = launch->program->calls.empty() ? 0 : b.stack[i];
    if (pa != pb) return order[pa] < order[pb];
  }
  const u32 pa = a.stack.size() > depth ? a.stack[depth] : a.pc;
  const u32 pb = b.stack.size() > depth ? b.stack[depth] : b.pc;
  if (pa != pb) return order[pa] < order[pb];
  return a.stack.size() > b.stack.size();  // the one inside the call returns to the other
}

u32 Warp::first_in_order() const {
  u32 best = kNoIndex;
  for (u32 i = 0; i < fragments.size(); ++i) {
    if (fragments[i].state != FragmentState::ready) continue;
    if (best == kNoIndex || precedes(fragments[i], fragments[best])) best = i;
  }
  return best;
}

// Joins fragments at one place; drops empty ones. True if the current fragment was affected.
bool Warp::merge() {
  bool changed = false;
  for (std::size_t i = 0; i < fragments.size(); ++i) {
    if (fragments[i].mask == 0) continue;
    for (std::size_t j = i + 1; j < fragments.size(); ++j) {
      Fragment &a = fragments[i], &b = fragments[j];
      if (b.mask == 0 || a.pc != b.pc || a.state == FragmentState::blocked ||
          b.state == FragmentState::blocked || a.stack != b.stack)
        continue;
      a.mask |= b.mask;
      a.state = FragmentState::ready;
      b.mask = 0;
      if (current == j) current = static_cast<u32>(i);
      changed = true;
    }
  }
  const Fragment* kept = &fragments[current];
  const bool kept_lives = kept->mask != 0;
  const u32 kept_mask = kept->mask;
  std::erase_if(fragments, [](const Fragment& f) { return f.mask == 0; });
  current = 0;
  for (u32 i = 0; kept_lives && i < fragments.size(); ++i)
    if (fragments[i].mask == kept_mask) current = i;
  return changed || !kept_lives;
}

// Chooses the fragment to run; false if none can.
bool Warp::select() {
  if (fragments.size() > 1 || (!fragments.empty() && fragments[0].mask == 0)) merge();
  if (fragments.empty()) {
    finished = true;
    return false;
  }
  if (fragments.size() == 1) {
    current = 0;
    patience = kPatience;
    forced = 0;
    if (fragments[0].state == FragmentState::ready) return true;
  }
  const u32 first = first_in_order();
  if (first == kNoIndex) {
    // Lanes that wait for each other at different places will never meet.
    const bool blocked = std::any_of(fragments.begin(), fragments.end(), [](const Fragment& f) {
      return f.state == FragmentState::blocked;
    });
    if (!blocked) {
      const Fragment& f = fragments[0];
      const Code& c = launch->program->code[f.pc];
      std::string text =
          describe_lanes(f.mask) + " wait here for " + describe_lanes(f.needed & live & ~f.mask);
      for (std::size_t i = 1; i < fragments.size(); ++i) {
        text += ", and " + describe_lanes(fragments[i].mask) + " are at " +
                launch->kernel_line(launch->program->code[fragments[i].pc].line);
      }
      fault(c, std::countr_zero(f.mask), FaultKind::divergence, text);
    }
    return false;
  }
  if (forced > 0 && fragments[current].state == FragmentState::ready) {
    --forced;
    return true;
  }
  if (first != current) {
    if (patience == 0) patience = kPatience;
  } else if (patience == 0 || --patience == 0) {
    // The first in order has had its time: the next one that is ready, out of order.
    for (u32 step = 1; step < fragments.size(); ++step) {
      const u32 next = (current + step) % static_cast<u32>(fragments.size());
      if (fragments[next].state != FragmentState::ready) continue;
      current = next;
      forced = kForcedLeaders;
      patience = kPatience;
      return true;
    }
    patience = kPatience;
  }
  current = first;
  return true;
}

Fragment& Warp::split(u32 mask) {
  Fragment other = fragment();
  other.mask = mask;
  fragment().mask &= ~mask;
  fragments.push_back(std::move(other));
  yield = true;
  return fragments.back();
}

void Warp::branch(u32 mask, u32 target) {
  Fragment& f = fragment();
  if (mask == f.mask) {
    f.pc = target;
  } else {
    split(mask).pc = target;
  }
}

void Warp::exit_lanes(u32 mask) {
  Fragment& f = fragment();
  f.mask &= ~mask;
  live &= ~mask;
  const u32 lanes = static_cast<u32>(std::popcount(mask));
  cta->exited += lanes;
  cta->cluster->exited += lanes;
  yield = true;
  for (Fragment& waiting : fragments)
    if (waiting.state == FragmentState::converging) waiting.state = FragmentState::ready;
  if (cta->exited == cta->threads) {
    launch->check_exit(*cta);
    cta->trigger();
  }
  cta->complete_barriers();
  cta->cluster->complete_barrier();
}

bool Warp::converged(const Code& c, u32 mask, u32 needed) {
  Fragment& f = fragment();
  const u32 alive = needed & live;
  if ((alive & ~mask) == 0) return true;
  if ((alive & f.mask & ~mask) != 0) {
    fault(c, std::countr_zero(alive & f.mask & ~mask), FaultKind::divergence,
          describe_lanes(alive & f.mask & ~mask) +
              " would have to take part, but the guard keeps them from it");
  }
  f.pc = static_cast<u32>(&c - launch->program->code.data());
  f.state = FragmentState::converging;
  f.needed = needed;
  f.waits_for = "the other lanes of the warp";
  yield = true;
  return false;
}

void Warp::block(std::string_view what) {
  fragment().state = FragmentState::blocked;
  fragment().waits_for = what;
  yield = true;
}

void Warp::block_and_retry(const Code& c, std::string_view what) {
  fragment().pc = launch->pc_of(c);
  fragment().again = true;
  block(what);
}

void Warp::wake_all(std::string_view what) {
  for (Fragment& f : fragments)
    if (f.state == FragmentState::blocked && f.waits_for == what) wake(f);
}

void Warp::wake(Fragment& f) {
  f.again = false;

  f.state = FragmentState::ready;
  launch->enqueue(this);
}

}  // namespace jax_fp4::sim

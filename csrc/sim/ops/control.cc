// Control flow (PTX ISA 9.7.12), barriers (9.7.13), and instructions that only tell the machine something.
#include <algorithm>
#include <cstring>

#include "sim/ops/lanes.h"

namespace jax_fp4::sim {
namespace {

void branch_lanes(Warp& w, const Code& c, u32 mask) { w.branch(mask, c.target); }

void branch_indexed(Warp& w, const Code& c, u32 mask) {
  const std::vector<u32>& targets = w.launch->program->branch_lists[c.target];
  const In<u32> index(w, c.src[0]);
  u32 left = mask;
  while (left != 0) {
    const u32 value = index[std::countr_zero(left)];
    if (value >= targets.size()) {
      w.fault(c, std::countr_zero(left), FaultKind::trap,
              "brx.idx with index " + std::to_string(value) + " of " +
                  std::to_string(targets.size()) + " targets");
    }
    u32 same = 0;
    for (u32 rest = left; rest != 0; rest &= rest - 1)
      if (index[std::countr_zero(rest)] == value) same |= rest & (0 - rest);
    w.branch(same, targets[value]);
    left &= ~same;
  }
}

void exit_lanes(Warp& w, const Code&, u32 mask) { w.exit_lanes(mask); }

void copy_arguments(Warp& w, const std::vector<CallCopy>& copies, u32 mask) {
  const u64 frame = w.launch->program->local_bytes;
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const u64 base = frame * static_cast<u64>(lane);
    for (const CallCopy& copy : copies) {
      const bool wide = copy.bytes == 8;
      u64 value = 0;
      if (copy.from_slot != kNoSlot)
        value = wide ? w.in64(copy.from_slot)[lane] : w.in(copy.from_slot)[lane];
      if (copy.from_slot == kNoSlot && copy.to_slot == kNoSlot) {
        std::memmove(&w.local[base + copy.to], &w.local[base + copy.from], copy.bytes);
        std::memmove(&w.local_written[base + copy.to], &w.local_written[base + copy.from],
                     copy.bytes);
        continue;
      }
      if (copy.from_slot == kNoSlot) std::memcpy(&value, &w.local[base + copy.from], copy.bytes);
      if (copy.to_slot == kNoSlot) {
        std::memcpy(&w.local[base + copy.to], &value, copy.bytes);
        std::memset(&w.local_written[base + copy.to], 1, copy.bytes);
      } else if (wide) {
        w.out64(copy.to_slot)[lane] = value;
      } else {
        w.out(copy.to_slot)[lane] = static_cast<u32>(value);
      }
    }
  }
  for (const CallCopy& copy : copies)
    if (copy.to_slot != kNoSlot) w.written[copy.to_slot] |= mask;
}

// The text at a generic address, as far as it lies in one global array.
std::string text_at(const Warp& w, u64 address) {
  const Buffer* buffer = w.launch->global->find(address);
  if (buffer == nullptr) return "(no text)";
  const u8* begin = buffer->data + (address - buffer->base);
  const u8* end = buffer->data + buffer->bytes;
  return std::string(begin, std::find(begin, end, u8{0}));
}

// The arguments of __assertfail lie in its parameters.
[[noreturn]] void report_assertion(Warp& w, const Code& c, const CallSite& site, u32 mask) {
  const int lane = std::countr_zero(mask);
  const auto argument = [&](std::size_t n) {
    const CallCopy& copy = site.before[n];
    u64 value = 0;
    const u64 frame = w.launch->program->local_bytes * static_cast<u64>(lane);
    std::memcpy(&value, &w.local[frame + copy.to], copy.bytes);
    return value;
  };
  w.fault(c, lane, FaultKind::trap,
          describe_lanes(mask) + " found that assert(" + text_at(w, argument(0)) +
              ") does not hold, " + text_at(w, argument(1)) + " line " +
              std::to_string(argument(2)) + ", in " + text_at(w, argument(3)));
}

void call_lanes(Warp& w, const Code& c, u32 mask) {
  const CallSite& callee = w.launch->program->calls[c.src[0]];
  copy_arguments(w, callee.before, mask);
  if (callee.reports_assertion) report_assertion(w, c, callee, mask);
  const u32 site = static_cast<u32>(&c - w.launch->program->code.data());
  Fragment& f = mask == w.fragment().mask ? w.fragment() : w.split(mask);
  f.stack.push_back(site);
  f.pc = c.target;
}

void return_lanes(Warp& w, const Code& c, u32 mask) {
  if (w.fragment().stack.empty()) {
    exit_lanes(w, c, mask);
    return;
  }
  Fragment& f = mask == w.fragment().mask ? w.fragment() : w.split(mask);
  const u32 site = f.stack.back();
  f.stack.pop_back();
  f.pc = site + 1;
  copy_arguments(w, w.launch->program->calls[w.launch->program->code[site].src[0]].after, mask);
  w.yield = true;  // lanes that did not take part in the call may wait behind it
}

void trap_lanes(Warp& w, const Code& c, u32 mask) {
  w.fault(c, std::countr_zero(mask), FaultKind::trap,
          describe_lanes(mask) + " executed '" +
              std::string(w.launch->program->forms[c.form].row->opcode) + "'");
}

void nothing(Warp&, const Code&, u32) {}
void give_up_turn(Warp& w, const Code&, u32) { w.end_turn = true; }

void read_special_lanes(Warp& w, const Code& c, u32 mask) {
  each_lane(mask, [&](int i) {
    const u64 value = special_value(w, static_cast<Special>(c.variant), i);
    if (c.width == 64) {
      w.out64(c.dst[0])[i] = value;
    } else {
      w.out(c.dst[0])[i] = static_cast<u32>(value);
    }
  });
}

// ---- Named barriers

enum BarrierFlag : u16 {
  kPopc = 0,
  kAnd = 1,
  kOr = 2,
  kReduces = 4,
  kArrives = 8,
  kAligned = 16,
  kReleases = 32
};

// Threads that a fragment stands for: a warp counts whole once all its live lanes are there.
u32 threads_of(const Warp& w, u32 mask) {
  return mask == w.live ? kLanes : static_cast<u32>(std::popcount(mask));
}

// Sources: barrier number, and thread count if c.offset[0] says so; bar.red: a predicate.
void barrier_lanes(Warp& w, const Code& c, u32 mask) {
  if ((c.variant & kAligned) && !w.converged(c, mask)) return;
  Cta& cta = *w.cta;
  const int first = std::countr_zero(mask);
  const u32 number = w.in(c.src[0])[first];
  const bool counted = c.offset[0] != 0;
  const u32 expected = counted ? w.in(c.src[1])[first] : 0;
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    if (w.in(c.src[0])[lane] != number || (counted && w.in(c.src[1])[lane] != expected))
      w.fault(c, lane, FaultKind::barrier, "lanes of one warp name different barriers or counts");
  }
  if (number >= kNamedBarriers)
    w.fault(c, first, FaultKind::barrier, "barrier " + std::to_string(number) + " of 0 to 15");
  if (counted && (expected == 0 || expected % kLanes != 0)) {
    w.fault(c, first, FaultKind::barrier,
            "a barrier for " + std::to_string(expected) + " threads; it takes a multiple of 32");
  }
  NamedBarrier& barrier = cta.barriers[number];
  if (barrier.arrived == 0) {
    barrier.expected = expected;
    barrier.line = c.line;
  } else if (barrier.expected != expected) {
    w.fault(c, first, FaultKind::barrier,
            "barrier " + std::to_string(number) + " counts " + std::to_string(expected) +
                " threads here, but " + std::to_string(barrier.expected) + " at " +
                w.launch->kernel_line(barrier.line) + " (0: all of the CTA)");
  }
  for (const BarrierWaiter& waiter : barrier.waiters) {
    if (waiter.warp == &w && (waiter.mask & mask) != 0)
      w.fault(c, first, FaultKind::barrier, "these lanes already wait at this barrier");
  }
  barrier.arrived += counted ? threads_of(w, mask) : static_cast<u32>(std::popcount(mask));
  if (counted && barrier.arrived > expected) {
    w.fault(c, first, FaultKind::barrier,
            "barrier " + std::to_string(number) + " for " + std::to_string(expected) +
                " threads gets more arrivals than that before it completes");
  }
  w.meet();
  if (w.launch->spec.checks.races) join(barrier.clocks, w.clocks);
  w.advance_clock();
  if (c.variant & kReduces) {
    const u32 values = w.predicate(c.src[counted ? 2 : 1]) & mask;
    barrier.count += static_cast<u32>(std::popcount(values));
    barrier.any |= values != 0;
    barrier.all &= values == mask;
  }
  if (!(c.variant & kArrives)) {
    // Code::variant of the waiter tells complete() how to reduce: 0 popc, 1 and, 2 or.
    barrier.waiters.push_back({&w, mask, (c.variant & kReduces) ? &c : nullptr});
    if (mask != w.fragment().mask) {
      // The lanes that the guard held back go on; the others wait apart from them.
      Fragment& apart = w.split(mask);
      apart.state = FragmentState::blocked;
      apart.needed = number;
      apart.waits_for = "a named barrier";
    } else {
      w.fragment().needed = number;
      w.block("a named barrier");
    }
  }
  cta.complete(barrier);
}

// ---- Cluster barrier

void cluster_arrive(Warp& w, const Code& c, u32 mask) {
  if ((c.variant & kAligned) && !w.converged(c, mask)) return;
  w.meet();
  Cluster& cluster = *w.cta->cluster;
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    if (w.cluster_arrived >> lane & 1) {
      w.fault(c, lane, FaultKind::barrier,
              "barrier.cluster.arrive twice without barrier.cluster.wait in between");
    }
  }
  w.cluster_arrived |= mask;
  if (w.cluster_arrived == mask) w.cluster_phase = cluster.barrier.phase;
  cluster.barrier.arrived += static_cast<u32>(std::popcount(mask));
  if (c.variant & kReleases) {
    join(cluster.barrier.clocks, w.clocks);
  } else {
    // A relaxed arrival orders nothing; fence.mbarrier_init before it does, for mbarriers.
    join(cluster.barrier.clocks.inits, w.clocks.inits);
  }
  w.advance_clock();
  cluster.complete_barrier();
}

void cluster_wait(Warp& w, const Code& c, u32 mask) {
  if ((c.variant & kAligned) && !w.converged(c, mask)) return;
  w.meet();
  Cluster& cluster = *w.cta->cluster;
  if ((mask & ~w.cluster_arrived) != 0) {
    w.fault(c, std::countr_zero(mask & ~w.cluster_arrived), FaultKind::barrier,
            "barrier.cluster.wait without barrier.cluster.arrive before it");
  }
  w.cluster_arrived &= ~mask;
  if (cluster.barrier.phase != w.cluster_phase) {
    join(w.clocks, cluster.barrier.clocks);
    return;
  }
  cluster.barrier.waiters.push_back(&w);
  w.block("the cluster barrier");
}

// ---- Programmatic dependent launch

void grid_wait(Warp& w, const Code& c, u32) {
  for (const Launch* grid = w.launch->before; grid; grid = grid->before) {
    if (grid->finished()) continue;
    w.block_and_retry(c, kWaitsForGrids);
    return;
  }
  if (w.launch->before) w.clocks.seen[w.launch->prerequisite_agent()] = 1;
}

void grid_trigger(Warp& w, const Code&, u32) {
  w.launch->overlaps = true;
  w.cta->trigger();
}

// ---- Registers of a warp (PTX ISA 9.7.19.5)

constexpr u32 kRegisterGranule = 8, kFewestRegisters = 24, kMostRegisters = 256;
constexpr u32 kRegistersOfSm = 65536;

// Registers of a thread when the CTA starts: .maxnreg, or what the compiler gives a kernel that
// declares its block's size and wants one CTA an SM.
u32 launched_registers(const Warp& w) {
  const u32 limit = w.launch->program->max_registers[0];
  const u32 threads = static_cast<u32>(w.cta->warps.size()) * kLanes;
  const u32 most = limit != 0 ? limit : kRegistersOfSm / threads;
  return std::min(most, kMostRegisters) / kRegisterGranule * kRegisterGranule;
}

void set_registers(Warp& w, const Code& c, u32 mask) {
  if (!w.converged(c, mask)) return;
  const int first = std::countr_zero(mask);
  const u32 wanted = w.in(c.src[0])[first];
  const u32 held = w.register_count != 0 ? w.register_count : launched_registers(w);
  const auto refuse = [&](const std::string& why) {
    w.fault(c, first, FaultKind::argument, "setmaxnreg to " + std::to_string(wanted) + ": " + why);
  };
  if (wanted % kRegisterGranule != 0 || wanted < kFewestRegisters || wanted > kMostRegisters)
    refuse("a count is a multiple of 8 from 24 to 256");
  const bool increases = c.variant != 0;
  if (increases ? wanted < held : wanted > held)
    refuse("a thread of this warp has " + std::to_string(held) + " registers, so ." +
           (increases ? "inc" : "dec") + " is the wrong way");
  u32& pool = w.cta->free_registers;
  if (increases) {
    if ((wanted - held) * kLanes > pool) {
      w.block_and_retry(c, kWaitsForRegisters);
      return;
    }
    pool -= (wanted - held) * kLanes;
  } else {
    pool += (held - wanted) * kLanes;
    for (const auto& warp : w.cta->warps) warp->wake_all(kWaitsForRegisters);
  }
  w.register_count = wanted;
}

}  // namespace

Exec bra(const Form&, Code&) { return branch_lanes; }
Exec brx(const Form&, Code&) { return branch_indexed; }
Exec call(const Form&, Code&) { return call_lanes; }
Exec ret(const Form&, Code&) { return return_lanes; }
Exec exit_op(const Form&, Code&) { return exit_lanes; }
Exec trap(const Form&, Code&) { return trap_lanes; }
Exec hint(const Form&, Code&) { return nothing; }
Exec griddepcontrol(const Form& form, Code&) { return form.has("wait") ? grid_wait : grid_trigger; }
Exec setmaxnreg(const Form& form, Code& code) {
  code.variant = form.has("inc");
  return set_registers;
}
Exec nanosleep(const Form&, Code&) { return give_up_turn; }
Exec read_special(const Form&, Code&) { return read_special_lanes; }

Exec bar(const Form& form, Code& code) {
  code.variant = form.row->opcode == "bar" || form.has("aligned") ? kAligned : 0;
  if (form.has("arrive")) code.variant |= kArrives;
  if (form.has("red")) {
    code.variant |= kReduces;
    if (form.has("and")) code.variant |= kAnd;
    if (form.has("or")) code.variant |= kOr;
  }
  // The second source is a thread count, or the predicate of bar.red.
  const u32 count = code.src[1];
  code.offset[0] = count != kNoSlot && (!form.has("red") || code.src[2] != kNoSlot);
  return barrier_lanes;
}
Exec barrier_cluster(const Form& form, Code& code) {
  code.variant = form.has("aligned") ? kAligned : 0;
  if (!form.has("relaxed")) code.variant |= kReleases;
  return form.has("arrive") ? cluster_arrive : cluster_wait;
}

}  // namespace jax_fp4::sim

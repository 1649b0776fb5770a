// Registers that are never needed at the same time get the same blocks.
//
// A compiler names a new register for every value: thousands, of which a warp needs some dozens at a time. With
// a block for each name a warp's registers would fill a processor's second cache, and clearing them would take longer
// than some kernels do.
//
//   liveness    backward over the blocks of instructions; each lane has its own control flow, so divergence changes nothing
//   lifetimes   from the first to the last instruction, in the order of the text, where a register is live or used
//   assignment  by the start of lifetimes, to blocks whose last register's lifetime is over
//
// A destination never shares with a source of its instruction: handlers write lanes while they read others. A register
// that is checked for having been written, anywhere, keeps its blocks for itself.
#include "sim/machine/register_sharing.h"

#include <algorithm>
#include <map>

#include "sim/machine/flow_graph.h"

namespace jax_fp4::sim {
namespace {

constexpr u32 kNever = ~0u;

struct Lifetime {
  u32 first = kNever, last = 0;  // instructions - begin, both inclusive
  void include(u32 at) {
    first = std::min(first, at);
    last = std::max(last, at);
  }
};

using Set = std::vector<u64>;
bool contains(const Set& set, u32 n) { return (set[n / 64] >> (n % 64) & 1) != 0; }
void insert(Set& set, u32 n) { set[n / 64] |= u64{1} << (n % 64); }
void erase(Set& set, u32 n) { set[n / 64] &= ~(u64{1} << (n % 64)); }

class Sharing {
 public:
  Sharing(const Program& program, u32 begin, u32 end, const std::vector<RegisterBlocks>& registers)
      : program_(program),
        begin_(begin),
        registers_(registers),
        graph_(make_flow_graph(program, begin, end)),
        register_of_(program.blocks, kNever),
        lifetimes_(registers.size()) {
    for (u32 r = 0; r < registers.size(); ++r)
      if (registers[r].count > 0) register_of_[registers[r].block] = r;
    find_lifetimes();
    for (u32 pc = 0; pc < program.code.size(); ++pc) {
      const Code& c = program.code[pc];
      for (u32 k = c.checks_begin; k < c.checks_end; ++k) {
        const u32 r = number(program.checks[k]);
        if (r != kNever) lifetimes_[r] = {0, end - begin};
      }
    }
  }

  // By register: its block among those of all.
  std::vector<u32> assign(u32& blocks) const {
    std::vector<u32> order, result(registers_.size(), kNoSlot);
    for (u32 r = 0; r < registers_.size(); ++r)
      if (lifetimes_[r].first != kNever) order.push_back(r);
    std::stable_sort(order.begin(), order.end(),
                     [&](u32 a, u32 b) { return lifetimes_[a].first < lifetimes_[b].first; });
    // Blocks by their number per register and by when they become free.
    std::map<u32, std::multimap<u32, u32>> taken;
    blocks = 0;
    for (u32 r : order) {
      auto& ends = taken[registers_[r].count];
      u32 block = blocks;
      if (!ends.empty() && ends.begin()->first < lifetimes_[r].first) {
        block = ends.begin()->second;
        ends.erase(ends.begin());
      } else {
        blocks += registers_[r].count;
      }
      ends.insert({lifetimes_[r].last, block});
      result[r] = block;
    }
    return result;
  }

 private:
  // The register of a slot as in Program::operand_slots, if it is one of those.
  u32 number(u32 slot) const {
    return (slot & kPredicate) != 0 || slot >= register_of_.size() ? kNever : register_of_[slot];
  }
  template <class F>
  void each_read(u32 pc, F f) const {
    const OperandSlots& o = program_.operands[pc];
    for (u32 k = o.reads_begin; k < o.reads_end; ++k)
      if (const u32 r = number(program_.operand_slots[k]); r != kNever) f(r);
  }
  template <class F>
  void each_write(u32 pc, F f) const {
    const OperandSlots& o = program_.operands[pc];
    for (u32 k = o.writes_begin; k < o.writes_end; ++k)
      if (const u32 r = number(program_.operand_slots[k]); r != kNever) f(r);
  }

  void find_lifetimes() {
    const std::size_t words = registers_.size() / 64 + 1;
    std::vector<Set> live_in(graph_.size(), Set(words, 0));
    const auto live_out = [&](u32 b) {
      Set live(words, 0);
      for (u32 successor : graph_.successors[b])
        for (std::size_t w = 0; w < words; ++w) live[w] |= live_in[successor][w];
      return live;
    };
    std::vector<u32> roots(graph_.size());
    for (u32 b = 0; b < graph_.size(); ++b) roots[b] = b;
    std::vector<u32> order = reverse_post_order(graph_.successors, roots);
    std::reverse(order.begin(), order.end());
    for (bool changed = true; changed;) {
      changed = false;
      for (u32 b : order) {
        Set live = live_out(b);
        for (u32 pc = graph_.start[b + 1]; pc-- > graph_.start[b];) {
          // What a guarded instruction writes may be the old value still.
          if (program_.code[pc].guard == kNoSlot) each_write(pc, [&](u32 r) { erase(live, r); });
          each_read(pc, [&](u32 r) { insert(live, r); });
        }
        if (live == live_in[b]) continue;
        live_in[b] = std::move(live);
        changed = true;
      }
    }
    for (u32 b = 0; b < graph_.size(); ++b) {
      const u32 first = graph_.start[b] - begin_, last = graph_.start[b + 1] - 1 - begin_;
      const Set out = live_out(b);
      for (u32 r = 0; r < registers_.size(); ++r) {
        if (contains(live_in[b], r)) lifetimes_[r].include(first);
        if (contains(out, r)) lifetimes_[r].include(last);
      }
      for (u32 at = first; at <= last; ++at) {
        each_read(begin_ + at, [&](u32 r) { lifetimes_[r].include(at); });
        each_write(begin_ + at, [&](u32 r) { lifetimes_[r].include(at); });
      }
    }
  }

  const Program& program_;
  u32 begin_;
  const std::vector<RegisterBlocks>& registers_;
  FlowGraph graph_;
  std::vector<u32> register_of_;  // by first block
  std::vector<Lifetime> lifetimes_;
};

}  // namespace

RegisterPlan share_registers(const Program& program, u32 begin, u32 end,
                             const std::vector<RegisterBlocks>& registers) {
  RegisterPlan plan;
  plan.block = Sharing(program, begin, end, registers).assign(plan.blocks);
  return plan;
}

}  // namespace jax_fp4::sim

// Control flow of one function: blocks, post-dominators, the order in which diverged lanes run, and
// which registers are certainly written.
#include <algorithm>

#include "sim/machine/flow_graph.h"

namespace jax_fp4::sim {

FlowGraph make_flow_graph(const Program& program, u32 begin, u32 end) {
  const u32 count = end - begin;
  std::vector<bool> starts(count + 1, false);
  starts[0] = true;
  for (u32 pc = begin; pc < end; ++pc) {
    const Code& c = program.code[pc];
    if (c.flow == Flow::next) continue;
    starts[pc + 1 - begin] = true;
    if (c.flow == Flow::branch) starts[c.target - begin] = true;
    if (c.flow == Flow::branch_list)
      for (u32 target : program.branch_lists[c.target]) starts[target - begin] = true;
  }
  FlowGraph graph;
  graph.block_of.resize(count);
  for (u32 i = 0; i < count; ++i) {
    if (starts[i]) graph.start.push_back(begin + i);
    graph.block_of[i] = static_cast<u32>(graph.start.size() - 1);
  }
  graph.start.push_back(end);
  graph.successors.resize(graph.start.size() - 1);
  graph.predecessors.resize(graph.start.size() - 1);
  for (u32 b = 0; b < graph.size(); ++b) {
    const Code& last = program.code[graph.start[b + 1] - 1];
    const auto edge = [&](u32 target) {
      std::vector<u32>& list = graph.successors[b];
      const u32 to = graph.block_of[target - begin];
      if (std::find(list.begin(), list.end(), to) != list.end()) return;
      list.push_back(to);
      graph.predecessors[to].push_back(b);
    };
    const bool falls_through = last.flow == Flow::next || last.guard != kNoSlot;
    if (falls_through && graph.start[b + 1] < end) edge(graph.start[b + 1]);
    if (last.flow == Flow::branch) edge(last.target);
    if (last.flow == Flow::branch_list)
      for (u32 target : program.branch_lists[last.target]) edge(target);
  }
  return graph;
}

std::vector<u32> reverse_post_order(const std::vector<std::vector<u32>>& edges,
                                    const std::vector<u32>& roots) {
  std::vector<u32> order;
  std::vector<u8> seen(edges.size(), 0);
  std::vector<std::pair<u32, std::size_t>> stack;
  for (u32 root : roots) {
    if (seen[root]) continue;
    seen[root] = 1;
    stack.push_back({root, 0});
    while (!stack.empty()) {
      auto& [node, next] = stack.back();
      if (next < edges[node].size()) {
        const u32 to = edges[node][next++];
        if (!seen[to]) {
          seen[to] = 1;
          stack.push_back({to, 0});
        }
      } else {
        order.push_back(node);
        stack.pop_back();
      }
    }
  }
  std::reverse(order.begin(), order.end());
  return order;
}

namespace {

// Immediate post-dominators (Cooper, Harvey, Kennedy, "A simple, fast dominance algorithm") with a
// virtual exit, number size(). Blocks of endless loops are joined to the exit, so that they have one.
std::vector<u32> post_dominators(const FlowGraph& graph) {
  const u32 exit = graph.size();
  std::vector<std::vector<u32>> backward = graph.predecessors;
  std::vector<std::vector<u32>> forward = graph.successors;
  backward.emplace_back();
  forward.emplace_back();
  const auto join_exit = [&](u32 block) {
    backward[exit].push_back(block);
    forward[block].push_back(exit);
  };
  for (u32 b = 0; b < exit; ++b)
    if (graph.successors[b].empty()) join_exit(b);
  std::vector<u32> order = reverse_post_order(backward, {exit});
  for (u32 b = exit; b-- > 0 && order.size() <= exit;) {
    if (std::find(order.begin(), order.end(), b) != order.end()) continue;
    join_exit(b);
    order = reverse_post_order(backward, {exit});
  }
  std::vector<u32> rank(exit + 1, 0), result(exit + 1, kNoIndex);
  for (u32 i = 0; i < order.size(); ++i) rank[order[i]] = i;
  result[exit] = exit;
  for (bool changed = true; changed;) {
    changed = false;
    for (u32 block : order) {
      if (block == exit) continue;
      u32 common = kNoIndex;
      for (u32 successor : forward[block]) {
        if (result[successor] == kNoIndex) continue;
        if (common == kNoIndex) {
          common = successor;
          continue;
        }
        u32 other = successor;
        while (common != other) {
          while (rank[common] > rank[other]) common = result[common];
          while (rank[other] > rank[common]) other = result[other];
        }
      }
      if (common != result[block]) {
        result[block] = common;
        changed = true;
      }
    }
  }
  return result;
}

}  // namespace

void order_blocks(Program& program, u32 begin, u32 end) {
  const FlowGraph graph = make_flow_graph(program, begin, end);
  for (u32 b = 0; b < graph.size(); ++b) program.code[graph.start[b]].leader = true;
  const std::vector<u32> post_dominator = post_dominators(graph);
  // A depth-first search that goes to a block's post-dominator before its successors finishes it
  // first: in reverse post-order it comes after every block on the way to it.
  std::vector<std::vector<u32>> edges = graph.successors;
  for (u32 b = 0; b < graph.size(); ++b)
    if (post_dominator[b] < graph.size()) edges[b].insert(edges[b].begin(), post_dominator[b]);
  std::vector<u32> roots(graph.size());
  for (u32 b = 0; b < graph.size(); ++b) roots[b] = b;
  u32 next = begin;
  // Blocks that nothing reaches come from later roots; their place does not matter.
  for (u32 block : reverse_post_order(edges, roots))
    for (u32 pc = graph.start[block]; pc < graph.start[block + 1]; ++pc) program.order[pc] = next++;
}

void drop_needless_checks(Program& program, u32 begin, u32 end) {
  const FlowGraph graph = make_flow_graph(program, begin, end);
  const std::size_t registers = program.blocks;
  const auto bit_of = [&](u32 slot) {
    return (slot & kPredicate) ? registers + (slot & ~kPredicate) : std::size_t{slot};
  };
  const std::size_t words = (registers + program.predicates + 63) / 64;
  using Set = std::vector<u64>;
  const auto is_written = [&](u32 slot, const Set& written) {
    const std::size_t bit = bit_of(slot);
    return (written[bit / 64] >> (bit % 64) & 1) != 0;
  };
  const auto apply = [&](const Code& c, Set& written) {
    bool carries = false;  // an unwritten register may go on
    for (u32 k = c.checks_begin; c.computes && k < c.checks_end; ++k)
      carries |= !is_written(program.checks[k], written);
    if (!carries && c.guard != kNoSlot) return;
    for (u32 k = c.marks_begin; k < c.marks_end; ++k) {
      const std::size_t bit = bit_of(program.checks[k]);
      const u64 mask = u64{1} << (bit % 64);
      written[bit / 64] = carries ? written[bit / 64] & ~mask : written[bit / 64] | mask;
    }
  };
  Set specials(words, 0);
  for (const SpecialUse& use : program.specials)
    specials[use.slot / 64] |= u64{1} << (use.slot % 64);
  // out(block) = in(block) + what it writes - what it computes from others; in = intersection over predecessors; entry: %tid and
  // its like only.
  std::vector<Set> out(graph.size(), Set(words, ~u64{0}));
  const auto in_of = [&](u32 b) {
    if (b == 0) return specials;
    Set in(words, graph.predecessors[b].empty() ? 0 : ~u64{0});
    for (u32 p : graph.predecessors[b])
      for (std::size_t w = 0; w < words; ++w) in[w] &= out[p][w];
    return in;
  };
  std::vector<u32> order = reverse_post_order(graph.successors, {0});
  for (bool changed = true; changed;) {
    changed = false;
    for (u32 b : order) {
      Set written = in_of(b);
      for (u32 pc = graph.start[b]; pc < graph.start[b + 1]; ++pc) apply(program.code[pc], written);
      if (written != out[b]) {
        out[b] = std::move(written);
        changed = true;
      }
    }
  }
  for (u32 b : order) {
    Set written = in_of(b);
    for (u32 pc = graph.start[b]; pc < graph.start[b + 1]; ++pc) {
      Code& c = program.code[pc];
      u32 kept = c.checks_begin;
      for (u32 k = c.checks_begin; k < c.checks_end; ++k)
        if (!is_written(program.checks[k], written)) program.checks[kept++] = program.checks[k];
      c.checks_end = kept;
      if (c.guard != kNoSlot) c.guard_checked = !is_written(c.guard | kPredicate, written);
      apply(c, written);
    }
  }
}

void drop_needless_marks(Program& program) {
  std::vector<bool> checked(program.blocks), checked_predicate(program.predicates);
  for (const Code& c : program.code) {
    for (u32 k = c.checks_begin; k < c.checks_end; ++k) {
      const u32 slot = program.checks[k];
      (slot & kPredicate) ? checked_predicate[slot & ~kPredicate] = true : checked[slot] = true;
    }
    if (c.guard != kNoSlot && c.guard_checked) checked_predicate[c.guard] = true;
  }
  for (Code& c : program.code) {
    u32 kept = c.marks_begin;
    for (u32 k = c.marks_begin; k < c.marks_end; ++k) {
      const u32 slot = program.checks[k];
      if ((slot & kPredicate) ? checked_predicate[slot & ~kPredicate] : checked[slot])
        program.checks[kept++] = slot;
    }
    c.marks_end = kept;
  }
}

}  // namespace jax_fp4::sim

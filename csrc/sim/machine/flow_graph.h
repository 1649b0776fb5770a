// The blocks of one function's instructions and the edges between them.
#pragma once

#include <vector>

#include "sim/machine/program.h"

namespace jax_fp4::sim {

struct FlowGraph {
  std::vector<u32> start;     // first instruction of each block, and the end
  std::vector<u32> block_of;  // by instruction - begin
  std::vector<std::vector<u32>> successors, predecessors;
  u32 size() const { return static_cast<u32>(successors.size()); }
};

// Of code[begin, end), one function's instructions; a call is an instruction like others.
FlowGraph make_flow_graph(const Program& program, u32 begin, u32 end);

// Reverse post-order of the graph seen from `roots` along `edges`.
std::vector<u32> reverse_post_order(const std::vector<std::vector<u32>>& edges,
                                    const std::vector<u32>& roots);

}  // namespace jax_fp4::sim

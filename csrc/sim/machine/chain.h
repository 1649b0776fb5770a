// Grids of one stream that may overlap: programmatic dependent launch (PTX ISA 9.7.13.13; CUDA programming
// guide, "Programmatic Dependent Launch and Synchronization").
//
// A grid starts when every CTA of the grid before it has executed griddepcontrol.launch_dependents or
// has exited. griddepcontrol.wait waits until all grids before are done. What a warp does before its wait,
// or before it has met another warp that has waited, is ordered with nothing that an earlier grid
// does: an access to the same global bytes, one of the two a write, is reported in every schedule.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "sim/machine/core.h"

namespace jax_fp4::sim {

// Who used 16 bytes of global memory, for as long as the chain runs.
class GlobalOrder {
 public:
  void access(const Actor& actor, u64 address, u32 bytes, bool writes);

 private:
  struct Use {
    const Launch* launch;
    u32 pc;
    bool writes;
    bool early;  // before the warp has waited for the grids before its own
  };
  std::unordered_map<u64, std::vector<Use>> granules_;
};

class Chain {
 public:
  // The grids, in the order of the stream; they live as long as the chain.
  explicit Chain(const std::vector<Launch*>& grids);
  void run();

 private:
  bool may_start(std::size_t index) const;
  void finish(std::size_t index);

  std::vector<Launch*> grids_;
  GlobalOrder order_;
};

}  // namespace jax_fp4::sim

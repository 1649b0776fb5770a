// L2 and DRAM as the cycle model sees them, and the SMs' ports to them.
//
// A read enters its SM's port, which passes 64 bytes a cycle in each direction, and comes back after L2's latency, or
// DRAM's where a sector is not in L2; if it is the other die's, later. DRAM is one queue for the whole chip. L2 holds what was touched last: a sector is
// there if fewer bytes than L2's size have been filled in since it was touched. What is written is charged to DRAM
// when it is written. L1 holds nothing; banks and slices are not modelled.
#pragma once

#include <array>
#include <unordered_map>
#include <vector>

#include "sim/costs/constants.h"
#include "sim/machine/async.h"

namespace jax_fp4::sim::costs {

class MemoryModel {
 public:
  MemoryModel(const ChipConstants& chip, u32 sms);

  // When the last byte of a read that enters the port at `now` is in the SM.
  // `repeated`: by another SM's copy, of a multicast, which L2 has sent once.
  double read(u32 sm, double now, const std::vector<AsyncWork::Range>& ranges,
              bool repeated = false);
  // When the last byte of a write is in L2.
  double write(u32 sm, double now, const std::vector<AsyncWork::Range>& ranges);
  // Until when the SM's writes occupy its port.
  double write_port(u32 sm) const { return ports_[sm].out; }
  // When everything is done.
  double idle_at() const;

  u64 l2_read = 0, l2_written = 0, dram_read = 0, dram_written = 0;  // bytes

 private:
  struct Port {
    double in = 0, out = 0;
  };
  static constexpr u64 kPageSectors = kPageBytes / kSectorBytes;
  using Page =
      std::array<u64, kPageSectors>;  // bytes filled in when a sector was touched; 0: never

  struct Touched {
    u64 bytes = 0, missing = 0;  // of sectors; of those that were not in L2
    bool far = false;            // some are the other die's
  };
  Touched touch(u32 sm, const std::vector<AsyncWork::Range>& ranges);

  u32 sms_per_die_;
  double dram_bytes_per_cycle_;
  u64 l2_bytes_;
  std::vector<Port> ports_;
  std::unordered_map<u64, Page> pages_;
  u64 filled_ = 1;
  double dram_free_ = 0;
};

}  // namespace jax_fp4::sim::costs

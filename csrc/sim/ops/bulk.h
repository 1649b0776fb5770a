// What bulk copies have in common (PTX ISA 9.7.9.25.4 to .6): alignment, poison, signals, groups.
//
//   into shared memory    performed whole; then complete_tx at an mbarrier
//   out of shared memory  two steps, source and destination; the issuing thread waits for groups of them
//
// From the issue on, the bytes of a destination count as unwritten: who reads them too early is told so.
#pragma once

#include "sim/machine/async.h"

namespace jax_fp4::sim {

inline constexpr std::string_view kWaitsForBulkGroup = "bulk copies of its groups";

void require_aligned(const Actor& actor, std::string_view what, u64 address, u32 bytes);

// The bytes count as unwritten until something writes them. Out of bounds: nothing happens; the
// operation will report it.
void forget(const Warp& warp, Space space, u64 address, u64 bytes);

// Into the shared memory of one CTA.
class BulkLoad : public AsyncOperation {
 public:
  BulkLoad(const Actor& actor, u64 destination, u64 barrier, u32 bytes);
  void perform() override;
  bool uses(const Cta& cta) const override;
  AsyncWork work() const override;

  bool repeated = false;  // a multicast to more CTAs, and not the first of them

 protected:
  virtual void copy() = 0;
  // Of global memory; empty: the source is shared memory.
  virtual std::vector<AsyncWork::Range> ranges() const = 0;

  u64 destination_, barrier_;
  u32 bytes_;  // that the mbarrier counts
};

// Out of the shared memory of the issuing CTA.
class BulkStore : public AsyncOperation {
 public:
  BulkStore(const Actor& actor, u64 source);
  void perform() override;
  bool uses(const Cta& cta) const override;
  AsyncWork work() const override;

 protected:
  virtual void read() = 0;
  virtual void write() = 0;
  virtual std::vector<AsyncWork::Range> ranges() const = 0;

  u64 source_;

 private:
  std::shared_ptr<BulkProgress> progress_;
};

// The CTAs of a 16-bit mask, all in the cluster; at least one.
u32 check_cta_mask(const Actor& actor, u32 mask);
// The same offset in the shared memory of another CTA of the cluster.
inline u64 in_cta(u64 address, u32 rank) {
  return (address & kSharedOffsetMask) | u64{rank} << kRankShift;
}
inline u32 rank_of(u64 address) { return static_cast<u32>(address >> kRankShift); }

}  // namespace jax_fp4::sim

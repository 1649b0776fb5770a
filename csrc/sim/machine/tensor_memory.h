// Tensor memory of a CTA (PTX ISA 9.7.16.1): 128 lanes x 512 columns of 32 bits. A taddr is lane << 16 | column.
//
// Every CTA has one of its own, as if it were alone on its SM. Words know whether they were written since
// their columns were allocated; races are looked for by 16 lanes of a column, the smallest part
// that an instruction addresses. For them an allocation and a release are writes of the columns.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sim/checks/race.h"

namespace jax_fp4::sim {

struct Actor;
struct Code;
struct Launch;
struct Warp;

inline constexpr u32 kTensorLanes = 128;
inline constexpr u32 kTensorColumns = 512;
inline constexpr u32 kTensorLaneGroup = 16;

inline u32 tensor_lane(u32 taddr) { return taddr >> 16; }
inline u32 tensor_column(u32 taddr) { return taddr & 0xFFFF; }

struct TensorAllocation {
  u32 column, columns;
  Warp* warp;
  const Code* code;
};

// An allocation or a release by a warp of a CTA pair that waits for the same of the other CTA.
struct TensorRequest {
  Warp* warp = nullptr;  // null: there is none
  const Code* code = nullptr;
  u32 column = 0, columns = 0;
  bool granted = false;
  Clocks clocks;  // of the other CTA's warp when it granted this
};

class TensorMemory {
 public:
  explicit TensorMemory(bool checks_races);

  bool is_free(u32 column, u32 columns) const;
  // Nothing in the columns is written after that.
  void allocate(const Actor& actor, u32 column, u32 columns);
  void release(const Actor& actor, const TensorAllocation& allocation);
  const TensorAllocation* find(u32 column) const;  // the allocation that holds it, or null
  const std::vector<TensorAllocation>& allocations() const { return allocations_; }
  // "; it was released at ...", or nothing: a part of messages.
  std::string release_text(const Launch& launch, u32 column) const;

  // Checks an access to lanes [lane, lane + lanes) x columns [column, column + columns): inside the lanes,
  // allocated, written where it reads, free of races; then marks what it writes as written. Asynchronous
  // loads and stores of a warp have an accessor of their own.
  enum class Use : u8 { read, write };
  void access(const Actor& actor, Use use, u32 lane, u32 lanes, u32 column, u32 columns);
  void access(const Actor& actor, Accessor by, Use use, u32 lane, u32 lanes, u32 column,
              u32 columns);

  // The words of a lane, by column.
  u32* lane(u32 number) { return words_.data() + std::size_t{number} * kTensorColumns; }

  // What the rules of allocation need to know (ops/tcgen05_alloc.cc).
  u32 largest = kTensorColumns;        // that may be allocated: the size of the latest allocation
  const Code* relinquished = nullptr;  // where the right to allocate was given up
  TensorRequest allocating, releasing;

 private:
  // Tells the race checker of an access.
  void check_order(const Actor& actor, const Accessor& by, Use use, u32 lane, u32 lanes, u32 column,
                   u32 columns, const std::string& access);
  RaceConflict record(Accessor by, Use use, u32 lane, u32 lanes, u32 column, u32 columns);

  std::vector<u32> words_;
  std::vector<u8> written_;  // by word
  std::vector<TensorAllocation> allocations_;
  std::vector<const Code*> released_;  // by column: where it was released last
  std::unique_ptr<RaceChecker> races_;
  Clocks released_clocks_;  // of those who have released columns
};

}  // namespace jax_fp4::sim

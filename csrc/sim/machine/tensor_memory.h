// Tensor memory of a CTA (PTX ISA 9.7.16.1): 128 lanes x 512 columns of 32 bits. A taddr is lane << 16 | column.
//
// Every CTA has one of its own, as if it were alone on its SM. Words know whether they were written since
// their columns were allocated; races are looked for by 16 lanes of a column, the smallest part
// that an instruction addresses.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sim/checks/race.h"

namespace jax_fp4::sim {

struct Actor;

inline constexpr u32 kTensorLanes = 128;
inline constexpr u32 kTensorColumns = 512;
inline constexpr u32 kTensorLaneGroup = 16;

inline u32 tensor_lane(u32 taddr) { return taddr >> 16; }
inline u32 tensor_column(u32 taddr) { return taddr & 0xFFFF; }

class TensorMemory {
 public:
  TensorMemory();

  // Columns of an allocation: nothing in them is written yet.
  void allocate(u32 column, u32 columns, bool checks_races);
  void release(u32 column, u32 columns);
  bool allocated(u32 column) const { return column < kTensorColumns && owned_[column] != 0; }

  // Checks an access to lanes [lane, lane + lanes) x columns [column, column + columns): inside the lanes,
  // allocated, written where it reads, free of races; then marks what it writes as written.
  enum class Use : u8 { read, write };
  void access(const Actor& actor, Use use, u32 lane, u32 lanes, u32 column, u32 columns);

  // The words of a lane, by column.
  u32* lane(u32 number) { return words_.data() + std::size_t{number} * kTensorColumns; }

 private:
  std::vector<u32> words_;
  std::vector<u8> written_;  // by word
  std::vector<u8> owned_;    // by column
  std::unique_ptr<RaceChecker> races_;
};

}  // namespace jax_fp4::sim

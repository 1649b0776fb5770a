// A box of a tensor map: where its rows are in global memory, and how they lie in shared memory (PTX
// ISA 5.5).
//
// A row is what the box spans in dimension 0, packed. In shared memory the rows follow each other; of
// the types with gaps 16 elements fill 16 bytes. Swizzling exchanges the atoms of a 128-byte line, by
// address bits above the line.
#pragma once

#include <vector>

#include "sim/machine/core.h"
#include "sim/tensor_map.h"

namespace jax_fp4::sim {

// Where coordinates point, and the four rows of .tile::gather4 and .tile::scatter4.
struct TensorPlace {
  i32 coordinates[kMaxTensorRank] = {};
  bool rows4 = false;  // {column, row, row, row, row}
};

struct BoxRow {
  u64 global;  // address of its first byte that is inside the tensor
  u32 lead;    // packed bytes before that
  u32 bytes;   // packed bytes inside; what remains of the row is outside again
};

class TensorBox {
 public:
  TensorBox(const TensorMap& map, const TensorPlace& place);

  u32 rows = 0;
  u32 row_bytes = 0;  // packed
  u32 pitch = 0;      // of the rows in shared memory
  u32 shared_bytes() const { return rows * pitch; }
  u32 copied_bytes() const { return rows * row_bytes; }
  BoxRow row(u32 number) const;

  // Moves packed bytes [begin, end) of a row to or from shared memory; `base` is the byte at the
  // shared address `address`, where the box starts.
  void scatter(u32 number, u32 begin, u32 end, const u8* packed, u8* base, u64 address) const;
  void gather(u32 number, u32 begin, u32 end, u8* packed, const u8* base, u64 address) const;
  // Calls f(offset in the box, bytes) for the bytes of a row in shared memory that hold [begin, end).
  template <class F>
  void each_piece(u32 number, u32 begin, u32 end, u64 address, F f) const;

  // What elements outside the tensor are: `bytes` of them from the start of an element.
  void fill(u8* packed, u32 bytes) const;

 private:
  const TensorMap& map_;
  TensorPlace place_;
  u32 group_;  // packed bytes that fill 16 bytes of shared memory
};

// The address to which swizzling moves the 16 bytes at an address.
u64 swizzled(u32 mode, u64 address);

template <class F>
void TensorBox::each_piece(u32 number, u32 begin, u32 end, u64 address, F f) const {
  const u32 halves = map_.swizzle == kSwizzle128BAtom32BFlip8B ? 2 : 1;
  const u32 piece = group_ / halves;
  u32 index = begin / piece, inside = begin % piece;
  for (u32 at = begin; at < end; ++index, inside = 0) {
    const u32 bytes = std::min(piece - inside, end - at);
    const u64 linear = address + u64{number} * pitch + index / halves * 16;
    u64 to = swizzled(map_.swizzle, linear);
    // Every other 128-byte line has its 8-byte halves exchanged.
    if (halves == 2) to += 8 * ((index ^ linear >> 7) & 1);
    f(static_cast<u32>(to + inside - address), at, bytes);
    at += bytes;
  }
}

}  // namespace jax_fp4::sim

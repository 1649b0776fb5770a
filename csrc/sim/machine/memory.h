// Memories of the machine and the windows through which generic addresses see them.
//
//   global    registered buffers, far apart; everything between them is unmapped
//   shared    one arena per CTA. A shared address is rank << 24 | offset, so it names a CTA of the
//             cluster; the first KiB is reserved as on hardware, which also catches null pointers
//   local     per lane; parameters of calls live there too
//   param     the kernel's parameters, read only
//   constant  .const variables, read only
//
// Every byte of shared and local memory, and of global buffers that ask for it, knows whether it was
// written.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sim/machine/program.h"

namespace jax_fp4::sim {

// Generic addresses. No source fixes these values; programs cannot see them but through cvta.
inline constexpr u64 kSharedWindow = 0x0000'7100'0000'0000;
inline constexpr u64 kLocalWindow = 0x0000'7200'0000'0000;
inline constexpr u64 kParamWindow = 0x0000'7300'0000'0000;
inline constexpr u64 kConstantWindow = 0x0000'7400'0000'0000;
inline constexpr u64 kWindowBytes = 0x0000'0001'0000'0000;
inline constexpr u64 kGlobalBase = 0x0000'0010'0000'0000;
// Unmapped bytes on both sides of a buffer: a wrong stride must not land in a neighbour.
inline constexpr u64 kRedZone = u64{1} << 24;
inline constexpr u32 kSharedReserved = 1024;
inline constexpr u32 kRankShift = 24;
inline constexpr u32 kSharedOffsetMask = (1u << kRankShift) - 1;
inline constexpr u64 kLocalBase = 16;

struct Buffer {
  std::string name;
  u64 base = 0;
  u64 bytes = 0;
  u8* data = nullptr;
  bool writable = true;
  std::vector<u8> storage;  // where the machine owns the bytes
  std::vector<u8> written;  // one flag a byte; empty: all are
};

class GlobalMemory {
 public:
  explicit GlobalMemory(u64 base = kGlobalBase) : next_(base) {}
  // Maps host memory; `initialized` false: reading a byte before it is written is an error.
  Buffer& map(std::string name, u8* data, u64 bytes, bool writable, bool initialized);
  // Memory of the machine's own, zero.
  Buffer& allocate(std::string name, u64 bytes, bool writable);
  void unmap(u64 base);
  // The buffer that holds the address, or the one before it, or null: for messages and accesses.
  Buffer* find(u64 address);
  Buffer* nearest(u64 address);
  // The buffer that the latest find() has found, or null.
  const Buffer* last() const { return last_; }

 private:
  Buffer& place(Buffer buffer);
  std::map<u64, std::unique_ptr<Buffer>> buffers_;
  u64 next_;
  Buffer* last_ = nullptr;
};

}  // namespace jax_fp4::sim

// Sectors and wavefronts of a warp's accesses.
#include "sim/costs/memory_access.h"

#include <algorithm>
#include <bit>

#include "sim/costs/constants.h"

namespace jax_fp4::sim::costs {
namespace {

constexpr int kTileRows = 8;  // of ldmatrix: each lane's address is one row of 16 bytes
constexpr u32 kRowBytes = 16;

}  // namespace

Wavefronts shared_wavefronts(const std::array<u64, kLanes>& addresses, u32 mask, u32 bytes,
                             bool merges) {
  Wavefronts result;
  const int group = bytes <= 4 ? kLanes : bytes == 8 ? 16 : bytes == 16 ? 8 : 4;
  for (int first = 0; first < kLanes; first += group) {
    // The words that a group wants, by bank; few enough to look through.
    std::array<std::array<u64, kLanes>, kBanks> words;
    std::array<u32, kBanks> counts{};
    u32 most = 0;
    for (int lane = first; lane < first + group; ++lane) {
      if (!(mask >> lane & 1)) continue;
      const u64 begin = addresses[lane] / kBankBytes;
      const u64 end = (addresses[lane] + bytes - 1) / kBankBytes;
      for (u64 word = begin; word <= end; ++word) {
        const u32 bank = word % kBanks;
        u32& count = counts[bank];
        const auto known = words[bank].begin() + count;
        if (merges && std::find(words[bank].begin(), known, word) != known) continue;
        if (count < kLanes) words[bank][count] = word;
        most = std::max(most, ++count);
      }
    }
    result.all += most;
    result.least += most != 0;
  }
  return result;
}

void touched_sectors(const std::array<u64, kLanes>& addresses, u32 mask, u32 bytes,
                     std::vector<u64>& sectors) {
  sectors.clear();
  bool sorted = true;
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const u64 address = addresses[static_cast<std::size_t>(std::countr_zero(rest))];
    for (u64 sector = address / kSectorBytes; sector <= (address + bytes - 1) / kSectorBytes;
         ++sector) {
      if (!sectors.empty() && sector == sectors.back()) continue;
      sorted &= sectors.empty() || sector > sectors.back();
      sectors.push_back(sector);
    }
  }
  if (sorted) return;
  std::sort(sectors.begin(), sectors.end());
  sectors.erase(std::unique(sectors.begin(), sectors.end()), sectors.end());
}

AccessForm access_form(const Form& form, const Code& code) {
  using Kind = MemoryAccess::Kind;
  const std::string_view opcode = form.row->opcode;
  if (opcode == "cp" && !form.has("bulk") && form.has("async") &&
      (form.has("ca") || form.has("cg")))
    return {Kind::copy, static_cast<u32>(code.immediate)};
  if (form.row->asynchronous) return {};
  const auto element_bytes = [&] { return static_cast<u32>(bits_of_type(form.type(0))) / 8; };
  if (opcode == "ld" || opcode == "st") {
    return {opcode == "ld" ? Kind::load : Kind::store, element_bytes() * code.counts[0]};
  }
  if (opcode == "atom" || opcode == "red") {
    return {Kind::atomic, element_bytes() * std::max<u32>(code.counts[0], 1)};
  }
  if (opcode == "ldmatrix" || opcode == "stmatrix") {
    // A tile of m16n16 has 16 rows.
    const int tiles = form.has("x4") ? 4 : form.has("x2") ? 2 : 1;
    const int rows = std::min(kLanes, tiles * kTileRows * (form.has("m16n16") ? 2 : 1));
    return {opcode == "ldmatrix" ? Kind::load : Kind::store, kRowBytes,
            kAllLanes >> (kLanes - rows)};
  }
  return {};
}

void find_access(const Warp& warp, const Code& code, const AccessForm& form, u32 mask,
                 MemoryAccess& access) {
  access.kind = form.kind;
  access.sectors.clear();
  access.wavefronts = {};
  mask &= form.address_lanes;
  if (form.kind == MemoryAccess::Kind::none || mask == 0) {
    access.kind = MemoryAccess::Kind::none;
    return;
  }
  access.bytes = form.bytes;
  access.lanes = static_cast<u32>(std::popcount(mask));
  const bool copies = form.kind == MemoryAccess::Kind::copy;
  std::array<u64, kLanes> addresses{};
  const auto read = [&](u32 slot, int operand, Space space) {
    for (u32 rest = mask; rest != 0; rest &= rest - 1) {
      const int lane = std::countr_zero(rest);
      u64 address = address_of(warp, code, lane, slot, operand);
      // The lanes of one instruction are taken to mean one space: that of the last.
      access.space = space == Space::generic ? resolve_generic(address) : space;
      addresses[static_cast<std::size_t>(lane)] = address;
    }
  };
  if (copies) {
    read(code.src[0], 0, Space::shared);
    access.wavefronts = shared_wavefronts(addresses, mask, form.bytes);
    read(code.src[1], 1, Space::global);
  } else {
    read(code.src[0], 0, code.space);
  }
  const bool shared = access.space == Space::shared || access.space == Space::shared_cluster;
  if (shared)
    access.wavefronts =
        shared_wavefronts(addresses, mask, form.bytes, form.kind != MemoryAccess::Kind::atomic);
  if (access.space == Space::global) touched_sectors(addresses, mask, form.bytes, access.sectors);
}

}  // namespace jax_fp4::sim::costs

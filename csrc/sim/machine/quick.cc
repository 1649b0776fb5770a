// The common access of a whole warp.
#include "sim/machine/quick.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace jax_fp4::sim {
namespace {

// Whether `count` flags one behind the other are set; count is a multiple of 32.
bool all_set(const u8* written, u32 count) {
  u8 all = 1;
  for (u32 k = 0; k < count; ++k) all &= written[k];
  return all == 1;
}

// Whether all flags of all lanes are set.
template <u32 kBytes>
bool all_written(const u8* written, const u32* offsets) {
  using Flags = std::conditional_t<
      kBytes == 1, u8,
      std::conditional_t<kBytes == 2, u16, std::conditional_t<kBytes == 4, u32, u64>>>;
  constexpr Flags kSet = static_cast<Flags>(0x0101'0101'0101'0101u);
  Flags all = kSet;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (u32 k = 0; k < kBytes; k += sizeof(Flags)) {
      Flags flags;
      std::memcpy(&flags, written + offsets[lane] + k, sizeof flags);
      all &= flags;
    }
  }
  return all == kSet;
}

bool all_written(const u8* written, const u32* offsets, u32 bytes) {
  switch (bytes) {
    case 1: return all_written<1>(written, offsets);
    case 2: return all_written<2>(written, offsets);
    case 4: return all_written<4>(written, offsets);
    case 8: return all_written<8>(written, offsets);
    case 16: return all_written<16>(written, offsets);
    case 32: return all_written<32>(written, offsets);
    default: return false;
  }
}

template <u32 kBytes>
void set_written(u8* written, const u32* offsets) {
  for (int lane = 0; lane < kLanes; ++lane) std::memset(written + offsets[lane], 1, kBytes);
}

void set_written(u8* written, const u32* offsets, u32 bytes) {
  switch (bytes) {
    case 1: set_written<1>(written, offsets); break;
    case 2: set_written<2>(written, offsets); break;
    case 4: set_written<4>(written, offsets); break;
    case 8: set_written<8>(written, offsets); break;
    case 16: set_written<16>(written, offsets); break;
    default: set_written<32>(written, offsets);
  }
}

}  // namespace

QuickAccess::Place QuickAccess::find(Warp& warp, Space& space, u64 address, bool writes) {
  Place place;
  u64 window = 0;
  if (space == Space::generic) {
    window = address;
    space = resolve_generic(address);
    window -= address;
  }
  if (space == Space::shared || space == Space::shared_cluster) {
    Cta& cta = *warp.cta;
    place.base = window + (u64{cta.rank} << kRankShift) + kSharedReserved;
    place.bytes = cta.shared.size();
    place.data = cta.shared.data();
    place.written = cta.shared_written.data();
    place.races = cta.races.get();
    place.lanes = cta.lanes.get();
  } else if (space == Space::global && !warp.launch->order) {
    Buffer* buffer = warp.launch->global->find(address);
    if (!buffer || (writes && !buffer->writable)) return place;
    place.base = buffer->base;
    place.bytes = buffer->bytes;
    place.data = buffer->data;
    if (!buffer->written.empty()) place.written = buffer->written.data();
  } else if (space == Space::local) {
    place.base = window + kLocalBase;
    place.bytes = place.lane_stride = warp.launch->program->local_bytes;
    place.data = warp.local.data();
    place.written = warp.local_written.data();
  } else if (space == Space::param && !writes) {
    place.base = window;
    place.bytes = warp.launch->spec.parameters.size();
    place.data = warp.launch->spec.parameters.data();
  } else if (space == Space::constant && !writes && warp.launch->constant) {
    place.base = window;
    place.bytes = warp.launch->constant->bytes;
    place.data = warp.launch->constant->data;
  }
  return place;
}

// Offsets from `base` of the lanes' addresses; false unless all accesses are aligned and end before `size`.
bool QuickAccess::find_offsets(const Warp& warp, const Code& c, u32 mask, u32 bytes, u64 base,
                               u64 size) {
  constexpr u64 kMost = ~u32{0};
  const u64 shift = static_cast<u64>(c.offset[0]) - base;
  if (size < bytes || base % bytes != 0) return false;
  const u32 last = static_cast<u32>(std::min(size - bytes, kMost));
  // Lanes outside the mask take the address of one inside.
  alignas(64) u64 wide[kLanes];
  alignas(64) u32 narrow[kLanes];
  const auto fill = [mask](auto* some, const auto* a) {
    const auto first = a[std::countr_zero(mask)];
    for (int lane = 0; lane < kLanes; ++lane) some[lane] = (mask >> lane & 1) ? a[lane] : first;
    return some;
  };
  u32 outside = 0, low = 0;  // of all lanes: whether any is outside; bits of the offsets
  if (c.address_bits & 1) {
    const Lane64* a = warp.in64(c.src[0]);
    if (mask != kAllLanes) a = reinterpret_cast<const Lane64*>(fill(wide, a));
    u64 high = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      const u64 offset = a[lane] + shift;
      offsets_[lane] = static_cast<u32>(offset);
      high |= offset >> 32;
    }
    outside = high != 0;
    for (int lane = 0; lane < kLanes; ++lane) outside |= offsets_[lane] > last;
  } else {
    // Register plus constant does not wrap at 32 bits: the registers that give a place in the memory
    // lie between two numbers of 32 bits.
    const i64 least = std::max<i64>(-static_cast<i64>(shift), 0);
    const i64 greatest = std::min(i64{last} - static_cast<i64>(shift), static_cast<i64>(kMost));
    if (least > greatest) return false;
    const u32 least32 = static_cast<u32>(least), range = static_cast<u32>(greatest - least);
    const Lane32* a = warp.in(c.src[0]);
    if (mask != kAllLanes) a = reinterpret_cast<const Lane32*>(fill(narrow, a));
    for (int lane = 0; lane < kLanes; ++lane) {
      offsets_[lane] = a[lane] + static_cast<u32>(shift);
      outside |= a[lane] - least32 > range;
    }
  }
  u32 apart = 0;
  for (u32 lane = 0; lane < kLanes; ++lane) {
    low |= offsets_[lane];
    apart |= offsets_[lane] ^ (offsets_[0] + lane * bytes);
  }
  contiguous_ = apart == 0 && mask == kAllLanes;
  return outside == 0 && (low & (bytes - 1)) == 0;
}

QuickAccess::QuickAccess(Warp& warp, const Code& c, u32 mask, u32 bytes, bool writes) {
  Launch& launch = *warp.launch;
  if (c.src[0] == kNoSlot || !launch.spec.quick) return;
  Space space = c.space;
  const Place place =
      find(warp, space, address_of(warp, c, std::countr_zero(mask), c.src[0], 0), writes);
  if (!place.data || bytes > 32 || !find_offsets(warp, c, mask, bytes, place.base, place.bytes))
    return;
  if (place.lane_stride != 0) {
    contiguous_ = false;
    const u32 first = static_cast<u32>(std::countr_zero(mask));
    for (u32 lane = 0; lane < kLanes; ++lane)
      offsets_[lane] += place.lane_stride * ((mask >> lane & 1) ? lane : first);
  }
  if (place.written && !writes && launch.spec.checks.uninitialized &&
      !(contiguous_ ? all_set(place.written + offsets_[0], kLanes * bytes)
                    : all_written(place.written, offsets_, bytes)))
    return;
  if (place.lanes) {
    const LaneAccess by = warp.lane_access(c);
    for (u32 rest = mask; rest != 0; rest &= rest - 1) {
      const u32 lane = static_cast<u32>(std::countr_zero(rest));
      if (place.lanes->access(offsets_[lane], bytes, writes, lane, by).found) return;
    }
  }
  if (place.races) {
    const Accessor by = Actor{warp, c, 0}.accessor(false);
    RaceChecker& races = *place.races;
    const bool run = contiguous_ && offsets_[0] % 4 == 0;
    if (!(run      ? writes ? races.write_run(offsets_[0], kLanes * bytes, by)
                            : races.read_run(offsets_[0], kLanes * bytes, by)
          : writes ? races.write_lanes(offsets_, mask, bytes, by)
                   : races.read_lanes(offsets_, mask, bytes, by)))
      return;
  }
  if (place.written && writes) {
    if (contiguous_)
      std::memset(place.written + offsets_[0], 1, kLanes * bytes);
    else
      set_written(place.written, offsets_, bytes);
  }
  (writes ? launch.bytes_written : launch.bytes_read)[static_cast<int>(space)] +=
      u64{bytes} * (mask == kAllLanes ? kLanes : static_cast<u32>(std::popcount(mask)));
  data_ = place.data;
}

}  // namespace jax_fp4::sim

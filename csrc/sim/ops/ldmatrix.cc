// ldmatrix, stmatrix and movmatrix (PTX ISA 9.7.14.5) of 8x8 tiles of 16-bit elements.
//
// Row r of tile m lies at the address that lane 8m + r gives: 16 bytes. Lane t holds elements 2(t%4) and
// 2(t%4)+1 of row t/4; with .trans of column t/4.
#include "sim/machine/quick.h"
#include "sim/ops/lanes.h"

namespace jax_fp4::sim {
namespace {

constexpr int kTileRows = 8;
constexpr u32 kRowBytes = 16;
constexpr u16 kTranspose = 1 << 8;  // of variant; below it the number of tiles

// Element (row, column) pairs that lane t holds of a tile of 16-bit elements.
struct Place {
  int row, column;
};
Place place_of(int lane, int half, bool transpose) {
  const int major = lane / 4, minor = 2 * (lane % 4) + half;
  return transpose ? Place{minor, major} : Place{major, minor};
}

// The rows of all tiles, in place.
class Rows {
 public:
  Rows(Warp& w, const Code& c, int tiles, AccessKind kind)
      : w_(w),
        c_(c),
        kind_(kind),
        quick_(w, c, kAllLanes >> (kLanes - kTileRows * tiles), kRowBytes,
               kind == AccessKind::write) {}

  u8* operator()(int tile, int row) const {
    const int lane = kTileRows * tile + row;
    if (quick_) return quick_.at(lane);
    return access(w_, c_, lane, c_.space, address_of(w_, c_, lane, c_.src[0], 0), kRowBytes, kind_);
  }

 private:
  Warp& w_;
  const Code& c_;
  AccessKind kind_;
  QuickAccess quick_;
};

void load_tiles(Warp& w, const Code& c, u32 mask) {
  if (!w.converged(c, mask)) return;
  const int tiles = c.variant & 0xFF;
  const u32* slots = w.launch->program->slots.data() + c.vectors[0];
  const bool transpose = c.variant & kTranspose;
  const Rows rows(w, c, tiles, AccessKind::read);
  for (int tile = 0; tile < tiles; ++tile) {
    // Without .trans the elements of lane t are the t-th pair of the tile.
    u16 elements[kTileRows][kTileRows];
    for (int row = 0; row < kTileRows; ++row)
      std::memcpy(elements[row], rows(tile, row), kRowBytes);
    u32 pairs[kLanes];
    if (transpose) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const Place low = place_of(lane, 0, true), high = place_of(lane, 1, true);
        pairs[lane] =
            elements[low.row][low.column] | static_cast<u32>(elements[high.row][high.column]) << 16;
      }
    } else {
      std::memcpy(pairs, elements, sizeof pairs);
    }
    const Out<u32> d(w, slots[tile]);
    each_lane(mask, [&](int lane) { d.set(lane, pairs[lane]); });
  }
}

void store_tiles(Warp& w, const Code& c, u32 mask) {
  if (!w.converged(c, mask)) return;
  const int tiles = c.variant & 0xFF;
  const u32* slots = w.launch->program->slots.data() + c.vectors[0];
  const bool transpose = c.variant & kTranspose;
  const Rows rows(w, c, tiles, AccessKind::write);
  for (int tile = 0; tile < tiles; ++tile) {
    u16 elements[kTileRows][kTileRows];
    const In<u32> a(w, slots[tile]);
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int half = 0; half < 2; ++half) {
        const Place at = place_of(lane, half, transpose);
        elements[at.row][at.column] = static_cast<u16>(a[lane] >> (16 * half));
      }
    }
    for (int row = 0; row < kTileRows; ++row)
      std::memcpy(rows(tile, row), elements[row], kRowBytes);
  }
}

// The tile that the lanes hold, transposed among them.
void transpose_tile(Warp& w, const Code& c, u32 mask) {
  if (!w.converged(c, mask)) return;
  u16 elements[kTileRows][kTileRows];
  const In<u32> a(w, c.src[0]);
  const Out<u32> d(w, c.dst[0]);
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int half = 0; half < 2; ++half) {
      const Place at = place_of(lane, half, false);
      elements[at.row][at.column] = static_cast<u16>(a[lane] >> (16 * half));
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const Place low = place_of(lane, 0, true), high = place_of(lane, 1, true);
    d.set(lane, elements[low.row][low.column] | static_cast<u32>(elements[high.row][high.column])
                                                    << 16);
  }
}

int tiles_of(const Form& form) { return form.has("x4") ? 4 : form.has("x2") ? 2 : 1; }

Exec with_tiles(const Form& form, Code& code, Exec handler) {
  code.space = form.has("shared::cluster")                     ? Space::shared_cluster
               : form.has("shared") || form.has("shared::cta") ? Space::shared
                                                               : Space::generic;
  code.variant = static_cast<u16>(tiles_of(form) | (form.has("trans") ? kTranspose : 0));
  return code.counts[0] == tiles_of(form) ? handler : nullptr;
}

}  // namespace

Exec ldmatrix(const Form& form, Code& code) { return with_tiles(form, code, load_tiles); }
Exec stmatrix(const Form& form, Code& code) { return with_tiles(form, code, store_tiles); }
Exec movmatrix(const Form&, Code&) { return transpose_tile; }

}  // namespace jax_fp4::sim

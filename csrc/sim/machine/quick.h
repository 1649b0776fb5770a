// The common accesses of a load or store, without a call for each lane: aligned, inside this CTA's shared
// memory or inside the global buffer used last, initialised, and with no race at first sight.
// Everything else goes through access(), which decides and reports.
#pragma once

#include <cstring>

#include "sim/machine/core.h"

namespace jax_fp4::sim {

class QuickAccess {
 public:
  QuickAccess(Warp& warp, const Code& c, u32 bytes, bool writes)
      : warp_(warp), bytes_(bytes), writes_(writes) {
    pc_ = static_cast<u32>(&c - warp.launch->program->code.data());
    if (c.space == Space::shared && bytes % 4 == 0) {
      Cta& cta = *warp.cta;
      data_ = cta.shared.data();
      written_ = cta.shared_written.data();
      base_ = (u64{cta.rank} << kRankShift) + kSharedReserved;
      size_ = cta.shared.size();
      races_ = cta.races.get();
      epoch_ = make_epoch(warp.agent, warp.clocks.seen[warp.agent]);
    } else if (c.space == Space::global && !warp.launch->order) {
      const Buffer* buffer = warp.launch->global->last();
      if (!buffer || !buffer->written.empty() || (writes && !buffer->writable)) return;
      data_ = buffer->data;
      base_ = buffer->base;
      size_ = buffer->bytes;
    }
  }

  // The bytes, or null: the slow path must decide.
  u8* at(u64 address) {
    const u64 offset = address - base_;
    if (offset >= size_ || size_ - offset < bytes_ || (address & (bytes_ - 1)) != 0) return nullptr;
    if (written_) {
      if (writes_) {
        std::memset(written_ + offset, 1, bytes_);
      } else {
        for (u32 k = 0; k < bytes_; k += 4) {
          u32 flags;
          std::memcpy(&flags, written_ + offset + k, 4);
          if (flags != 0x0101'0101u) return nullptr;
        }
      }
    }
    if (races_) {
      for (u64 word = offset / 4; word < (offset + bytes_) / 4; ++word) {
        const bool fine =
            writes_ ? races_->write_word(word, epoch_, warp_.clocks.seen, pc_)
                    : races_->read_word(word, warp_.agent, epoch_, warp_.clocks.seen, pc_);
        if (!fine) return nullptr;
      }
    }
    ++count_;
    return data_ + offset;
  }

  // Adds the bytes moved to the launch's counts.
  void account(Space space) const {
    Launch& launch = *warp_.launch;
    (writes_ ? launch.bytes_written : launch.bytes_read)[static_cast<int>(space)] +=
        count_ * bytes_;
  }

 private:
  Warp& warp_;
  u32 bytes_;
  bool writes_;
  u32 pc_ = 0;
  u8* data_ = nullptr;
  u8* written_ = nullptr;
  u64 base_ = 0;
  u64 size_ = 0;  // 0: nothing is quick
  RaceChecker* races_ = nullptr;
  Epoch epoch_ = 0;
  u64 count_ = 0;
};

}  // namespace jax_fp4::sim

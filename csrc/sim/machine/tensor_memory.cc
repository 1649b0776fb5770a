// Tensor memory: allocation marks, and the checks of an access.
#include "sim/machine/tensor_memory.h"

#include <algorithm>
#include <cstring>

#include "sim/machine/core.h"

namespace jax_fp4::sim {
namespace {

constexpr u32 kPoison = 0xCCCC'CCCC;

std::string describe(TensorMemory::Use use, u32 lane, u32 lanes, u32 column, u32 columns) {
  return std::string(use == TensorMemory::Use::write ? "write" : "read") +
         " of tensor memory, lanes " + std::to_string(lane) + "-" +
         std::to_string(lane + lanes - 1) + ", columns " + std::to_string(column) + "-" +
         std::to_string(column + columns - 1);
}

}  // namespace

TensorMemory::TensorMemory()
    : words_(std::size_t{kTensorLanes} * kTensorColumns, kPoison),
      written_(words_.size(), 0),
      owned_(kTensorColumns, 0) {}

void TensorMemory::allocate(u32 column, u32 columns, bool checks_races) {
  if (checks_races && !races_) {
    races_ =
        std::make_unique<RaceChecker>(u64{kTensorLanes / kTensorLaneGroup} * kTensorColumns * 4);
  }
  std::fill_n(owned_.begin() + column, columns, u8{1});
  for (u32 l = 0; l < kTensorLanes; ++l) {
    std::fill_n(lane(l) + column, columns, kPoison);
    std::fill_n(written_.begin() + std::size_t{l} * kTensorColumns + column, columns, u8{0});
  }
}

void TensorMemory::release(u32 column, u32 columns) {
  std::fill_n(owned_.begin() + column, columns, u8{0});
}

void TensorMemory::access(const Actor& actor, Use use, u32 first_lane, u32 lanes, u32 column,
                          u32 columns) {
  const auto text = [&] { return describe(use, first_lane, lanes, column, columns); };
  if (lanes == 0 || columns == 0) return;
  if (first_lane + lanes > kTensorLanes || column + columns > kTensorColumns)
    actor.fault(FaultKind::out_of_bounds, text() + " is outside the 128 lanes and 512 columns");
  for (u32 c = column; c < column + columns; ++c) {
    if (!owned_[c]) {
      actor.fault(FaultKind::out_of_bounds,
                  text() + ": column " + std::to_string(c) + " is not allocated");
    }
  }
  const bool uninitialized = actor.warp.launch->spec.checks.uninitialized;
  for (u32 l = first_lane; l < first_lane + lanes; ++l) {
    u8* flags = written_.data() + std::size_t{l} * kTensorColumns + column;
    if (use == Use::write) {
      std::memset(flags, 1, columns);
    } else if (const void* unset = uninitialized ? std::memchr(flags, 0, columns) : nullptr) {
      actor.fault(FaultKind::uninitialized_memory,
                  text() + ": nothing has written lane " + std::to_string(l) + ", column " +
                      std::to_string(column + (static_cast<const u8*>(unset) - flags)));
    }
  }
  if (!races_) return;
  Accessor by = actor.accessor(false);
  by.async = false;  // tensor memory has one proxy
  for (u32 group = first_lane / kTensorLaneGroup;
       group <= (first_lane + lanes - 1) / kTensorLaneGroup; ++group) {
    const u64 offset = (u64{group} * kTensorColumns + column) * 4;
    const RaceConflict conflict = use == Use::write ? races_->write(offset, columns * 4, by)
                                                    : races_->read(offset, columns * 4, by);
    if (conflict.found) report_conflict(actor, conflict, false, text());
  }
}

}  // namespace jax_fp4::sim

// Tensor memory: allocation, and the checks of an access.
#include "sim/machine/tensor_memory.h"

#include <algorithm>
#include <cstring>

#include "sim/machine/async.h"

namespace jax_fp4::sim {
namespace {

constexpr u32 kPoison = 0xCCCC'CCCC;

std::string columns_text(u32 column, u32 columns) {
  return "columns " + std::to_string(column) + "-" + std::to_string(column + columns - 1);
}

std::string describe(TensorMemory::Use use, u32 lane, u32 lanes, u32 column, u32 columns) {
  return std::string(use == TensorMemory::Use::write ? "write" : "read") +
         " of tensor memory, lanes " + std::to_string(lane) + "-" +
         std::to_string(lane + lanes - 1) + ", " + columns_text(column, columns);
}

}  // namespace

TensorMemory::TensorMemory(bool checks_races)
    : words_(std::size_t{kTensorLanes} * kTensorColumns, kPoison),
      written_(words_.size(), 0),
      released_(kTensorColumns, nullptr) {
  if (checks_races) {
    races_ =
        std::make_unique<RaceChecker>(u64{kTensorLanes / kTensorLaneGroup} * kTensorColumns * 4);
  }
}

bool TensorMemory::is_free(u32 column, u32 columns) const {
  return std::none_of(allocations_.begin(), allocations_.end(), [&](const TensorAllocation& a) {
    return a.column < column + columns && column < a.column + a.columns;
  });
}

const TensorAllocation* TensorMemory::find(u32 column) const {
  const auto found =
      std::find_if(allocations_.begin(), allocations_.end(), [&](const TensorAllocation& a) {
        return column >= a.column && column - a.column < a.columns;
      });
  return found == allocations_.end() ? nullptr : &*found;
}

std::string TensorMemory::release_text(const Launch& launch, u32 column) const {
  const Code* code = column < kTensorColumns ? released_[column] : nullptr;
  return code ? "; it was released at " + launch.kernel_line(code->line) : "";
}

void TensorMemory::allocate(const Actor& actor, u32 column, u32 columns) {
  // Whoever gets columns comes after those who have released them.
  join(actor.warp.clocks, released_clocks_);
  for (u32 l = 0; l < kTensorLanes; ++l) {
    std::fill_n(lane(l) + column, columns, kPoison);
    std::fill_n(written_.begin() + std::size_t{l} * kTensorColumns + column, columns, u8{0});
  }
  const RaceConflict conflict =
      record(actor.accessor(false), Use::write, 0, kTensorLanes, column, columns);
  if (conflict.found)
    report_conflict(actor, conflict, false, "allocation of " + columns_text(column, columns));
  allocations_.push_back({column, columns, &actor.warp, &actor.code});
  largest = columns;
}

void TensorMemory::release(const Actor& actor, const TensorAllocation& allocation) {
  const u32 column = allocation.column, columns = allocation.columns;
  check_order(actor, actor.accessor(false), Use::write, 0, kTensorLanes, column, columns,
              "release of " + columns_text(column, columns));
  join(released_clocks_, actor.warp.clocks);
  actor.warp.advance_clock();
  std::fill_n(released_.begin() + column, columns, &actor.code);
  std::erase_if(allocations_, [&](const TensorAllocation& a) { return a.column == column; });
}

void TensorMemory::access(const Actor& actor, Use use, u32 first_lane, u32 lanes, u32 column,
                          u32 columns) {
  access(actor, actor.accessor(false), use, first_lane, lanes, column, columns);
}

void TensorMemory::access(const Actor& actor, Accessor by, Use use, u32 first_lane, u32 lanes,
                          u32 column, u32 columns) {
  const auto text = [&] { return describe(use, first_lane, lanes, column, columns); };
  if (lanes == 0 || columns == 0) return;
  if (first_lane + lanes > kTensorLanes || column + columns > kTensorColumns)
    actor.fault(FaultKind::out_of_bounds, text() + " is outside the 128 lanes and 512 columns");
  for (u32 c = column; c < column + columns;) {
    const TensorAllocation* owner = find(c);
    if (!owner) {
      actor.fault(FaultKind::out_of_bounds, text() + ": column " + std::to_string(c) +
                                                " is not allocated" +
                                                release_text(*actor.warp.launch, c));
    }
    c = owner->column + owner->columns;
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
  check_order(actor, by, use, first_lane, lanes, column, columns, text());
}

// Reports what the access races with. Strict: only what tcgen05 fences have made usable, and what the actor
// itself has done, counts as before.
void TensorMemory::check_order(const Actor& actor, const Accessor& by, Use use, u32 first_lane,
                               u32 lanes, u32 column, u32 columns, const std::string& access) {
  if (!actor.warp.launch->spec.checks.strict) {
    const RaceConflict conflict = record(by, use, first_lane, lanes, column, columns);
    if (conflict.found) report_conflict(actor, conflict, false, access);
    return;
  }
  Warp& warp = actor.warp;
  Clocks usable;
  usable.seen = actor.operation ? warp.pipe_ready : warp.tensor_ready;
  if (!actor.operation || !actor.operation->follows_waits)
    for (const u32 own : {by.agent, actor.operation ? by.agent : warp.agent})
      usable.seen[own] = std::max(usable.seen[own], by.clocks.seen[own]);
  const Accessor strict{by.agent, by.epoch, usable, by.pc};
  RaceConflict conflict = record(strict, use, first_lane, lanes, column, columns);
  if (!conflict.found) return;
  if (!happened_before(conflict.earlier, by.clocks.seen))
    report_conflict(actor, conflict, false, access);
  const Program& program = *warp.launch->program;
  actor.fault(FaultKind::tensor_memory,
              access + " is ordered after the " + (conflict.earlier_is_write ? "write" : "read") +
                  " at " + warp.launch->kernel_line(program.code[conflict.pc].line) +
                  ", but not by tcgen05.fence::before_thread_sync there (or a commit) and "
                  "tcgen05.fence::after_thread_sync here");
}

RaceConflict TensorMemory::record(Accessor by, Use use, u32 first_lane, u32 lanes, u32 column,
                                  u32 columns) {
  RaceConflict first;
  if (!races_) return first;
  by.async = false;  // tensor memory has one proxy
  for (u32 group = first_lane / kTensorLaneGroup;
       group <= (first_lane + lanes - 1) / kTensorLaneGroup; ++group) {
    const u64 offset = (u64{group} * kTensorColumns + column) * 4;
    const RaceConflict conflict = use == Use::write ? races_->write(offset, columns * 4, by)
                                                    : races_->read(offset, columns * 4, by);
    if (conflict.found && !first.found) first = conflict;
  }
  return first;
}

}  // namespace jax_fp4::sim

// tcgen05.alloc, dealloc and relinquish_alloc_permit (PTX ISA 9.7.16.7): columns of tensor memory for a CTA.
//
// With .cta_group::2 a warp of each CTA of the pair executes alloc and dealloc. The first leaves a request in
// its tensor memory and waits; the second allocates the same columns in both.
#include <cstdio>

#include "sim/ops/tcgen05.h"

namespace jax_fp4::sim {
namespace {

constexpr u32 kFewestColumns = 32;

constexpr u16 kPair = 1;  // Code::variant

[[noreturn]] void refuse(Warp& w, const Code& c, const std::string& message) {
  w.fault(c, -1, FaultKind::tensor_memory, message);
}

std::string columns_text(u32 columns) { return std::to_string(columns) + " columns"; }

void check_size(Warp& w, const Code& c, u32 columns) {
  if (std::has_single_bit(columns) && columns >= kFewestColumns && columns <= kTensorColumns)
    return;
  refuse(w, c, columns_text(columns) + "; their number is a power of two from 32 to 512");
}

// The request that the other CTA waits with. Null: it has none yet, and this warp waits with its own.
TensorRequest* meet_peer(Warp& w, const Code& c, TensorRequest TensorMemory::* kind, u32 column,
                         u32 columns) {
  TensorRequest& mine = (*w.cta->tensor).*kind;
  Cta& peer = peer_of(*w.cta);
  TensorRequest& other = (*peer.tensor).*kind;
  if (mine.warp == nullptr && other.warp != nullptr && !other.granted) {
    if (other.column == column && other.columns == columns) return &other;
    refuse(w, c,
           "both CTAs of a pair name the same columns; rank " + std::to_string(peer.rank) +
               " waits with " + columns_text(other.columns) + " at " +
               w.launch->kernel_line(other.code->line));
  }
  if (mine.warp == nullptr) {
    if (peer.exited == peer.threads) {
      refuse(w, c,
             "rank " + std::to_string(peer.rank) +
                 ", the other CTA of the pair, has exited; with .cta_group::2 both execute "
                 "this instruction");
    }
    mine = {&w, &c, column, columns, false, {}};
  }
  w.block_and_retry(c, kWaitsForPeer);
  return nullptr;
}

void grant(TensorRequest& request, u32 column) {
  request.granted = true;
  request.column = column;
  request.warp->cta->cluster->wake(kWaitsForPeer);
}

// Whether the other CTA has granted this warp's request.
bool take_grant(Warp& w, TensorRequest& request, u32& column) {
  if (request.warp != &w || !request.granted) return false;
  column = request.column;
  join(w.clocks, request.clocks);
  request = {};
  w.cta->cluster->wake(kWaitsForPeer);  // another warp's turn
  return true;
}

// The lowest free place, a multiple of the number of columns; in both CTAs of a pair.
u32 find_free(const TensorMemory& mine, const TensorMemory& other, u32 columns) {
  u32 column = 0;
  while (column < kTensorColumns &&
         !(mine.is_free(column, columns) && other.is_free(column, columns)))
    column += columns;
  return column;
}

void store_address(Warp& w, const Code& c, u32 mask, u32 column) {
  const int lane = std::countr_zero(mask);
  u64 address = address_of(w, c, lane, c.src[0], 0);
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int other = std::countr_zero(rest);
    if (address_of(w, c, other, c.src[0], 0) != address)
      w.fault(c, other, FaultKind::argument, "the shared address is the same in all lanes");
  }
  if (c.space == Space::generic && resolve_generic(address) != Space::shared_cluster)
    w.fault(c, lane, FaultKind::out_of_bounds,
            "the address of the result is not one of shared memory");
  std::memcpy(access(w, c, lane, Space::shared, address, 4, AccessKind::write), &column, 4);
}

void allocate(Warp& w, const Code& c, u32 mask) {
  if (!w.converged(c, mask)) return;
  TensorMemory& mine = *w.cta->tensor;
  const u32 columns = uniform(w, c, mask, c.src[1], "the number of columns");
  u32 column;
  if (take_grant(w, mine.allocating, column)) {
    store_address(w, c, mask, column);
    return;
  }
  check_size(w, c, columns);
  if (mine.relinquished) {
    refuse(w, c,
           "allocates after the CTA has given up the right to, at " +
               w.launch->kernel_line(mine.relinquished->line));
  }
  if (columns > mine.largest) {
    refuse(w, c,
           "allocates " + columns_text(columns) + " after " + columns_text(mine.largest) +
               "; later allocations of a CTA are not larger than earlier ones");
  }
  TensorRequest* other = nullptr;
  if (c.variant & kPair) {
    other = meet_peer(w, c, &TensorMemory::allocating, 0, columns);
    if (!other) return;
  }
  column = find_free(mine, other ? *other->warp->cta->tensor : mine, columns);
  if (column == kTensorColumns) {
    w.block_and_retry(c, kWaitsForTensorMemory);
    return;
  }
  mine.allocate({w, c, -1}, column, columns);
  if (other) {
    // Each of the two warps knows then what the other one did before.
    Warp& waiting = *other->warp;
    waiting.cta->tensor->allocate({waiting, *other->code, -1}, column, columns);
    other->clocks = w.clocks;
    join(w.clocks, waiting.clocks);
    w.advance_clock();
    waiting.advance_clock();
    grant(*other, column);
  }
  store_address(w, c, mask, column);
}

void deallocate(Warp& w, const Code& c, u32 mask) {
  if (!w.converged(c, mask)) return;
  TensorMemory& mine = *w.cta->tensor;
  const u32 taddr = uniform(w, c, mask, c.src[0], "the address");
  const u32 columns = uniform(w, c, mask, c.src[1], "the number of columns");
  u32 column;
  if (take_grant(w, mine.releasing, column)) return;
  if (mine.releasing.warp != nullptr) {
    w.block_and_retry(c, kWaitsForPeer);
    return;
  }
  check_size(w, c, columns);
  const TensorAllocation* found = mine.find(tensor_column(taddr));
  if (!found || found->column != taddr || found->columns != columns) {
    char address[16];
    std::snprintf(address, sizeof address, "0x%x", taddr);
    refuse(w, c,
           "address " + std::string(address) + " with " + columns_text(columns) +
               (found ? " is not what was allocated: address " + std::to_string(found->column) +
                            " with " + columns_text(found->columns) + " at " +
                            w.launch->kernel_line(found->code->line)
                      : " is not allocated" + mine.release_text(*w.launch, tensor_column(taddr))));
  }
  mine.release({w, c, -1}, *found);
  w.cta->cluster->wake(kWaitsForTensorMemory);
  if (!(c.variant & kPair)) return;
  if (TensorRequest* other = meet_peer(w, c, &TensorMemory::releasing, taddr, columns))
    grant(*other, taddr);
}

void relinquish(Warp& w, const Code& c, u32 mask) {
  if (w.converged(c, mask)) w.cta->tensor->relinquished = &c;
}

Exec with_group(const Form& form, Code& code, Exec handler) {
  code.space = form.has("shared::cta") ? Space::shared : Space::generic;
  code.variant = form.has("cta_group::2") ? kPair : 0;
  return handler;
}

}  // namespace

Exec tcgen05_alloc(const Form& f, Code& c) { return with_group(f, c, allocate); }
Exec tcgen05_dealloc(const Form& f, Code& c) { return with_group(f, c, deallocate); }
Exec tcgen05_relinquish(const Form& f, Code& c) { return with_group(f, c, relinquish); }

// Called when a CTA exits: it holds no columns, and nobody waits for it to allocate or release some.
void Launch::check_tensor_exit(const Cta& cta) const {
  if (!cta.tensor) return;
  for (const TensorAllocation& allocation : cta.tensor->allocations()) {
    allocation.warp->fault(*allocation.code, -1, FaultKind::tensor_memory,
                           "the CTA exits and has not released " +
                               columns_text(allocation.columns) + " that it allocated here");
  }
  if (program->cta_group != 2) return;
  TensorMemory& peer = *peer_of(cta).tensor;
  for (const TensorRequest* request : {&peer.allocating, &peer.releasing}) {
    if (request->warp == nullptr || request->granted) continue;
    request->warp->fault(*request->code, -1, FaultKind::tensor_memory,
                         "waits for the same instruction in rank " + std::to_string(cta.rank) +
                             ", the other CTA of the pair, which exits");
  }
}

}  // namespace jax_fp4::sim

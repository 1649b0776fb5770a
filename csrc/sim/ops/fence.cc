// Fences (PTX ISA 9.7.13.4), as the race checker sees them: machine/async.h and checks/race.h.
#include "sim/ops/lanes.h"

namespace jax_fp4::sim {
namespace {

// All that this warp knows of is visible to engines whose work it causes from now on.
void fence_async(Warp& w, const Code&, u32) {
  join(w.clocks.fenced, w.clocks.seen);
  join(w.clocks.inits, w.clocks.seen);
  w.advance_clock();
}

void fence_inits(Warp& w, const Code&, u32) {
  join(w.clocks.inits, w.clocks.seen);
  w.advance_clock();
}

// What others did before a releasing fence, and passed on through a relaxed cluster barrier, is visible to
// engines whose work this warp causes (the pair of fences around cluster launch control).
void acquire_async(Warp& w, const Code&, u32) {
  join(w.clocks.seen, w.clocks.inits);
  join(w.clocks.fenced, w.clocks.inits);
}

// What the warp knows of is offered to the tensor memory accesses of others; what others have offered and the
// warp knows of is usable by its own.
void fence_before(Warp& w, const Code&, u32) {
  join(w.clocks.tensor, w.clocks.seen);
  w.advance_clock();
}
void fence_after(Warp& w, const Code&, u32) { join(w.tensor_ready, w.clocks.tensor); }

void nothing(Warp&, const Code&, u32) {}

}  // namespace

// Within a CTA barriers order initialisations anyway.
Exec fence(const Form& form, Code&) { return form.has("cta") ? nothing : fence_inits; }
Exec fence_mbarrier_init(const Form&, Code&) { return fence_inits; }
// Global memory has no clocks, so a fence for it alone orders nothing here.
Exec fence_proxy_async(const Form& form, Code&) {
  return form.has("global") ? nothing : fence_async;
}
Exec fence_proxy_acquire(const Form&, Code&) { return acquire_async; }

Exec tcgen05_fence(const Form& form, Code&) {
  return form.has("fence::before_thread_sync") ? fence_before : fence_after;
}

}  // namespace jax_fp4::sim

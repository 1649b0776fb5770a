// st.async and red.async (PTX ISA 9.7.9.12 and 9.7.13.8): stores and reductions to shared memory of
// the cluster that happen some time later and are counted in bytes by an mbarrier of the same CTA.
#include "sim/ops/atomic.h"
#include "sim/ops/bulk.h"
#include "sim/ops/memory_forms.h"

namespace jax_fp4::sim {
namespace {

class SharedStore : public AsyncOperation {
 public:
  SharedStore(const Actor& actor, u64 destination, u64 barrier, const u8 (&data)[16], u32 bytes)
      : AsyncOperation(actor.warp, actor.code, actor.lane, Clock::slot),
        destination_(destination),
        barrier_(barrier),
        bytes_(bytes) {
    generic = true;  // the PTX ISA has only bulk copies in the asynchronous proxy
    std::memcpy(data_, data, sizeof data_);
  }
  void perform() override {
    std::memcpy(access(Space::shared_cluster, destination_, bytes_, AccessKind::strong_write),
                data_, bytes_);
    signal(barrier_, 0, bytes_);
  }
  bool uses(const Cta& cta) const override {
    return warp->cta->cluster == cta.cluster && rank_of(destination_) == cta.rank;
  }

 protected:
  u64 destination_, barrier_;
  u32 bytes_;
  u8 data_[16];
};

class SharedReduction : public SharedStore {
 public:
  using SharedStore::SharedStore;
  void perform() override {
    const Form& form = warp->launch->program->forms[code->form];
    u8* cell = access(Space::shared_cluster, destination_, bytes_, AccessKind::atomic);
    const u64 result = apply_atomic(static_cast<AtomicOp>(code->variant), form.type(0),
                                    get_bytes(cell, bytes_), get_bytes(data_, bytes_), 0);
    put_bytes(cell, result, bytes_);
    signal(barrier_, 0, bytes_);
  }
};

// Checked addresses of one lane: destination and mbarrier, which lie in the same CTA.
struct Places {
  u64 destination, barrier;
};
Places places_of(const Actor& actor, u32 bytes) {
  const Code& c = actor.code;
  const auto place = [&](u32 slot, int n) {
    u64 address = address_of(actor.warp, c, actor.lane, slot, n);
    if (c.space == Space::generic && resolve_generic(address) != Space::shared_cluster)
      actor.fault(FaultKind::argument, "the address is not in the shared memory of the cluster");
    return address;
  };
  const Places places{place(c.src[0], 0), place(c.src[c.counts[0] != 0 ? 1 : 2], 1)};
  require_aligned(actor, "the destination", places.destination, bytes);
  if (rank_of(places.destination) != rank_of(places.barrier)) {
    actor.fault(FaultKind::argument,
                "the destination lies in CTA " + std::to_string(rank_of(places.destination)) +
                    " of the cluster and the mbarrier in CTA " +
                    std::to_string(rank_of(places.barrier)) + "; they must be in the same one");
  }
  return places;
}

void store_lanes(Warp& w, const Code& c, u32 mask) {
  const Program& program = *w.launch->program;
  const u32 bytes = static_cast<u32>(bits_of_type(program.forms[c.form].type(0))) / 8;
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const Places places = places_of(Actor{w, c, lane}, bytes * c.counts[0]);
    u8 data[16] = {};
    for (u32 k = 0; k < c.counts[0]; ++k) {
      const u32 slot = program.slots[c.vectors[0] + k];
      put_bytes(data + bytes * k, bytes == 8 ? w.in64(slot)[lane] : w.in(slot)[lane], bytes);
    }
    forget(w, Space::shared_cluster, places.destination, bytes * c.counts[0]);
    w.launch->issue(std::make_unique<SharedStore>(Actor{w, c, lane}, places.destination,
                                                  places.barrier, data, bytes * c.counts[0]));
  }
}

void reduce_lanes(Warp& w, const Code& c, u32 mask) {
  const u32 bytes = static_cast<u32>(bits_of_type(w.launch->program->forms[c.form].type(0))) / 8;
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const Places places = places_of(Actor{w, c, lane}, bytes);
    u8 data[16] = {};
    put_bytes(data, bytes == 8 ? w.in64(c.src[1])[lane] : w.in(c.src[1])[lane], bytes);
    w.launch->issue(std::make_unique<SharedReduction>(Actor{w, c, lane}, places.destination,
                                                      places.barrier, data, bytes));
  }
}

}  // namespace

Exec st_async(const Form& form, Code& code) {
  code.space = form.has("shared::cluster") ? Space::shared_cluster : Space::generic;
  const int vector = vector_of(form);
  const bool fits = vector * bits_of_type(form.type(0)) <= 128;
  return fits && code.counts[0] == vector ? store_lanes : nullptr;
}
Exec red_async(const Form& form, Code& code) {
  code.space = form.has("shared::cluster") ? Space::shared_cluster : Space::generic;
  code.variant = static_cast<u16>(atomic_op_of(form));
  return reduce_lanes;
}

}  // namespace jax_fp4::sim

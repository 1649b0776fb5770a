// Bulk copies of consecutive bytes (PTX ISA 9.7.9.25.4).
#include "sim/ops/atomic.h"
#include "sim/ops/bulk.h"
#include "sim/ops/lanes.h"

namespace jax_fp4::sim {
namespace {

// Code::variant; the AtomicOp of a reduction from kOpShift on
constexpr u16 kMulticast = 1, kMask = 2, kReduces = 4;
constexpr int kOpShift = 8;
constexpr u32 kUnit = 16;  // of addresses and sizes

AtomicOp op_of(const Code& c) { return static_cast<AtomicOp>(c.variant >> kOpShift); }
Type type_of(const AsyncOperation& operation) {
  return operation.warp->launch->program->forms[operation.code->form].types[0];
}

// What all of them take: two addresses and a size.
struct Range {
  u64 destination, source;
  u32 bytes;
};
Range read_range(const Actor& actor) {
  Warp& w = actor.warp;
  const Code& c = actor.code;
  const Range range{address_of(w, c, actor.lane, c.src[0], 0),
                    address_of(w, c, actor.lane, c.src[1], 1), w.in(c.src[2])[actor.lane]};
  require_aligned(actor, "the destination", range.destination, kUnit);
  require_aligned(actor, "the source", range.source, kUnit);
  if (range.bytes % kUnit != 0) {
    actor.fault(FaultKind::argument,
                "the size is " + std::to_string(range.bytes) + "; it is a multiple of 16 bytes");
  }
  return range;
}

// ---- Into shared memory

// From global memory, or from shared memory of the issuing CTA; `from` says which.
class LinearLoad final : public BulkLoad {
 public:
  LinearLoad(const Actor& actor, Space from, u64 source, u64 destination, u64 barrier, u32 bytes)
      : BulkLoad(actor, destination, barrier, bytes), from_(from), source_(source) {
    if (!(code->variant & kReduces)) forget(*warp, Space::shared_cluster, destination, bytes);
  }
  bool uses(const Cta& cta) const override {
    return BulkLoad::uses(cta) || (from_ == Space::shared && warp->cta == &cta);
  }

 private:
  std::vector<AsyncWork::Range> ranges() const override {
    if (from_ == Space::shared) return {};
    return {{source_, bytes_}};
  }
  void copy() override {
    const bool reduces = code->variant & kReduces;
    const u8* from = access(from_, source_, bytes_, AccessKind::read);
    u8* to = access(Space::shared_cluster, destination_, bytes_,
                    reduces ? AccessKind::atomic : AccessKind::write);
    if (reduces) {
      reduce_elements(op_of(*code), type_of(*this), to, from, bytes_);
    } else {
      std::memcpy(to, from, bytes_);
    }
  }

  Space from_;
  u64 source_;
};

void load_lanes(Warp& w, const Code& c, u32 mask) {
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const Actor actor{w, c, lane};
    const Range range = read_range(actor);
    if (range.bytes == 0) continue;
    const u64 barrier = address_of(w, c, lane, c.src[3], 2);
    require_aligned(actor, "the mbarrier", barrier, 8);
    const u32 own = w.cta->rank;
    if (c.space == Space::shared && rank_of(range.destination) != own)
      actor.fault(FaultKind::argument, "a .shared::cta destination is in memory of another CTA");
    u32 ctas = 1u << rank_of(range.destination);
    if (c.variant & kMulticast) {
      ctas = check_cta_mask(actor, w.in(c.src[4])[lane]);
    } else if (rank_of(barrier) != rank_of(range.destination)) {
      actor.fault(FaultKind::argument,
                  "the mbarrier is in CTA " + std::to_string(rank_of(barrier)) +
                      " and the destination in CTA " + std::to_string(rank_of(range.destination)));
    }
    for (bool first = true; ctas != 0; ctas &= ctas - 1, first = false) {
      const u32 rank = static_cast<u32>(std::countr_zero(ctas));
      auto load = std::make_unique<LinearLoad>(actor, Space::global, range.source,
                                               in_cta(range.destination, rank),
                                               in_cta(barrier, rank), range.bytes);
      load->repeated = !first;
      w.launch->issue(std::move(load));
    }
  }
}

// From the CTA's own shared memory to that of another one.
void exchange_lanes(Warp& w, const Code& c, u32 mask) {
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const Actor actor{w, c, lane};
    const Range range = read_range(actor);
    if (range.bytes == 0) continue;
    const u64 barrier = address_of(w, c, lane, c.src[3], 2);
    require_aligned(actor, "the mbarrier", barrier, 8);
    if (rank_of(range.destination) == w.cta->rank) {
      actor.fault(FaultKind::argument,
                  "the destination is in the CTA's own memory; it must be in another CTA's");
    }
    if (rank_of(barrier) != rank_of(range.destination))
      actor.fault(FaultKind::argument, "the mbarrier is not in the CTA of the destination");
    w.launch->issue(std::make_unique<LinearLoad>(actor, Space::shared, range.source,
                                                 range.destination, barrier, range.bytes));
  }
}

// ---- Out of shared memory

class LinearStore final : public BulkStore {
 public:
  LinearStore(const Actor& actor, const Range& range, u32 byte_mask)
      : BulkStore(actor, range.source), range_(range), byte_mask_(byte_mask) {
    if (!(code->variant & kReduces))
      each_run(
          [&](u32 at, u32 bytes) { forget(*warp, Space::global, range_.destination + at, bytes); });
  }

 private:
  // Calls f(offset, bytes) for what the mask lets through.
  template <class F>
  void each_run(F f) const {
    if (byte_mask_ == 0xFFFF) {
      f(0, range_.bytes);
      return;
    }
    for (u32 at = 0; at < range_.bytes; ++at)
      if (byte_mask_ >> at % kUnit & 1) f(at, 1);
  }
  std::vector<AsyncWork::Range> ranges() const override {
    std::vector<AsyncWork::Range> ranges;
    each_run([&](u32 at, u32 bytes) { ranges.push_back({range_.destination + at, bytes}); });
    return ranges;
  }
  void read() override {
    data_.resize(range_.bytes);
    each_run([&](u32 at, u32 bytes) {
      std::memcpy(data_.data() + at, access(Space::shared, source_ + at, bytes, AccessKind::read),
                  bytes);
    });
  }
  void write() override {
    const bool reduces = code->variant & kReduces;
    each_run([&](u32 at, u32 bytes) {
      u8* to = access(Space::global, range_.destination + at, bytes,
                      reduces ? AccessKind::atomic : AccessKind::write);
      if (reduces) {
        reduce_elements(op_of(*code), type_of(*this), to, data_.data() + at, bytes);
      } else {
        std::memcpy(to, data_.data() + at, bytes);
      }
    });
  }

  const Range range_;
  const u32 byte_mask_;
  std::vector<u8> data_;
};

void store_lanes(Warp& w, const Code& c, u32 mask) {
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const Actor actor{w, c, lane};
    // The mask is the last operand.
    const u32 slot = c.src[4] != kNoSlot ? c.src[4] : c.src[3];
    const u32 byte_mask = c.variant & kMask ? w.in(slot)[lane] & 0xFFFF : 0xFFFF;
    const Range range = read_range(actor);
    if (range.bytes > 0) w.launch->issue(std::make_unique<LinearStore>(actor, range, byte_mask));
  }
}

// A hint; the range must exist all the same.
void prefetch_lanes(Warp& w, const Code& c, u32 mask) {
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const Actor actor{w, c, lane};
    const u64 source = address_of(w, c, lane, c.src[0], 0);
    const u32 bytes = w.in(c.src[1])[lane];
    require_aligned(actor, "the source", source, kUnit);
    const Buffer* buffer = w.launch->global->find(source);
    if (bytes % kUnit != 0 || !buffer || source - buffer->base + bytes > buffer->bytes) {
      actor.fault(FaultKind::argument, "a prefetch of " + std::to_string(bytes) +
                                           " bytes: a multiple of 16 inside one buffer expected");
    }
  }
}

// Whether the cache policy is given where the modifier asks for it.
bool hint_fits(const Form& form, const Code& code, int source) {
  return form.has("L2::cache_hint") == (code.src[source] != kNoSlot);
}

u16 reduction(const Form& form) {
  return static_cast<u16>(kReduces | static_cast<u16>(atomic_op_of(form)) << kOpShift);
}

}  // namespace

Exec cp_bulk_load(const Form& form, Code& code) {
  code.space = form.has("shared::cluster") ? Space::shared_cluster : Space::shared;
  code.variant = form.has("multicast::cluster") ? kMulticast : 0;
  return hint_fits(form, code, code.variant ? 5 : 4) ? load_lanes : nullptr;
}
Exec cp_bulk_exchange(const Form&, Code&) { return exchange_lanes; }
Exec cp_bulk_store(const Form& form, Code& code) {
  code.variant = form.has("cp_mask") ? kMask : 0;
  return code.variant || hint_fits(form, code, 3) ? store_lanes : nullptr;
}
Exec cp_bulk_exchange_reduce(const Form& form, Code& code) {
  code.variant = reduction(form);
  return exchange_lanes;
}
Exec cp_bulk_reduce(const Form& form, Code& code) {
  code.variant = reduction(form);
  return hint_fits(form, code, 3) ? store_lanes : nullptr;
}
Exec cp_bulk_prefetch(const Form& form, Code& code) {
  return hint_fits(form, code, 2) ? prefetch_lanes : nullptr;
}

}  // namespace jax_fp4::sim

// Cluster launch control (PTX ISA 9.7.13.17, 9.7.13.18): a running cluster takes over one that has not
// been launched yet.
//
// The response (opaque for programs): a mark with the answer in bit 0, then the first CTA's index.
#include "sim/ops/bulk.h"
#include "sim/ops/lanes.h"

namespace jax_fp4::sim {
namespace {

constexpr u32 kResponseBytes = 16;
constexpr u32 kResponseMark = 0x51C1'0DE0;

// Code::variant of try_cancel: the response goes to all CTAs of the cluster.
constexpr u16 kAll = 1;

class CancelRequest final : public AsyncOperation {
 public:
  CancelRequest(const Actor& actor, u64 destination, u64 barrier, u32 ctas)
      : AsyncOperation(actor.warp, actor.code, actor.lane, Clock::slot),
        destination_(destination),
        barrier_(barrier),
        ctas_(ctas) {
    // As the PTX ISA's example has it: those who have read an answer fence before the next one is asked for.
    fences_reads = warp->launch->spec.checks.strict;
    for (u32 rest = ctas_; rest != 0; rest &= rest - 1) {
      forget(*warp, Space::shared_cluster, in_cta(destination_, rank_of_first(rest)),
             kResponseBytes);
    }
  }
  AsyncWork work() const override {
    AsyncWork work;
    work.engine = AsyncWork::Engine::launch_control;
    return work;
  }
  void perform() override {
    u32 response[4] = {kResponseMark, 0, 0, 0};
    u32 first_cta[3];
    if (warp->launch->take_cluster(first_cta)) {
      response[0] |= 1;
      std::copy(first_cta, first_cta + 3, response + 1);
    }
    for (u32 rest = ctas_; rest != 0; rest &= rest - 1) {
      const u32 rank = rank_of_first(rest);
      u8* to = access(Space::shared_cluster, in_cta(destination_, rank), kResponseBytes,
                      AccessKind::write);
      std::memcpy(to, response, kResponseBytes);
      signal(in_cta(barrier_, rank), 0, kResponseBytes);
    }
  }
  bool uses(const Cta& cta) const override {
    return warp->cta->cluster == cta.cluster && (ctas_ >> cta.rank & 1);
  }

 private:
  static u32 rank_of_first(u32 mask) { return static_cast<u32>(std::countr_zero(mask)); }

  u64 destination_, barrier_;
  u32 ctas_;  // ranks
};

void request(Warp& w, const Code& c, u32 mask) {
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const Actor actor{w, c, lane};
    if (w.cta->cancel_refused) {
      actor.fault(
          FaultKind::argument,
          "this CTA has seen a request fail: no cluster is left, and it must not ask again");
    }
    u64 destination = address_of(w, c, lane, c.src[0], 0);
    u64 barrier = address_of(w, c, lane, c.src[1], 1);
    for (u64* address : {&destination, &barrier}) {
      if (c.space == Space::generic && resolve_generic(*address) != Space::shared_cluster)
        actor.fault(FaultKind::argument, "a generic address that is not of shared memory");
      if (rank_of(*address) != w.cta->rank)
        actor.fault(FaultKind::argument, "an address in memory of another CTA");
    }
    require_aligned(actor, "the response", destination, kResponseBytes);
    require_aligned(actor, "the mbarrier", barrier, 8);
    const u32 all = (1u << w.cta->cluster->ctas.size()) - 1;
    w.launch->issue(std::make_unique<CancelRequest>(actor, destination, barrier,
                                                    c.variant & kAll ? all : 1u << w.cta->rank));
  }
}

struct Response {
  bool canceled;
  u32 first_cta[3];
  bool asked = true;  // false: 16 bytes of zeros (assumption S34)
};
Response read_response(Warp& w, const Code& c, int lane) {
  const u64 low = w.in64(c.src[0])[lane], high = w.in64(c.src[0] + 2)[lane];
  if (low == 0 && high == 0) return {false, {}, false};
  const u32 mark = static_cast<u32>(low);
  if ((mark & ~1u) != kResponseMark)
    w.fault(c, lane, FaultKind::argument, "these 16 bytes are no response of try_cancel");
  return {(mark & 1) != 0,
          {static_cast<u32>(low >> 32), static_cast<u32>(high), static_cast<u32>(high >> 32)}};
}

void is_canceled(Warp& w, const Code& c, u32 mask) {
  u32 canceled = 0;
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    const Response response = read_response(w, c, lane);
    if (response.canceled) {
      canceled |= 1u << lane;
    } else if (response.asked) {
      w.cta->cancel_refused = true;
    }
  }
  w.set_predicate(c.dst[0], mask, canceled);
}

u32 first_cta(Warp& w, const Code& c, int lane, int dimension) {
  const Response response = read_response(w, c, lane);
  if (!response.canceled)
    w.fault(c, lane, FaultKind::argument, "the request failed: there is no first CTA");
  return response.first_cta[dimension];
}

// One dimension, in Code::variant.
void first_cta_dimension(Warp& w, const Code& c, u32 mask) {
  const Out<u32> d(w, c.dst[0]);
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    d.set(lane, first_cta(w, c, lane, c.variant));
  }
}

// All three; the fourth element is unspecified, and stays as it was.
void first_cta_vector(Warp& w, const Code& c, u32 mask) {
  const u32* slots = w.launch->program->slots.data() + c.vectors[0];
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    for (int d = 0; d < 3; ++d) w.out(slots[d])[lane] = first_cta(w, c, lane, d);
  }
}

}  // namespace

Exec clc_try_cancel(const Form& form, Code& code) {
  code.space = form.has("shared::cta") ? Space::shared : Space::generic;
  code.variant = form.has("multicast::cluster::all") ? kAll : 0;
  return request;
}
Exec clc_is_canceled(const Form&, Code&) { return is_canceled; }
Exec clc_first_cta(const Form& form, Code& code) {
  code.variant = form.has("get_first_ctaid::y") ? 1 : form.has("get_first_ctaid::z") ? 2 : 0;
  return first_cta_dimension;
}
Exec clc_first_cta_vector(const Form&, Code& code) {
  return code.counts[0] == 4 ? first_cta_vector : nullptr;
}

}  // namespace jax_fp4::sim

// One lane's access to memory, with every check that belongs to it.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "sim/machine/async.h"
#include "sim/machine/chain.h"

namespace jax_fp4::sim {
namespace {

bool reads(AccessKind kind) {
  return kind != AccessKind::write && kind != AccessKind::strong_write;
}
bool writes(AccessKind kind) { return kind != AccessKind::read && kind != AccessKind::strong_read; }
bool strong(AccessKind kind) { return kind != AccessKind::read && kind != AccessKind::write; }

std::string hex(u64 value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", value);
  return text;
}

std::string describe(AccessKind kind, u32 bytes, std::string_view space, u64 address) {
  return std::string(kind == AccessKind::atomic ? "atomic access to "
                     : writes(kind)             ? "write of "
                                                : "read of ") +
         std::to_string(bytes) + " bytes at " + std::string(space) + " address " + hex(address);
}

struct Target {
  const Actor& actor;
  AccessKind kind;
  u32 bytes;
  u64 address;  // as the program gave it

  [[noreturn]] void fail(FaultKind fault, std::string_view space, const std::string& why) const {
    actor.fault(fault, describe(kind, bytes, space, address) + " " + why);
  }
  void align(std::string_view space) const {
    if (!actor.operation && (address & (bytes - 1)) != 0)
      fail(FaultKind::misaligned, space, "is not aligned to " + std::to_string(bytes) + " bytes");
  }
  // `written`: one flag for each byte of the access, or null.
  void initialise(u8* written, std::string_view space) const {
    if (!written) return;
    if (reads(kind) && actor.warp.launch->spec.checks.uninitialized) {
      if (const void* unset = std::memchr(written, 0, bytes)) {
        fail(FaultKind::uninitialized_memory, space,
             "reads byte " + std::to_string(static_cast<const u8*>(unset) - written) +
                 " of it, which nothing has written");
      }
    }
    if (writes(kind)) std::memset(written, 1, bytes);
  }
};

u8* global_access(const Target& t) {
  t.align("global");
  Buffer* buffer = t.actor.warp.launch->global->find(t.address);
  if (!buffer || t.address - buffer->base + t.bytes > buffer->bytes) {
    std::string why = "is outside every buffer";
    if (const Buffer* near = t.actor.warp.launch->global->nearest(t.address)) {
      const i64 distance = static_cast<i64>(t.address - near->base);
      why += "; the nearest is '" + near->name + "' (" + std::to_string(near->bytes) +
             " bytes), and this is its byte " + std::to_string(distance);
    }
    t.fail(FaultKind::out_of_bounds, "global", why);
  }
  const u64 offset = t.address - buffer->base;
  if (GlobalOrder* order = t.actor.warp.launch->order)
    order->access(t.actor, t.address, t.bytes, writes(t.kind));
  if (writes(t.kind) && !buffer->writable)
    t.fail(FaultKind::read_only, "global", "changes '" + buffer->name + "', which is read only");
  t.initialise(buffer->written.empty() ? nullptr : buffer->written.data() + offset, "global");
  return buffer->data + offset;
}

// "warp 3 of cluster rank 1" or "an asynchronous operation".
std::string agent_name(const Launch& launch, u32 agent) {
  if (launch.spec.checks.strict && agent >= launch.first_alone())
    return "a lane alone of " + agent_name(launch, agent - launch.first_alone());
  const u32 all = launch.warps_of_cluster();
  const u32 ctas = static_cast<u32>(launch.spec.cluster.count());
  if (agent >= all) return "an asynchronous operation";
  const u32 warps = all / ctas;
  return "warp " + std::to_string(agent % warps) +
         (ctas > 1 ? " of cluster rank " + std::to_string(agent / warps) : "");
}

u8* shared_access(const Target& t, bool cluster, const void* value) {
  t.align("shared");
  Cta* owner = t.actor.warp.cta;
  const u32 rank = static_cast<u32>(t.address >> kRankShift);
  if (rank != owner->rank || t.address >> 32 != 0) {
    if (rank >= owner->cluster->ctas.size() || t.address >> 32 != 0) {
      t.fail(FaultKind::out_of_bounds, "shared",
             "names rank " + std::to_string(rank) + " of a cluster of " +
                 std::to_string(owner->cluster->ctas.size()));
    }
    if (!cluster) {
      t.fail(FaultKind::out_of_bounds, "shared",
             "belongs to CTA " + std::to_string(rank) +
                 " of the cluster; only .shared::cluster and generic addresses reach it");
    }
    owner = owner->cluster->ctas[rank].get();
    if (owner->exited == owner->threads)
      t.fail(FaultKind::out_of_bounds, "shared", "belongs to a CTA that has exited");
  }
  const u64 offset = (t.address & kSharedOffsetMask) - kSharedReserved;
  if ((t.address & kSharedOffsetMask) < kSharedReserved ||
      offset + t.bytes > owner->shared.size()) {
    t.fail(FaultKind::out_of_bounds, "shared",
           "is outside the CTA's " + std::to_string(owner->shared.size()) +
               " bytes, which start at " + hex(kSharedReserved));
  }
  t.initialise(owner->shared_written.data() + offset, "shared");
  if (owner->lanes && owner == t.actor.warp.cta && !t.actor.operation && !strong(t.kind) &&
      t.actor.lane >= 0) {
    const LaneOrder::Conflict conflict =
        owner->lanes->access(offset, t.bytes, writes(t.kind), static_cast<u32>(t.actor.lane),
                             t.actor.warp.lane_access(t.actor.code));
    if (conflict.found) {
      const Launch& launch = *t.actor.warp.launch;
      t.fail(FaultKind::race, "shared",
             std::string("races with an earlier ") +
                 (conflict.earlier_is_write ? "write" : "read") +
                 " by another lane of the warp at " +
                 launch.kernel_line(launch.program->code[conflict.pc].line) +
                 ": no bar.warp.sync orders the two");
    }
  }
  if (owner->races) {
    const Accessor by = t.actor.accessor(strong(t.kind));
    const RaceConflict conflict = writes(t.kind) ? owner->races->write(offset, t.bytes, by)
                                                 : owner->races->read(offset, t.bytes, by);
    if (conflict.found) {
      const bool same = value && conflict.earlier_is_write && !conflict.unfenced &&
                        std::memcmp(owner->shared.data() + offset, value, t.bytes) == 0;
      report_conflict(t.actor, conflict, same, describe(t.kind, t.bytes, "shared", t.address));
    }
  }
  return owner->shared.data() + offset;
}

u8* local_access(const Target& t) {
  t.align("local");
  Warp& warp = t.actor.warp;
  const u64 size = warp.launch->program->local_bytes;
  const u64 offset = t.address - kLocalBase;
  if (t.address < kLocalBase || offset + t.bytes > size)
    t.fail(FaultKind::out_of_bounds, "local",
           "is outside the lane's " + std::to_string(size) + " bytes");
  const u64 place = size * static_cast<u64>(t.actor.lane) + offset;
  t.initialise(warp.local_written.data() + place, "local");
  return warp.local.data() + place;
}

u8* parameter_access(const Target& t) {
  t.align("param");
  std::vector<u8>& bytes = t.actor.warp.launch->spec.parameters;
  if (writes(t.kind)) t.fail(FaultKind::read_only, "param", "changes a kernel parameter");
  if (t.address + t.bytes > bytes.size() || t.address > bytes.size())
    t.fail(FaultKind::out_of_bounds, "param",
           "is outside the " + std::to_string(bytes.size()) + " bytes of parameters");
  return bytes.data() + t.address;
}

u8* constant_access(const Target& t) {
  t.align("const");
  Buffer* bank = t.actor.warp.launch->constant;
  if (writes(t.kind)) t.fail(FaultKind::read_only, "const", "changes constant memory");
  if (!bank || t.address + t.bytes > bank->bytes || t.address > bank->bytes)
    t.fail(FaultKind::out_of_bounds, "const", "is outside the module's constants");
  return bank->data + t.address;
}

}  // namespace

void Actor::fault(FaultKind kind, const std::string& message) const {
  warp.fault(code, lane, kind,
             operation ? message + "\n  by the asynchronous operation that was issued" : message);
}

Accessor Actor::accessor(bool atomic) const {
  if (operation) return operation->accessor(atomic);
  const u32 time = warp.clocks.seen[warp.agent];
  return {warp.agent, make_epoch(warp.agent, time), warp.clocks, warp.launch->pc_of(code), atomic,
          false};
}

void report_conflict(const Actor& actor, const RaceConflict& conflict, bool same,
                     const std::string& access) {
  Launch& launch = *actor.warp.launch;
  const u32 line = launch.program->code[conflict.pc].line;
  const auto text = [&] {
    const std::string earlier = std::string(conflict.earlier_is_write ? "write" : "read") + " by " +
                                agent_name(launch, agent_of(conflict.earlier)) + " at " +
                                launch.kernel_line(line);
    return conflict.unfenced
               ? access + " through the asynchronous proxy follows a " + earlier +
                     " through the generic proxy: no fence.proxy.async lies between the two"
               : access + " races with an earlier " + earlier +
                     (same ? "; both store the same value" : "") + ": no barrier orders the two";
  };
  if (same) {
    launch.warn(line, actor.code.line,
                [&] { return text() + "\n  " + actor.warp.where(actor.code, actor.lane); });
  } else {
    actor.fault(conflict.unfenced ? FaultKind::proxy : FaultKind::race, text());
  }
}

Space resolve_generic(u64& address) {
  const auto in = [&](u64 window) { return address - window < kWindowBytes; };
  if (in(kSharedWindow)) {
    address -= kSharedWindow;
    return Space::shared_cluster;
  }
  if (in(kLocalWindow)) {
    address -= kLocalWindow;
    return Space::local;
  }
  if (in(kParamWindow)) {
    address -= kParamWindow;
    return Space::param;
  }
  if (in(kConstantWindow)) {
    address -= kConstantWindow;
    return Space::constant;
  }
  return Space::global;
}

u8* access(const Actor& actor, Space space, u64 address, u32 bytes, AccessKind kind,
           const void* value) {
  if (space == Space::generic) space = resolve_generic(address);
  Launch& launch = *actor.warp.launch;
  (writes(kind) ? launch.bytes_written : launch.bytes_read)[static_cast<int>(space)] += bytes;
  if (kind == AccessKind::atomic) launch.bytes_read[static_cast<int>(space)] += bytes;
  const Target target{actor, kind, bytes, address};
  switch (space) {
    case Space::shared: return shared_access(target, false, value);
    case Space::shared_cluster: return shared_access(target, true, value);
    case Space::local: return local_access(target);
    case Space::param: return parameter_access(target);
    case Space::constant: return constant_access(target);
    default: return global_access(target);
  }
}

void synchronize_through(Warp& warp, u64 address, bool acquire, bool release) {
  if (!warp.launch->spec.checks.races) return;
  Clocks& clocks = warp.cta->cluster->released[address];
  if (acquire) join(warp.clocks, clocks);
  if (release) {
    join(clocks, warp.clocks);
    warp.advance_clock();
  }
}

}  // namespace jax_fp4::sim

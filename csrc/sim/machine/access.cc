// One lane's access to memory, with every check that belongs to it.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "sim/machine/core.h"

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
  Warp& warp;
  const Code& c;
  int lane;
  AccessKind kind;
  u32 bytes;
  u64 address;  // as the program gave it

  [[noreturn]] void fail(FaultKind fault, std::string_view space, const std::string& why) const {
    warp.fault(c, lane, fault, describe(kind, bytes, space, address) + " " + why);
  }
  void align(std::string_view space) const {
    if ((address & (bytes - 1)) != 0)
      fail(FaultKind::misaligned, space, "is not aligned to " + std::to_string(bytes) + " bytes");
  }
  // `written`: one flag for each byte of the access, or null.
  void initialise(u8* written, std::string_view space) const {
    if (!written) return;
    if (reads(kind) && warp.launch->spec.checks.uninitialized) {
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
  Buffer* buffer = t.warp.launch->global->find(t.address);
  if (!buffer || t.address - buffer->base + t.bytes > buffer->bytes) {
    std::string why = "is outside every buffer";
    if (const Buffer* near = t.warp.launch->global->nearest(t.address)) {
      const i64 distance = static_cast<i64>(t.address - near->base);
      why += "; the nearest is '" + near->name + "' (" + std::to_string(near->bytes) +
             " bytes), and this is its byte " + std::to_string(distance);
    }
    t.fail(FaultKind::out_of_bounds, "global", why);
  }
  const u64 offset = t.address - buffer->base;
  if (writes(t.kind) && !buffer->writable)
    t.fail(FaultKind::read_only, "global", "changes '" + buffer->name + "', which is read only");
  t.initialise(buffer->written.empty() ? nullptr : buffer->written.data() + offset, "global");
  return buffer->data + offset;
}

void report_race(const Target& t, const Cta& owner, const RaceConflict& conflict, bool same) {
  Warp& warp = t.warp;
  const Program& program = *warp.launch->program;
  const u32 agent = agent_of(conflict.earlier);
  const u32 warps = static_cast<u32>(owner.warps.size());
  const u32 line = program.code[conflict.pc].line;
  const auto text = [&] {
    return describe(t.kind, t.bytes, "shared", t.address) + " races with an earlier " +
           (conflict.earlier_is_write ? "write" : "read") + " by warp " +
           std::to_string(agent % warps) +
           (owner.cluster->ctas.size() > 1 ? " of cluster rank " + std::to_string(agent / warps)
                                           : "") +
           " at " + warp.launch->kernel_line(line) + (same ? "; both store the same value" : "") +
           ": no barrier orders the two";
  };
  if (same) {
    warp.launch->warn(line, t.c.line, [&] { return text() + "\n  " + warp.where(t.c, t.lane); });
  } else {
    warp.fault(t.c, t.lane, FaultKind::race, text());
  }
}

u8* shared_access(const Target& t, bool cluster, const void* value) {
  t.align("shared");
  Warp& warp = t.warp;
  Cta* owner = warp.cta;
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
  if (owner->races) {
    const u32 pc = static_cast<u32>(&t.c - warp.launch->program->code.data());
    RaceConflict conflict =
        writes(t.kind)
            ? owner->races->write(offset, t.bytes, warp.agent, warp.clock, pc, strong(t.kind))
            : owner->races->read(offset, t.bytes, warp.agent, warp.clock, pc, strong(t.kind));
    if (conflict.found) {
      const bool same = value && conflict.earlier_is_write &&
                        std::memcmp(owner->shared.data() + offset, value, t.bytes) == 0;
      report_race(t, *owner, conflict, same);
    }
  }
  return owner->shared.data() + offset;
}

u8* local_access(const Target& t) {
  t.align("local");
  Warp& warp = t.warp;
  const u64 size = warp.launch->program->local_bytes;
  const u64 offset = t.address - kLocalBase;
  if (t.address < kLocalBase || offset + t.bytes > size)
    t.fail(FaultKind::out_of_bounds, "local",
           "is outside the lane's " + std::to_string(size) + " bytes");
  const u64 place = size * static_cast<u64>(t.lane) + offset;
  t.initialise(warp.local_written.data() + place, "local");
  return warp.local.data() + place;
}

u8* parameter_access(const Target& t) {
  t.align("param");
  std::vector<u8>& bytes = t.warp.launch->spec.parameters;
  if (writes(t.kind)) t.fail(FaultKind::read_only, "param", "changes a kernel parameter");
  if (t.address + t.bytes > bytes.size() || t.address > bytes.size())
    t.fail(FaultKind::out_of_bounds, "param",
           "is outside the " + std::to_string(bytes.size()) + " bytes of parameters");
  return bytes.data() + t.address;
}

u8* constant_access(const Target& t) {
  t.align("const");
  Buffer* bank = t.warp.launch->constant;
  if (writes(t.kind)) t.fail(FaultKind::read_only, "const", "changes constant memory");
  if (!bank || t.address + t.bytes > bank->bytes || t.address > bank->bytes)
    t.fail(FaultKind::out_of_bounds, "const", "is outside the module's constants");
  return bank->data + t.address;
}

}  // namespace

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

u8* access(Warp& warp, const Code& c, int lane, Space space, u64 address, u32 bytes,
           AccessKind kind, const void* value) {
  if (space == Space::generic) space = resolve_generic(address);
  Launch& launch = *warp.launch;
  (writes(kind) ? launch.bytes_written : launch.bytes_read)[static_cast<int>(space)] += bytes;
  if (kind == AccessKind::atomic) launch.bytes_read[static_cast<int>(space)] += bytes;
  const Target target{warp, c, lane, kind, bytes, address};
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
  VectorClock& clock = warp.cta->cluster->released[address];
  if (acquire) join(warp.clock, clock);
  if (release) {
    join(clock, warp.clock);
    warp.advance_clock();
  }
}

}  // namespace jax_fp4::sim

// Races on shared memory: the two access rules of FastTrack.
#include "sim/checks/race.h"

namespace jax_fp4::sim {
namespace {

bool both_atomic(u32 pc, bool atomic) { return atomic && (pc & kAtomicAccess) != 0; }

}  // namespace

RaceConflict RaceChecker::read(u64 offset, u32 bytes, u32 agent, const VectorClock& now, u32 pc,
                               bool atomic) {
  RaceConflict conflict;
  const Epoch epoch = make_epoch(agent, now[agent]);
  const u32 stored_pc = pc | (atomic ? kAtomicAccess : 0);
  for (u64 i = offset; i < offset + bytes; ++i) {
    ByteHistory& byte = history_[i];
    if (!happened_before(byte.write, now) && !both_atomic(byte.write_pc, atomic))
      conflict = {true, true, byte.write, byte.write_pc & ~kAtomicAccess};
    if (byte.read == kSharedReads) {
      ReadSet& set = sets_[byte.read_pc];
      std::size_t k = 0;
      while (k < set.reads.size() && agent_of(set.reads[k]) != agent) ++k;
      if (k == set.reads.size()) {
        set.reads.push_back(epoch);
        set.pcs.push_back(stored_pc);
      } else {
        set.reads[k] = epoch;
        set.pcs[k] = stored_pc;
      }
    } else if (byte.read == 0 || agent_of(byte.read) == agent ||
               happened_before(byte.read, now)) {
      byte.read = epoch;
      byte.read_pc = stored_pc;
    } else {
      sets_.push_back({{byte.read, epoch}, {byte.read_pc, stored_pc}});
      byte.read = kSharedReads;
      byte.read_pc = static_cast<u32>(sets_.size() - 1);
    }
  }
  return conflict;
}

RaceConflict RaceChecker::write(u64 offset, u32 bytes, u32 agent, const VectorClock& now, u32 pc,
                                bool atomic) {
  RaceConflict conflict;
  const Epoch epoch = make_epoch(agent, now[agent]);
  for (u64 i = offset; i < offset + bytes; ++i) {
    ByteHistory& byte = history_[i];
    if (!happened_before(byte.write, now) && !both_atomic(byte.write_pc, atomic))
      conflict = {true, true, byte.write, byte.write_pc & ~kAtomicAccess};
    if (byte.read == kSharedReads) {
      const ReadSet& set = sets_[byte.read_pc];
      for (std::size_t k = 0; k < set.reads.size(); ++k)
        if (!happened_before(set.reads[k], now) && !both_atomic(set.pcs[k], atomic))
          conflict = {true, false, set.reads[k], set.pcs[k] & ~kAtomicAccess};
      if (byte.read_pc + 1 == sets_.size()) sets_.pop_back();
    } else if (!happened_before(byte.read, now) && !both_atomic(byte.read_pc, atomic)) {
      conflict = {true, false, byte.read, byte.read_pc & ~kAtomicAccess};
    }
    byte = {epoch, pc | (atomic ? kAtomicAccess : 0), 0, 0};
  }
  return conflict;
}

}  // namespace jax_fp4::sim

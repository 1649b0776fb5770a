// Races on shared memory: the two access rules of FastTrack.
#include "sim/checks/race.h"

namespace jax_fp4::sim {
namespace {

bool both_atomic(u32 pc, bool atomic) { return atomic && (pc & kAtomicAccess) != 0; }

}  // namespace

// Calls f for the history of every word of the access, or of every byte where that is not possible.
template <class F>
void RaceChecker::each_record(u64 offset, u32 bytes, F f) {
  for (u64 at = offset; at < offset + bytes;) {
    AccessHistory& word = words_[at / 4];
    const bool whole = at % 4 == 0 && at + 4 <= offset + bytes;
    if (whole && word.write != kSplit) {
      f(word);
      at += 4;
      continue;
    }
    if (word.write != kSplit) {
      std::array<AccessHistory, 4>& bytes_of_word = split_[at / 4];
      bytes_of_word.fill(word);
      if (word.read == kSharedReads) {
        // Each byte gets a set of its own.
        for (std::size_t k = 1; k < 4; ++k) {
          sets_.push_back(ReadSet(sets_[word.read_pc]));
          bytes_of_word[k].read_pc = static_cast<u32>(sets_.size() - 1);
        }
      }
      word.write = kSplit;
    }
    std::array<AccessHistory, 4>& parts = split_[at / 4];
    do f(parts[at % 4]);
    while (++at % 4 != 0 && at < offset + bytes);
  }
}

void RaceChecker::read_record(AccessHistory& record, const Access& access, RaceConflict& conflict) {
  const u32 stored_pc = access.pc | (access.atomic ? kAtomicAccess : 0);
  if (!happened_before(record.write, access.now) && !both_atomic(record.write_pc, access.atomic))
    conflict = {true, true, record.write, record.write_pc & ~kAtomicAccess};
  if (record.read == kSharedReads) {
    ReadSet& set = sets_[record.read_pc];
    set.reads[access.agent] = access.epoch;
    set.pcs[access.agent] = stored_pc;
  } else if (record.read == 0 || agent_of(record.read) == access.agent ||
             happened_before(record.read, access.now)) {
    record.read = access.epoch;
    record.read_pc = stored_pc;
  } else {
    if (free_sets_.empty()) {
      free_sets_.push_back(static_cast<u32>(sets_.size()));
      sets_.emplace_back();
    }
    const u32 number = free_sets_.back();
    free_sets_.pop_back();
    ReadSet& set = sets_[number];
    set.reads.assign(access.now.size(), 0);
    set.pcs.assign(access.now.size(), 0);
    set.reads[agent_of(record.read)] = record.read;
    set.pcs[agent_of(record.read)] = record.read_pc;
    set.reads[access.agent] = access.epoch;
    set.pcs[access.agent] = stored_pc;
    record.read = kSharedReads;
    record.read_pc = number;
  }
}

void RaceChecker::write_record(AccessHistory& record, const Access& access,
                               RaceConflict& conflict) {
  if (!happened_before(record.write, access.now) && !both_atomic(record.write_pc, access.atomic))
    conflict = {true, true, record.write, record.write_pc & ~kAtomicAccess};
  if (record.read == kSharedReads) {
    const ReadSet& set = sets_[record.read_pc];
    for (std::size_t k = 0; k < set.reads.size(); ++k)
      if (!happened_before(set.reads[k], access.now) && !both_atomic(set.pcs[k], access.atomic))
        conflict = {true, false, set.reads[k], set.pcs[k] & ~kAtomicAccess};
    free_sets_.push_back(record.read_pc);
  } else if (!happened_before(record.read, access.now) &&
             !both_atomic(record.read_pc, access.atomic)) {
    conflict = {true, false, record.read, record.read_pc & ~kAtomicAccess};
  }
  record = {access.epoch, access.pc | (access.atomic ? kAtomicAccess : 0), 0, 0};
}

RaceConflict RaceChecker::read(u64 offset, u32 bytes, u32 agent, const VectorClock& now, u32 pc,
                               bool atomic) {
  RaceConflict conflict;
  const Access access{agent, make_epoch(agent, now[agent]), now, pc, atomic};
  each_record(offset, bytes, [&](AccessHistory& r) { read_record(r, access, conflict); });
  return conflict;
}

RaceConflict RaceChecker::write(u64 offset, u32 bytes, u32 agent, const VectorClock& now, u32 pc,
                                bool atomic) {
  RaceConflict conflict;
  const Access access{agent, make_epoch(agent, now[agent]), now, pc, atomic};
  each_record(offset, bytes, [&](AccessHistory& r) { write_record(r, access, conflict); });
  return conflict;
}

}  // namespace jax_fp4::sim

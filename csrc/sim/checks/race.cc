// Races on shared memory: the two access rules of FastTrack.
#include "sim/checks/race.h"

namespace jax_fp4::sim {
namespace {

bool both_atomic(u32 pc, const Accessor& by) { return by.atomic && (pc & kAtomicAccess) != 0; }

u32 stored_pc(const Accessor& by) {
  return by.pc | (by.atomic ? kAtomicAccess : 0) | (by.async ? kAsyncAccess : 0);
}

// Checks an access against the last write of the place.
void against_write(Epoch write, u32 pc, const Accessor& by, RaceConflict& conflict) {
  if (both_atomic(pc, by)) return;
  const bool ordered = happened_before(write, by.clocks.seen);
  // A generic write before an asynchronous access needs a fence between them; the completion of an
  // asynchronous operation is one itself (PTX ISA 9.7.9.25.4).
  const bool fenced =
      !by.async || (pc & kAsyncAccess) != 0 || happened_before(write, by.clocks.fenced);
  if (!ordered || !fenced) conflict = {true, true, ordered, write, pc & ~kAccessFlags};
}

// Checks a write against a read of the place.
void against_read(Epoch read, u32 pc, const Accessor& by, RaceConflict& conflict) {
  if (!happened_before(read, by.clocks.seen) && !both_atomic(pc, by))
    conflict = {true, false, false, read, pc & ~kAccessFlags};
}

}  // namespace

// Calls f for the history of every word of the access, or of every byte where that is not possible.
// Bulk copies reach thousands of words with one history: what f made of it once holds for all of them
// (but sets of reads, which a record has for itself).
template <class F>
void RaceChecker::each_record(u64 offset, u32 bytes, F f) {
  AccessHistory before{.write = kSplit}, after{.read = kSharedReads};
  for (u64 at = offset; at < offset + bytes;) {
    AccessHistory& word = words_[at / 4];
    const bool whole = at % 4 == 0 && at + 4 <= offset + bytes;
    if (whole && word.write != kSplit) {
      if (after.read != kSharedReads && word == before) {
        word = after;
      } else {
        before = word;
        f(word);
        after = word;
      }
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

void RaceChecker::read_record(AccessHistory& record, const Accessor& by, RaceConflict& conflict) {
  against_write(record.write, record.write_pc, by, conflict);
  if (record.read == kSharedReads) {
    ReadSet& set = sets_[record.read_pc];
    set.reads[by.agent] = by.epoch;
    set.pcs[by.agent] = stored_pc(by);
  } else if (record.read == 0 || agent_of(record.read) == by.agent ||
             happened_before(record.read, by.clocks.seen)) {
    record.read = by.epoch;
    record.read_pc = stored_pc(by);
  } else {
    if (free_sets_.empty()) {
      free_sets_.push_back(static_cast<u32>(sets_.size()));
      sets_.emplace_back();
    }
    const u32 number = free_sets_.back();
    free_sets_.pop_back();
    ReadSet& set = sets_[number];
    set.reads.assign(by.clocks.seen.size(), 0);
    set.pcs.assign(by.clocks.seen.size(), 0);
    set.reads[agent_of(record.read)] = record.read;
    set.pcs[agent_of(record.read)] = record.read_pc;
    set.reads[by.agent] = by.epoch;
    set.pcs[by.agent] = stored_pc(by);
    record.read = kSharedReads;
    record.read_pc = number;
  }
}

void RaceChecker::write_record(AccessHistory& record, const Accessor& by, RaceConflict& conflict) {
  against_write(record.write, record.write_pc, by, conflict);
  if (record.read == kSharedReads) {
    const ReadSet& set = sets_[record.read_pc];
    for (std::size_t k = 0; k < set.reads.size(); ++k)
      against_read(set.reads[k], set.pcs[k], by, conflict);
    free_sets_.push_back(record.read_pc);
  } else {
    against_read(record.read, record.read_pc, by, conflict);
  }
  record = {by.epoch, stored_pc(by), 0, 0};
}

RaceConflict RaceChecker::read(u64 offset, u32 bytes, const Accessor& by) {
  RaceConflict conflict;
  each_record(offset, bytes, [&](AccessHistory& r) { read_record(r, by, conflict); });
  return conflict;
}

RaceConflict RaceChecker::write(u64 offset, u32 bytes, const Accessor& by) {
  RaceConflict conflict;
  each_record(offset, bytes, [&](AccessHistory& r) { write_record(r, by, conflict); });
  return conflict;
}

}  // namespace jax_fp4::sim

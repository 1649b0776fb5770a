// Races on shared memory: the two access rules of FastTrack.
#include "sim/checks/race.h"

#include <algorithm>
#include <bit>

namespace jax_fp4::sim {
namespace {

bool both_atomic(Access earlier, const Accessor& by) {
  return by.atomic && (pc_of(earlier) & kAtomicAccess) != 0;
}

// Checks an access against the last write of the place.
inline void against_write(Access write, const Accessor& by, RaceConflict& conflict) {
  if (both_atomic(write, by)) return;
  const Epoch epoch = epoch_of(write);
  const bool ordered = happened_before(epoch, by.clocks.seen);
  // A generic write before an asynchronous access needs a fence between them; the completion of an
  // asynchronous operation is one itself (PTX ISA 9.7.9.25.4).
  const bool fenced =
      !by.async || (pc_of(write) & kAsyncAccess) != 0 || happened_before(epoch, by.clocks.fenced);
  if (!ordered || !fenced) conflict = {true, true, ordered, epoch, pc_of(write) & ~kAccessFlags};
}

// Checks a write against a read of the place.
inline void against_read(Access read, const Accessor& by, RaceConflict& conflict) {
  if (both_atomic(read, by)) return;
  const Epoch epoch = epoch_of(read);
  const bool ordered = happened_before(epoch, by.clocks.seen);
  const bool fenced = !by.fences_reads || (pc_of(read) & kAsyncAccess) != 0 ||
                      happened_before(epoch, by.clocks.fenced);
  if (!ordered || !fenced) conflict = {true, false, ordered, epoch, pc_of(read) & ~kAccessFlags};
}

bool is_set(Access reads) { return epoch_of(reads) == kSharedReads; }

// Sets that nothing names any more are looked for when there are this many, or twice what is left; histories when there
// are this many, or half as many as words, or twice what is left.
constexpr std::size_t kFewSets = 4096, kFewHistories = 1024;

}  // namespace

RaceChecker::RaceChecker(u64 bytes)
    : words_((bytes + 3) / 4, 0),
      histories_(1),
      next_history_sweep_(std::max(kFewHistories, words_.size() / 2)) {}

RaceChecker::Pass RaceChecker::start(const Accessor& by, bool stops) {
  // Between passes nothing but words names a history, and nothing but histories a set.
  if (free_histories_.empty() && histories_.size() >= next_history_sweep_) find_free_histories();
  if (free_sets_.empty() && sets_.size() >= next_set_sweep_) find_free_sets();
  const u32 pc = by.pc | (by.atomic ? kAtomicAccess : 0) | (by.async ? kAsyncAccess : 0);
  return {by, make_access(by.epoch, pc), stops, kNoNumber, {}, {}};
}

void RaceChecker::find_free_histories() {
  std::vector<u8> named(histories_.size(), 0);
  named[0] = 1;
  free_histories_.clear();
  for (const Number word : words_)
    if ((word & kSplit) == 0) named[word] = 1;
  for (const auto& parts : split_)
    for (const Number part : parts) named[part] = 1;
  for (Number n = 0; n < histories_.size(); ++n) {
    if (named[n]) continue;
    histories_[n] = {};
    free_histories_.push_back(n);
  }
  std::fill(std::begin(latest_), std::end(latest_), Latest{});
  next_history_sweep_ = std::max(
      {kFewHistories, words_.size() / 2, 2 * (histories_.size() - free_histories_.size())});
}

void RaceChecker::find_free_sets() {
  find_free_histories();
  std::vector<bool> named(sets_.size(), false);
  for (const AccessHistory& h : histories_)
    if (is_set(h.read)) named[pc_of(h.read)] = true;
  for (u32 n = 0; n < sets_.size(); ++n)
    if (!named[n]) free_sets_.push_back(n);
  next_set_sweep_ = std::max(kFewSets, 2 * (sets_.size() - free_sets_.size()));
}

// A set for which no history has a name.
u32 RaceChecker::new_set() {
  if (free_sets_.empty()) {
    sets_.emplace_back();
    return static_cast<u32>(sets_.size() - 1);
  }
  const u32 number = free_sets_.back();
  free_sets_.pop_back();
  return number;
}

RaceChecker::Number RaceChecker::number_of(const AccessHistory& history) {
  constexpr u64 kSpread = 0x9E37'79B9'7F4A'7C15;  // 2^64 divided by the golden ratio
  Latest& latest =
      latest_[((history.write * kSpread ^ history.read) * kSpread) >> (64 - kLatestBits)];
  if (latest.history == history) return latest.number;
  Number number;
  if (free_histories_.empty()) {
    number = static_cast<Number>(histories_.size());
    histories_.push_back(history);
  } else {
    number = free_histories_.back();
    free_histories_.pop_back();
    histories_[number] = history;
  }
  latest = {history, number};
  return number;
}

// The reads of a place after one more.
Access RaceChecker::reads_with(Access reads, const Accessor& by, Access own) {
  const bool shared = is_set(reads);
  if (!shared && (reads == 0 || agent_of(epoch_of(reads)) == by.agent ||
                  happened_before(epoch_of(reads), by.clocks.seen)))
    return own;
  if (shared && sets_[pc_of(reads)][by.agent] == own) return reads;
  const u32 number = new_set();
  ReadSet& set = sets_[number];
  if (shared) {
    set = sets_[pc_of(reads)];
  } else {
    set.assign(by.clocks.seen.size(), 0);
    set[agent_of(epoch_of(reads))] = reads;
  }
  set[by.agent] = own;
  return make_access(kSharedReads, number);
}

// A history that the pass has not met, or does not remember.
template <bool kWrites>
bool RaceChecker::meet(Number& place, Pass& pass) {
  if ((place & kSplit) != 0) return touch_parts<kWrites>(place, pass);
  const AccessHistory history = histories_[place];
  RaceConflict conflict;
  against_write(history.write, pass.by, conflict);
  if constexpr (kWrites) {
    if (is_set(history.read)) {
      for (const Access read : sets_[pc_of(history.read)]) against_read(read, pass.by, conflict);
    } else {
      against_read(history.read, pass.by, conflict);
    }
  }
  if (conflict.found) {
    if (pass.stops) return false;
    pass.conflict = conflict;
  }
  Number after = pass.written;
  if constexpr (!kWrites) {
    after = number_of({history.write, reads_with(history.read, pass.by, pass.own)});
  } else if (after == kNoNumber) {
    after = pass.written = number_of({pass.own, 0});
  }
  // Conflicts are looked at each time: the last one is reported.
  if (!conflict.found) pass.memory_of(place) = {place, after};
  place = after;
  return true;
}

std::array<RaceChecker::Number, 4>& RaceChecker::split(Number& word) {
  if ((word & kSplit) != 0) return split_[word & ~kSplit];
  if (free_splits_.empty()) {
    free_splits_.push_back(static_cast<u32>(split_.size()));
    split_.emplace_back();
  }
  const u32 number = free_splits_.back();
  free_splits_.pop_back();
  split_[number].fill(word);
  word = number | kSplit;
  return split_[number];
}

// All bytes of a word that has been split.
template <bool kWrites>
bool RaceChecker::touch_parts(Number& word, Pass& pass) {
  const u32 number = word & ~kSplit;
  for (Number& part : split_[number])
    if (!touch<kWrites>(part, pass)) return false;
  if constexpr (kWrites) {
    word = split_[number][0];
    split_[number].fill(0);
    free_splits_.push_back(number);
  }
  return true;
}

template <bool kWrites>
bool RaceChecker::touch_range(u64 offset, u32 bytes, Pass& pass) {
  for (u64 at = offset; at < offset + bytes;) {
    Number& word = words_[at / 4];
    if (at % 4 == 0 && at + 4 <= offset + bytes) {
      if (!touch<kWrites>(word, pass)) return false;
      at += 4;
      continue;
    }
    std::array<Number, 4>& parts = split(word);
    do {
      if (!touch<kWrites>(parts[at % 4], pass)) return false;
    } while (++at % 4 != 0 && at < offset + bytes);
  }
  return true;
}

// Words one behind the other, which mostly have one history.
template <bool kWrites>
bool RaceChecker::touch_run(Number* words, u32 count, Pass& pass) {
  const Number first = words[0];
  u32 other = 0;
  for (u32 k = 0; k < count; ++k) other |= words[k] ^ first;
  if (!touch<kWrites>(words[0], pass)) return false;
  if (other == 0 && pass.memory_of(first).met == first) {
    std::fill(words, words + count, words[0]);
    return true;
  }
  for (u32 k = 1; k < count; ++k)
    if (!touch<kWrites>(words[k], pass)) return false;
  return true;
}

// Lanes that access whole words, kWords each.
template <bool kWrites, u32 kWords>
bool RaceChecker::touch_words(const u32* offsets, u32 mask, Pass& pass) {
  Memory latest;  // apart from the others: mostly it serves for all words
  for (u32 rest = mask; rest != 0; rest &= rest - 1) {
    Number* const words = &words_[offsets[std::countr_zero(rest)] / 4];
    for (u32 k = 0; k < kWords; ++k) {
      const Number met = words[k];
      if (met == latest.met) {
        words[k] = latest.after;
        continue;
      }
      if (!touch<kWrites>(words[k], pass)) return false;
      latest = pass.memory_of(met);
    }
  }
  return true;
}

// Lanes that access 1 or 2 bytes: neighbours that fill a word together count as one access to it.
template <bool kWrites, u32 kBytes>
bool RaceChecker::touch_parts_of_words(const u32* offsets, u32 mask, Pass& pass) {
  constexpr u32 kTogether = 4 / kBytes;
  constexpr u32 kTogetherMask = (1u << kTogether) - 1;
  for (u32 first = 0; first < 32; first += kTogether) {
    const u32 active = mask >> first & kTogetherMask;
    if (active == 0) continue;
    const u32* at = offsets + first;
    bool whole = active == kTogetherMask && at[0] % 4 == 0;
    for (u32 k = 1; k < kTogether; ++k) whole = whole && at[k] == at[0] + k * kBytes;
    if (whole) {
      if (!touch<kWrites>(words_[at[0] / 4], pass)) return false;
      continue;
    }
    for (u32 k = 0; k < kTogether; ++k)
      if ((active >> k & 1) && !touch_range<kWrites>(at[k], kBytes, pass)) return false;
  }
  return true;
}

template <bool kWrites>
bool RaceChecker::touch_lanes(const u32* offsets, u32 mask, u32 bytes, const Accessor& by) {
  Pass pass = start(by, true);
  switch (bytes) {
    case 1: return touch_parts_of_words<kWrites, 1>(offsets, mask, pass);
    case 2: return touch_parts_of_words<kWrites, 2>(offsets, mask, pass);
    case 4: return touch_words<kWrites, 1>(offsets, mask, pass);
    case 8: return touch_words<kWrites, 2>(offsets, mask, pass);
    case 16: return touch_words<kWrites, 4>(offsets, mask, pass);
    default: return false;
  }
}

RaceConflict RaceChecker::read(u64 offset, u32 bytes, const Accessor& by) {
  Pass pass = start(by, false);
  touch_range<false>(offset, bytes, pass);
  return pass.conflict;
}

RaceConflict RaceChecker::write(u64 offset, u32 bytes, const Accessor& by) {
  Pass pass = start(by, false);
  touch_range<true>(offset, bytes, pass);
  return pass.conflict;
}

bool RaceChecker::read_lanes(const u32* offsets, u32 mask, u32 bytes, const Accessor& by) {
  return touch_lanes<false>(offsets, mask, bytes, by);
}

bool RaceChecker::write_lanes(const u32* offsets, u32 mask, u32 bytes, const Accessor& by) {
  return touch_lanes<true>(offsets, mask, bytes, by);
}

bool RaceChecker::read_run(u64 offset, u32 bytes, const Accessor& by) {
  Pass pass = start(by, true);
  return touch_run<false>(&words_[offset / 4], bytes / 4, pass);
}

bool RaceChecker::write_run(u64 offset, u32 bytes, const Accessor& by) {
  Pass pass = start(by, true);
  return touch_run<true>(&words_[offset / 4], bytes / 4, pass);
}

}  // namespace jax_fp4::sim

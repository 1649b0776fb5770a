// The cycle model: when each instruction issues, when each asynchronous operation is done, and the order that follows.
//
// The machine executes as always; only the schedule is another one. Instead of drawing whose turn it is, the
// event with the earliest time comes next, ties in the order in which they arose: the same launch always gives the
// same times. An event is a warp's next instruction, the start of an operation of a tensor pipe, or the moment at
// which an operation is performed.
//
//   a warp      issues in order, one instruction a cycle, when the registers that it reads are ready, the ones that
//               it writes are not awaited, and its sub-partition (warp % 4) and the unit are free
//   memory      shared: one wavefront a cycle and SM. Global: the sectors through memory_model.h
//   a copy      of bulk: starts a few cycles after the one before in its SM; then as memory; then its signal
//   a pipe      operations of one warp start in order. An MMA takes as long as its products or its operands' way from
//               shared memory, whichever is longer, wavefronts of warps meanwhile added to the latter, and has the
//               tensor cores of its CTAs for itself. tcgen05.cp goes beside the MMA before it; the MMA behind it waits for it
//   waiting     who waits at a barrier goes on some cycles after it completes; arrivals themselves take no time,
//               those in another CTA neither. A try_wait says no when its time limit has passed, but not to a
//               loop around it
//   a CTA       has a place on an SM: the CTAs of a cluster on neighbouring ones. Grids follow each other
//
// Constants and their sources: constants.h. What is not modelled: docs/simulator.md.
#pragma once

#include <deque>
#include <memory>
#include <queue>
#include <string>
#include <vector>

#include "sim/costs/instruction_cost.h"
#include "sim/costs/memory_access.h"
#include "sim/costs/memory_model.h"

namespace jax_fp4::sim::costs {

// Something that took time: of a warp, or of an engine of a CTA.
struct Interval {
  enum class Track : u8 { warp, wait, tensor_mma, tensor_copy, copy_in, copy_out };
  Track track;
  u32 cta;   // number in the order of their start
  u32 warp;  // that did or asked for it
  u32 line;  // of the PTX text
  double begin, end;
  std::string_view name;
};

struct CtaPlace {
  u32 index[3];
  u32 sm;
  double begin = 0, end = 0;
};

class Timing {
 public:
  explicit Timing(Launch& launch);

  // Of the scheduler (machine/launch.cc).
  bool can_step() const { return !events_.empty(); }
  void step();
  void wake(Warp& warp);
  u32 sms() const { return sms_count_; }
  u32 capacity() const { return groups_ * ctas_per_sm_; }  // clusters
  void place(Cluster& cluster);
  void release(const Cluster& cluster);
  double now() const { return now_; }

  // Of an instruction (costs.h). When it may issue, at the earliest.
  double earliest(Warp& warp, const Code& code, u32 pc, const InstructionCost& cost);
  void postpone(Warp& warp, double time);
  void issued(Warp& warp, const Code& code, u32 pc, u32 mask, const InstructionCost& cost,
              const MemoryAccess& access, bool retried);
  // `again`: the same copy as the one before it, by another lane of the instruction.
  void operation(AsyncOperation& operation, AsyncWork work, bool again);

  // Results.
  struct Summary {
    double cycles = 0, seconds = 0;
    u32 sms = 0, used_sms = 0, ctas_per_sm = 0;
    double tensor_busy = 0;         // of the SMs used, over the whole time
    double tensor_busy_steady = 0;  // from an SM's first MMA to its last
    double issue_busy = 0;          // of the sub-partitions of the SMs used
    u64 l2_read = 0, l2_written = 0, dram_read = 0, dram_written = 0;
    std::map<std::string, double> waits;  // cycles of warps, by what they waited for
  };
  Summary summary() const;
  const std::vector<Interval>& intervals() const { return intervals_; }
  const std::vector<CtaPlace>& ctas() const { return ctas_; }

 private:
  struct SubPartition {
    double issue = 0, tensor_memory = 0;  // free from then on
    double units[kUnits] = {};
    double busy = 0;
  };
  struct Sm {
    SubPartition parts[kSubPartitions];
    double wavefronts = 0, copies = 0, tensor = 0;  // free from then on
    double tensor_begin = 0;                        // of the latest MMA
    double shared_meanwhile = 0;                    // cycles of shared memory for others since then
    double first_mma = -1, last_mma = 0, tensor_busy = 0;
    bool used = false;
  };
  struct Pipe {
    std::deque<std::pair<AsyncOperation*, AsyncWork>> waiting;
    bool starting = false;  // an event says so
    double copied = 0;      // tcgen05.cp done
    double done = 0;        // everything done
  };
  struct WarpTime {
    double next = 0;
    std::vector<double> ready;  // registers by block, then predicates
    double tensor_loads = 0, tensor_stores = 0;
    double copies = 0;  // cp.async, all; and by committed group
    std::vector<double> copy_groups;
    double waiting_since = -1;
    std::string_view waits_for;
    u32 waiting_line = 0;
    u64 expires = 0;  // number of the event at which it stops waiting; 0: none
    u32 gave_up = 0;  // the try_wait that has said no, and when
    double gave_up_at = -1e9;
    double started = 0;
    Pipe pipe;
    u32 cta = 0;
    Warp* warp = nullptr;
  };
  struct Event {
    enum class Kind : u8 { warp, start, perform, expire } kind;
    double time;
    u64 number;
    Warp* warp;
    AsyncOperation* operation;
    u32 waiter = 0;  // expire: the number of a warp that may be gone
    bool operator>(const Event& other) const {
      return time != other.time ? time > other.time : number > other.number;
    }
  };

  WarpTime& of(const Warp& warp) { return *warps_[warp.number]; }
  Sm& sm_of(const Warp& warp) { return sms_[warp.cta->sm]; }
  SubPartition& part_of(const Warp& warp) { return sm_of(warp).parts[warp.id % kSubPartitions]; }
  void push(Event::Kind kind, double time, Warp* warp, AsyncOperation* operation);
  void run(Warp& warp);
  void perform(AsyncOperation& operation);
  void expire(const Event& event);
  void start_pipe(Warp& warp);
  void advance_pipe(Warp& warp);
  double multiply(Warp& warp, const AsyncWork& work);
  double tensor_rate(const AsyncWork& work) const;
  double memory_ready(Warp& warp, const InstructionCost& cost, const MemoryAccess& access);
  double patience(const Warp& warp, const Code& code) const;
  void note(Interval::Track track, u32 cta, const Warp& warp, u32 line, double begin, double end,
            std::string_view name);
  void finish(Warp& warp);

  Launch& launch_;
  const ChipConstants& chip_;
  u32 sms_count_, groups_, ctas_per_sm_;
  MemoryModel memory_;
  std::vector<Sm> sms_;
  std::vector<u32> used_;  // places of each group of SMs
  std::vector<std::unique_ptr<WarpTime>> warps_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  u64 event_number_ = 1;
  double now_ = 0, last_ = 0;
  std::map<std::string, double> waits_;
  std::vector<Interval> intervals_;
  std::vector<CtaPlace> ctas_;
  std::vector<AsyncWork::Range> ranges_;
  double copy_read_ = 0, copy_done_ = 0;  // of the latest copy out of shared memory
};

// Calls visit(name, value) for each result.
template <class Visit>
void for_each_result(const Timing::Summary& s, Visit&& visit) {
  visit("cycles", s.cycles);
  visit("seconds", s.seconds);
  visit("sms", s.sms);
  visit("used_sms", s.used_sms);
  visit("ctas_per_sm", s.ctas_per_sm);
  visit("tensor_busy", s.tensor_busy);
  visit("tensor_busy_steady", s.tensor_busy_steady);
  visit("issue_busy", s.issue_busy);
  visit("l2_read", s.l2_read);
  visit("l2_written", s.l2_written);
  visit("dram_read", s.dram_read);
  visit("dram_written", s.dram_written);
  visit("waits", s.waits);
}

}  // namespace jax_fp4::sim::costs

// The events of the cycle model.
#include "sim/costs/timing.h"

#include <algorithm>
#include <bit>

#include "sim/chip.h"
#include "sim/costs/constants.h"

namespace jax_fp4::sim::costs {
namespace {

// Accesses that an SM's load and store unit may have in its queue [assume].
constexpr double kMemoryQueueCycles = 64;
constexpr double kWriteQueueCycles = 256;

u32 least(u32 a, u32 b) { return a < b ? a : b; }

}  // namespace

Timing::Timing(Launch& launch)
    : launch_(launch),
      chip_(*constants_of(static_cast<int>(launch.spec.chip))),
      sms_count_(launch.spec.costs.sms != 0 ? launch.spec.costs.sms : chip_.sms),
      memory_(chip_, sms_count_),
      sms_(sms_count_) {
  const LaunchSpec& spec = launch.spec;
  const u32 cluster = static_cast<u32>(spec.cluster.count());
  groups_ = std::max(sms_count_ / cluster, 1u);
  if (groups_ * cluster > sms_count_) sms_.resize(cluster), memory_ = MemoryModel(chip_, cluster);
  const ChipLimits limits = limits_of(static_cast<int>(spec.chip));
  const u32 threads = static_cast<u32>(spec.block.count() + kLanes - 1) / kLanes * kLanes;
  ctas_per_sm_ = least(chip_.threads_per_sm / threads,
                       limits.shared_bytes / (launch.shared_bytes() + kSharedReserved));
  // A CTA has all of tensor memory here (assumption S40).
  if (launch.program->tensor_memory) ctas_per_sm_ = 1;
  if (spec.costs.ctas_per_sm != 0) ctas_per_sm_ = least(ctas_per_sm_, spec.costs.ctas_per_sm);
  ctas_per_sm_ = std::max(least(ctas_per_sm_, kCtasPerSm), 1u);
  used_.assign(groups_, 0);
}

// ---- Events

void Timing::push(Event::Kind kind, double time, Warp* warp, AsyncOperation* operation) {
  events_.push({kind, std::max(time, now_), event_number_++, warp, operation});
}

void Timing::step() {
  const Event event = events_.top();
  events_.pop();
  now_ = event.time;
  switch (event.kind) {
    case Event::Kind::warp: run(*event.warp); break;
    case Event::Kind::start: start_pipe(*event.warp); break;
    case Event::Kind::perform: perform(*event.operation); break;
    case Event::Kind::expire: expire(event); break;
  }
}

void Timing::run(Warp& warp) {
  WarpTime& time = of(warp);
  while (true) {
    launch_.instructions += warp.run(1);
    launch_.check_budget(warp);
    if (warp.finished) {
      warp.queued = false;
      finish(warp);
      launch_.retire();
      return;
    }
    if (!warp.ready()) break;
    // As long as nothing else comes before, it goes on.
    if (!events_.empty() && events_.top().time <= time.next) {
      push(Event::Kind::warp, time.next, &warp, nullptr);
      return;
    }
    now_ = std::max(now_, time.next);
  }
  warp.queued = false;
}

void Timing::wake(Warp& warp) {
  WarpTime& time = of(warp);
  time.next = std::max(time.next, now_ + (time.waiting_since >= 0 ? kBarrierLatency : 0));
  push(Event::Kind::warp, time.next, &warp, nullptr);
}

// A try_wait has waited long enough, unless what it waits for has come meanwhile.
void Timing::expire(const Event& event) {
  WarpTime* const time = warps_[event.waiter].get();
  if (!time || time->expires != event.number) return;
  for (Fragment& f : time->warp->fragments) {
    if (f.state != FragmentState::blocked || f.waits_for != kWaitsForMbarrier) continue;
    f.expired = true;
    time->gave_up = f.pc;
    time->gave_up_at = now_;
    time->warp->wake(f);
  }
}

// For how long a try_wait waits: its hint in nanoseconds says so, or the hardware.
double Timing::patience(const Warp& warp, const Code& code) const {
  if (code.src[2] == kNoSlot) return kTryWaitCycles;
  const int lane = std::countr_zero(warp.fragments[warp.current].mask);
  return warp.in(code.src[2])[lane] * 1e-9 * chip_.clock_hz;
}

void Timing::perform(AsyncOperation& operation) {
  for (std::size_t i = 0; i < launch_.pending.size(); ++i) {
    if (launch_.pending[i].get() != &operation) continue;
    launch_.perform(i);
    break;
  }
  last_ = std::max(last_, now_);
  launch_.retire();
}

// ---- CTAs

void Timing::place(Cluster& cluster) {
  const u32 group = static_cast<u32>(std::min_element(used_.begin(), used_.end()) - used_.begin());
  ++used_[group];
  const u32 size = static_cast<u32>(cluster.ctas.size());
  const double begin = now_ + kCtaLaunchCycles;
  for (const auto& cta : cluster.ctas) {
    cta->sm = group * size + cta->rank;
    sms_[cta->sm].used = true;
    const u32 number = static_cast<u32>(ctas_.size());
    ctas_.push_back({{cta->index[0], cta->index[1], cta->index[2]}, cta->sm, begin, begin});
    for (const auto& warp : cta->warps) {
      if (warps_.size() <= warp->number) warps_.resize(warp->number + 1);
      auto time = std::make_unique<WarpTime>();
      time->ready.assign(std::size_t{launch_.program->blocks} + launch_.program->predicates + 1, 0);
      time->next = time->started = begin;
      time->cta = number;
      time->warp = warp.get();
      warps_[warp->number] = std::move(time);
    }
  }
}

void Timing::release(const Cluster& cluster) {
  --used_[cluster.ctas[0]->sm / cluster.ctas.size()];
  for (const auto& cta : cluster.ctas)
    for (const auto& warp : cta->warps) warps_[warp->number].reset();
}

void Timing::finish(Warp& warp) {
  const WarpTime& time = of(warp);
  last_ = std::max(last_, now_);
  ctas_[time.cta].end = std::max(ctas_[time.cta].end, now_);
  note(Interval::Track::warp, time.cta, warp, 0, time.started, now_, "warp");
}

// ---- Instructions

double Timing::earliest(Warp& warp, const Code& code, u32 pc, const InstructionCost& cost) {
  WarpTime& time = of(warp);
  double at = time.next;
  if (cost.unit == Unit::none) return at;
  const Program& program = *launch_.program;
  const auto ready = [&](u32 slot) -> double {
    return time.ready[(slot & kPredicate) ? program.blocks + (slot & ~kPredicate) : slot];
  };
  const OperandSlots& operands = program.operands[pc];
  for (u32 k = operands.reads_begin; k < operands.reads_end; ++k)
    at = std::max(at, ready(program.operand_slots[k]));
  for (u32 k = operands.writes_begin; k < operands.writes_end; ++k)
    at = std::max(at, ready(program.operand_slots[k]));
  if (code.guard != kNoSlot) at = std::max(at, ready(code.guard | kPredicate));
  switch (cost.wait) {
    case InstructionCost::Wait::tensor_loads: at = std::max(at, time.tensor_loads); break;
    case InstructionCost::Wait::tensor_stores: at = std::max(at, time.tensor_stores); break;
    case InstructionCost::Wait::copies: at = std::max(at, time.copies); break;
    case InstructionCost::Wait::copy_groups: {
      const u64 keep = code.immediate;
      for (std::size_t i = 0; i + keep < time.copy_groups.size(); ++i)
        at = std::max(at, time.copy_groups[i]);
      break;
    }
    default: break;
  }
  const SubPartition& part = part_of(warp);
  at = std::max({at, part.issue, part.units[static_cast<int>(cost.unit)]});
  if (cost.unit == Unit::memory) {
    const Sm& sm = sm_of(warp);
    at = std::max({at, sm.wavefronts - kMemoryQueueCycles,
                   memory_.write_port(warp.cta->sm) - kWriteQueueCycles});
  }
  return at;
}

void Timing::postpone(Warp& warp, double time) { of(warp).next = time; }

// When the memory that an instruction loads has arrived.
double Timing::memory_ready(Warp& warp, const InstructionCost& cost, const MemoryAccess& access) {
  using Kind = MemoryAccess::Kind;
  Sm& sm = sm_of(warp);
  WarpTime& time = of(warp);
  if (cost.tensor != InstructionCost::Tensor::none) {
    SubPartition& part = part_of(warp);
    const double rate = kTensorMemoryBytesPerCycle / kSubPartitions;
    part.tensor_memory = std::max(now_, part.tensor_memory) + cost.tensor_bytes / rate;
    const double done = part.tensor_memory + kTensorMemoryLatency;
    double& last =
        cost.tensor == InstructionCost::Tensor::load ? time.tensor_loads : time.tensor_stores;
    last = std::max(last, done);
    return done;
  }
  if (access.kind == Kind::none) return now_ + cost.latency;
  const double wavefronts =
      std::max<double>(access.wavefronts.all, static_cast<double>((access.sectors.size() + 3) / 4));
  sm.wavefronts = std::max(now_, sm.wavefronts) + std::max(wavefronts, 1.0);
  sm.shared_meanwhile += std::max(wavefronts, 1.0);
  if (access.space != Space::global) return sm.wavefronts + kSharedLatency - 1;
  ranges_.clear();
  for (const u64 sector : access.sectors) ranges_.push_back({sector * kSectorBytes, kSectorBytes});
  double done = sm.wavefronts;
  if (access.kind != Kind::store) done = memory_.read(warp.cta->sm, sm.wavefronts, ranges_);
  if (access.kind == Kind::store || access.kind == Kind::atomic)
    memory_.write(warp.cta->sm, sm.wavefronts, ranges_);
  if (access.kind == Kind::copy) time.copies = std::max(time.copies, done);
  return done;
}

void Timing::issued(Warp& warp, const Code& code, u32 pc, u32 mask, const InstructionCost& cost,
                    const MemoryAccess& access, bool retried) {
  WarpTime& time = of(warp);
  const Fragment& f = warp.fragment();
  const auto begin_wait = [&] {
    if (time.waiting_since < 0) {
      time.waiting_since = now_;
      const bool loops = time.gave_up == pc && now_ <= time.gave_up_at + kTryAgainCycles;
      if (f.waits_for == kWaitsForMbarrier && !loops) {
        time.expires = event_number_++;
        events_.push({Event::Kind::expire, now_ + patience(warp, code), time.expires, nullptr,
                      nullptr, warp.number});
      }
    }
    time.waits_for = f.waits_for;
    time.waiting_line = code.line;
  };
  if (retried) {
    begin_wait();
    time.next = now_;
    return;
  }
  if (time.waiting_since >= 0) {
    const std::string_view what = time.waits_for;
    if (now_ > time.waiting_since) {
      waits_[std::string(what)] += now_ - time.waiting_since;
      note(Interval::Track::wait, time.cta, warp, time.waiting_line, time.waiting_since, now_,
           what);
    }
    time.waiting_since = -1;
    time.expires = 0;
  }
  const Program& program = *launch_.program;
  double done = now_;
  if (cost.unit == Unit::none) {
    // It is as ready as what it was made of.
    const OperandSlots& operands = program.operands[pc];
    for (u32 k = operands.reads_begin; k < operands.reads_end; ++k) {
      const u32 slot = program.operand_slots[k];
      done = std::max(
          done, time.ready[(slot & kPredicate) ? program.blocks + (slot & ~kPredicate) : slot]);
    }
    time.next = now_;
  } else {
    SubPartition& part = part_of(warp);
    double cycles = cost.cycles;
    if (cost.warp_mma_flop > 0) {
      const double rate = cost.warp_mma_bits == 4    ? chip_.warp_mma_4
                          : cost.warp_mma_bits == 8  ? chip_.warp_mma_8
                          : cost.warp_mma_bits == 16 ? chip_.warp_mma_16
                                                     : chip_.warp_mma_16 / 2;
      cycles = cost.warp_mma_flop / (rate / kSubPartitions);
      Sm& sm = sm_of(warp);
      if (sm.first_mma < 0) sm.first_mma = now_;
      sm.last_mma = now_ + cycles;
      sm.tensor_busy += cycles / kSubPartitions;
    }
    part.issue = now_ + cost.slots;
    part.busy += cost.slots;
    part.units[static_cast<int>(cost.unit)] = now_ + cycles;
    time.next = now_ + cost.slots;
    if (code.flow != Flow::next) time.next += kBranchLatency;
    if (mask != 0) {
      done = cost.unit == Unit::memory ? memory_ready(warp, cost, access) : now_ + cost.latency;
      if (cost.warp_mma_flop > 0) done += cycles;
    }
    // The last one to arrive does not block.
    if (cost.barrier && f.state == FragmentState::ready) time.next += kBarrierLatency;
    if (cost.commits_copies) time.copy_groups.push_back(time.copies);
  }
  const OperandSlots& operands = program.operands[pc];
  for (u32 k = operands.writes_begin; k < operands.writes_end; ++k) {
    const u32 slot = program.operand_slots[k];
    time.ready[(slot & kPredicate) ? program.blocks + (slot & ~kPredicate) : slot] = done;
  }
  if (f.state == FragmentState::blocked) begin_wait();
}

// ---- Asynchronous operations

void Timing::operation(AsyncOperation& operation, AsyncWork work, bool again) {
  using Engine = AsyncWork::Engine;
  Warp& warp = *operation.warp;
  WarpTime& time = of(warp);
  const u32 line = operation.code->line;
  switch (work.engine) {
    case Engine::copy_in: {
      // The issuing SM's engine asks; the data goes to the destination's SM.
      Sm& sm = sm_of(warp);
      const Cta& to = *warp.cta->cluster->ctas[static_cast<u32>(std::countr_zero(work.ctas))];
      const double begin = sm.copies = std::max(now_, sm.copies) + kBulkIssueCycles;
      const double done = memory_.read(to.sm, begin, work.global, work.repeated) + kBulkLatency;
      note(Interval::Track::copy_in, of(*to.warps[0]).cta, warp, line, begin, done, "copy in");
      push(Event::Kind::perform, done, &warp, &operation);
      return;
    }
    case Engine::copy_out: {
      if (again) {
        push(Event::Kind::perform, copy_read_, &warp, &operation);
        push(Event::Kind::perform, copy_done_, &warp, &operation);
        return;
      }
      Sm& sm = sm_of(warp);
      const double begin = sm.copies = std::max(now_, sm.copies) + kBulkIssueCycles;
      const double shared = static_cast<double>(work.shared_bytes) / kSharedBytesPerCycle;
      sm.shared_meanwhile += shared;
      const double done = memory_.write(warp.cta->sm, begin, work.global) + kBulkLatency;
      // Its source is read as fast as the port takes it.
      const double read = std::max(begin + shared + kSharedLatency,
                                   memory_.write_port(warp.cta->sm) + kSharedLatency);
      note(Interval::Track::copy_out, time.cta, warp, line, begin, done, "copy out");
      copy_read_ = read;
      copy_done_ = done;
      push(Event::Kind::perform, read, &warp, &operation);
      push(Event::Kind::perform, done, &warp, &operation);
      return;
    }
    case Engine::tensor_copy:
    case Engine::tensor_mma:
    case Engine::commit:
      time.pipe.waiting.emplace_back(&operation, std::move(work));
      advance_pipe(warp);
      return;
    case Engine::launch_control:
      push(Event::Kind::perform, now_ + kLaunchControlLatency, &warp, &operation);
      return;
    case Engine::signal:
      push(Event::Kind::perform, std::max(now_, time.copies) + kSignalLatency, &warp, &operation);
  }
}

// An event for the start of the pipe's next operation, where there is none yet.
void Timing::advance_pipe(Warp& warp) {
  Pipe& pipe = of(warp).pipe;
  if (pipe.starting || pipe.waiting.empty()) return;
  const AsyncWork& work = pipe.waiting.front().second;
  double time = now_ + (pipe.done > now_ ? 0 : kTensorIssueLatency);
  if (work.engine == AsyncWork::Engine::tensor_mma) {
    time = std::max(time, pipe.copied);
    for (const auto& cta : warp.cta->cluster->ctas)
      if (work.ctas >> cta->rank & 1) time = std::max(time, sms_[cta->sm].tensor);
  }
  pipe.starting = true;
  push(Event::Kind::start, time, &warp, nullptr);
}

double Timing::tensor_rate(const AsyncWork& work) const {
  if (work.element_bits <= 4) return chip_.tensor_4;
  if (work.element_bits <= 8) return chip_.tensor_8;
  return work.element_bits == 16 ? chip_.tensor_16 : chip_.tensor_32;
}

// When an MMA that starts now has ended, in all its CTAs.
double Timing::multiply(Warp& warp, const AsyncWork& work) {
  double cycles = work.occupied_flop / tensor_rate(work);
  const double operands = static_cast<double>(work.shared_bytes) / kSharedBytesPerCycle;
  for (const auto& cta : warp.cta->cluster->ctas) {
    if (!(work.ctas >> cta->rank & 1)) continue;
    const Sm& sm = sms_[cta->sm];
    // Who used shared memory while the MMA before this one ran has kept this one's operands waiting.
    const bool continues = now_ <= sm.tensor + kTensorIssueLatency;
    const double meanwhile = continues ? std::min(sm.shared_meanwhile, now_ - sm.tensor_begin) : 0;
    cycles = std::max(cycles, operands + meanwhile);
  }
  for (const auto& cta : warp.cta->cluster->ctas) {
    if (!(work.ctas >> cta->rank & 1)) continue;
    Sm& sm = sms_[cta->sm];
    sm.tensor_begin = now_;
    sm.shared_meanwhile = 0;
    sm.tensor = now_ + cycles;
    sm.tensor_busy += cycles;
    if (sm.first_mma < 0) sm.first_mma = now_;
    sm.last_mma = now_ + cycles;
  }
  return now_ + cycles;
}

void Timing::start_pipe(Warp& warp) {
  Pipe& pipe = of(warp).pipe;
  pipe.starting = false;
  const auto [operation, work] = std::move(pipe.waiting.front());
  pipe.waiting.pop_front();
  const u32 line = operation->code->line;
  const auto note_all = [&](Interval::Track track, double end, std::string_view name) {
    for (const auto& cta : warp.cta->cluster->ctas)
      if (work.ctas >> cta->rank & 1)
        note(track, of(*cta->warps[0]).cta, warp, line, now_, end, name);
  };
  double done = now_;
  switch (work.engine) {
    case AsyncWork::Engine::tensor_mma:
      // Another warp's MMA may have come between.
      for (const auto& cta : warp.cta->cluster->ctas) {
        if (!(work.ctas >> cta->rank & 1) || sms_[cta->sm].tensor <= now_) continue;
        pipe.waiting.emplace_front(operation, work);
        advance_pipe(warp);
        return;
      }
      done = multiply(warp, work);
      note_all(Interval::Track::tensor_mma, done, "mma");
      break;
    case AsyncWork::Engine::tensor_copy: {
      const double shared = static_cast<double>(work.shared_bytes) / kSharedBytesPerCycle;
      const double cycles =
          std::max(shared, static_cast<double>(work.tensor_bytes) / kTensorMemoryBytesPerCycle);
      done = pipe.copied = std::max(now_, pipe.copied) + cycles;
      for (const auto& cta : warp.cta->cluster->ctas)
        if (work.ctas >> cta->rank & 1) sms_[cta->sm].shared_meanwhile += shared;
      note_all(Interval::Track::tensor_copy, done, "tcgen05.cp");
      break;
    }
    default: done = std::max(now_, pipe.done) + kTensorLatency + kSignalLatency;
  }
  // Operations of a pipe are performed in their order, and a commit holds nobody back.
  const double performed = std::max(done, pipe.done);
  if (work.engine != AsyncWork::Engine::commit) pipe.done = performed;
  push(Event::Kind::perform, performed, &warp, operation);
  advance_pipe(warp);
}

// ---- Results

void Timing::note(Interval::Track track, u32 cta, const Warp& warp, u32 line, double begin,
                  double end, std::string_view name) {
  if (launch_.spec.costs.timeline)
    intervals_.push_back({track, cta, warp.id, line, begin, end, name});
}

Timing::Summary Timing::summary() const {
  Summary s;
  s.cycles = std::max(last_, memory_.idle_at());
  s.seconds = s.cycles / chip_.clock_hz;
  s.sms = sms_count_;
  s.ctas_per_sm = ctas_per_sm_;
  double busy = 0, steady = 0, steady_time = 0, issue = 0;
  for (const Sm& sm : sms_) {
    s.used_sms += sm.used;
    busy += sm.tensor_busy;
    for (const SubPartition& part : sm.parts) issue += part.busy;
    if (sm.first_mma < 0) continue;
    steady += sm.tensor_busy;
    steady_time += sm.last_mma - sm.first_mma;
  }
  if (s.cycles > 0 && s.used_sms > 0) {
    s.tensor_busy = busy / (s.cycles * s.used_sms);
    s.issue_busy = issue / (s.cycles * s.used_sms * kSubPartitions);
  }
  if (steady_time > 0) s.tensor_busy_steady = steady / steady_time;
  s.l2_read = memory_.l2_read;
  s.l2_written = memory_.l2_written;
  s.dram_read = memory_.dram_read;
  s.dram_written = memory_.dram_written;
  s.waits = waits_;
  return s;
}

}  // namespace jax_fp4::sim::costs

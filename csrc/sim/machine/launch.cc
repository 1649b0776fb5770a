// A launch from the first CTA to the last: residency, the seeded scheduler, the deadlock report.
#include <algorithm>
#include <bit>
#include <cstring>

#include "sim/costs/costs.h"
#include "sim/machine/async.h"
#include "sim/ptx/lexer.h"

namespace jax_fp4::sim {
namespace {

// A warp's turn is between 1 and this many instructions.
constexpr u64 kLongestTurn = 128;

void unpack(u64 linear, const Dim3& size, u32 (&index)[3]) {
  index[0] = static_cast<u32>(linear % size.x);
  index[1] = static_cast<u32>(linear / size.x % size.y);
  index[2] = static_cast<u32>(linear / size.x / size.y);
}

// Of 1024 turns of the scheduler, those that go to asynchronous operations while warps can run: a seed draws
// one. The last lets nearly every operation wait until no warp can go on.
constexpr u64 kEagerness[] = {768, 256, 32, 4};

}  // namespace

Launch::Launch() = default;
Launch::~Launch() = default;

u32 Launch::warps_of_cluster() const {
  return static_cast<u32>((spec.block.count() + kLanes - 1) / kLanes * spec.cluster.count());
}

u32 Launch::first_tensor_load() const { return 2 * warps_of_cluster() + kAsyncSlots; }

u32 Launch::first_alone() const {
  const u32 warps = warps_of_cluster();
  return (program->asynchronous ? first_tensor_load() : warps) +
         (program->tensor_memory ? 2 * warps : 0);
}

u32 Launch::agents() const {
  // The last one stands for the grids before this one.
  return first_alone() + (spec.checks.strict ? warps_of_cluster() : 0) + (before ? 1 : 0);
}

std::string_view name_of_fault(FaultKind kind) {
  constexpr std::string_view kNames[] = {"uninitialized-register",
                                         "uninitialized-memory",
                                         "out-of-bounds",
                                         "misaligned",
                                         "read-only",
                                         "divergence",
                                         "deadlock",
                                         "timeout",
                                         "race",
                                         "barrier",
                                         "trap",
                                         "call",
                                         "argument",
                                         "mbarrier",
                                         "proxy",
                                         "exit",
                                         "tensor-memory"};
  return kNames[static_cast<int>(kind)];
}

std::string Launch::kernel_line(u32 line) const {
  return "PTX line " + std::to_string(line) + ": " +
         std::string(line_text(program->module->source, line));
}

u32 Launch::shared_bytes() const {
  return static_cast<u32>(round_up(program->static_shared_bytes, program->dynamic_shared_align)) +
         spec.dynamic_shared;
}

void Launch::warn(u64 key_a, u64 key_b, const std::function<std::string()>& text) {
  if (warnings.size() < 100 && warned.insert({key_a, key_b}).second) warnings.push_back(text());
}

void Launch::enqueue(Warp* warp) {
  if (warp->queued || warp->finished) return;
  warp->queued = true;
  if (costs && costs->timing()) {
    costs->timing()->wake(*warp);
  } else {
    runnable.push_back(warp);
  }
}

bool Launch::can_step() const {
  if (costs && costs->timing()) return costs->timing()->can_step();
  return !runnable.empty() || !pending.empty();
}

u64 special_value(const Warp& warp, Special special, int lane) {
  const LaunchSpec& spec = warp.launch->spec;
  const Cta& cta = *warp.cta;
  const u32 thread = warp.id * kLanes + static_cast<u32>(lane);
  const Dim3 &block = spec.block, &grid = spec.grid, &cluster = spec.cluster;
  const u32 bit = 1u << lane;
  // One instruction of any warp is one tick; with a cycle model, a cycle.
  const auto* costs = warp.launch->costs.get();
  const u64 ticks = costs && costs->timing() ? static_cast<u64>(costs->timing()->now())
                                             : warp.launch->instructions + warp.executed;
  switch (special) {
    case Special::tid_x: return thread % block.x;
    case Special::tid_y: return thread / block.x % block.y;
    case Special::tid_z: return thread / block.x / block.y;
    case Special::ntid_x: return block.x;
    case Special::ntid_y: return block.y;
    case Special::ntid_z: return block.z;
    case Special::ctaid_x: return cta.index[0];
    case Special::ctaid_y: return cta.index[1];
    case Special::ctaid_z: return cta.index[2];
    case Special::nctaid_x: return grid.x;
    case Special::nctaid_y: return grid.y;
    case Special::nctaid_z: return grid.z;
    case Special::laneid: return static_cast<u64>(lane);
    case Special::warpid: return warp.id;
    case Special::nwarpid: return 64;
    case Special::smid: return cta.sm;
    case Special::nsmid: return spec.sms;
    case Special::gridid: return 1;
    case Special::clusterid_x: return cta.cluster->index[0];
    case Special::clusterid_y: return cta.cluster->index[1];
    case Special::clusterid_z: return cta.cluster->index[2];
    case Special::nclusterid_x: return grid.x / cluster.x;
    case Special::nclusterid_y: return grid.y / cluster.y;
    case Special::nclusterid_z: return grid.z / cluster.z;
    case Special::cluster_ctaid_x: return cta.index[0] % cluster.x;
    case Special::cluster_ctaid_y: return cta.index[1] % cluster.y;
    case Special::cluster_ctaid_z: return cta.index[2] % cluster.z;
    case Special::cluster_nctaid_x: return cluster.x;
    case Special::cluster_nctaid_y: return cluster.y;
    case Special::cluster_nctaid_z: return cluster.z;
    case Special::cluster_ctarank: return cta.rank;
    case Special::cluster_nctarank: return cluster.count();
    case Special::lanemask_eq: return bit;
    case Special::lanemask_le: return bit | (bit - 1);
    case Special::lanemask_lt: return bit - 1;
    case Special::lanemask_ge: return ~(bit - 1);
    case Special::lanemask_gt: return ~(bit | (bit - 1));
    case Special::dynamic_smem_size: return spec.dynamic_shared;
    case Special::total_smem_size:
    case Special::aggr_smem_size: return warp.launch->shared_bytes();
    case Special::is_explicit_cluster: return cluster.count() > 1;
    case Special::clock:
    case Special::globaltimer_lo: return static_cast<u32>(ticks);
    case Special::clock_hi:
    case Special::globaltimer_hi: return ticks >> 32;
    case Special::clock64:
    case Special::globaltimer: return ticks;
    case Special::shared_address: return u64{cta.rank} << kRankShift;
  }
  return 0;
}

void fill_specials(Warp& warp) {
  for (const SpecialUse& use : warp.launch->program->specials) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const u64 value = special_value(warp, use.special, lane) + use.value;
      if (use.wide) {
        warp.out64(use.slot)[lane] = value;
      } else {
        warp.out(use.slot)[lane] = static_cast<u32>(value);
      }
    }
    warp.written[use.slot] = kAllLanes;
  }
}

Dim3 Launch::clusters() const {
  return {spec.grid.x / spec.cluster.x, spec.grid.y / spec.cluster.y, spec.grid.z / spec.cluster.z};
}

bool Launch::take_cluster(u32 (&first_cta)[3]) {
  if (next_cluster == clusters().count()) return false;
  unpack(next_cluster++, clusters(), first_cta);
  first_cta[0] *= spec.cluster.x;
  first_cta[1] *= spec.cluster.y;
  first_cta[2] *= spec.cluster.z;
  // CTAs that never run hold back no grid that depends on this one.
  triggered_ctas += spec.cluster.count();
  return true;
}

void Launch::start_clusters() {
  while (resident.size() < spec.resident_clusters && next_cluster < clusters().count()) {
    auto cluster = std::make_unique<Cluster>();
    unpack(next_cluster++, clusters(), cluster->index);
    const u32 threads = static_cast<u32>(spec.block.count());
    const u32 warps = (threads + kLanes - 1) / kLanes;
    const u32 ctas = static_cast<u32>(spec.cluster.count());
    cluster->live_ctas = ctas;
    cluster->threads = threads * ctas;
    if (program->asynchronous) cluster->slot_times.assign(kAsyncSlots, 0);
    for (u32 rank = 0; rank < ctas; ++rank) {
      auto cta = std::make_unique<Cta>();
      cta->launch = this;
      cta->cluster = cluster.get();
      cta->rank = rank;
      u32 inside[3];
      unpack(rank, spec.cluster, inside);
      const u32 size[3] = {spec.cluster.x, spec.cluster.y, spec.cluster.z};
      for (int d = 0; d < 3; ++d) cta->index[d] = cluster->index[d] * size[d] + inside[d];
      cta->sm = static_cast<u32>(random() % spec.sms);
      cta->threads = threads;
      cta->shared.assign(shared_bytes(), 0xCC);
      cta->shared_written.assign(shared_bytes(), 0);
      if (spec.checks.races && (warps * ctas > 1 || program->asynchronous) && shared_bytes() > 0)
        cta->races = std::make_unique<RaceChecker>(shared_bytes());
      if (cta->races && spec.checks.strict)
        cta->lanes = std::make_unique<LaneOrder>(shared_bytes());
      if (program->tensor_memory) cta->tensor = std::make_unique<TensorMemory>(spec.checks.races);
      for (u32 w = 0; w < warps; ++w) {
        auto warp = std::make_unique<Warp>();
        warp->launch = this;
        warp->cta = cta.get();
        warp->id = w;
        warp->agent = warp->place = rank * warps + w;
        warp->number = warps_started++;
        const u32 lanes = std::min<u32>(kLanes, threads - w * kLanes);
        warp->live = lanes == kLanes ? kAllLanes : (1u << lanes) - 1;
        warp->storage.assign((std::size_t{program->blocks} + 1) * (kLanes + 1) + kLanes, 0);
        // Registers first, aligned to 64 bytes for the vector units; then the masks.
        const auto start = reinterpret_cast<std::uintptr_t>(warp->storage.data());
        warp->registers = reinterpret_cast<u32*>((start + 63) & ~std::uintptr_t{63});
        warp->written = warp->registers + std::size_t{program->blocks} * kLanes;
        warp->constants = program->constants.data();
        warp->predicates.assign(program->predicates + 1, 0);
        warp->predicates_written.assign(program->predicates + 1, 0);
        warp->predicates[program->true_predicate] = kAllLanes;
        warp->predicates_written[program->true_predicate] = kAllLanes;
        warp->local.assign(std::size_t{program->local_bytes} * kLanes, 0xCC);
        warp->local_written.assign(std::size_t{program->local_bytes} * kLanes, 0);
        warp->clocks.assign(agents());
        warp->advance_clock();
        if (before && !before->overlaps) warp->clocks.seen[prerequisite_agent()] = 1;
        if (program->asynchronous) {
          warp->pipe.assign(agents());
          warp->tensor_ready.assign(agents(), 0);
          warp->pipe_ready.assign(agents(), 0);
          warp->pipe.seen[warps * ctas + warp->place] = 1;
        }
        if (spec.checks.strict) {
          warp->other_agent = first_alone() + warp->place;
          warp->other_clocks.assign(agents());
        }
        warp->fragments.reserve(kLanes + 1);
        Fragment all;
        all.mask = warp->live;
        warp->fragments.push_back(all);
        cta->warps.push_back(std::move(warp));
      }
      cluster->ctas.push_back(std::move(cta));
    }
    if (costs && costs->timing()) costs->timing()->place(*cluster);
    for (const auto& cta : cluster->ctas) {
      for (const auto& warp : cta->warps) {
        fill_specials(*warp);
        enqueue(warp.get());
      }
    }
    resident.push_back(std::move(cluster));
  }
}

void Launch::retire() {
  std::erase_if(resident, [this](const std::unique_ptr<Cluster>& cluster) {
    const bool done = cluster->exited == cluster->threads && cluster->pending == 0;
    if (done && costs && costs->timing()) costs->timing()->release(*cluster);
    return done;
  });
  start_clusters();
}

void Launch::report_deadlock() {
  std::string text = "deadlock: no warp can go on";
  u32 line = 0;
  bool diverged = false;
  for (const auto& cluster : resident) {
    for (const auto& cta : cluster->ctas) {
      for (const auto& warp : cta->warps) {
        for (const Fragment& f : warp->fragments) {
          if (f.mask == 0) continue;
          const bool converging = f.state == FragmentState::converging;
          diverged |= converging;
          // What is tried again when the fragment wakes has its PC at the instruction itself.
          const u32 at = program->code[converging || f.again ? f.pc : f.pc - 1].line;
          if (line == 0) line = at;
          text += "\n  CTA (" + std::to_string(cta->index[0]) + "," +
                  std::to_string(cta->index[1]) + "," + std::to_string(cta->index[2]) + ") warp " +
                  std::to_string(warp->id) + ", " + describe_lanes(f.mask) + ": waits for " +
                  std::string(f.waits_for);
          if (!converging && f.waits_for == "a named barrier") {
            const NamedBarrier& barrier = cta->barriers[f.needed];
            text += " (number " + std::to_string(f.needed) + ": " +
                    std::to_string(barrier.arrived) + " threads of " +
                    std::to_string(barrier.expected ? barrier.expected : cta->threads) +
                    " have arrived)";
          }
          text += " at " + kernel_line(at);
        }
      }
    }
  }
  throw Fault(this, diverged ? FaultKind::divergence : FaultKind::deadlock, line,
              text + "\n  in kernel '" + program->entry + "'; seed " + std::to_string(spec.seed));
}

void Launch::start() {
  started = true;
  overlaps = before && before->overlaps;
  random.seed(spec.seed);
  counts.assign(program->code.size(), 0);
  lane_counts.assign(program->code.size(), 0);
  eagerness = kEagerness[random() % std::size(kEagerness)];
  if (spec.costs.count) costs = std::make_unique<costs::Costs>(*this);
  if (costs && costs->timing()) {
    spec.sms = costs->timing()->sms();
    spec.resident_clusters = costs->timing()->capacity();
  }
  start_clusters();
}

void Launch::check_budget(const Warp& warp) {
  if (instructions <= spec.max_instructions) return;
  throw Fault(this, FaultKind::timeout, 0,
              "timeout: more than " + std::to_string(spec.max_instructions) +
                  " warp instructions in kernel '" + program->entry + "'; warp " +
                  std::to_string(warp.id) + " was at " +
                  (warp.fragments.empty()
                       ? "its end"
                       : kernel_line(program->code[warp.fragments[warp.current].pc].line)) +
                  "; seed " + std::to_string(spec.seed));
}

void Launch::step() {
  if (costs && costs->timing()) {
    costs->timing()->step();
    return;
  }
  const u64 draw = random();
  const auto late = [](const auto& operation) { return operation->late; };
  if (!pending.empty() &&
      (runnable.empty() ||
       ((draw >> 48 & 1023) < eagerness && !std::all_of(pending.begin(), pending.end(), late)))) {
    perform_one();
    retire();
    return;
  }
  const std::size_t pick = draw % runnable.size();
  Warp* warp = runnable[pick];
  runnable[pick] = runnable.back();
  runnable.pop_back();
  // It stays marked as queued while it runs: it may wake itself.
  const u64 executed = warp->run((draw >> 32) % kLongestTurn + 1);
  warp->queued = false;
  instructions += executed;
  trace = (trace ^ (u64{warp->number} << 32 | executed)) * kTracePrime;
  check_budget(*warp);
  if (warp->finished) {
    retire();
  } else if (warp->ready()) {
    enqueue(warp);
  }
}

}  // namespace jax_fp4::sim

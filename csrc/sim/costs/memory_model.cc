// Queues of bytes.
#include "sim/costs/memory_model.h"

#include <algorithm>
#include <bit>

namespace jax_fp4::sim::costs {

MemoryModel::MemoryModel(const ChipConstants& chip, u32 sms)
    : sms_per_die_(std::max((sms + chip.dies - 1) / chip.dies, 1u)),
      dram_bytes_per_cycle_(chip.dram_bytes_per_second / chip.clock_hz),
      l2_bytes_(chip.l2_bytes),
      ports_(sms) {}

MemoryModel::Touched MemoryModel::touch(u32 sm, const std::vector<AsyncWork::Range>& ranges) {
  Touched result;
  const bool two_dies = sms_per_die_ < ports_.size();
  const u32 die = sm / sms_per_die_;
  for (const AsyncWork::Range& range : ranges) {
    if (range.bytes == 0) continue;
    const u64 end = (range.address + range.bytes - 1) / kSectorBytes;
    for (u64 sector = range.address / kSectorBytes; sector <= end;) {
      const u64 number = sector / kPageSectors;
      result.far |= two_dies && (std::popcount(number) & 1) != static_cast<int>(die);
      Page& page = pages_[number];
      do {
        u64& touched = page[sector % kPageSectors];
        if (touched == 0 || filled_ - touched >= l2_bytes_) {
          result.missing += kSectorBytes;
          filled_ += kSectorBytes;
        }
        touched = filled_;
        result.bytes += kSectorBytes;
      } while (++sector <= end && sector % kPageSectors != 0);
    }
  }
  return result;
}

double MemoryModel::read(u32 sm, double now, const std::vector<AsyncWork::Range>& ranges,
                         bool repeated) {
  const Touched touched = touch(sm, ranges);
  if (!repeated) l2_read += touched.bytes;
  dram_read += touched.missing;
  Port& port = ports_[sm];
  const double begin = std::max(now, port.in);
  port.in = begin + static_cast<double>(touched.bytes) / kPortBytesPerCycle;
  double done = port.in + kL2Latency;
  if (touched.missing != 0) {
    dram_free_ =
        std::max(begin, dram_free_) + static_cast<double>(touched.missing) / dram_bytes_per_cycle_;
    done = std::max(port.in, dram_free_) + kDramLatency;
  }
  return done + (touched.far ? kFarLatency : 0);
}

double MemoryModel::write(u32 sm, double now, const std::vector<AsyncWork::Range>& ranges) {
  const Touched touched = touch(sm, ranges);
  const double bytes = static_cast<double>(touched.bytes);
  l2_written += touched.bytes;
  dram_written += touched.bytes;
  Port& port = ports_[sm];
  port.out = std::max(now, port.out) + bytes / kPortBytesPerCycle;
  dram_free_ = std::max(now, dram_free_) + bytes / dram_bytes_per_cycle_;
  return port.out + kL2Latency + (touched.far ? kFarLatency : 0);
}

double MemoryModel::idle_at() const {
  double time = dram_free_;
  for (const Port& port : ports_) time = std::max({time, port.in, port.out});
  return time;
}

}  // namespace jax_fp4::sim::costs

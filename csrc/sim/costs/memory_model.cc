// Queues of bytes.
#include "sim/costs/memory_model.h"

#include <algorithm>

namespace jax_fp4::sim::costs {

MemoryModel::MemoryModel(const ChipConstants& chip, u32 sms)
    : dram_bytes_per_cycle_(chip.dram_bytes_per_second / chip.clock_hz),
      l2_bytes_(chip.l2_bytes),
      ports_(sms) {}

u64 MemoryModel::touch(const std::vector<AsyncWork::Range>& ranges, u64& bytes) {
  u64 missing = 0;
  for (const AsyncWork::Range& range : ranges) {
    if (range.bytes == 0) continue;
    const u64 end = (range.address + range.bytes - 1) / kSectorBytes;
    for (u64 sector = range.address / kSectorBytes; sector <= end;) {
      Page& page = pages_[sector / kPageSectors];
      do {
        u64& touched = page[sector % kPageSectors];
        if (touched == 0 || filled_ - touched >= l2_bytes_) {
          missing += kSectorBytes;
          filled_ += kSectorBytes;
        }
        touched = filled_;
        bytes += kSectorBytes;
      } while (++sector <= end && sector % kPageSectors != 0);
    }
  }
  return missing;
}

double MemoryModel::read(u32 sm, double now, const std::vector<AsyncWork::Range>& ranges) {
  u64 bytes = 0;
  const u64 missing = touch(ranges, bytes);
  l2_read += bytes;
  dram_read += missing;
  Port& port = ports_[sm];
  const double begin = std::max(now, port.in);
  port.in = begin + static_cast<double>(bytes) / kPortBytesPerCycle;
  double done = port.in + kL2Latency;
  if (missing != 0) {
    dram_free_ = std::max(begin, dram_free_) + static_cast<double>(missing) / dram_bytes_per_cycle_;
    done = std::max(port.in, dram_free_) + kDramLatency;
  }
  return done;
}

double MemoryModel::write(u32 sm, double now, const std::vector<AsyncWork::Range>& ranges) {
  u64 bytes = 0;
  touch(ranges, bytes);
  l2_written += bytes;
  dram_written += bytes;
  Port& port = ports_[sm];
  port.out = std::max(now, port.out) + static_cast<double>(bytes) / kPortBytesPerCycle;
  dram_free_ = std::max(now, dram_free_) + static_cast<double>(bytes) / dram_bytes_per_cycle_;
  return port.out + kL2Latency;
}

double MemoryModel::idle_at() const {
  double time = dram_free_;
  for (const Port& port : ports_) time = std::max({time, port.in, port.out});
  return time;
}

}  // namespace jax_fp4::sim::costs

// Global memory: where buffers are placed and how an address finds its buffer.
#include "sim/machine/memory.h"

namespace jax_fp4::sim {

Buffer& GlobalMemory::place(Buffer buffer) {
  // CUDA allocations are aligned to 256 bytes.
  buffer.base = static_cast<u64>(round_up(static_cast<i64>(next_ + kRedZone), 256));
  next_ = buffer.base + buffer.bytes;
  last_ = nullptr;
  return *buffers_.emplace(buffer.base, std::make_unique<Buffer>(std::move(buffer))).first->second;
}

Buffer& GlobalMemory::map(std::string name, u8* data, u64 bytes, bool writable, bool initialized) {
  Buffer buffer;
  buffer.name = std::move(name);
  buffer.bytes = bytes;
  buffer.data = data;
  buffer.writable = writable;
  if (!initialized) buffer.written.assign(bytes, 0);
  return place(std::move(buffer));
}

Buffer& GlobalMemory::allocate(std::string name, u64 bytes, bool writable) {
  Buffer buffer;
  buffer.name = std::move(name);
  buffer.bytes = bytes;
  buffer.writable = writable;
  buffer.storage.assign(bytes, 0);
  Buffer& placed = place(std::move(buffer));
  placed.data = placed.storage.data();
  return placed;
}

void GlobalMemory::unmap(u64 base) {
  buffers_.erase(base);
  last_ = nullptr;
}

Buffer* GlobalMemory::nearest(u64 address) {
  auto it = buffers_.upper_bound(address);
  if (it == buffers_.begin()) return it == buffers_.end() ? nullptr : it->second.get();
  Buffer* before = std::prev(it)->second.get();
  // Of the two neighbours the closer one.
  if (address >= before->base + before->bytes && it != buffers_.end() &&
      it->first - address < address - (before->base + before->bytes))
    return it->second.get();
  return before;
}

Buffer* GlobalMemory::find(u64 address) {
  if (last_ && address - last_->base < last_->bytes) return last_;
  auto it = buffers_.upper_bound(address);
  if (it == buffers_.begin()) return nullptr;
  Buffer* buffer = std::prev(it)->second.get();
  if (address - buffer->base >= buffer->bytes) return nullptr;
  return last_ = buffer;
}

}  // namespace jax_fp4::sim

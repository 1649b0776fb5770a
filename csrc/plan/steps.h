// What a plan consists of: kernels to launch and memory to clear, in order, on one stream.
//
// Plain data without a driver's types: the plan can be made, printed and tested on any machine, and
// csrc/driver executes it. Pointers are device pointers and are never read here.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/params.h"

namespace jax_fp4::plan {

// Values of CUtensorMapDataType (cuda.h of CUDA 12.8).
enum class MapType : u32 {
  uint8 = 0,
  uint16 = 1,
  f16 = 6,
  f32 = 7,
  bf16 = 9,
  u4_align16 = 14,  // 16 codes of 4 bits in global memory, 16 bytes in shared memory
  u6_align16 = 15,  // 16 codes of 6 bits, likewise
};

// A tensor map that the driver encodes into the parameters, at `offset`. Element strides are 1, what
// lies outside reads as zero.
struct MapRequest {
  u32 offset = 0;
  MapType type = MapType::uint8;
  u32 rank = 0;
  const void* address = nullptr;
  unsigned long long dims[4] = {}, strides[3] = {};  // innermost first; strides in bytes
  u32 box[4] = {};
  u32 swizzle = 0;  // 0, 64 or 128 bytes
};

inline constexpr std::size_t kMostParameterBytes = 1024;

struct Launch {
  std::string kernel;  // of csrc/kernels/variants.def
  Grid grid{};
  u32 threads = 0;
  u32 cluster = 1;       // CTAs, along x
  u32 shared_bytes = 0;  // dynamic
  // May start before the step before it has ended: the kernel waits for it (griddepcontrol.wait).
  bool overlaps = false;
  std::vector<MapRequest> maps;
  u32 parameter_bytes = 0;
  alignas(64) unsigned char parameters[kMostParameterBytes] = {};
};

struct Clear {  // to zero
  void* address;
  std::size_t bytes;
};

using Step = std::variant<Clear, Launch>;
using Steps = std::vector<Step>;

// A launch with its one parameter, a structure of csrc/kernels.
template <class Params>
Launch make_launch(std::string kernel, Grid grid, u32 threads, const Params& params) {
  static_assert(sizeof(Params) <= kMostParameterBytes && std::is_trivially_copyable_v<Params>);
  Launch launch;
  launch.kernel = std::move(kernel);
  launch.grid = grid;
  launch.threads = threads;
  launch.parameter_bytes = sizeof(Params);
  std::memcpy(launch.parameters, &params, sizeof(Params));
  return launch;
}

// What a plan has to know of a device.
struct Chip {
  int number = 0;           // compute capability: 100 for 10.0
  u32 multiprocessors = 1;  // SMs

  bool datacenter() const { return number / 10 == 10; }  // B200, B300: tensor memory, tcgen05
  bool consumer() const {
    return number / 10 == 12;
  }  // RTX 50, DGX Spark: mma.sync with block scales
  bool dependent_launches() const { return number >= 90; }
};

inline constexpr int kLeastChip = 80;

}  // namespace jax_fp4::plan

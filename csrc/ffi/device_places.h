// Where a call of a device handler runs: on XLA's CUDA device, or on a simulated one.
//
//   Place place(handle, args, rets);
//   place.at(pointer)                  the device address of an operand or result
//   place.chip(), place.run(steps)     plan for this chip; queue the work
//   place.finish()                     before the handler returns
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "compile/images.h"
#include "driver/launch.h"
#include "driver/load.h"
#include "sim/cuda_shim.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp4::ffi {

namespace xf = ::xla::ffi;

inline cuda::Launcher& cuda_launcher() {
  const cuda::Driver& driver = cuda::driver();
  if (!driver.problem.empty()) throw cuda::DriverError("jax_fp4: " + driver.problem);
  static cuda::Launcher launcher(driver.api, images());
  return launcher;
}

// XLA's device: pointers are device pointers already.
class CudaPlace {
 public:
  using Handle = cuda::CUstream;
  CudaPlace(cuda::CUstream stream, const xf::RemainingArgs&, const xf::RemainingRets&)
      : launcher_(cuda_launcher()), stream_(stream) {}
  template <typename T>
  T* at(T* pointer) const {
    return pointer;
  }
  plan::Chip chip() { return launcher_.chip(stream_); }
  void run(const plan::Steps& steps) { launcher_.run(stream_, steps); }
  void finish() {}

 private:
  cuda::Launcher& launcher_;
  cuda::CUstream stream_;
};

// The simulated driver, with a context and a stream for each of its devices.
class SimDriver {
 public:
  struct Device {
    cuda::CUcontext context;
    cuda::CUstream stream;
  };

  static SimDriver& instance() {
    static SimDriver driver;
    return driver;
  }
  std::shared_ptr<cuda::Launcher> launcher() {
    const std::lock_guard lock(mutex_);
    if (!launcher_) launcher_ = std::make_shared<cuda::Launcher>(api(), images());
    return launcher_;
  }
  // XLA's CPU devices take the simulated ones in turn.
  Device device(std::int32_t ordinal) {
    const std::lock_guard lock(mutex_);
    check(api().cuInit(0), "cuInit");
    int count = 0;
    check(api().cuDeviceGetCount(&count), "cuDeviceGetCount");
    if (count == 0) throw cuda::DriverError("jax_fp4: the simulated driver has no device");
    const int number = ordinal % count;
    if (const auto found = devices_.find(number); found != devices_.end()) return found->second;
    Device device{};
    check(api().cuDevicePrimaryCtxRetain(&device.context, number), "cuDevicePrimaryCtxRetain");
    check(api().cuCtxPushCurrent(device.context), "cuCtxPushCurrent");
    const cuda::CUresult made = api().cuStreamCreate(&device.stream, 0);
    cuda::CUcontext popped = nullptr;
    check(api().cuCtxPopCurrent(&popped), "cuCtxPopCurrent");
    check(made, "cuStreamCreate");
    return devices_.emplace(number, device).first->second;
  }
  void reset(sim::ShimOptions options) {
    const std::lock_guard lock(mutex_);
    launcher_.reset();
    devices_.clear();
    shim().reset(std::move(options));
  }
  static sim::CudaShim& shim() { return sim::CudaShim::instance(); }
  static const cuda::CudaApi& api() { return shim().api(); }
  static void check(cuda::CUresult status, const char* call) {
    if (status == cuda::CUDA_SUCCESS) return;
    throw cuda::DriverError(std::string("jax_fp4: ") + call + " failed with " +
                            cuda::error_text(api(), status) + "\n" + shim().last_report());
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<cuda::Launcher> launcher_;
  std::map<int, Device> devices_;
};

// A simulated device: the arrays of the call are its memory, for as long as the call lasts.
class SimPlace {
 public:
  using Handle = std::int32_t;  // of XLA's CPU device
  SimPlace(std::int32_t ordinal, const xf::RemainingArgs& args, const xf::RemainingRets& rets)
      : launcher_(SimDriver::instance().launcher()),
        device_(SimDriver::instance().device(ordinal)) {
    try {
      for (std::size_t i = 0; i < args.size(); ++i)
        if (const auto arg = args.get<xf::AnyBuffer>(i))
          map("operand " + std::to_string(i), *arg, false);
      for (std::size_t i = 0; i < rets.size(); ++i)
        if (auto ret = rets.get<xf::AnyBuffer>(i)) map("result " + std::to_string(i), **ret, true);
    } catch (...) {
      unmap();
      throw;
    }
  }
  ~SimPlace() { unmap(); }
  SimPlace(const SimPlace&) = delete;
  SimPlace& operator=(const SimPlace&) = delete;

  // The device address of a place in an array of the call; null stays null.
  template <typename T>
  T* at(T* pointer) const {
    if (pointer == nullptr) return nullptr;
    const auto* place = reinterpret_cast<const char*>(pointer);
    const auto after = arrays_.upper_bound(place);
    const auto found = after == arrays_.begin() ? arrays_.end() : std::prev(after);
    if (found == arrays_.end() ||
        place - found->first > static_cast<std::ptrdiff_t>(found->second.bytes))
      throw std::logic_error("jax_fp4: a pointer that is in no operand or result of the call");
    return reinterpret_cast<T*>(found->second.address + (place - found->first));
  }
  plan::Chip chip() { return launcher_->chip(device_.stream); }
  void run(const plan::Steps& steps) { launcher_->run(device_.stream, steps); }
  void finish() {
    SimDriver::check(SimDriver::api().cuStreamSynchronize(device_.stream), "cuStreamSynchronize");
  }

 private:
  void map(const std::string& name, const xf::AnyBuffer& buffer, bool result) {
    auto* data = static_cast<char*>(buffer.untyped_data());
    if (data == nullptr || arrays_.contains(data)) return;  // an operand may be given twice
    // An empty array is nowhere: an aligned address that no access fits.
    const std::size_t bytes = buffer.size_bytes();
    arrays_[data] = {
        bytes == 0 ? kEmpty
                   : SimDriver::shim().map(device_.context, name, data, bytes, result, !result),
        bytes};
  }
  void unmap() {
    for (const auto& [data, mapped] : arrays_)
      if (mapped.bytes != 0) SimDriver::shim().unmap(device_.context, mapped.address);
    arrays_.clear();
  }

  struct Mapped {
    cuda::CUdeviceptr address;
    std::size_t bytes;
  };

  static constexpr cuda::CUdeviceptr kEmpty = 256;
  std::shared_ptr<cuda::Launcher> launcher_;
  SimDriver::Device device_;
  std::map<const char*, Mapped> arrays_;  // by where they begin on the host
};

}  // namespace jax_fp4::ffi

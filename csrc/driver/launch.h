// Executes plans on a device through the table of driver functions.
//
//   Launcher launcher(api, images());
//   launcher.load(stream, "gemm");        // before anything is captured: XLA's initialize stage
//   launcher.run(stream, steps);          // queues the work; waits for nothing
//
// * Handles are kept by context: a module loaded in one context means nothing in another, and a
//   process may use several devices. Calls may come from several threads.
// * `run` allocates nothing on the device, reads nothing back and does not synchronise, so it may be
//   captured into a graph; under capture it refuses to load a kernel that is not loaded yet.
// * Every driver call is checked. A failure throws DriverError, which names the call, the kernel and the
//   driver's reason; the steps queued before it stay queued.
#pragma once

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>

#include "compile/images.h"
#include "driver/load.h"
#include "plan/steps.h"

namespace jax_fp4::cuda {

struct DriverError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An image of a kernel fits a device: a cubin of the same major and at most the same minor version,
// architecture-specific ones ("100a") only of the very same; PTX of its family ("100f") or of any
// older version.
bool image_fits(const ImageEntry& image, int chip);

// Which of two fitting images is tried first: cubins before PTX, then the newest.
bool image_better(const ImageEntry& a, const ImageEntry& b);

class Launcher {
 public:
  Launcher(const CudaApi& api, ImageTable images) : api_(api), images_(images) {}
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  // The device a stream belongs to.
  plan::Chip chip(CUstream stream);
  // Loads every kernel whose name starts with `prefix` and that fits the stream's device.
  void load(CUstream stream, std::string_view prefix);
  void run(CUstream stream, const plan::Steps& steps);

 private:
  struct Context {
    plan::Chip chip;
    int shared_bytes = 0;                            // that a CTA may have
    std::map<std::string_view, CUfunction> kernels;  // by names of images_
  };

  void check(CUresult status, const std::string& what) const;
  CUcontext context_of(CUstream stream) const;
  Context& enter(CUcontext handle);
  template <class Body>
  void in_context(CUstream stream, const Body& body);
  CUfunction kernel(Context& context, CUstream stream, std::string_view name);
  CUfunction load_kernel(const Context& context, std::string_view name);
  void launch(Context& context, CUstream stream, const plan::Launch& launch);

  const CudaApi& api_;
  const ImageTable images_;
  std::mutex mutex_;  // of contexts_
  std::map<CUcontext, Context> contexts_;
};

}  // namespace jax_fp4::cuda

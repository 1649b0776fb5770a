// XLA's intra-op thread pool as a Parallel.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "cpu/cpu.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp4::ffi {

// The calling thread works too and takes whatever the pool does not, so that a handler that itself
// runs on a pool thread cannot wait for a task that is queued behind it. Tasks that start after the
// work is gone find it gone; they own the shared state and touch nothing else.
class XlaParallel final : public cpu::Parallel {
 public:
  explicit XlaParallel(::xla::ffi::ThreadPool pool) : pool_(pool) {}

  int threads() const override {
    const std::int64_t n = pool_.num_threads();
    return n < 1 ? 1 : static_cast<int>(n);
  }

  void run(std::int64_t n, const std::function<void(std::int64_t)>& body) override {
    const std::int64_t helpers = std::min<std::int64_t>(threads(), n) - 1;
    if (helpers <= 0) {
      cpu::Serial().run(n, body);
      return;
    }
    auto state = std::make_shared<State>(n, body);
    for (std::int64_t i = 0; i < helpers; ++i) pool_.Schedule([state] { state->work(); });
    state->work();
    state->wait();
  }

 private:
  struct State {
    State(std::int64_t n, const std::function<void(std::int64_t)>& body) : n(n), body(&body) {}

    void work() {
      const cpu::IeeeEnvironment ieee;
      std::int64_t completed = 0;
      for (std::int64_t i; (i = next.fetch_add(1)) < n; ++completed) {
        try {
          (*body)(i);
        } catch (...) {
          const std::lock_guard<std::mutex> lock(mutex);
          if (!error) error = std::current_exception();
        }
      }
      if (completed == 0) return;
      const std::lock_guard<std::mutex> lock(mutex);
      done += completed;
      if (done == n) all_done.notify_one();
    }

    // Returns only when every body has returned, so `body` outlives its last use.
    void wait() {
      std::unique_lock<std::mutex> lock(mutex);
      all_done.wait(lock, [this] { return done == n; });
      if (error) std::rethrow_exception(error);
    }

    const std::int64_t n;
    const std::function<void(std::int64_t)>* const body;
    std::atomic<std::int64_t> next{0};
    std::mutex mutex;
    std::condition_variable all_done;
    std::int64_t done = 0;
    std::exception_ptr error;
  };

  ::xla::ffi::ThreadPool pool_;
};

}  // namespace jax_fp4::ffi

// The work of one call, which the caller and threads of XLA's pool take in pieces.
//
// The caller takes pieces, too, and waits only for pieces that a running thread has taken. So a call ends even if no thread
// of the pool is free, and a thread that comes too late finds nothing to do.
#pragma once
#include <atomic>
#include <cfenv>
#include <functional>
#include <thread>

namespace jrnn {

// Numbers below `count`, each of which one thread takes.
class Pieces {
 public:
  explicit Pieces(int64_t count) : count_(count) {}

  template <class Function>
  void work(Function&& f) {
    for (;;) {
      const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= count_) return;
      f(i);
      done_.fetch_add(1, std::memory_order_release);
    }
  }
  void wait() const {
    while (done_.load(std::memory_order_acquire) < count_) std::this_thread::yield();
  }

 private:
  const int64_t count_;
  std::atomic<int64_t> next_{0}, done_{0};
};

// Computes as the thread that made it does: with its rounding, and with denormals flushed or not.
class Environment {
 public:
  Environment() { std::fegetenv(&environment_); }
  template <class Function>
  void run(Function&& f) const {
    std::fenv_t own;
    std::fegetenv(&own);
    std::fesetenv(&environment_);
    f();
    std::fesetenv(&own);
  }

 private:
  std::fenv_t environment_;
};

}  // namespace jrnn

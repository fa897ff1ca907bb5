#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fg {

Scratch::~Scratch() { std::free(memory_); }

void* Scratch::bytes(size_t size) {
  if (size > size_) {
    std::free(memory_);
    size_ = (size + size / 4 + 4095) / 4096 * 4096;
    memory_ = std::aligned_alloc(64, size_);
    if (!memory_) std::abort();
  }
  return memory_;
}

namespace {

constexpr int kSpins = 4000;  // some tens of microseconds

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

thread_local Scratch own_scratch;
thread_local Scratch caller_scratch;

class Pool {
 public:
  explicit Pool(int workers) {
    for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { work(); });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_.store(true);
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int workers() const { return int(threads_.size()); }

  void run(int64_t count, Task task, const void* context) {
    // What workers read of a round is written before its tasks can be taken, and taking one proves it still holds.
    task_.store(task, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    unfinished_.store(count, std::memory_order_relaxed);
    uint64_t round = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    state_.store(round << 32 | uint64_t(count), std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst)) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    while (take_task()) {
    }
    for (int spins = 0; unfinished_.load(std::memory_order_acquire); ++spins) {
      if (spins < kSpins) pause();
      else std::this_thread::yield();
    }
  }

 private:
  // The round's number in the upper half, its tasks that nobody has taken in the lower.
  static uint64_t left(uint64_t state) { return state & 0xffffffff; }

  bool take_task() {
    uint64_t state = state_.load(std::memory_order_acquire);
    for (;;) {
      if (!left(state)) return false;
      Task task = task_.load(std::memory_order_relaxed);
      const void* context = context_.load(std::memory_order_relaxed);
      int64_t count = count_.load(std::memory_order_relaxed);
      if (!state_.compare_exchange_weak(state, state - 1, std::memory_order_acq_rel)) continue;
      task(context, count - int64_t(left(state)), own_scratch);
      unfinished_.fetch_sub(1, std::memory_order_release);
      return true;
    }
  }

  void work() {
    while (!stop_.load(std::memory_order_relaxed)) {
      if (!take_task()) await();
    }
  }

  void await() {
    for (int spins = 0; spins < kSpins; ++spins) {
      if (left(state_.load(std::memory_order_acquire))) return;
      pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return stop_.load() || left(state_.load(std::memory_order_seq_cst)); });
    asleep_.fetch_sub(1, std::memory_order_seq_cst);
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> state_{0};
  std::atomic<int64_t> unfinished_{0}, count_{0};
  std::atomic<Task> task_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int> asleep_{0};
  std::atomic<bool> stop_{false};
};

std::mutex running;  // held while an operation uses the pool
Pool* pool = nullptr;
std::atomic<int> wanted{1};

// A forked child has none of its parent's threads: it makes its own when it needs them.
void forget_threads() {
  pool = nullptr;
  new (&running) std::mutex;
}

struct AtFork {
  AtFork() { pthread_atfork(nullptr, nullptr, forget_threads); }
} at_fork;

}  // namespace

void run_tasks(int64_t count, Task task, const void* context) {
  if (count > 1 && wanted.load(std::memory_order_relaxed) > 1 && running.try_lock()) {
    int workers = wanted.load(std::memory_order_relaxed) - 1;
    if (!pool || pool->workers() != workers) {
      delete pool;
      pool = new Pool(workers);
    }
    pool->run(count, task, context);
    running.unlock();
    return;
  }
  for (int64_t i = 0; i < count; ++i) task(context, i, own_scratch);
}

Scratch& shared_scratch() { return caller_scratch; }

int threads() { return wanted.load(std::memory_order_relaxed); }

}  // namespace fg

extern "C" void fg_set_threads(int64_t count) { fg::wanted.store(int(count < 1 ? 1 : count)); }

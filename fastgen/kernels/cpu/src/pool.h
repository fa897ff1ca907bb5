// The threads that share one operation's work.
//
// A worker that has nothing to do spins for some microseconds, since the next operation of a step follows at once, and
// then sleeps: it never holds a core that others want. Tasks are taken one by one, and only tasks that were taken are
// waited for: a worker that has no core right now costs the others nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fg {

// Memory of one thread that lives on between operations, grown when asked for more. 64-byte aligned.
class Scratch {
 public:
  ~Scratch();
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(bytes(size_t(count) * sizeof(T)));
  }

 private:
  void* bytes(size_t size);
  void* memory_ = nullptr;
  size_t size_ = 0;
};

using Task = void (*)(const void* context, int64_t task, Scratch& scratch);

// Run task(context, 0 .. count - 1, the thread's scratch) on up to set_threads() threads, the caller among them.
// Returns when all are done. While another thread's operation runs, all run on the caller.
void run_tasks(int64_t count, Task task, const void* context);

// run_tasks for a lambda (task number, scratch).
template <class F>
void parallel(int64_t count, const F& f) {
  run_tasks(count, [](const void* context, int64_t task, Scratch& scratch) {
    (*static_cast<const F*>(context))(task, scratch);
  }, &f);
}

// The calling thread's scratch for what all tasks of an operation read (tasks have their own).
Scratch& shared_scratch();

int threads();

}  // namespace fg

extern "C" void fg_set_threads(int64_t count);

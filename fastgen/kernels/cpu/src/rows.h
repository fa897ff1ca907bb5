// How operations without products go over rows: vector by vector within one, and shared out among threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "pool.h"
#include "simd.h"

namespace fg {

// How the vector at hand is read and written: whole, or only its first elements at the end of a row.
struct Whole {
  template <class T>
  Floats load(const T* from) const {
    return fg::load(from);
  }
  template <class T>
  void store(T* to, Floats v) const {
    fg::store(to, v);
  }
  // Stores v, and returns it as it is there.
  template <class T>
  Floats keep(T* to, Floats v) const {
    v = rounded<T>(v);
    store_rounded(to, v);
    return v;
  }
  Floats zero_beyond(Floats v) const { return v; }
};

struct Part {
  int64_t count;

  template <class T>
  Floats load(const T* from) const {
    return load_some(from, count);
  }
  template <class T>
  void store(T* to, Floats v) const {
    store_some(to, v, count);
  }
  template <class T>
  Floats keep(T* to, Floats v) const {
    store_some(to, v, count);
    return rounded<T>(v);
  }
  // v with zeros in the lanes that are not part of the row.
  Floats zero_beyond(Floats v) const {
    float lanes[kLanes];
    fg::store(lanes, v);
    return load_some(lanes, count);
  }
};

// f(i, at) for the vectors of a row of `size` elements: `at` loads and stores the one that begins at element i.
template <class F>
inline void each_vector(int64_t size, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) f(i, Whole{});
  if (i < size) f(i, Part{size - i});
}

// The sum over a row of what f(i, at) returns; in four sums, since one would wait for itself. Lanes beyond the end of
// the row are summed too: f leaves zeros there.
template <class F>
inline float sum_over(int64_t size, const F& f) {
  Floats sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sums[j] += f(i + j * kLanes, Whole{});
  }
  for (; i + kLanes <= size; i += kLanes) sums[0] += f(i, Whole{});
  if (i < size) sums[1] += f(i, Part{size - i});
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// f(row) for all rows. Threads take as many at once as make a task worth handing over; what is one task's work, such as
// a step's few tokens, stays on the caller.
constexpr int64_t kTaskElements = 1 << 15;  // ten microseconds or so

template <class F>
inline void each_row(int64_t rows, int64_t size, const F& f) {
  int64_t together = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(size, 1));
  parallel((rows + together - 1) / together, [&](int64_t task, Scratch&) {
    int64_t end = std::min(rows, (task + 1) * together);
    for (int64_t row = task * together; row < end; ++row) f(row);
  });
}

}  // namespace fg

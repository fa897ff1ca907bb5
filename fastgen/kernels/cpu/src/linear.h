// What the linear kernels share: the product's operands, and the order in which they read them.
#pragma once

#include <algorithm>
#include <type_traits>
#include <cstdint>

#include "op.h"
#include "pool.h"
#include "simd.h"

namespace fg {

// x [rows, in] times weight [outs, in] transposed, plus bias [outs] or null, into out [rows, outs]; all of `dtype`.
// Strides are in elements; weight is contiguous.
struct LinearArgs {
  const void* x;
  const void* weight;
  const void* bias;
  void* out;
  int64_t rows, in, outs, x_stride, out_stride, dtype;
};

// Two vectors of consecutive elements; of bf16 the even ones and the odd ones, which costs one instruction each. A sum of
// products does not mind, as long as both factors are read alike.
struct Pair {
  Floats a, b;
};
constexpr int64_t kPair = 2 * kLanes;

inline Pair load_pair(const float* from) { return {load(from), load(from + kLanes)}; }
inline Pair load_pair(const bf16* from) {
  Words both = load_bytes<Words>(from);
  return {(Floats)(both << 16), (Floats)(both & 0xffff0000)};
}

// The first `count` (< kPair) elements, zeros after them.
template <class T>
inline Pair load_pair_some(const T* from, int64_t count) {
  T padded[kPair] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load_pair(padded);
}

void linear_few_rows(const LinearArgs& args);
void linear_many_rows(const LinearArgs& args);

}  // namespace fg

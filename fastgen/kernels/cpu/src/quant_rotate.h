// The fast Walsh-Hadamard transform of a group of 64 numbers, not normalised: it spreads what is far greater than the
// rest over all of them, which then lose less when they are rounded. Sums in the order of fastgen's reference, bit for
// bit.
#pragma once

#include <utility>

#include "quant.h"

namespace fg {

// v[i], v[i + S] -> v[i] + v[i + S], v[i] - v[i + S] for lanes i without the bit S.
template <int S, int... J>
inline Floats exchange_sums(Floats v, std::integer_sequence<int, J...>) {
  Floats other = __builtin_shufflevector(v, v, (J ^ S)...);
  Floats signs = {((J & S) ? -1.f : 1.f)...};
  return other + v * signs;
}

// Numbers in one lane of 64 vectors, or 64 / kLanes vectors with numbers side by side, by the step from which strides
// cross vectors.
template <int Count, int S = 1>
inline void sums_of_vectors(Floats* v) {
  if constexpr (S < Count) {
#pragma GCC unroll 64
    for (int i = 0; i < Count; ++i) {
      if (i & S) continue;
      Floats a = v[i], b = v[i + S];
      v[i] = a + b;
      v[i + S] = a - b;
    }
    sums_of_vectors<Count, 2 * S>(v);
  }
}

template <int S = 1>
inline void sums_of_lanes(Floats& v) {
  if constexpr (S < kLanes) {
    v = exchange_sums<S>(v, std::make_integer_sequence<int, kLanes>{});
    sums_of_lanes<2 * S>(v);
  }
}

// 64 numbers, one after another.
inline void rotate_group(Floats (&v)[kGroup8 / kLanes]) {
  for (Floats& one : v) sums_of_lanes(one);
  sums_of_vectors<kGroup8 / kLanes>(v);
}

// 64 numbers in each lane.
inline void rotate_columns(Floats* v) { sums_of_vectors<kGroup8>(v); }

}  // namespace fg

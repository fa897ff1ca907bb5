// A square of vectors, rows to columns, in registers (Eklundh, 1972): log2(kLanes) rounds of exchanges.
#pragma once

#include <utility>

#include "simd.h"

namespace fg {

// Exchange the off-diagonal S x S squares of rows a and b (S apart).
template <int S, int... J>
inline void exchange(Floats& a, Floats& b, std::integer_sequence<int, J...>) {
  Floats low = __builtin_shufflevector(a, b, ((J & S) ? kLanes + J - S : J)...);
  Floats high = __builtin_shufflevector(a, b, ((J & S) ? kLanes + J : J + S)...);
  a = low;
  b = high;
}

template <int S = 1>
inline void transpose(Floats (&rows)[kLanes]) {
  if constexpr (S < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
      if (!(i & S)) exchange<S>(rows[i], rows[i + S], std::make_integer_sequence<int, kLanes>{});
    transpose<2 * S>(rows);
  }
}

}  // namespace fg

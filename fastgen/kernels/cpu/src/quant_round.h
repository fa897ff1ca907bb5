// From numbers to integers.
#pragma once

#include <cmath>

#include "simd.h"

namespace fg {

// To nearest, ties to even; v must fit.
inline Ints nearest(Floats v) {
#if defined(__AVX512F__) && FG_LANES == 16
  return (Ints)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__) && FG_LANES == 8
  return (Ints)_mm256_cvtps_epi32((__m256)v);
#else
  Ints whole;
  for (int i = 0; i < kLanes; ++i) whole[i] = int32_t(std::lrintf(v[i]));
  return whole;
#endif
}

inline Floats floats(Ints v) { return __builtin_convertvector(v, Floats); }

// The bits of |v|. As integers they are ordered as the numbers are, infinity above all and NaN above it: so the
// greatest of them tells whether all are finite.
inline Ints magnitude_bits(Floats v) { return (Ints)v & 0x7fffffff; }
inline Ints greater(Ints a, Ints b) { return a > b ? a : b; }

constexpr int32_t kInfinityBits = 0x7f800000;
// A greatest magnitude below this counts as zero, since the inverse of its scale could not be represented.
constexpr float kTiny = 1e-30f;

}  // namespace fg

// Keys and values in 8 bits: numbers from -127 to 127, with a scale for each group of components of a token's head.
#pragma once

#include <cstdint>

#include "math.h"
#include "simd.h"

namespace fg {

// Components that share a scale; the last group of a head may be smaller. Of keys fewer, because some of their components
// are much larger than others in many models.
constexpr int64_t kKeyGroup = 32;
constexpr int64_t kValueGroup = 64;
constexpr int64_t kCodes = 127;

struct Code {
  int8_t value;
};

inline int64_t groups(int64_t dim, int64_t group) { return (dim + group - 1) / group; }

typedef int8_t Bytes __attribute__((vector_size(FG_LANES)));

inline Floats load(const Code* from) {
#if defined(__AVX512F__) && FG_LANES == 16
  constexpr __mmask16 kAll = 0xffff;  // of the unmasked ones gcc 12 warns
  __m512i whole = _mm512_maskz_cvtepi8_epi32(kAll, _mm_loadu_si128((const __m128i*)from));
  return (Floats)_mm512_maskz_cvtepi32_ps(kAll, whole);
#elif defined(__AVX2__) && FG_LANES == 8
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  return __builtin_convertvector(__builtin_convertvector(load_bytes<Bytes>(from), Ints), Floats);
#endif
}

inline float widen(Code code) { return code.value; }

// `count` (<= kValueGroup) numbers to codes, in room for as many; returns their scale, NaN where one of them is no finite
// number. The scale is rounded first, so that its own rounding is no error of the codes.
template <class T>
inline bf16 quantise(const T* from, int64_t count, Code* codes) {
  Floats numbers[kValueGroup / kLanes], most = {}, odd = {};
  int64_t vectors = (count + kLanes - 1) / kLanes;
  for (int64_t i = 0; i < vectors; ++i) {
    int64_t left = count - i * kLanes;
    numbers[i] = left >= kLanes ? load(from + i * kLanes) : load_some(from + i * kLanes, left);
    most = max(abs(numbers[i]), most);
    odd += numbers[i] * 0.f;  // 0, but for what is infinite or NaN
  }
  bf16 scale = narrow<bf16>((max(most) + sum(odd)) / kCodes);
  float step = widen(scale), inverse = step > 1e-30f ? 1.f / step : 0.f;
  const Floats round = splat(12582912.f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  for (int64_t i = 0; i < vectors; ++i) {
    Floats scaled = min(max(numbers[i] * inverse, splat(-kCodes)), splat(kCodes));
    Ints whole = (Ints)(scaled + round) - (Ints)round;
    store_bytes(codes + i * kLanes, __builtin_convertvector(whole, Bytes));
  }
  return scale;
}

}  // namespace fg

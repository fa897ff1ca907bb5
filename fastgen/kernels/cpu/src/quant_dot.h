// Integer products of quantised weights and activations: the best that each instruction set has for them.
//
// A vector of weights holds in each lane four inputs of one output, as unsigned bytes; the activations of the same four
// inputs, signed, are the same for all lanes.
#pragma once

#include "simd.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace fg {

#if defined(__AVX512VNNI__) && FG_LANES == 16
#define FG_VNNI 1
#else
#define FG_VNNI 0
#endif

typedef int16_t Shorts __attribute__((vector_size(FG_LANES * 4)));
typedef uint16_t UShorts __attribute__((vector_size(FG_LANES * 4)));

inline Ints splat(int32_t x) { return x - Ints{}; }

// Of each lane, the products of its two 16-bit numbers, added.
inline Ints pair_products(Ints a, Ints b) {
#if defined(__AVX512BW__) && FG_LANES == 16
  return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && FG_LANES == 8
  return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && FG_LANES == 4
  return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Weights of 8 bits (Bytes: as they lie in memory; the products of a pair do not fit 16 bits), activations as they are
// prepared for them: kWords8 rows of words for a group of inputs, in each a word for four inputs.
#if FG_VNNI
constexpr int kWords8 = 1;
struct Weights8 {
  Words bytes;
};
inline Weights8 weights8(Words bytes) { return {bytes}; }
inline Ints add_products(Ints sum, Weights8 w, const int32_t* x, int64_t) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w.bytes, _mm512_set1_epi32(*x));
}
#else
constexpr int kWords8 = 2;  // the first and third input as 16-bit numbers, then the second and fourth
struct Weights8 {
  Ints even, odd;
};
inline Weights8 weights8(Words bytes) { return {(Ints)(bytes & 0x00ff00ff), (Ints)((UShorts)bytes >> 8)}; }
inline Ints add_products(Ints sum, Weights8 w, const int32_t* x, int64_t odd) {
  return sum + pair_products(w.even, splat(x[0])) + pair_products(w.odd, splat(x[odd]));
}
#endif

// Weights of 4 bits, one to a byte. Sums4 holds the sum of a group of 32 inputs: at most 32 * 15 * 127 of 32 bits; of
// 16 bits in two parts, each at most half of that: 30480.
#if FG_VNNI
typedef Ints Sums4;
inline Sums4 add_products4(Sums4 sum, Words w, int32_t x) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x));
}
inline Ints whole(Sums4 sum) { return sum; }
#else
typedef Shorts Sums4;
inline Sums4 add_products4(Sums4 sum, Words w, int32_t x) {
#if defined(__AVX512BW__) && FG_LANES == 16
  return sum + (Shorts)_mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__) && FG_LANES == 8
  return sum + (Shorts)_mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(x));
#else
  Shorts both = (Shorts)splat(x);
  return sum + (Shorts)(w & 0x00ff00ff) * ((both << 8) >> 8) + (Shorts)((UShorts)w >> 8) * (both >> 8);
#endif
}
inline Ints whole(Sums4 sum) { return pair_products((Ints)sum, splat(0x00010001)); }
#endif

}  // namespace fg

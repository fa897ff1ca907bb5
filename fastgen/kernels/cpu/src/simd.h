// Vectors of the build's width, by the compiler's vector extensions: one source for every instruction set.
//
// FG_LANES is the number of floats in a vector. It defaults to what the target's registers hold; a wider one still
// compiles (the compiler splits it), which is how the code for wide registers is tested where there are none.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef FG_LANES
#if defined(__AVX512F__)
#define FG_LANES 16
#elif defined(__AVX__)
#define FG_LANES 8
#else
#define FG_LANES 4
#endif
#endif

namespace fg {

constexpr int64_t kLanes = FG_LANES;

// Of alignment 1 element: loads and stores through them may start anywhere. may_alias: they read any type's bytes.
typedef float Floats __attribute__((vector_size(FG_LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(FG_LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(FG_LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(FG_LANES * 2)));

struct bf16 {
  uint16_t bits;
};

template <class V>
inline V load_bytes(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
inline void store_bytes(void* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

inline Floats splat(float x) { return x - Floats{}; }

inline Floats load(const float* from) { return load_bytes<Floats>(from); }
inline Floats load(const bf16* from) {
#if defined(__AVX2__) && FG_LANES == 8  // gcc 12 takes five instructions for the line below
  return (Floats)((Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)) << 16);
#else
  return (Floats)(__builtin_convertvector(load_bytes<Halves>(from), Words) << 16);
#endif
}

// v as it is after being kept as a T: bfloat16 to nearest, ties to even; a NaN stays one.
template <class T>
inline Floats rounded(Floats v) {
  if constexpr (std::is_same_v<T, float>) return v;
  Words bits = (Words)v;
  Words near = bits + 0x7fff + ((bits >> 16) & 1);
  near = (v == v) ? near : (bits | 0x400000);
  return (Floats)(near & 0xffff0000);
}

// Stores of what is rounded already.
inline void store_rounded(float* to, Floats v) { store_bytes(to, v); }
inline void store_rounded(bf16* to, Floats v) { store_bytes(to, __builtin_convertvector((Words)v >> 16, Halves)); }

template <class T>
inline void store(T* to, Floats v) {
  store_rounded(to, rounded<T>(v));
}

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

template <class T>
inline T narrow(float x);
template <>
inline float narrow<float>(float x) {
  return x;
}
template <>
inline bf16 narrow<bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return {uint16_t((bits >> 16) | 0x40)};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// The first `count` (< kLanes) elements; zeros in the other lanes.
template <class T>
inline Floats load_some(const T* from, int64_t count) {
  T padded[kLanes] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

template <class T>
inline void store_some(T* to, Floats v, int64_t count) {
  T padded[kLanes];
  store(padded, v);
  std::memcpy(to, padded, count * sizeof(T));
}

// Every lane gets v's lane S further on, round and round.
template <int S, int... J>
inline Floats rotate(Floats v, std::integer_sequence<int, J...>) {
  return __builtin_shufflevector(v, v, ((J + S) % kLanes)...);
}

template <int S = kLanes / 2>
inline float sum(Floats v) {
  v += rotate<S>(v, std::make_integer_sequence<int, kLanes>{});
  if constexpr (S > 1) return sum<S / 2>(v);
  else return v[0];
}

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

template <int S = kLanes / 2>
inline float max(Floats v) {
  v = max(v, rotate<S>(v, std::make_integer_sequence<int, kLanes>{}));
  if constexpr (S > 1) return max<S / 2>(v);
  else return v[0];
}

inline Floats min(Floats a, Floats b) { return a < b ? a : b; }

}  // namespace fg

// The inner loops of attention: products of a few query rows with the keys and values of some tokens, in registers.
//
// Blocks lie all over memory, where no processor guesses what comes next: it is told. While keys are multiplied, what lies
// at the same distances from `ahead` is fetched (kAhead); so are other keys while values are added up.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "attention.h"
#include "math.h"
#include "simd.h"

namespace fg {

// Query rows that share what is loaded of keys and values; their sums must fit in the registers.
constexpr int kRows = FG_LANES == 16 ? 12 : FG_LANES == 8 ? 6 : 3;
constexpr int kSubtileVectors = kSubtile / kLanes;

inline void fetch(const void* from) { __builtin_prefetch(from, 0, 3); }

// sums [R][C vectors] += q [R] times keys [C vectors], for one component of both.
template <int R, int C, class T>
[[gnu::always_inline]] inline void multiply_component(const float* q, int64_t q_stride, const T* keys, Floats* sums) {
  Floats k[C];
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) k[c] = load(keys + c * kLanes);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    Floats one = splat(q[r * q_stride]);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sums[r * C + c] += one * k[c];
  }
}

// sums [R][16] = q [R][dim] times keys [dim][16].
template <int R, bool kAhead, class T>
[[gnu::always_inline]] inline void multiply_components(const float* q, int64_t q_stride, const T* keys,
                                                       int64_t key_stride, int64_t dim, const T* ahead, Floats* sums) {
  constexpr int C = kSubtileVectors;
  constexpr bool kTwice = R * C <= 6;  // so few sums that each would wait for itself: those of odd components apart
  int64_t d = 0;
#pragma GCC unroll 12
  for (int i = 0; i < R * C; ++i) sums[i] = Floats{};
  if constexpr (kTwice) {
    Floats odd[R * C] = {};
    for (; d + 2 <= dim; d += 2) {
      if constexpr (kAhead) fetch(ahead + d * key_stride);
      if constexpr (kAhead && sizeof(T) == 4) fetch(ahead + (d + 1) * key_stride);
      multiply_component<R, C>(q + d, q_stride, keys + d * key_stride, sums);
      multiply_component<R, C>(q + d + 1, q_stride, keys + (d + 1) * key_stride, odd);
    }
#pragma GCC unroll 12
    for (int i = 0; i < R * C; ++i) sums[i] += odd[i];
  }
  for (; d < dim; ++d) {
    if constexpr (kAhead) fetch(ahead + d * key_stride);
    multiply_component<R, C>(q + d, q_stride, keys + d * key_stride, sums);
  }
}

// out [R][16] = q [R][dim] times the keys of a piece.
template <int R, bool kAhead, class T>
void multiply_keys(const float* q, const Piece<T>& piece, int64_t dim, const T* ahead, float* out, int64_t out_stride) {
  constexpr int C = kSubtileVectors;
  const int64_t stride = piece.key_stride, together = Cache<T>::kScaled ? kKeyGroup : dim;
  const bf16* scales = piece.key_scales;
  for (int64_t first = 0; first < dim; first += together, scales += piece.scale_stride) {
    Floats sums[R * C];
    multiply_components<R, kAhead>(q + first, dim, piece.keys + first * stride, stride,
                                   std::min(together, dim - first), ahead + first * stride, sums);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      Floats scale = {};
      if constexpr (Cache<T>::kScaled) scale = load(scales + c * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        float* to = out + r * out_stride + c * kLanes;
        Floats v = sums[r * C + c];
        if constexpr (Cache<T>::kScaled) v = first ? load(to) + v * scale : v * scale;
        store(to, v);
      }
    }
  }
}

// out [R][C vectors] += weights [R][count] times values [count][C vectors].
template <int R, int C, bool kAhead, class T>
void add_columns(const float* weights, int64_t stride, const T* values, int64_t value_stride, int64_t count,
                 const T* ahead, float* out, int64_t out_stride) {
  constexpr int64_t kLine = 64 / sizeof(T);
  Floats sums[R][C];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sums[r][c] = load(out + r * out_stride + c * kLanes);
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (kAhead)
      for (int64_t j = 0; j < C * kLanes; j += kLine) fetch(ahead + i * value_stride + j);
    Floats v[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) v[c] = load(values + i * value_stride + c * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      Floats one = splat(weights[r * stride + i]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums[r][c] += one * v[c];
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(out + r * out_stride + c * kLanes, sums[r][c]);
}

// out [R][width] += weights [R][count] times values [count][width]; width is a multiple of kLanes.
template <int R, bool kAhead, class T>
void add_values(const float* weights, int64_t stride, const T* values, int64_t value_stride, int64_t count,
                int64_t width, const T* ahead, float* out, int64_t out_stride) {
  constexpr int C = R == 1 ? 8 : R <= 3 ? 4 : 2;
  int64_t j = 0;
  for (; j + C * kLanes <= width; j += C * kLanes)
    add_columns<R, C, kAhead>(weights, stride, values + j, value_stride, count, ahead + j, out + j, out_stride);
  for (; j < width; j += kLanes)
    add_columns<R, 1, kAhead>(weights, stride, values + j, value_stride, count, ahead + j, out + j, out_stride);
}

// out [R][width] += weights [R][last - first] times the values of tokens `first : last` of a piece.
template <int R, bool kAhead, class T>
void add_piece(const float* weights, int64_t stride, const Piece<T>& piece, int64_t first, int64_t last, int64_t width,
               const T* ahead, float* out, int64_t out_stride) {
  const T* values = piece.values + first * piece.value_stride;
  ahead += first * piece.value_stride;
  if constexpr (!Cache<T>::kScaled) {
    add_values<R, kAhead>(weights, stride, values, piece.value_stride, last - first, width, ahead, out, out_stride);
  } else {
    const bf16* scales = piece.value_scales + first;
    for (int64_t j = 0; j < width; j += kValueGroup, scales += piece.scale_stride) {
      float scaled[R * kSubtile];
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int64_t i = 0; i < kSubtile; i += kLanes)
          store(scaled + r * kSubtile + i, load(weights + r * stride + i) * load(scales + i));
      add_values<R, kAhead>(scaled, kSubtile, values + j, piece.value_stride, last - first,
                            std::min(kValueGroup, width - j), ahead + j, out + j, out_stride);
    }
  }
}

// f(std::integral_constant<int, rows>{}) for 1 <= rows <= kRows.
template <int R = 1, class F>
inline void with_rows(int64_t rows, const F& f) {
  if constexpr (R == kRows) {
    f(std::integral_constant<int, R>{});
  } else {
    if (rows == R) f(std::integral_constant<int, R>{});
    else with_rows<R + 1>(rows, f);
  }
}

// The state of one row's softmax over the tokens seen so far (Milakov and Gimelshein, 2018).
struct Running {
  float most = -INFINITY;  // of the scores
  float total = 0;         // of e^(score - most)
};

// Scores [width] to weights e^(score - most), in place; width is a multiple of kLanes, and -inf is a token not seen.
// Returns what earlier sums must be multiplied by.
inline float weigh(float* scores, int64_t width, Running& row) {
  Floats most = splat(row.most);
  for (int64_t i = 0; i < width; i += kLanes) most = max(load(scores + i), most);
  float now = max(most);
  if (now == -INFINITY) now = 0;  // nothing seen yet: all weights 0, not NaN
  Floats total = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    Floats weight = exp_of_negative(load(scores + i) - now);
    store(scores + i, weight);
    total += weight;
  }
  float kept = row.most == now ? 1.f : exp_of_negative(splat(row.most - now))[0];
  row.total = row.total * kept + sum(total);
  row.most = max(most);
  return kept;
}

}  // namespace fg

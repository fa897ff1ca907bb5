// A tile of the cache in float32, in pieces of whole sub-tiles: for many query rows, which read it many times, and where
// the cache's own pieces are small.
#pragma once

#include "attention.h"
#include "attention_kernels.h"
#include "transpose.h"

namespace fg {

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Room for a tile's keys and values, in floats.
inline int64_t unpacked_keys(int64_t head_dim) { return kTile * head_dim + kSubtile * kLanes + kSlack; }
inline int64_t unpacked_values(int64_t value_dim) { return kTile * round_up(value_dim, kLanes) + kSlack; }

// f(first, last, scale's place) for the components of a head that share a scale; all of them where there are none.
template <class T, class F>
inline void each_group(int64_t dim, int64_t group, int64_t scale_stride, const F& f) {
  if constexpr (!Cache<T>::kScaled) return f(0, dim, 0);
  for (int64_t first = 0; first < dim; first += group)
    f(first, std::min(dim, first + group), first / group * scale_stride);
}

// A piece's keys to where the tile's tokens from `offset` on belong.
template <class T>
void unpack_keys(const Piece<T>& piece, int64_t head_dim, int64_t offset, float* keys) {
  constexpr bool kScaled = Cache<T>::kScaled;
  each_group<T>(head_dim, kKeyGroup, piece.scale_stride, [&](int64_t first, int64_t last, int64_t scales) {
    if (piece.count == kSubtile && offset % kSubtile == 0) {  // a whole sub-tile stays one
      Floats scale[kSubtile / kLanes] = {};
      if constexpr (kScaled)
        for (int64_t i = 0; i < kSubtile; i += kLanes) scale[i / kLanes] = load(piece.key_scales + scales + i);
      float* to = keys + offset * head_dim;
      for (int64_t d = first * kSubtile; d < last * kSubtile; d += kSubtile)
#pragma GCC unroll 4
        for (int64_t i = 0; i < kSubtile; i += kLanes) {
          Floats v = load(piece.keys + d + i);
          if constexpr (kScaled) v *= scale[i / kLanes];
          store(to + d + i, v);
        }
      return;
    }
    for (int64_t i = 0; i < piece.count; ++i) {
      int64_t at = offset + i;
      float* to = keys + at / kSubtile * kSubtile * head_dim + at % kSubtile;
      float scale = 1;
      if constexpr (kScaled) scale = widen(piece.key_scales[scales + i]);
      for (int64_t d = first; d < last; ++d) to[d * kSubtile] = widen(piece.keys[d * piece.key_stride + i]) * scale;
    }
  });
}

// A piece's values to [count][width].
template <class T>
void unpack_values(const Piece<T>& piece, int64_t width, float* values) {
  constexpr bool kScaled = Cache<T>::kScaled;
  each_group<T>(width, kValueGroup, piece.scale_stride, [&](int64_t first, int64_t last, int64_t scales) {
    for (int64_t i = 0; i < piece.count; ++i) {
      Floats scale = {};
      if constexpr (kScaled) scale = splat(widen(piece.value_scales[scales + i]));
      for (int64_t d = first; d < last; d += kLanes) {
        Floats v = load(piece.values + i * piece.value_stride + d);
        if constexpr (kScaled) v *= scale;
        store(values + i * width + d, v);
      }
    }
  });
}

// values [kSubtile][width] = the first components of a sub-tile's keys, transposed.
inline void values_of_keys(const float* keys, int64_t width, float* values) {
  for (int64_t d = 0; d < width; d += kLanes) {
    for (int64_t i = 0; i < kSubtile; i += kLanes) {
      Floats square[kLanes];
      for (int64_t j = 0; j < kLanes; ++j) square[j] = load(keys + (d + j) * kSubtile + i);
      transpose(square);
      for (int64_t j = 0; j < kLanes; ++j) store(values + (i + j) * width + d, square[j]);
    }
  }
}

template <class T>
void unpack(const Cache<T>& cache, const Tile<T>& given, float* keys, float* values, Tile<float>& made) {
  int64_t width = round_up(cache.value_dim, kLanes), tokens = 0;
  for (const Piece<T>* piece = given.pieces; piece < given.pieces + given.count; ++piece) {
    unpack_keys(*piece, cache.head_dim, tokens, keys);
    if (cache.values) unpack_values(*piece, width, values + tokens * width);
    tokens += piece->count;
  }
  made.from = given.from;
  made.to = given.to;
  made.count = 0;
  for (int64_t first = 0; first < tokens; first += kSubtile) {
    const float* at = keys + first * cache.head_dim;
    if (!cache.values) values_of_keys(at, width, values + first * width);
    made.pieces[made.count++] = {at, values + first * width, kSubtile, width, std::min(kSubtile, tokens - first),
                                 nullptr, nullptr, 0};
  }
}

}  // namespace fg

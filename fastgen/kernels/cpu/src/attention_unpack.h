// A tile of the cache in float32, in pieces of whole sub-tiles: for many query rows, which read it many times, and where
// the cache's own pieces are small.
#pragma once

#include "attention.h"
#include "transpose.h"

namespace fg {

constexpr int64_t kTile = 64;  // tokens whose scores are computed before they become weights

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Room for a tile's keys and values, in floats.
inline int64_t unpacked_keys(int64_t head_dim) { return kTile * head_dim + kSubtile * kLanes + kSlack; }
inline int64_t unpacked_values(int64_t value_dim) { return kTile * round_up(value_dim, kLanes) + kSlack; }

template <class T>
void unpack_keys(const Piece<T>& piece, int64_t head_dim, int64_t offset, float* keys) {
  if (piece.count == kSubtile && offset % kSubtile == 0) {  // a whole sub-tile stays one
    for (int64_t i = 0; i < kSubtile * head_dim; i += kLanes)
      store(keys + offset * head_dim + i, load(piece.keys + i));
    return;
  }
  for (int64_t i = 0; i < piece.count; ++i) {
    int64_t at = offset + i;
    float* to = keys + at / kSubtile * kSubtile * head_dim + at % kSubtile;
    for (int64_t d = 0; d < head_dim; ++d) to[d * kSubtile] = widen(piece.keys[d * piece.key_stride + i]);
  }
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

// Returns the number of pieces made of the `count` given.
template <class T>
int64_t unpack(const Cache<T>& cache, const Piece<T>* given, int64_t count, float* keys, float* values,
               Piece<float>* made) {
  int64_t width = round_up(cache.value_dim, kLanes), tokens = 0;
  for (const Piece<T>* piece = given; piece < given + count; ++piece) {
    unpack_keys(*piece, cache.head_dim, tokens, keys);
    if (cache.values)
      for (int64_t i = 0; i < piece->count; ++i)
        for (int64_t d = 0; d < width; d += kLanes)
          store(values + (tokens + i) * width + d, load(piece->values + i * piece->value_stride + d));
    tokens += piece->count;
  }
  int64_t pieces = 0;
  for (int64_t first = 0; first < tokens; first += kSubtile) {
    const float* at = keys + first * cache.head_dim;
    if (!cache.values) values_of_keys(at, width, values + first * width);
    made[pieces++] = {at, values + first * width, kSubtile, width, std::min(kSubtile, tokens - first)};
  }
  return pieces;
}

}  // namespace fg

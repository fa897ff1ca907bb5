// Ragged attention over a blocked cache: its arguments, and where the cache keeps what.
//
// K of a (block, kv head) lies in sub-tiles of 16 tokens, transposed: [head_dim][16], the last one as narrow as what is
// left of the block. So a load serves 16 tokens, and all query heads that share them, and no score needs a horizontal
// sum. V lies as [block_size][value_dim], whose weighted sum needs none either. Loads of whole vectors run over the end
// of a row: what they find there is never used, and an allocation ends with kSlack elements that nobody owns.
#pragma once

#include <algorithm>
#include <cstdint>

#include "op.h"
#include "pool.h"
#include "simd.h"

namespace fg {

// Strides are in elements. All that changes between passes of one shape is read from the arrays.
struct AttentionArgs {
  const void* query;  // [tokens, heads, head_dim], rows query_stride apart
  const void* key;    // [tokens, kv_heads, head_dim], rows key_stride apart
  const void* value;  // [tokens, kv_heads, value_dim], rows value_stride apart; null: the keys hold the values
  void* out;          // [tokens, heads, value_dim], contiguous
  void* key_cache;
  void* value_cache;           // null: the keys hold the values
  const int64_t* block_table;  // [sequences, blocks], rows table_stride apart
  const int64_t* spans;        // [3, sequences]: starts, counts, contexts, rows spans_stride apart
  const int64_t* slots;        // [tokens]: block * block_size + offset
  const float* slopes;         // [heads] or null
  int64_t query_stride, key_stride, value_stride, table_stride, spans_stride;
  int64_t tokens, sequences, heads, kv_heads, head_dim, value_dim, block_size;
  int64_t window;  // 0: none
  double scale;
  double softcap;  // 0: none
  int64_t dtype;
};

constexpr int64_t kSubtile = 16;
constexpr int64_t kSlack = 64;

// Tokens that follow each other in one sub-tile: element (d, i) of their keys is at keys[d * key_stride + i], of their
// values at values[i * value_stride + d].
template <class T>
struct Piece {
  const T* keys;
  const T* values;
  int64_t key_stride, value_stride, count;
};

template <class T>
struct Cache {
  T* keys;
  T* values;
  int64_t block_size, kv_heads, head_dim, value_dim;

  explicit Cache(const AttentionArgs& args)
      : keys(static_cast<T*>(args.key_cache)),
        values(static_cast<T*>(args.value_cache)),
        block_size(args.block_size),
        kv_heads(args.kv_heads),
        head_dim(args.head_dim),
        value_dim(args.value_dim) {}

  // From the token at `offset` of `block` to the end of its sub-tile.
  Piece<T> piece(int64_t block, int64_t head, int64_t offset) const {
    int64_t first = offset / kSubtile * kSubtile, width = std::min(kSubtile, block_size - first);
    int64_t row = (block * kv_heads + head) * block_size;
    return {keys + (row + first) * head_dim + offset - first,
            values ? values + (row + offset) * value_dim : nullptr, width, value_dim, first + width - offset};
  }
};

// Tokens `from : to` of the context in the blocks of `table`, as pieces; returns how many.
template <class T>
int64_t find_pieces(const Cache<T>& cache, const int64_t* table, int64_t head, int64_t from, int64_t to,
                    Piece<T>* pieces) {
  int64_t found = 0;
  while (from < to) {
    Piece<T>& piece = pieces[found++] = cache.piece(table[from / cache.block_size], head, from % cache.block_size);
    piece.count = std::min(piece.count, to - from);
    from += piece.count;
  }
  return found;
}

// Put this pass's keys and values into their slots.
template <class T>
void write_cache(const AttentionArgs& args) {
  Cache<T> cache(args);
  const T* key = static_cast<const T*>(args.key);
  const T* value = static_cast<const T*>(args.value);
  constexpr int64_t kTokens = 64;
  int64_t groups = (args.tokens + kTokens - 1) / kTokens;
  auto write = [&](int64_t head, int64_t first) {
    for (int64_t n = first; n < std::min(args.tokens, first + kTokens); ++n) {
      Piece<T> at = cache.piece(args.slots[n] / args.block_size, head, args.slots[n] % args.block_size);
      const T* from = key + n * args.key_stride + head * args.head_dim;
      T* to = const_cast<T*>(at.keys);
      for (int64_t d = 0; d < args.head_dim; ++d) to[d * at.key_stride] = from[d];
      if (at.values)
        std::memcpy(const_cast<T*>(at.values), value + n * args.value_stride + head * args.value_dim,
                    args.value_dim * sizeof(T));
    }
  };
  if (groups == 1) {  // so little that it is done before another thread has heard of it
    for (int64_t head = 0; head < args.kv_heads; ++head) write(head, 0);
    return;
  }
  parallel(groups * args.kv_heads,
           [&](int64_t task, Scratch&) { write(task % args.kv_heads, task / args.kv_heads * kTokens); });
}

}  // namespace fg

// Ragged attention over a blocked cache: its arguments, and where the cache keeps what.
//
// K of a (block, kv head) lies in sub-tiles of 16 tokens, transposed: [head_dim][16], the last one as narrow as what is
// left of the block. So a load serves 16 tokens, and all query heads that share them, and no score needs a horizontal
// sum. V lies as [block_size][value_dim], whose weighted sum needs none either. In 8 bits (attention_codes.h) their
// scales lie apart, as [block][kv head][group][block_size], so that a load serves 16 tokens too. Loads of whole vectors
// run over the end of a row: what they find there is never used, and an allocation ends with kSlack elements that
// nobody owns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "attention_codes.h"
#include "op.h"
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
  bf16* key_scales;            // null: the cache is of dtype; else of 8 bits
  bf16* value_scales;          // null with value_cache, or with key_scales
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
// values at values[i * value_stride + d], the scales of group g at ..._scales[g * scale_stride + i].
template <class T>
struct Piece {
  const T* keys;
  const T* values;
  int64_t key_stride, value_stride, count;
  const bf16* key_scales;
  const bf16* value_scales;
  int64_t scale_stride;
};

template <class T>
struct Cache {
  static constexpr bool kScaled = std::is_same_v<T, Code>;

  T* keys;
  T* values;
  bf16* key_scales;
  bf16* value_scales;
  int64_t block_size, kv_heads, head_dim, value_dim;

  explicit Cache(const AttentionArgs& args)
      : keys(static_cast<T*>(args.key_cache)),
        values(static_cast<T*>(args.value_cache)),
        key_scales(args.key_scales),
        value_scales(args.value_scales),
        block_size(args.block_size),
        kv_heads(args.kv_heads),
        head_dim(args.head_dim),
        value_dim(args.value_dim) {}

  // From the token at `offset` of `block` to the end of its sub-tile.
  Piece<T> piece(int64_t block, int64_t head, int64_t offset) const {
    int64_t first = offset / kSubtile * kSubtile, width = std::min(kSubtile, block_size - first);
    int64_t row = (block * kv_heads + head) * block_size;
    return {keys + (row + first) * head_dim + offset - first,
            values ? values + (row + offset) * value_dim : nullptr,
            width,
            value_dim,
            first + width - offset,
            kScaled ? key_scales + row * groups(head_dim, kKeyGroup) + offset : nullptr,
            kScaled && values ? value_scales + row * groups(value_dim, kValueGroup) + offset : nullptr,
            block_size};
  }
};

constexpr int64_t kTile = 64;  // tokens whose scores are computed before they become weights

// Tokens `from : to` of a context, in pieces.
template <class T>
struct Tile {
  int64_t from, to, count;
  Piece<T> pieces[kTile];
};

// The tokens from `from` to the end of their tile, but not beyond `to`, in the blocks of `table`. None: no pieces.
template <class T>
void find_tile(const Cache<T>& cache, const int64_t* table, int64_t head, int64_t from, int64_t to, Tile<T>& tile) {
  tile.from = from;
  tile.to = to = std::min(to, (from / kTile + 1) * kTile);
  tile.count = 0;
  while (from < to) {
    Piece<T>& piece = tile.pieces[tile.count++];
    piece = cache.piece(table[from / cache.block_size], head, from % cache.block_size);
    piece.count = std::min(piece.count, to - from);
    from += piece.count;
  }
}

}  // namespace fg

// A pass's keys and values on their way into the cache.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention.h"
#include "pool.h"

namespace fg {

// One token's key or value [dim], as it is; its elements come to lie `stride` apart.
template <class T>
inline void put(const T* from, int64_t dim, T* to, int64_t stride) {
  if (stride == 1) std::memcpy(to, from, dim * sizeof(T));
  else
    for (int64_t d = 0; d < dim; ++d) to[d * stride] = from[d];
}

// The same in 8 bits; the scale of group g goes to scales[g * scale_stride].
template <class T>
inline void put_codes(const T* from, int64_t dim, int64_t group, Code* to, int64_t stride, bf16* scales,
                      int64_t scale_stride) {
  for (int64_t first = 0; first < dim; first += group) {
    Code codes[kValueGroup];
    int64_t count = std::min(group, dim - first);
    *scales = quantise(from + first, count, codes);
    put(codes, count, to + first * stride, stride);
    scales += scale_stride;
  }
}

// Put this pass's keys and values [of T] into their slots in a cache of K.
template <class T, class K>
void write_cache(const AttentionArgs& args) {
  Cache<K> cache(args);
  const T* key = static_cast<const T*>(args.key);
  const T* value = static_cast<const T*>(args.value);
  constexpr int64_t kTokens = 64;
  int64_t parts = (args.tokens + kTokens - 1) / kTokens;
  auto write = [&](int64_t head, int64_t first) {
    for (int64_t n = first; n < std::min(args.tokens, first + kTokens); ++n) {
      Piece<K> at = cache.piece(args.slots[n] / args.block_size, head, args.slots[n] % args.block_size);
      const T* k = key + n * args.key_stride + head * args.head_dim;
      const T* v = value + n * args.value_stride + head * args.value_dim;
      auto* keys = const_cast<K*>(at.keys);
      auto* values = const_cast<K*>(at.values);
      if constexpr (Cache<K>::kScaled) {
        auto* key_scales = const_cast<bf16*>(at.key_scales);
        auto* value_scales = const_cast<bf16*>(at.value_scales);
        put_codes(k, args.head_dim, kKeyGroup, keys, at.key_stride, key_scales, at.scale_stride);
        if (values) put_codes(v, args.value_dim, kValueGroup, values, 1, value_scales, at.scale_stride);
      } else {
        put(k, args.head_dim, keys, at.key_stride);
        if (values) put(v, args.value_dim, values, 1);
      }
    }
  };
  if (parts == 1) {  // so little that it is done before another thread has heard of it
    for (int64_t head = 0; head < args.kv_heads; ++head) write(head, 0);
    return;
  }
  parallel(parts * args.kv_heads,
           [&](int64_t task, Scratch&) { write(task % args.kv_heads, task / args.kv_heads * kTokens); });
}

}  // namespace fg

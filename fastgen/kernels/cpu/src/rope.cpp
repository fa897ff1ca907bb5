// Rotary position embedding (Su et al., 2021): component i of a head turns with component i + half.
#include <cstring>

#include "op.h"
#include "rows.h"

namespace fg {

// x [tokens, heads, size] -> out, contiguous, the first 2 * half components of each head turned by the token's angles,
// cos and sin [tokens, half] contiguous; all of `dtype`. Strides of x in elements.
struct RotaryArgs {
  const void* x;
  const void* cos;
  const void* sin;
  void* out;
  int64_t tokens, heads, size, half, token_stride, head_stride, dtype;
};

namespace {

// The first product is rounded to T before the second is added, as torch's addcmul does.
template <class T>
void turn(const T* x, const T* cos, const T* sin, T* out, int64_t half) {
  each_vector(half, [&](int64_t i, auto at) {
    Floats first = at.load(x + i), second = at.load(x + half + i);
    Floats c = at.load(cos + i), s = at.load(sin + i);
    at.store(out + i, rounded<T>(first * c) - second * s);
    at.store(out + half + i, rounded<T>(second * c) + first * s);
  });
}

template <class T>
void turn_token(const RotaryArgs& args, int64_t token) {
  int64_t size = args.size, half = args.half;
  const T* x = static_cast<const T*>(args.x) + token * args.token_stride;
  const T* cos = static_cast<const T*>(args.cos) + token * half;
  const T* sin = static_cast<const T*>(args.sin) + token * half;
  T* out = static_cast<T*>(args.out) + token * args.heads * size;
  for (int64_t head = 0; head < args.heads; ++head, x += args.head_stride, out += size) {
    turn(x, cos, sin, out, half);
    std::memcpy(out + 2 * half, x + 2 * half, (size - 2 * half) * sizeof(T));
  }
}

}  // namespace

}  // namespace fg

extern "C" void fg_rotary(const fg::RotaryArgs* args) {
  fg::with_type(args->dtype, [&](auto type) {
    fg::each_row(args->tokens, args->heads * args->size, [&](int64_t token) {
      fg::turn_token<decltype(type)>(*args, token);
    });
  });
}

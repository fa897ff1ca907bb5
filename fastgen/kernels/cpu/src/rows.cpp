// The greatest element of each row: the next token of greedy decoding.
#include "op.h"
#include "rows.h"

namespace fg {

// x [rows, size], rows `stride` elements apart -> out [rows]: where each row's greatest is, the first of equals. A NaN is
// greater than any number, as in torch. size is at least 1.
struct ArgmaxArgs {
  const void* x;
  int64_t* out;
  int64_t rows, size, stride, dtype;
};

namespace {

constexpr int64_t kBlock = 1024;  // elements looked at for their maximum, and again only if it is a new one

// The maximum of x [size]; NaN if there is one among them.
template <class T>
float greatest(const T* x, int64_t size) {
  constexpr int kChains = 4;
  Floats best[kChains];
  Ints nan = {};
  for (int j = 0; j < kChains; ++j) best[j] = splat(widen(x[0]));
  int64_t i = 0;
  for (; i + kChains * kLanes <= size; i += kChains * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < kChains; ++j) {
      Floats v = load(x + i + j * kLanes);
      best[j] = max(v, best[j]);
      nan |= v != v;
    }
  }
  float found = max(max(max(best[0], best[1]), max(best[2], best[3])));
  bool any = sum((Floats)(nan & 0x3f800000)) != 0.f;
  for (; i < size; ++i) {
    float one = widen(x[i]);
    found = one > found ? one : found;
    any |= one != one;
  }
  return any ? __builtin_nanf("") : found;
}

template <class T>
int64_t first_of(const T* x, float value) {
  int64_t i = 0;
  if (value != value) {
    while (widen(x[i]) == widen(x[i])) ++i;
  } else {
    while (widen(x[i]) != value) ++i;
  }
  return i;
}

template <class T>
int64_t argmax(const T* x, int64_t size) {
  int64_t at = 0;
  float best = greatest(x, std::min(kBlock, size));
  for (int64_t i = kBlock; i < size && best == best; i += kBlock) {
    float here = greatest(x + i, std::min(kBlock, size - i));
    if (here <= best) continue;
    best = here;
    at = i;
  }
  return at + first_of(x + at, best);
}

}  // namespace

}  // namespace fg

extern "C" void fg_argmax(const fg::ArgmaxArgs* args) {
  fg::with_type(args->dtype, [&](auto type) {
    using T = decltype(type);
    fg::each_row(args->rows, args->size, [&](int64_t row) {
      args->out[row] = fg::argmax(static_cast<const T*>(args->x) + row * args->stride, args->size);
    });
  });
}

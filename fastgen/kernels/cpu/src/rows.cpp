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

// A row is read in kParts places at once: a processor fetches from memory ahead of each of them by itself, and one place
// alone gets half of what memory can give.
constexpr int kParts = 8;
constexpr int64_t kBlock = 1024;  // elements looked at for their maximum, and again only if it is a new one

struct Greatest {
  float value[kParts];
  bool nan;
};

// The maximum of `count` elements from each of x, x + apart, x + 2 * apart, ...; and whether a NaN is among them all.
// count is a multiple of kLanes.
template <class T>
Greatest greatest(const T* x, int64_t apart, int64_t count) {
  Floats best[kParts];
  Ints nan = {};
  for (int j = 0; j < kParts; ++j) best[j] = load(x + j * apart);
  for (int64_t i = 0; i < count; i += kLanes) {
#pragma GCC unroll 8
    for (int j = 0; j < kParts; ++j) {
      Floats v = load(x + j * apart + i);
      best[j] = max(v, best[j]);
      nan |= v != v;
    }
  }
  Greatest found;
  for (int j = 0; j < kParts; ++j) found.value[j] = max(best[j]);
  found.nan = sum((Floats)(nan & 0x3f800000)) != 0.f;
  return found;
}

template <class T>
int64_t first_of(const T* x, float value) {
  int64_t i = 0;
  while (widen(x[i]) != value) ++i;
  return i;
}

template <class T>
int64_t first_nan(const T* x) {
  int64_t i = 0;
  while (widen(x[i]) == widen(x[i])) ++i;
  return i;
}

template <class T>
int64_t argmax(const T* x, int64_t size) {
  int64_t part = size / kParts / kLanes * kLanes;
  float best[kParts];
  int64_t at[kParts] = {};  // the block, of each part, that has its greatest first
  for (int64_t i = 0; i < part; i += kBlock) {
    Greatest here = greatest(x + i, part, std::min(kBlock, part - i));
    if (here.nan) return first_nan(x);
    for (int j = 0; j < kParts; ++j) {
      if (i > 0 && here.value[j] <= best[j]) continue;
      best[j] = here.value[j];
      at[j] = i;
    }
  }
  int64_t found = 0;
  float value = widen(x[0]);
  if (part > 0) {
    int first = int(std::max_element(best, best + kParts) - best);  // the first of equals
    value = best[first];
    found = first * part + at[first];
    found += first_of(x + found, value);
  }
  for (int64_t i = kParts * part; i < size; ++i) {
    float one = widen(x[i]);
    if (one != one) return i;
    if (one > value) value = one, found = i;
  }
  return found;
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

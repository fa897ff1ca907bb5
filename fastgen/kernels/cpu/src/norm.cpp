// Norms over rows, fused with the addition before them. Statistics in float32, of the sum as it is stored.
#include <cmath>

#include "op.h"
#include "rows.h"

namespace fg {

// stream + delta [rows, size] into added, its norm into normed; all contiguous and of `dtype`. Without a delta (null)
// the stream itself is normed, and added is not used.
struct RmsNormArgs {
  const void* stream;
  const void* delta;
  const void* weight;
  void* added;
  void* normed;
  int64_t rows, size;
  double eps, offset;  // offset: added to the weight
  int64_t dtype;
};

// The same; weight and bias may be null.
struct LayerNormArgs {
  const void* stream;
  const void* delta;
  const void* weight;
  const void* bias;
  void* added;
  void* normed;
  int64_t rows, size;
  double eps;
  int64_t dtype;
};

namespace {

// What f(vector) sums up to over the row stream + delta, which is stored in `added` on the way.
template <class T, class F>
float add_and_sum(const T* stream, const T* delta, T* added, int64_t size, const F& f) {
  if (!delta) return sum_over(size, [&](int64_t i, auto at) { return f(at.load(stream + i)); });
  return sum_over(size, [&](int64_t i, auto at) {
    return f(at.keep(added + i, at.load(stream + i) + at.load(delta + i)));
  });
}

template <class T>
void rms_norm_row(const RmsNormArgs& args, int64_t row) {
  int64_t size = args.size, start = row * size;
  const T* stream = static_cast<const T*>(args.stream) + start;
  const T* delta = args.delta ? static_cast<const T*>(args.delta) + start : nullptr;
  const T* weight = static_cast<const T*>(args.weight);
  T* added = static_cast<T*>(args.added) + start;
  T* normed = static_cast<T*>(args.normed) + start;

  float squares = add_and_sum(stream, delta, added, size, [](Floats v) { return v * v; });
  float scale = 1.f / std::sqrt(squares / float(size) + float(args.eps));
  float offset = float(args.offset);
  const T* x = delta ? added : stream;
  if (offset != 0.f) {
    each_vector(size, [&](int64_t i, auto at) {
      at.store(normed + i, at.load(x + i) * scale * (offset + at.load(weight + i)));
    });
  } else {  // the product of two numbers of the model's dtype, as checkpoints were trained
    each_vector(size, [&](int64_t i, auto at) {
      at.store(normed + i, rounded<T>(at.load(x + i) * scale) * at.load(weight + i));
    });
  }
}

template <class T>
void layer_norm_row(const LayerNormArgs& args, int64_t row) {
  int64_t size = args.size, start = row * size;
  const T* stream = static_cast<const T*>(args.stream) + start;
  const T* delta = args.delta ? static_cast<const T*>(args.delta) + start : nullptr;
  const T* weight = static_cast<const T*>(args.weight);
  const T* bias = static_cast<const T*>(args.bias);
  T* added = static_cast<T*>(args.added) + start;
  T* normed = static_cast<T*>(args.normed) + start;

  float mean = add_and_sum(stream, delta, added, size, [](Floats v) { return v; }) / float(size);
  const T* x = delta ? added : stream;
  float squares = sum_over(size, [&](int64_t i, auto at) {
    Floats off = at.zero_beyond(at.load(x + i) - mean);
    return off * off;
  });
  float scale = 1.f / std::sqrt(squares / float(size) + float(args.eps));
  each_vector(size, [&](int64_t i, auto at) {
    Floats v = (at.load(x + i) - mean) * scale;
    if (weight) v *= at.load(weight + i);
    if (bias) v += at.load(bias + i);
    at.store(normed + i, v);
  });
}

}  // namespace

}  // namespace fg

extern "C" void fg_add_rms_norm(const fg::RmsNormArgs* args) {
  fg::with_type(args->dtype, [&](auto type) {
    fg::each_row(args->rows, args->size, [&](int64_t row) { fg::rms_norm_row<decltype(type)>(*args, row); });
  });
}

extern "C" void fg_add_layer_norm(const fg::LayerNormArgs* args) {
  fg::with_type(args->dtype, [&](auto type) {
    fg::each_row(args->rows, args->size, [&](int64_t row) { fg::layer_norm_row<decltype(type)>(*args, row); });
  });
}

// The activation between a feed-forward branch's two products.
#include "activation.h"

#include "op.h"
#include "rows.h"

namespace fg {

// x [rows, size] -> out [rows, size], or with gates x [rows, 2 * size] -> act(first half) * second half; contiguous.
struct ActivationArgs {
  const void* x;
  void* out;
  int64_t rows, size, activation, dtype;
};

namespace {

// f(Named activation, T{}) with those of the arguments.
template <class F>
void with_both(const ActivationArgs& args, const F& f) {
  with_activation(args.activation, [&](auto named) { with_type(args.dtype, [&](auto type) { f(named, type); }); });
}

}  // namespace

}  // namespace fg

extern "C" void fg_activation(const fg::ActivationArgs* args) {
  int64_t size = args->size;
  fg::with_both(*args, [&](auto named, auto type) {
    using T = decltype(type);
    fg::each_row(args->rows, size, [&](int64_t row) {
      const T* x = static_cast<const T*>(args->x) + row * size;
      T* out = static_cast<T*>(args->out) + row * size;
      fg::each_vector(size, [&](int64_t i, auto at) {
        at.store(out + i, fg::activate<decltype(named)::value, T>(at.load(x + i)));
      });
    });
  });
}

extern "C" void fg_gated_activation(const fg::ActivationArgs* args) {
  int64_t size = args->size;
  fg::with_both(*args, [&](auto named, auto type) {
    using T = decltype(type);
    fg::each_row(args->rows, size, [&](int64_t row) {
      const T* gate = static_cast<const T*>(args->x) + row * 2 * size;
      const T* up = gate + size;
      T* out = static_cast<T*>(args->out) + row * size;
      fg::each_vector(size, [&](int64_t i, auto at) {
        fg::Floats opened = fg::rounded<T>(fg::activate<decltype(named)::value, T>(at.load(gate + i)));
        at.store(out + i, opened * at.load(up + i));
      });
    });
  });
}

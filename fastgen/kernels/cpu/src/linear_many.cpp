// A product of many rows, after Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008): a panel
// of a few weight rows is widened and transposed once, stays in the nearest cache, and is multiplied with all rows of x in
// tiles that live in registers.
#include "linear.h"
#include "transpose.h"

namespace fg {
namespace {

constexpr int kTileRows = FG_LANES == 16 ? 12 : 6;
constexpr int64_t kPanel = 2 * kLanes;  // weight rows in a panel
constexpr int64_t kDepth = 256;         // of their elements: 16 to 32 KiB

// panel [depth][kPanel] = weight rows [kPanel][depth] from column k on, zeros for rows that are not there.
template <class T>
void pack(const T* weight, int64_t in, int64_t there, int64_t depth, float* panel) {
  for (int64_t half = 0; half < kPanel; half += kLanes) {
    for (int64_t k = 0; k < depth; k += kLanes) {
      Floats square[kLanes];
      int64_t count = std::min(kLanes, depth - k);
      for (int64_t i = 0; i < kLanes; ++i) {
        const T* from = weight + (half + i) * in + k;
        square[i] = half + i >= there ? Floats{} : count == kLanes ? load(from) : load_some(from, count);
      }
      transpose(square);
      for (int64_t i = 0; i < count; ++i) store(panel + (k + i) * kPanel + half, square[i]);
    }
  }
}

// sums [R][kPanel] += x [R][depth] times panel [depth][kPanel].
template <int R>
void tile(const float* x, int64_t x_stride, const float* panel, int64_t depth, float* sums) {
  Floats left[R], right[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    left[r] = load(sums + r * kPanel);
    right[r] = load(sums + r * kPanel + kLanes);
  }
  for (int64_t k = 0; k < depth; ++k) {
    Floats a = load(panel + k * kPanel), b = load(panel + k * kPanel + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      Floats one = splat(x[r * x_stride + k]);
      left[r] += one * a;
      right[r] += one * b;
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    store(sums + r * kPanel, left[r]);
    store(sums + r * kPanel + kLanes, right[r]);
  }
}

void rows_of_tiles(int64_t rows, const float* x, int64_t x_stride, const float* panel, int64_t depth, float* sums) {
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows)
    tile<kTileRows>(x + r * x_stride, x_stride, panel, depth, sums + r * kPanel);
  for (; r + 3 <= rows; r += 3) tile<3>(x + r * x_stride, x_stride, panel, depth, sums + r * kPanel);
  for (; r < rows; ++r) tile<1>(x + r * x_stride, x_stride, panel, depth, sums + r * kPanel);
}

template <class T>
void write(const float* sums, int64_t rows, int64_t there, const T* bias, T* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < there; n += kLanes) {
      int64_t count = std::min(kLanes, there - n);
      Floats v = load(sums + r * kPanel + n);
      if (bias) v += count == kLanes ? load(bias + n) : load_some(bias + n, count);
      if (count == kLanes) store(out + r * out_stride + n, v);
      else store_some(out + r * out_stride + n, v, count);
    }
  }
}

// x itself where it is float32, else a widened copy; with the stride of its rows.
const float* wide(const float* x, const LinearArgs& args, int64_t* stride) {
  *stride = args.x_stride;
  return x;
}
const float* wide(const bf16* x, const LinearArgs& args, int64_t* stride) {
  int64_t in = args.in;
  float* copy = shared_scratch().take<float>(args.rows * in);
  constexpr int64_t kRows = 16;
  parallel((args.rows + kRows - 1) / kRows, [&](int64_t task, Scratch&) {
    for (int64_t r = task * kRows; r < std::min(args.rows, (task + 1) * kRows); ++r) {
      int64_t k = 0;
      for (; k + kLanes <= in; k += kLanes) store(copy + r * in + k, load(x + r * args.x_stride + k));
      for (; k < in; ++k) copy[r * in + k] = widen(x[r * args.x_stride + k]);
    }
  });
  *stride = in;
  return copy;
}

template <class T>
void run(const LinearArgs& args) {
  int64_t in = args.in, rows = args.rows, x_stride;
  const float* x = wide(static_cast<const T*>(args.x), args, &x_stride);
  parallel((args.outs + kPanel - 1) / kPanel, [&](int64_t task, Scratch& scratch) {
    int64_t n = task * kPanel, there = std::min(kPanel, args.outs - n);
    float* panel = scratch.take<float>(kPanel * (kDepth + rows));
    float* sums = panel + kPanel * kDepth;
    std::memset(sums, 0, rows * kPanel * sizeof(float));
    const T* weight = static_cast<const T*>(args.weight) + n * in;
    for (int64_t k = 0; k < in; k += kDepth) {
      int64_t depth = std::min(kDepth, in - k);
      pack(weight + k, in, there, depth, panel);
      rows_of_tiles(rows, x + k, x_stride, panel, depth, sums);
    }
    const T* bias = static_cast<const T*>(args.bias);
    write(sums, rows, there, bias ? bias + n : nullptr, static_cast<T*>(args.out) + n, args.out_stride);
  });
}

}  // namespace

void linear_many_rows(const LinearArgs& args) {
  with_type(args.dtype, [&](auto type) { run<decltype(type)>(args); });
}

}  // namespace fg

// A product of few rows: the weight is read once, in its own layout and format, and each row of it is a dot product with
// every row of x.
#include "linear.h"

namespace fg {
namespace {

// Accumulators of a tile must fit in the registers beside what is being multiplied: 16 below AVX-512, 32 with it.
constexpr int kTileRows = FG_LANES == 16 ? 6 : 3;
constexpr int64_t kTaskBytes = 64 * 1024;  // of weight: some microseconds of reading

// R rows of x (float32, in pair order, padded to whole pairs) times C rows of the weight.
template <class T, int R, int C>
void tile(const float* x, int64_t x_stride, const T* weight, int64_t in, const T* bias, T* out, int64_t out_stride) {
  Floats sums[R][C] = {};
  int64_t k = 0;
  for (; k + kPair <= in; k += kPair) {
    Pair rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = load_pair(x + r * x_stride + k);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      Pair w = load_pair(weight + c * in + k);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        sums[r][c] += rows[r].a * w.a;
        sums[r][c] += rows[r].b * w.b;
      }
    }
  }
  if (k < in) {
    for (int c = 0; c < C; ++c) {
      Pair w = load_pair_some(weight + c * in + k, in - k);
      for (int r = 0; r < R; ++r) {
        Pair row = load_pair(x + r * x_stride + k);
        sums[r][c] += row.a * w.a;
        sums[r][c] += row.b * w.b;
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      out[r * out_stride + c] = narrow<T>(sum(sums[r][c]) + (bias ? widen(bias[c]) : 0.f));
}

template <class T, int C>
void column(int64_t rows, const float* x, int64_t x_stride, const T* weight, int64_t in, const T* bias, T* out,
            int64_t out_stride) {
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows)
    tile<T, kTileRows, C>(x + r * x_stride, x_stride, weight, in, bias, out + r * out_stride, out_stride);
  for (; r + 2 <= rows; r += 2)
    tile<T, 2, C>(x + r * x_stride, x_stride, weight, in, bias, out + r * out_stride, out_stride);
  if (r < rows) tile<T, 1, C>(x + r * x_stride, x_stride, weight, in, bias, out + r * out_stride, out_stride);
}

// x in float32, in pair order, each row padded with zeros to whole pairs.
template <class T>
void widen_rows(const T* x, int64_t rows, int64_t in, int64_t x_stride, float* wide, int64_t padded) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = x + r * x_stride;
    float* to = wide + r * padded;
    for (int64_t k = 0; k < in; k += kPair) {
      Pair pair = k + kPair <= in ? load_pair(from + k) : load_pair_some(from + k, in - k);
      store(to + k, pair.a);
      store(to + k + kLanes, pair.b);
    }
  }
}

template <class T>
void run(const LinearArgs& args) {
  const T* weight = static_cast<const T*>(args.weight);
  const T* bias = static_cast<const T*>(args.bias);
  T* out = static_cast<T*>(args.out);
  int64_t in = args.in, rows = args.rows;
  int64_t padded = (in + kPair - 1) / kPair * kPair;
  float* x = shared_scratch().take<float>(std::max<int64_t>(1, rows * padded));
  widen_rows(static_cast<const T*>(args.x), rows, in, args.x_stride, x, padded);

  constexpr int64_t kColumns = 8;
  int64_t per_task = std::max<int64_t>(kColumns, kTaskBytes / (in * int64_t(sizeof(T)) + 1) / kColumns * kColumns);
  int64_t tasks = (args.outs + per_task - 1) / per_task;
  parallel(tasks, [&](int64_t task, Scratch&) {
    int64_t n = task * per_task, end = std::min(args.outs, n + per_task);
    auto step = [&](auto columns) {
      constexpr int C = decltype(columns)::value;
      for (; n + C <= end; n += C)
        column<T, C>(rows, x, padded, weight + n * in, in, bias ? bias + n : nullptr, out + n, args.out_stride);
    };
    if (rows == 1) step(std::integral_constant<int, 8>{});
    step(std::integral_constant<int, 4>{});
    step(std::integral_constant<int, 1>{});
  });
}

}  // namespace

void linear_few_rows(const LinearArgs& args) {
  with_type(args.dtype, [&](auto type) { run<decltype(type)>(args); });
}

}  // namespace fg

// A product of few rows: the weight is read once, in its own layout and format, and each row of it is a dot product with
// every row of x.
//
// Such a product takes the time of reading the weight. Processors fetch ahead along streams that they have recognised,
// several at once, and recognising one takes a few cache lines; so a task reads its part of the weight as some streams
// that are as long as can be, far apart, rather than as many neighbouring rows. That doubled the bandwidth of one core.
#include "linear.h"

namespace fg {
namespace {

// Accumulators of a tile must fit in the registers beside what is being multiplied: 16 below AVX-512, 32 with it.
constexpr int kTileRows = FG_LANES == 16 ? 6 : 3;
constexpr int kStreams = 8;
constexpr int64_t kTaskBytes = 128 * 1024;  // of weight: some microseconds of reading

// R rows of x (float32, in pair order, padded to whole pairs) times C rows of the weight, `apart` rows from each other.
template <class T, int R, int C>
void tile(const float* x, int64_t x_stride, const T* weight, int64_t in, int64_t apart, const T* bias, T* out,
          int64_t out_stride) {
  Floats sums[R][C] = {};
  const T* stream[C];
  for (int c = 0; c < C; ++c) stream[c] = weight + c * apart * in;
  int64_t k = 0;
  for (; k + kPair <= in; k += kPair) {
    Pair rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = load_pair(x + r * x_stride + k);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      Pair w = load_pair(stream[c] + k);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        sums[r][c] += rows[r].a * w.a;
        sums[r][c] += rows[r].b * w.b;
      }
    }
  }
  if (k < in) {
    for (int c = 0; c < C; ++c) {
      Pair w = load_pair_some(stream[c] + k, in - k);
      for (int r = 0; r < R; ++r) {
        Pair row = load_pair(x + r * x_stride + k);
        sums[r][c] += row.a * w.a;
        sums[r][c] += row.b * w.b;
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      out[r * out_stride + c * apart] = narrow<T>(sum(sums[r][c]) + (bias ? widen(bias[c * apart]) : 0.f));
}

template <class T, int C>
void columns(int64_t rows, const float* x, int64_t x_stride, const T* weight, int64_t in, int64_t apart, const T* bias,
             T* out, int64_t out_stride) {
  auto tiles = [&](int64_t r, auto height) {
    constexpr int R = decltype(height)::value;
    for (; r + R <= rows; r += R)
      tile<T, R, C>(x + r * x_stride, x_stride, weight, in, apart, bias, out + r * out_stride, out_stride);
    return r;
  };
  int64_t r = tiles(0, std::integral_constant<int, kTileRows>{});
  r = tiles(r, std::integral_constant<int, 2>{});
  tiles(r, std::integral_constant<int, 1>{});
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

  int64_t per_task = std::max<int64_t>(kStreams, kTaskBytes / (in * int64_t(sizeof(T)) + 1) / kStreams * kStreams);
  int64_t tasks = (args.outs + per_task - 1) / per_task;
  parallel(tasks, [&](int64_t task, Scratch&) {
    int64_t n = task * per_task, end = std::min(args.outs, n + per_task);
    auto part = [&](auto streams) {
      constexpr int C = decltype(streams)::value;
      int64_t apart = (end - n) / C;
      for (int64_t i = 0; i < apart; ++i, ++n)
        columns<T, C>(rows, x, padded, weight + n * in, in, apart, bias ? bias + n : nullptr, out + n, args.out_stride);
      n += (C - 1) * apart;
    };
    if (rows == 1) part(std::integral_constant<int, kStreams>{});
    part(std::integral_constant<int, 4>{});
    part(std::integral_constant<int, 1>{});
  });
}

}  // namespace

void linear_few_rows(const LinearArgs& args) {
  with_type(args.dtype, [&](auto type) { run<decltype(type)>(args); });
}

}  // namespace fg

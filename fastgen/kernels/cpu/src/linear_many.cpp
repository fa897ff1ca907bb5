// A product of many rows, after Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008), with
// the roles exchanged: x is transposed into panels, whose rows lie side by side in vectors, and the weight is read as it
// lies in memory, each number of it multiplied with whole vectors. So the larger of the two is never rearranged, and a
// tile has time to ask memory for what later ones will read.
//
// A task is a part of the weight times a block of panels. Of both it takes as many columns at once as let a panel stay
// in the first-level cache, and the part in the second.
#include "linear.h"
#include "transpose.h"

namespace fg {
namespace {

constexpr int kSums = FG_LANES == 16 ? 24 : 12;   // vectors of sums in a tile: they must fit in the registers
constexpr int64_t kPanel = 2 * kLanes;            // rows in a panel; the last one has a vector more or less
constexpr int64_t kBlock = 8;                     // panels in a task, at most
constexpr int64_t kDepth = 576;                   // columns that are multiplied at once, at most
constexpr int64_t kPartBytes = 192 * 1024;        // of the weight in a task, in float32, at most
constexpr int64_t kLine = 64;                     // bytes in a cache line
constexpr int64_t kStep = kLine / sizeof(float);  // columns of a tile between prefetches

constexpr int64_t divided(int64_t a, int64_t by) { return (a + by - 1) / by; }
constexpr int64_t rounded_up(int64_t a, int64_t to) { return divided(a, to) * to; }

// panel [depth][width] = x [there][depth] transposed, zeros for rows that are not there.
template <class T>
void pack(const T* x, int64_t x_stride, int64_t there, int64_t depth, int64_t width, float* panel) {
  for (int64_t first = 0; first < width; first += kLanes) {
    for (int64_t k = 0; k < depth; k += kLanes) {
      Floats square[kLanes];
      int64_t count = std::min(kLanes, depth - k);
      for (int64_t i = 0; i < kLanes; ++i) {
        const T* from = x + (first + i) * x_stride + k;
        square[i] = first + i >= there ? Floats{} : count == kLanes ? load(from) : load_some(from, count);
      }
      transpose(square);
      for (int64_t i = 0; i < count; ++i) store(panel + (k + i) * width + first, square[i]);
    }
  }
}

// What a tile asks for in each of its steps: as many cache lines as it has weight rows.
struct Ahead {
  const char* at;       // or null
  int64_t apart, step;  // bytes between lines, and from one step to the next
};

// sums [R][V * kLanes] += weight [R][depth], rows `apart` elements apart, times panel [depth][V * kLanes].
template <int R, int V>
[[gnu::noinline]] void tile(const float* panel, const float* weight, int64_t apart, int64_t depth, float* to,
                            Ahead ahead) {
  Floats sums[R][V];
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = load(to + (r * V + v) * kLanes);
  for (int64_t left = depth; left > 0; left -= kStep) {
    if (ahead.at) {
      for (int r = 0; r < R; ++r) __builtin_prefetch(ahead.at + r * ahead.apart, 0, 2);
      ahead.at += ahead.step;
    }
    const float* end = panel + std::min(kStep, left) * V * kLanes;
#pragma GCC unroll 2
    for (; panel < end; panel += V * kLanes, ++weight) {
      Floats x[V];
      for (int v = 0; v < V; ++v) x[v] = load(panel + v * kLanes);
#pragma GCC unroll 24
      for (int r = 0; r < R; ++r) {
        Floats w = splat(weight[r * apart]);
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v) sums[r][v] += w * x[v];
      }
    }
  }
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(to + (r * V + v) * kLanes, sums[r][v]);
}

// Some columns of some rows of the weight.
template <class T>
struct Part {
  const T* weight;  // [outs][depth], rows `in` elements apart
  const T* next;    // the part that is read after this one
  float* wide;      // [outs][depth]: the same in float32, if T is another type
  int64_t outs, in, depth;
};

// `count` rows of a part from row n on, in float32, and the elements between them. `first`: nobody asked before.
const float* wide_rows(const Part<float>& part, int64_t n, int, bool, int64_t* apart) {
  *apart = part.in;
  return part.weight + n * part.in;
}
const float* wide_rows(const Part<bf16>& part, int64_t n, int count, bool first, int64_t* apart) {
  *apart = part.depth;
  float* wide = part.wide + n * part.depth;
  if (!first) return wide;
  for (int r = 0; r < count; ++r) {
    const bf16* from = part.weight + (n + r) * part.in;
    float* to = wide + r * part.depth;
    int64_t k = 0;
    for (; k + kLanes <= part.depth; k += kLanes) store(to + k, load(from + k));
    for (; k < part.depth; ++k) to[k] = widen(from[k]);
  }
  return wide;
}

// sums [outs][V * kLanes] += a part of the weight times panel [depth][V * kLanes]. The first panel that meets the part
// asks for weight, the others for the panel that comes next.
template <int V, class T>
void part_times_panel(const Part<T>& part, const float* panel, const float* next_panel, bool first, float* sums) {
  const char* panel_ahead = reinterpret_cast<const char*>(next_panel);
  const char* panel_end = panel_ahead + part.depth * V * kLanes * int64_t(sizeof(float));
  auto tiles = [&](int64_t n, auto height) {
    constexpr int R = decltype(height)::value;
    for (; n + R <= part.outs; n += R) {
      Ahead ahead = {nullptr, kLine, R * kLine};
      if (first) {
        const T* next = n + R < part.outs ? part.weight + (n + R) * part.in : part.next;
        ahead = {reinterpret_cast<const char*>(next), part.in * int64_t(sizeof(T)), kStep * int64_t(sizeof(T))};
      } else if (panel_ahead < panel_end) {
        ahead.at = panel_ahead;
        panel_ahead += divided(part.depth, kStep) * ahead.step;
      }
      int64_t apart;
      const float* rows = wide_rows(part, n, R, first, &apart);
      tile<R, V>(panel, rows, apart, part.depth, sums + n * V * kLanes, ahead);
    }
    return n;
  };
  int64_t n = tiles(0, std::integral_constant<int, kSums / V>{});
  tiles(n, std::integral_constant<int, 1>{});
}

// sums [outs][width] transposed, with the bias, into out [rows][outs].
template <class T>
void write(const float* sums, int64_t width, int64_t rows, int64_t outs, const T* bias, T* out, int64_t out_stride) {
  for (int64_t first = 0; first < std::min(rows, width); first += kLanes) {
    for (int64_t n = 0; n < outs; n += kLanes) {
      int64_t count = std::min(kLanes, outs - n);
      Floats square[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) square[i] = i < count ? load(sums + (n + i) * width + first) : Floats{};
      transpose(square);
      Floats added = !bias ? Floats{} : count == kLanes ? load(bias + n) : load_some(bias + n, count);
      for (int64_t i = 0; i < std::min(kLanes, rows - first); ++i) {
        T* to = out + (first + i) * out_stride + n;
        if (count == kLanes) store(to, square[i] + added);
        else store_some(to, square[i] + added, count);
      }
    }
  }
}

template <class T>
void run(const LinearArgs& args) {
  const T* x = static_cast<const T*>(args.x);
  const T* weight = static_cast<const T*>(args.weight);
  const T* bias = static_cast<const T*>(args.bias);
  T* out = static_cast<T*>(args.out);
  int64_t in = args.in, rows = args.rows, padded = rounded_up(rows, kLanes);
  int64_t panels = std::max<int64_t>(1, padded / kPanel), blocks = divided(panels, kBlock);
  auto width_of = [&](int64_t panel) { return panel + 1 < panels ? kPanel : padded - panel * kPanel; };

  float* packed = shared_scratch().take<float>(padded * in + 1);  // [panels][in][rows of the panel]
  parallel(panels, [&](int64_t panel, Scratch&) {
    int64_t row = panel * kPanel;
    pack(x + row * args.x_stride, args.x_stride, rows - row, in, width_of(panel), packed + row * in);
  });

  // Chunks of `in` are of even size; so are parts, if that makes enough tasks for all threads.
  int64_t chunk = rounded_up(std::max<int64_t>(1, divided(in, std::max<int64_t>(1, divided(in, kDepth)))), kStep);
  int64_t part_outs = std::min(kPartBytes / int64_t(sizeof(float)) / chunk, divided(args.outs * blocks, 8 * threads()));
  part_outs = std::max<int64_t>(1, divided(part_outs, kSums)) * kSums;
  parallel(divided(args.outs, part_outs) * blocks, [&](int64_t task, Scratch& scratch) {
    int64_t n = task / blocks * part_outs, outs = std::min(part_outs, args.outs - n);
    int64_t begin = task % blocks * kBlock, end = std::min(panels, begin + kBlock);
    int64_t count = outs * ((end - begin - 1) * kPanel + width_of(end - 1));
    float* sums = scratch.take<float>(count + outs * chunk);  // [panels][outs][rows of the panel]
    auto sums_of = [&](int64_t panel) { return sums + (panel - begin) * kPanel * outs; };
    std::memset(sums, 0, count * sizeof(float));
    for (int64_t k = 0; k < in; k += chunk) {
      const T* columns = weight + n * in + k;
      const T* next = k + chunk < in ? columns + chunk : columns - k + outs * in;
      Part<T> part = {columns, next, sums + count, outs, in, std::min(chunk, in - k)};
      for (int64_t p = begin; p < end; ++p) {
        int64_t width = width_of(p);
        const float* panel = packed + p * kPanel * in + k * width;
        const float* next_panel = panel + in * width;  // the same columns; a little off if the next one is the last
        if (width < kPanel) part_times_panel<1>(part, panel, next_panel, p == begin, sums_of(p));
        else if (width == kPanel) part_times_panel<2>(part, panel, next_panel, p == begin, sums_of(p));
        else part_times_panel<3>(part, panel, next_panel, p == begin, sums_of(p));
      }
    }
    for (int64_t p = begin; p < end; ++p) {
      int64_t row = p * kPanel;
      write(sums_of(p), width_of(p), rows - row, outs, bias ? bias + n : nullptr, out + row * args.out_stride + n,
            args.out_stride);
    }
  });
}

}  // namespace

void linear_many_rows(const LinearArgs& args) {
  with_type(args.dtype, [&](auto type) { run<decltype(type)>(args); });
}

}  // namespace fg

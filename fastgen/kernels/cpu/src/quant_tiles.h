// How products go over panels of a packed weight and rows of activations.
#pragma once

#include <algorithm>
#include <type_traits>

#include "quant.h"

namespace fg {

// Rows of a tile: its sums must fit in the registers beside what is being multiplied.
constexpr int kTileRows = FG_LANES == 16 ? 10 : 4;

// Panels that are read side by side for one row.
constexpr int kStreams = 4;

// A tile's products: rows x the panel's outputs.
template <int R>
struct Tile {
  Floats sums[R][kVectors];
};

// The memory that will be read some groups later: for the first rows that meet a panel, reading is what takes the time.
template <int64_t GroupWords>
inline void prefetch_ahead(const uint32_t* panel) {
  constexpr int64_t kAhead = 4096 / 4, kLine = 64 / 4;
#pragma GCC unroll 40
  for (int64_t word = 0; word < GroupWords; word += kLine) __builtin_prefetch(panel + kAhead + word);
}

// Rows row .. row + R - 1 of a tile into out, with the bias.
template <class T, int R>
void write(const Tile<R>& tile, const QuantLinearArgs& args, int64_t row, int64_t first) {
  const T* bias = static_cast<const T*>(args.bias);
  int64_t there = std::min(kPanel, args.outs - first);
  for (int r = 0; r < R; ++r) {
    T* out = static_cast<T*>(args.out) + (row + r) * args.out_stride + first;
    for (int64_t n = 0; n < there; n += kLanes) {
      int64_t count = std::min(kLanes, there - n);
      Floats v = tile.sums[r][n / kLanes];
      if (bias) v += count == kLanes ? load(bias + first + n) : load_some(bias + first + n, count);
      if (count == kLanes) store(out + n, v);
      else store_some(out + n, v, count);
    }
  }
}

// P panels, `apart` panels from each other, times all rows: add(group of a panel, group, row, tile) for every group.
// The panels are read side by side: a processor fetches ahead along several streams at once, and so faster than along
// one.
template <class T, int P, int R, class F>
void tiles(const QuantLinearArgs& args, int64_t panel, int64_t apart, int64_t groups, int64_t group_words, int64_t* row,
           const F& add) {
  for (; *row + R <= args.rows; *row += R) {
    Tile<R> tile[P] = {};
    const uint32_t* group = args.packed + panel * groups * group_words;
    for (int64_t g = 0; g < groups; ++g, group += group_words)
      for (int p = 0; p < P; ++p) add(group + p * apart * groups * group_words, g, *row, tile[p]);
    for (int p = 0; p < P; ++p) write<T, R>(tile[p], args, *row, (panel + p * apart) * kPanel);
  }
}

// The same for all panels and all rows. Threads take as many panels at once as make some microseconds of work: few
// rows are bound by reading them, more by arithmetic.
template <class F>
void each_tile(const QuantLinearArgs& args, int64_t groups, int64_t group_words, const F& add) {
  constexpr int64_t kTaskBytes = 128 * 1024;
  int64_t panels = divided(args.outs, kPanel);
  int64_t panel_work = std::max<int64_t>(1, groups * group_words * 4 * divided(args.rows, 4));
  int64_t per_task = std::max<int64_t>(1, kTaskBytes / panel_work);
  if (args.rows == 1) per_task = divided(per_task, kStreams) * kStreams;
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    parallel(divided(panels, per_task), [&](int64_t task, Scratch&) {
      int64_t panel = task * per_task, end = std::min(panels, panel + per_task);
      if (args.rows == 1) {
        int64_t apart = (end - panel) / kStreams;
        for (int64_t i = 0; i < apart; ++i, ++panel) {
          int64_t row = 0;
          tiles<T, kStreams, 1>(args, panel, apart, groups, group_words, &row, add);
        }
        panel += (kStreams - 1) * apart;
      }
      for (; panel < end; ++panel) {
        int64_t row = 0;
        tiles<T, 1, kTileRows>(args, panel, 0, groups, group_words, &row, add);
        tiles<T, 1, 2>(args, panel, 0, groups, group_words, &row, add);
        tiles<T, 1, 1>(args, panel, 0, groups, group_words, &row, add);
      }
    });
  });
}

}  // namespace fg

// The product with a weight of 4 bits.
#include "quant_activations.h"
#include "quant_dot.h"
#include "quant_round.h"
#include "quant_tiles.h"

namespace fg {
namespace {

constexpr int64_t kWords = kGroup4 / 4;  // of a group's activations

// sums += a group of a panel times the same group of R rows.
template <int R>
void add_group(const uint32_t* panel, const Activations& x, int64_t g, int64_t row, Tile<R>& tile) {
  const int32_t* words = x.words + row * x.row_words + g * kWords;
  if (row == 0) prefetch_ahead<kGroupWords4>(panel);
  Sums4 sums[R][kVectors] = {};
  const uint32_t* weights = panel + kPanel;
#pragma GCC unroll 4
  for (int64_t k = 0; k < kWords; k += 2, weights += kPanel) {
    Words low[kVectors], high[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      Words both = load_bytes<Words>(weights + v * kLanes);
      low[v] = both & 0x0f0f0f0f, high[v] = (both >> 4) & 0x0f0f0f0f;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const int32_t* four = words + r * x.row_words + k;
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[r][v] = add_products4(sums[r][v], low[v], four[0]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[r][v] = add_products4(sums[r][v], high[v], four[1]);
    }
  }
  const int64_t at = row * x.groups + g;
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    Words both = load_bytes<Words>(panel + v * kLanes);
    Floats scales = (Floats)(both & 0xffff0000), minima = (Floats)(both << 16);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      Floats sum = tile.sums[r][v] + minima * splat(x.totals[at + r * x.groups]);
      tile.sums[r][v] = sum + scales * splat(x.scales[at + r * x.groups]) * floats(whole(sums[r][v]));
    }
  }
}

}  // namespace
}  // namespace fg

extern "C" void fg_linear_int4(const fg::QuantLinearArgs* args) {
  fg::Activations x = fg::activations_for_int4(*args);
  fg::each_tile(*args, x.groups, fg::kGroupWords4, [&](const uint32_t* panel, int64_t group, int64_t row, auto& tile) {
    fg::add_group(panel, x, group, row, tile);
  });
}

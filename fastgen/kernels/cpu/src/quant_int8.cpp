// The product with a weight of 8 bits.
#include "quant_activations.h"
#include "quant_dot.h"
#include "quant_round.h"
#include "quant_tiles.h"

namespace fg {
namespace {

constexpr int64_t kSteps = kGroup8 / 4;  // words of a group, for one output
constexpr int32_t kOffset = 128;         // what is added to a weight in memory

// sums += a group of a panel times the same group of R rows.
template <int R>
void add_group(const uint32_t* panel, const Activations& x, int64_t g, int64_t row, Tile<R>& tile) {
  const int32_t* words = x.words + row * x.row_words + g * kSteps * kWords8;
  if (row == 0) prefetch_ahead<kGroupWords8>(panel);
  const int64_t at = row * x.groups + g;
  Ints sums[R][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = splat(x.sums[at + r * x.groups]) * -kOffset;
  const uint32_t* weights = panel + kPanel / 2;
  for (int64_t k = 0; k < kSteps; ++k, weights += kPanel) {
    Weights8 w[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) w[v] = weights8(load_bytes<Words>(weights + v * kLanes));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] = add_products(sums[r][v], w[v], words + r * x.row_words + k, kSteps);
  }
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    Floats scales = load(reinterpret_cast<const bf16*>(panel) + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      tile.sums[r][v] += scales * splat(x.scales[at + r * x.groups]) * floats(sums[r][v]);
  }
}

}  // namespace
}  // namespace fg

extern "C" void fg_linear_int8(const fg::QuantLinearArgs* args) {
  fg::Activations x = fg::activations_for_int8(*args);
  fg::each_tile(*args, x.groups, fg::kGroupWords8, [&](const uint32_t* panel, int64_t group, int64_t row, auto& tile) {
    fg::add_group(panel, x, group, row, tile);
  });
}

// Quantised linear maps: where things lie in a packed weight. What the numbers mean: fastgen/kernels/quantisation.py.
//
// A packed weight is a row of panels, each of kPanel consecutive outputs (the last one filled up) and all groups of
// inputs, in the order in which it is read. Four consecutive inputs of one output share a 32-bit word, so that vectors
// hold outputs side by side and no sum ever crosses lanes. A group is
//
// int8: kPanel bfloat16 scales; [64 / 4][kPanel] words of four bytes, each a weight + 128.
// int4: kPanel words (upper half: bfloat16 scale, lower half: bfloat16 minimum); [32 / 8][kPanel] words, in the lower
//       halves of their bytes the weights of four inputs, in the upper those of the next four.
#pragma once

#include <algorithm>
#include <cstdint>

#include "op.h"
#include "pool.h"
#include "simd.h"

namespace fg {

constexpr int kVectors = 2;
constexpr int64_t kPanel = kVectors * kLanes;

// Inputs in a group.
constexpr int64_t kGroup8 = 64, kGroup4 = 32;

// Words of a group in a panel.
constexpr int64_t kGroupWords8 = kPanel / 2 + kGroup8 / 4 * kPanel;
constexpr int64_t kGroupWords4 = kPanel + kGroup4 / 8 * kPanel;

constexpr int64_t divided(int64_t a, int64_t by) { return (a + by - 1) / by; }

// x [rows, in] times the packed weight [outs, in] transposed, plus bias [outs] or null, into out [rows, outs]; x, bias
// and out of `dtype`. Strides are in elements.
struct QuantLinearArgs {
  const void* x;
  const uint32_t* packed;
  const void* bias;
  void* out;
  int64_t rows, in, outs, x_stride, out_stride, dtype;
};

// weight [outs, in] of `dtype`, contiguous, into packed.
struct QuantPackArgs {
  const void* weight;
  uint32_t* packed;
  int64_t outs, in, dtype;
};

// Where to write kPanel.
struct QuantPanelArgs {
  int64_t* panel;
};

}  // namespace fg

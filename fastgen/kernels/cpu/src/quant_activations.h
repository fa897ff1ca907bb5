// Activations, quantised for one product.
#pragma once

#include "quant.h"

namespace fg {

// For each row and group a scale, so that activation = scale * integer; the sum of its integers; and scale * sum.
struct Activations {
  const int32_t* words;  // [rows][groups] of words for four inputs: four bytes, or as quant_dot.h wants them
  const float* scales;   // [rows][groups]; NaN where the group is not finite
  const int32_t* sums;   // [rows][groups]
  const float* totals;   // [rows][groups]
  int64_t groups, row_words;
};

// For weights of 8 bits, in groups of 64, rotated; for weights of 4 bits, in groups of 32. In the calling thread's
// shared scratch.
Activations activations_for_int8(const QuantLinearArgs& args);
Activations activations_for_int4(const QuantLinearArgs& args);

}  // namespace fg

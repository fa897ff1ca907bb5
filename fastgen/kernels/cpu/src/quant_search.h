// Scales of a group of weights, each lane's its own: the group lies in one lane of consecutive vectors.
#pragma once

#include "quant.h"
#include "quant_round.h"

namespace fg {

// numerator / v, or zero where v is next to nothing or not finite.
inline Floats divided_or_zero(Floats numerator, Floats v) {
  Ints used = (magnitude_bits(v) < kInfinityBits) & (v >= splat(kTiny));
  return used ? numerator / (used ? v : splat(1.f)) : Floats{};
}

// The bits of the greatest magnitude.
inline Ints greatest_bits(const Floats* weights, int64_t count) {
  Ints bits = {};
  for (int64_t k = 0; k < count; ++k) bits = greater(bits, magnitude_bits(weights[k]));
  return bits;
}

// A scale, or NaN where the greatest magnitude says that something is not finite.
inline Floats nan_unless_finite(Floats scale, Ints bits) {
  return bits < kInfinityBits ? scale : splat(__builtin_nanf(""));
}

// weight = scale * integer, -127..127.
struct Symmetric {
  Floats scale, inverse;

  Ints integer(Floats weight) const { return nearest(weight * inverse); }
};

inline Symmetric search_int8(const Floats* weights) {
  Ints bits = greatest_bits(weights, kGroup8);
  Floats scale = rounded<bf16>(nan_unless_finite((Floats)bits / 127.f, bits));
  return {scale, divided_or_zero(splat(1.f), scale)};
}

// weight = scale * level + minimum, level 0..15; both bfloat16.
struct Affine {
  Floats scale, minimum, inverse;

  Affine(Floats a_scale, Floats a_minimum)
      : scale(rounded<bf16>(a_scale)), minimum(rounded<bf16>(a_minimum)), inverse(divided_or_zero(splat(1.f), scale)) {}

  Floats level(Floats weight) const {
    return floats(nearest(min(max((weight - minimum) * inverse, Floats{}), splat(15.f))));
  }
};

inline Floats squared_error(const Affine& affine, const Floats* weights) {
  Floats error = {};
  for (int64_t k = 0; k < kGroup4; ++k) {
    Floats off = affine.scale * affine.level(weights[k]) + affine.minimum - weights[k];
    error += off * off;
  }
  return error;
}

// The scale and minimum of least squared error for the levels that `affine` gives the weights.
inline Affine refitted(const Affine& affine, const Floats* weights) {
  constexpr float kMean = 1.f / kGroup4;
  Floats levels = {}, squares = {}, sum = {}, products = {};
  for (int64_t k = 0; k < kGroup4; ++k) {
    Floats level = affine.level(weights[k]);
    levels += level;
    squares += level * level;
    sum += weights[k];
    products += level * weights[k];
  }
  Floats spread = squares - levels * levels * kMean, slope = (products - levels * sum * kMean) / spread;
  Floats scale = rounded<bf16>(spread > 0 ? slope : affine.scale);
  return {scale, (sum - scale * levels) * kMean};
}

// Of ranges that cut off more and more of both ends, each refitted, the one of least squared error.
inline Affine search_int4(const Floats* weights) {
  Floats low = weights[0], high = weights[0];
  for (int64_t k = 1; k < kGroup4; ++k) {
    low = min(low, weights[k]);
    high = max(high, weights[k]);
  }
  Affine best((high - low) * (1 / 15.f), low);
  Floats least = squared_error(best, weights);
  for (float cut : {0.f, .025f, .05f, .075f, .1f}) {
    Floats range = high - low;
    Affine found = refitted(Affine(range * ((1 - 2 * cut) / 15), low + range * cut), weights);
    Floats error = squared_error(found, weights);
    Ints better = error < least;
    best.scale = better ? found.scale : best.scale;
    best.minimum = better ? found.minimum : best.minimum;
    least = better ? error : least;
  }
  best = Affine(best.scale, best.minimum);
  best.scale = nan_unless_finite(best.scale, greatest_bits(weights, kGroup4));
  return best;
}

}  // namespace fg

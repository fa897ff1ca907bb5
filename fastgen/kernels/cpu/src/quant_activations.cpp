// Activations to integers -127..127, each group of a row by its greatest magnitude.
#include "quant_activations.h"

#include "quant_dot.h"
#include "quant_rotate.h"
#include "quant_round.h"
#include "rows.h"

namespace fg {
namespace {

typedef int8_t Bytes __attribute__((vector_size(FG_LANES)));

int32_t greatest(Ints v) {
  int32_t most = v[0];
  for (int i = 1; i < kLanes; ++i) most = std::max(most, v[i]);
  return most;
}

int32_t added(Ints v) {
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
}

// A group's integers, their sum and its scale.
template <int64_t Count>
float quantise(const Floats (&x)[Count], int8_t* values, int32_t* sum) {
  Ints most = {};
  for (const Floats& v : x) most = greater(most, magnitude_bits(v));
  int32_t bits = greatest(most);
  float size;
  std::memcpy(&size, &bits, 4);
  bool finite = bits < kInfinityBits;
  Ints sums = {};
  Floats inverse = splat(127.f / size);
  bool used = finite && size >= kTiny;
  for (int64_t i = 0; i < Count; ++i) {
    Ints whole = used ? nearest(x[i] * inverse) : Ints{};
    sums += whole;
    store_bytes(values + i * kLanes, __builtin_convertvector(whole, Bytes));
  }
  *sum = added(sums);
  return used ? size / 127.f : finite ? 0.f : __builtin_nanf("");
}

// A group's words of four bytes as two rows of words of two 16-bit numbers each.
void split_words(const int8_t* values, int32_t* words) {
  constexpr int64_t kCount = kGroup8 / 4;
  for (int64_t i = 0; i < kCount; i += kLanes) {
    Shorts both = load_bytes<Shorts>(values + 4 * i);
    store_bytes(words + i, (both << 8) >> 8);
    store_bytes(words + kCount + i, both >> 8);
  }
}

template <class T, int64_t Count>
void load_group(const T* x, int64_t there, Floats (&v)[Count]) {
  for (int64_t i = 0; i < Count; ++i) {
    int64_t count = there - i * kLanes;
    v[i] = count >= kLanes ? load(x + i * kLanes) : count > 0 ? load_some(x + i * kLanes, count) : Floats{};
  }
}

// quantise_group(vectors of the group, its words, &sum) -> its scale, for all groups of all rows.
template <int64_t Group, class F>
Activations each_group(const QuantLinearArgs& args, int64_t group_words, const F& quantise_group) {
  int64_t groups = divided(args.in, Group), row_words = groups * group_words, all = args.rows * groups;
  int32_t* words = shared_scratch().take<int32_t>(args.rows * row_words + 3 * all + 1);
  int32_t* sums = words + args.rows * row_words;
  float* scales = reinterpret_cast<float*>(sums + all);
  float* totals = scales + all;
  with_type(args.dtype, [&](auto type) {
    const auto* x = static_cast<const decltype(type)*>(args.x);
    each_row(args.rows, args.in, [&](int64_t row) {
      for (int64_t g = 0, at = row * groups; g < groups; ++g, ++at) {
        Floats v[Group / kLanes];
        load_group(x + row * args.x_stride + g * Group, args.in - g * Group, v);
        scales[at] = quantise_group(v, words + at * group_words, sums + at);
        totals[at] = scales[at] * float(sums[at]);
      }
    });
  });
  return {words, scales, sums, totals, groups, row_words};
}

}  // namespace

Activations activations_for_int8(const QuantLinearArgs& args) {
  return each_group<kGroup8>(args, kGroup8 / 4 * kWords8, [](auto& group, int32_t* words, int32_t* sum) {
    rotate_group(group);
    if constexpr (kWords8 == 1) return quantise(group, reinterpret_cast<int8_t*>(words), sum);
    int8_t values[kGroup8];
    float scale = quantise(group, values, sum);
    split_words(values, words);
    return scale;
  });
}

Activations activations_for_int4(const QuantLinearArgs& args) {
  return each_group<kGroup4>(args, kGroup4 / 4, [](auto& group, int32_t* words, int32_t* sum) {
    return quantise(group, reinterpret_cast<int8_t*>(words), sum);
  });
}

}  // namespace fg

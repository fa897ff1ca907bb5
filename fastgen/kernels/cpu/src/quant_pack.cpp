// Quantises and packs a weight: vectors hold the same input of consecutive outputs, so that each lane finds the scale
// of its own output.
#include "quant.h"
#include "quant_rotate.h"
#include "quant_round.h"
#include "quant_search.h"
#include "transpose.h"

namespace fg {
namespace {

// columns[i] = input i of kLanes consecutive outputs, for the `count` inputs of a group; zeros for inputs and outputs
// that are not there.
template <class T>
void load_columns(const T* weight, int64_t in, int64_t outs_there, int64_t ins_there, int64_t count, Floats* columns) {
  for (int64_t i = 0; i < count; i += kLanes) {
    int64_t ins = std::min(kLanes, ins_there - i);
    Floats square[kLanes];
    for (int64_t n = 0; n < kLanes; ++n) {
      const T* from = weight + n * in + i;
      square[n] = n >= outs_there || ins <= 0 ? Floats{} : ins == kLanes ? load(from) : load_some(from, ins);
    }
    transpose(square);
    std::copy(square, square + kLanes, columns + i);
  }
}

// pack(columns of a group, where it lies in its panel, which vector of the panel it is), for all outputs and groups.
template <int64_t Group, class F>
void each_group(const QuantPackArgs& args, int64_t group_words, const F& pack) {
  with_type(args.dtype, [&](auto type) {
    const auto* weight = static_cast<const decltype(type)*>(args.weight);
    int64_t groups = divided(args.in, Group);
    parallel(divided(args.outs, kPanel), [&](int64_t panel, Scratch&) {
      for (int64_t g = 0; g < groups; ++g) {
        for (int64_t v = 0; v < kVectors; ++v) {
          int64_t n = panel * kPanel + v * kLanes;
          Floats columns[Group];
          load_columns(weight + n * args.in + g * Group, args.in, args.outs - n, args.in - g * Group, Group, columns);
          pack(columns, args.packed + (panel * groups + g) * group_words, v);
        }
      }
    });
  });
}

void pack_int8(Floats* columns, uint32_t* to, int64_t v) {
  rotate_columns(columns);
  Symmetric found = search_int8(columns);
  store_rounded(reinterpret_cast<bf16*>(to) + v * kLanes, found.scale * (1.f / kGroup8));  // undoes the rotations' norm
  to += kPanel / 2 + v * kLanes;
  for (int64_t k = 0; k < kGroup8; k += 4, to += kPanel) {
    Words word = {};
    for (int i = 0; i < 4; ++i) word |= (Words)((found.integer(columns[k + i]) + 128) & 255) << (8 * i);
    store_bytes(to, word);
  }
}

void pack_int4(Floats* columns, uint32_t* to, int64_t v) {
  Affine found = search_int4(columns);
  to += v * kLanes;
  store_bytes(to, (Words)found.scale | ((Words)found.minimum >> 16));
  to += kPanel;
  for (int64_t k = 0; k < kGroup4; k += 8, to += kPanel) {
    Words word = {};
    for (int i = 0; i < 8; ++i) {
      Words level = (Words)__builtin_convertvector(found.level(columns[k + i]), Ints) & 15;
      word |= level << (8 * (i % 4) + 4 * (i / 4));
    }
    store_bytes(to, word);
  }
}

}  // namespace
}  // namespace fg

extern "C" void fg_pack_int8(const fg::QuantPackArgs* args) {
  fg::each_group<fg::kGroup8>(*args, fg::kGroupWords8, fg::pack_int8);
}

extern "C" void fg_pack_int4(const fg::QuantPackArgs* args) {
  fg::each_group<fg::kGroup4>(*args, fg::kGroupWords4, fg::pack_int4);
}

extern "C" void fg_quant_panel(const fg::QuantPanelArgs* args) { *args->panel = fg::kPanel; }

// Ragged attention over a blocked cache, decode rows and prompt chunks in one call, with an online softmax
// (FlashAttention, Dao et al., 2022) and, where there are fewer sequences than threads would like, the context split
// between them (Flash-Decoding, Dao et al., 2023).
#include "attention.h"

#include "attention_kernels.h"
#include "attention_unpack.h"
#include "attention_write.h"

namespace fg {
namespace {

constexpr int64_t kUnitRows = 96;         // of queries, all heads of a group counted: what unpacking a tile is shared by
constexpr int64_t kSplitTokens = 128;     // the least context worth a task of its own
constexpr int64_t kStride = kTile + 16;   // of a row of scores: the last piece may write a whole sub-tile

// Query tokens `first : first + tokens` of a sequence against tokens `from : to` of its context; for every kv head.
struct Unit {
  int64_t sequence, first, tokens, from, to;
  int64_t parts;    // how many units share these queries, each with its part of the context
  int64_t partial;  // where the result of part 0 lies among the partial rows of a head, if there are several
};

// One head's unit on its way: rows are tokens x heads of the group.
struct Rows {
  float* q;        // [rows][head_dim], scaled
  float* sums;     // [rows][width]
  Running* state;  // [rows]
  float* scores;   // [kRows][kStride]
  int64_t count;
  int64_t position;  // of the first token
};

// Queries and results of T, a cache of K.
template <class T, class K>
class Pass {
 public:
  explicit Pass(const AttentionArgs& args)
      : args_(args),
        cache_(args),
        group_(args.heads / args.kv_heads),
        width_(round_up(args.value_dim, kLanes)),
        unit_tokens_(std::max<int64_t>(1, kUnitRows / group_)),
        score_scale_(float(args.softcap > 0 ? args.scale / args.softcap : args.scale)) {}

  void run() {
    write_cache<T, K>(args_);
    plan();
    parallel(unit_count_ * args_.kv_heads, [&](int64_t task, Scratch& scratch) {
      attend(units_[task / args_.kv_heads], task % args_.kv_heads, scratch);
    });
    for (int64_t u = 0; u < unit_count_; u += units_[u].parts)
      if (units_[u].parts > 1)
        for (int64_t head = 0; head < args_.kv_heads; ++head) merge(units_[u], head);
  }

 private:
  int64_t start(int64_t s) const { return args_.spans[s]; }
  int64_t count(int64_t s) const { return args_.spans[args_.spans_stride + s]; }
  int64_t context(int64_t s) const { return args_.spans[2 * args_.spans_stride + s]; }

  int64_t first_seen(int64_t position) const {
    return args_.window ? std::max<int64_t>(0, position - args_.window + 1) : 0;
  }

  // f(unit) for the units of the pass, whole; those of a sequence longest first, so that the last to finish are short.
  template <class F>
  void each_unit(const F& f) const {
    for (int64_t s = 0; s < args_.sequences; ++s) {
      int64_t before = context(s) - count(s);
      for (int64_t last = count(s); last > 0;) {
        int64_t first = (last - 1) / unit_tokens_ * unit_tokens_;
        f(Unit{s, first, last - first, first_seen(before + first), before + last, 1, 0});
        last = first;
      }
    }
  }

  // The units, their contexts split where some threads would have nothing to do.
  void plan() {
    const int64_t threads = fg::threads();
    int64_t work = 0;
    each_unit([&](const Unit& unit) { work += unit.tokens * (unit.to - unit.from); });
    int64_t share = work * args_.kv_heads / (4 * threads);
    auto parts = [&](const Unit& unit) {
      int64_t least = std::max(kSplitTokens, share / unit.tokens), seen = unit.to - unit.from;
      return threads == 1 ? 1 : std::max<int64_t>(1, seen / least);
    };
    unit_count_ = partial_rows_ = 0;
    each_unit([&](const Unit& unit) {
      unit_count_ += parts(unit);
      if (parts(unit) > 1) partial_rows_ += parts(unit) * unit.tokens * group_;
    });
    int64_t unit_bytes = round_up(unit_count_ * int64_t(sizeof(Unit)), 64);
    int64_t rows = partial_rows_ * args_.kv_heads, state_bytes = round_up(rows * int64_t(sizeof(Running)), 64);
    char* memory = shared_scratch().take<char>(64 + unit_bytes + state_bytes + rows * width_ * int64_t(sizeof(float)));
    units_ = reinterpret_cast<Unit*>(memory);
    partial_state_ = reinterpret_cast<Running*>(memory + unit_bytes);
    partial_sums_ = reinterpret_cast<float*>(memory + unit_bytes + state_bytes);
    Unit* next = units_;
    int64_t partial = 0;
    each_unit([&](const Unit& whole) {
      int64_t count = parts(whole), length = round_up((whole.to - whole.from + count - 1) / count, kSubtile);
      for (int64_t i = 0; i < count; ++i) {
        Unit& unit = *next++ = whole;
        unit.from = std::min(whole.to, whole.from + i * length);
        unit.to = std::min(whole.to, unit.from + length);
        unit.parts = count;
        unit.partial = partial + i * whole.tokens * group_;
      }
      if (count > 1) partial += count * whole.tokens * group_;
    });
  }

  void attend(const Unit& unit, int64_t head, Scratch& scratch) {
    Rows rows;
    rows.count = unit.tokens * group_;
    rows.position = context(unit.sequence) - count(unit.sequence) + unit.first;
    int64_t q_size = round_up(rows.count * args_.head_dim, 16);
    int64_t keys_size = round_up(unpacked_keys(args_.head_dim), 16);
    int64_t values_size = round_up(unpacked_values(args_.value_dim), 16);
    float* memory = scratch.take<float>(q_size + keys_size + values_size + kRows * kStride +
                                        rows.count * (width_ + int64_t(sizeof(Running) / sizeof(float))) + 64);
    float* keys = memory;
    float* values = keys + keys_size;
    rows.scores = values + values_size;
    rows.q = rows.scores + kRows * kStride;
    rows.sums = rows.q + q_size;
    rows.state = reinterpret_cast<Running*>(rows.sums + rows.count * width_);
    begin(unit, head, rows);

    const int64_t* table = args_.block_table + unit.sequence * args_.table_stride;
    bool few = rows.count <= kRows;
    bool in_place = cache_.values && (few || (sizeof(K) == sizeof(float) && args_.block_size % kSubtile == 0));
    Tile<K> tiles[2];  // the one at hand, and the next one
    Tile<float> wide;
    find_tile(cache_, table, head, unit.from, unit.to, tiles[0]);
    for (int i = 0; tiles[i].count; i = 1 - i) {
      find_tile(cache_, table, head, tiles[i].to, unit.to, tiles[1 - i]);
      if (in_place) {
        attend_tile(rows, head, tiles[i], &tiles[1 - i]);
      } else {
        unpack(cache_, tiles[i], keys, values, wide);
        attend_tile<float>(rows, head, wide, nullptr);
      }
    }
    finish(unit, head, rows);
  }

  // The queries, widened and scaled; nothing seen yet.
  void begin(const Unit& unit, int64_t head, const Rows& rows) const {
    const T* query = static_cast<const T*>(args_.query) + (start(unit.sequence) + unit.first) * args_.query_stride;
    for (int64_t r = 0; r < rows.count; ++r) {
      const T* from = query + r / group_ * args_.query_stride + (head * group_ + r % group_) * args_.head_dim;
      float* to = rows.q + r * args_.head_dim;
      for (int64_t d = 0; d < args_.head_dim; ++d) to[d] = widen(from[d]) * score_scale_;
      rows.state[r] = Running{};
    }
    std::memset(rows.sums, 0, rows.count * width_ * sizeof(float));
  }

  // All rows against a tile. The first of them also fetch the `next` one, if there is one to be fetched.
  template <class P>
  void attend_tile(const Rows& rows, int64_t head, const Tile<P>& tile, const Tile<P>* next) {
    for (int64_t r = 0; r < rows.count; r += kRows) {
      int64_t some = std::min<int64_t>(kRows, rows.count - r);
      with_rows(some, [&](auto constant) {
        constexpr int R = decltype(constant)::value;
        if (next && r == 0) attend_rows<R, true>(rows, head, r, tile, *next);
        else attend_rows<R, false>(rows, head, r, tile, tile);
      });
    }
  }

  // R rows from `r` on.
  template <int R, bool kAhead, class P>
  void attend_rows(const Rows& rows, int64_t head, int64_t r, const Tile<P>& tile, const Tile<P>& next) {
    const Seen first = seen(rows, r, tile), last = seen(rows, r + R - 1, tile);
    if (first.from >= last.to) return;
    const int64_t dim = args_.head_dim;
    int64_t at = 0;
    for (const Piece<P>* piece = tile.pieces; at < last.to; at += piece++->count)
      multiply_keys<R, kAhead>(rows.q + r * dim, *piece, dim, piece->values, rows.scores + at, kStride);
    for (int64_t i = 0; i < R; ++i) soften(rows, head, r + i, rows.scores + i * kStride, tile, last.to);
    // What all see of it together; at its ends what only some see. A weight of 0 would not do: 0 times NaN is NaN.
    Seen all{last.from, first.to};
    if (all.from >= all.to) all = {last.to, last.to};
    add_up<R, kAhead>(rows, r, 0, tile, all, next);
    for (int64_t i = 0; i < R; ++i) {
      Seen own = seen(rows, r + i, tile);
      add_up<1, false>(rows, r, i, tile, {own.from, std::min(own.to, all.from)}, tile);
      add_up<1, false>(rows, r, i, tile, {std::max(own.from, all.to), own.to}, tile);
    }
  }

  // Tokens of a tile that a row sees, counted from the tile's first.
  struct Seen {
    int64_t from, to;
  };

  template <class P>
  Seen seen(const Rows& rows, int64_t r, const Tile<P>& tile) const {
    int64_t position = rows.position + r / group_;
    return {std::max(first_seen(position), tile.from) - tile.from, std::min(position + 1, tile.to) - tile.from};
  }

  // R rows' weights, from row `r + i` on, times the values of these tokens.
  template <int R, bool kAhead, class P>
  void add_up(const Rows& rows, int64_t r, int64_t i, const Tile<P>& tile, Seen tokens, const Tile<P>& next) {
    if (tokens.from >= tokens.to) return;
    const Piece<P>* piece = tile.pieces;
    for (int64_t at = 0; at < tokens.to; at += piece++->count) {
      int64_t first = std::max(at, tokens.from), last = std::min(at + piece->count, tokens.to);
      if (first >= last) continue;
      int64_t number = piece - tile.pieces;
      const P* ahead = number < next.count ? next.pieces[number].keys : piece->keys;
      add_piece<R, kAhead>(rows.scores + i * kStride + first, kStride, *piece, first - at, last - at, width_, ahead,
                           rows.sums + (r + i) * width_, width_);
    }
  }

  // A row's scores of a tile's first `count` tokens, capped, biased and masked, to weights.
  template <class P>
  void soften(const Rows& rows, int64_t head, int64_t r, float* scores, const Tile<P>& tile, int64_t count) const {
    const int64_t padded = round_up(count, kLanes);
    if (args_.softcap > 0) {
      float cap = float(args_.softcap);
      for (int64_t i = 0; i < padded; i += kLanes) store(scores + i, cap * tanh(load(scores + i)));
    }
    if (args_.slopes) {
      float slope = args_.slopes[head * group_ + r % group_];
      int64_t distance = tile.from - rows.position - r / group_;
      for (int64_t i = 0; i < count; ++i) scores[i] += slope * float(distance + i);
    }
    const Seen own = seen(rows, r, tile);
    std::fill(scores, scores + std::min(count, own.from), -INFINITY);
    std::fill(scores + std::max<int64_t>(0, own.to), scores + padded, -INFINITY);
    float kept = weigh(scores, padded, rows.state[r]);
    if (kept == 1.f) return;
    float* sums = rows.sums + r * width_;
    for (int64_t d = 0; d < width_; d += kLanes) store(sums + d, load(sums + d) * kept);
  }

  // To the output, or to where the parts of a split context meet.
  void finish(const Unit& unit, int64_t head, const Rows& rows) const {
    if (unit.parts > 1) {
      int64_t at = head * partial_rows_ + unit.partial;
      std::copy(rows.state, rows.state + rows.count, partial_state_ + at);
      std::copy(rows.sums, rows.sums + rows.count * width_, partial_sums_ + at * width_);
      return;
    }
    for (int64_t r = 0; r < rows.count; ++r) write(unit, head, r, rows.sums + r * width_, rows.state[r].total);
  }

  // The parts of a split context, the first of which is `unit`, weighed by what each saw.
  void merge(const Unit& unit, int64_t head) {
    int64_t rows = unit.tokens * group_, at = head * partial_rows_ + unit.partial;
    for (int64_t r = 0; r < rows; ++r) {
      float most = -INFINITY, total = 0;
      for (int64_t i = 0; i < unit.parts; ++i) most = std::max(most, partial_state_[at + i * rows + r].most);
      float* sums = partial_sums_ + (at + r) * width_;
      for (int64_t i = 0; i < unit.parts; ++i) {
        const Running& part = partial_state_[at + i * rows + r];
        float weight = exp(splat(part.most - most))[0];
        const float* from = sums + i * rows * width_;
        for (int64_t d = 0; d < width_; d += kLanes)
          store(sums + d, (i ? load(sums + d) : Floats{}) + weight * load(from + d));
        total += weight * part.total;
      }
      write(unit, head, r, sums, total);
    }
  }

  void write(const Unit& unit, int64_t head, int64_t r, const float* sums, float total) const {
    int64_t token = start(unit.sequence) + unit.first + r / group_;
    T* out = static_cast<T*>(args_.out) + (token * args_.heads + head * group_ + r % group_) * args_.value_dim;
    float share = 1.f / total;
    for (int64_t d = 0; d < args_.value_dim; d += kLanes) {
      Floats v = load(sums + d) * share;
      if (d + kLanes <= args_.value_dim) store(out + d, v);
      else store_some(out + d, v, args_.value_dim - d);
    }
  }

  const AttentionArgs& args_;
  const Cache<K> cache_;
  const int64_t group_, width_, unit_tokens_;
  const float score_scale_;
  int64_t unit_count_ = 0, partial_rows_ = 0;
  Unit* units_ = nullptr;
  Running* partial_state_ = nullptr;  // [kv_heads][partial_rows_]
  float* partial_sums_ = nullptr;     // [kv_heads][partial_rows_][width_]
};

}  // namespace
}  // namespace fg

extern "C" void fg_attention(const fg::AttentionArgs* args) {
  fg::with_type(args->dtype, [&](auto type) {
    using T = decltype(type);
    if (args->key_scales) fg::Pass<T, fg::Code>(*args).run();
    else fg::Pass<T, T>(*args).run();
  });
}

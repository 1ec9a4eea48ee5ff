// Which key tiles a row tile executes, and by which path.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/attention.h"

namespace tilefuse {
namespace {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t key_blocks_of(const AttentionSequence& s) { return divide_up(s.key_len, kKeyBlock); }
inline int64_t row_tiles_of(const AttentionSequence& s) { return divide_up(s.query_len, kRowTile); }

// Keys [begin, end) that query `row` sees.
struct Sight {
  int64_t begin;
  int64_t end;
};

inline Sight sight_of(const AttentionProblem& p, const AttentionSequence& s, int64_t row) {
  const int64_t diagonal = row + s.position;
  const int64_t end = p.causal ? std::clamp<int64_t>(diagonal + 1, 0, s.key_len) : s.key_len;
  const int64_t begin = p.window > 0 ? std::clamp<int64_t>(diagonal - p.window + 1, 0, end) : 0;
  return {begin, end};
}

// Key tiles [first, last) of row tile m.
struct TileRange {
  int64_t first;
  int64_t last;
};

inline TileRange tiles_of(const AttentionProblem& p, const AttentionSequence& s, int64_t m) {
  const int64_t begin = sight_of(p, s, m * kRowTile).begin;
  const int64_t end = sight_of(p, s, std::min((m + 1) * kRowTile, s.query_len) - 1).end;
  return {std::min(begin, end) / kKeyBlock, divide_up(end, kKeyBlock)};
}

// The routing word bits of row tile m for one key head.
class RouteRow {
 public:
  RouteRow(const AttentionProblem& p, const AttentionSequence& s, int64_t kv_head, int64_t m)
      : group_(s.group), sink_(s.sink != nullptr), full_blocks_(s.key_len / kKeyBlock) {
    if (p.words != nullptr) {
      const int64_t head = p.map_heads == 1 ? 0 : kv_head;
      words_ = p.words + (head * p.map_row_tiles + s.row_tile + m) * p.row_words;
      bits_ = p.row_words * 64;
    }
    if (s.sealed != nullptr) {
      cached_ = true;
      can8_ = p.sealed.k8 != kAbsent;
      can16_ = p.sealed.k16 != kAbsent;
    }
  }

  // Whether key tile t takes the INT8 path. A cache decides where it keeps one form only.
  [[nodiscard]] bool int8(int64_t t) const {
    if (cached_) {
      if (t >= full_blocks_ || !can8_ || (t == 0 && sink_)) return false;
      if (!can16_) return true;
    }
    const int64_t j = t / group_;
    return j < bits_ && (words_[j / 64] >> (j % 64) & 1U) != 0;
  }

 private:
  const uint64_t* words_ = nullptr;
  int64_t bits_ = 0;
  int64_t group_;
  bool sink_;
  int64_t full_blocks_;
  bool cached_ = false;
  bool can8_ = true;
  bool can16_ = true;
};

}  // namespace
}  // namespace tilefuse

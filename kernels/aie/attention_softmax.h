// The online softmax of a core's rows: weights p = 2^(exponent - m) of a tile, for any exponents that
// attention_scores.h describes, and the running maxima m and sums l of them.
//
// m is a whole number, the nearest to the largest exponent (p is then at most 2^0.5 and the largest at least 2^-0.5).
// So what was summed under an older m is off by a power of two, and rescaling is exact; and it is seldom due, where a
// maximum grows by a whole number. AIE2P has 2^x with a bfloat16 result only: for these factors, that would cost half a
// unit in 2^8 each time.
//
// Exponents are counted from the row's largest score of the tile: multiplier (raw - largest), small where p matters, so
// 16 bits of each factor do. l sums the p that V is multiplied by, in 8 lanes a row, which are added at the end.
#pragma once

#include <stdint.h>

#include <aie_api/aie.hpp>
#include <algorithm>
#include <array>

#include "attention_layout.h"
#include "attention_numbers.h"
#include "attention_scores.h"
#include "loops.h"

namespace tilefuse::attention {

inline constexpr unsigned kPFactors = kRowBlocks * kKeyBlocks * kPair;
inline constexpr unsigned kPMarks = kPFactors + kRowBlocks * 64 * 2;

// Of a block's lanes, column - row and column.
alignas(64) inline constexpr int8 kColumnLessRow[64] = {0,  1,  2,  3,  4,  5,  6, 7, -1, 0,  1,  2,  3,  4,  5,  6,
                                                        -2, -1, 0,  1,  2,  3,  4, 5, -3, -2, -1, 0,  1,  2,  3,  4,
                                                        -4, -3, -2, -1, 0,  1,  2, 3, -5, -4, -3, -2, -1, 0,  1,  2,
                                                        -6, -5, -4, -3, -2, -1, 0, 1, -7, -6, -5, -4, -3, -2, -1, 0};
alignas(64) inline constexpr int8 kColumn[64] = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5,
                                                 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3,
                                                 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};

// Which keys of a tile 8 rows see.
class Visible {
 public:
  TF_INLINE Visible(const Tile& tile, unsigned rows) : tile_(tile) {
    tile_.reach += static_cast<int32_t>(8 * rows);
    windowed_ = tile.window < kNoWindow;
  }

  // Whether a row does not see the whole tile.
  [[nodiscard]] TF_INLINE bool masks() const {
    const auto last = static_cast<int32_t>(kKeys) - 1;
    return tile_.keys <= last || (tile_.causal != 0 && tile_.reach < last) ||
           (windowed_ && tile_.reach + 7 >= tile_.window);
  }

  // Of 8 rows by the 8 keys of a block.
  [[nodiscard]] TF_INLINE aie::mask<64> operator()(unsigned block) const {
    const auto first = static_cast<int32_t>(8 * block);
    const int32_t past = tile_.causal != 0 ? within(tile_.reach - first + 1) : 8;
    const int32_t from = windowed_ ? within(tile_.reach - tile_.window - first + 1) : -8;
    const auto difference = aie::load_v<64>(kColumnLessRow);
    return aie::lt(difference, static_cast<int8>(past)) & aie::ge(difference, static_cast<int8>(from)) &
           aie::lt(aie::load_v<64>(kColumn), static_cast<int8>(within(tile_.keys - first)));
  }

 private:
  static TF_INLINE int32_t within(int32_t x) { return std::clamp(x, int32_t{-8}, int32_t{8}); }

  Tile tile_;
  bool windowed_;
};

class Softmax {
 public:
  static TF_INLINE void run(const uint8_t* scores, float* state, uint8_t* p) {
    const auto tile = read<Tile>(scores + kScoresTile);
    const auto* raw = reinterpret_cast<const float*>(scores);
    TF_LOOP_RANGE(2, 2)
    TF_LOOP_NO_UNROLL
    for (unsigned pair = 0; pair < 2; ++pair) {
      const Row16 top(tile.base > 0 ? largest<false>(raw, pair, tile) : largest<true>(raw, pair, tile));
      const Rows rows = advance(scores, pair, top, tile.base, state + 16 * pair);
      TF_LOOP_RANGE(2, 2)
      TF_LOOP_NO_UNROLL
      for (unsigned which = 0; which < 2; ++which) weigh(raw, 2 * pair + which, tile, rows, which, state, p);
    }
  }

 private:
  using IntBlock = std::array<Ints, 4>;

  // Of two blocks of rows, what makes exponents less m of raw scores.
  struct Rows {
    Floats top;          // the largest raw score
    Floats start;        // its exponent - m
    Bf16Rows high, low;  // of the multiplier
    Bf16Rows factor;     // of what was summed before
    bool grown;          // whether a factor is not 1
  };

  // The largest raw score of each row of two blocks. Positive numbers compare like their bits as integers, negative
  // ones the other way round; and AIE2P compares integers. So it is the largest integer or, if that is negative, the
  // smallest. INT8 scores are positive, with their base; only what is masked is not.
  template <bool Signed>
  static TF_INLINE Floats largest(const float* raw, unsigned pair, const Tile& tile) {
    std::array<IntBlock, 2> high, low;
    TF_LOOP_UNROLL_FULL
    for (unsigned i = 0; i < 2; ++i) {
      const unsigned block = 2 * pair + i;
      const Visible visible(tile, block);
      const float* at = raw + block * (kKeyBlocks * 64);
      if (visible.masks())
        extremes<Signed, true>(at, visible, high[i], low[i]);
      else
        extremes<Signed, false>(at, visible, high[i], low[i]);
    }
    const auto larger = [](const Ints& v, const Ints& w) TF_INLINE_LAMBDA { return aie::max(v, w); };
    const Ints top = fold_rows(high[0], high[1], larger);
    if constexpr (!Signed) return top.template cast_to<float>();
    const auto smaller = [](const Ints& v, const Ints& w) TF_INLINE_LAMBDA { return aie::min(v, w); };
    const Ints bottom = fold_rows(low[0], low[1], smaller);
    return aie::select(top, bottom, aie::lt(top, int32(0))).template cast_to<float>();
  }

  template <bool Signed, bool Masked>
  static TF_INLINE void extremes(const float* raw, const Visible& visible, IntBlock& high, IntBlock& low) {
    const Ints nothing = aie::broadcast<float, 16>(kMasked).template cast_to<int32>();
    high.fill(nothing);
    low.fill(nothing);
    // 4 loads, 4 or, of signed scores, 8 moves; masked, 10 more.
    TF_REGION(maxima);
    TF_LOOP_RANGE(8, 8)
    TF_LOOP_NO_UNROLL
    for (unsigned block = 0; block < kKeyBlocks; ++block) {
      aie::mask<64> seen;
      if constexpr (Masked) seen = visible(block);
      TF_LOOP_UNROLL_FULL
      for (unsigned i = 0; i < 4; ++i) {
        Ints x = aie::load_v<16>(raw).template cast_to<int32>();
        if constexpr (Masked) x = aie::select(nothing, x, seen.template extract<16>(i));
        high[i] = aie::max(high[i], x);
        if constexpr (Signed) low[i] = aie::min(low[i], x);
        raw += 16;
      }
    }
  }

  // m of 16 rows, and what follows from it.
  static TF_INLINE Rows advance(const uint8_t* scores, unsigned pair, const Row16& top, float base, float* m_at) {
    const Row16 multiplier(aie::load_v<16>(reinterpret_cast<const float*>(scores + kScoresMultiplier) + 16 * pair));
    const Row16 offset(aie::load_v<16>(reinterpret_cast<const float*>(scores + kScoresOffset) + 16 * pair));
    const Floats m_before = aie::load_v<16>(m_at);
    const Row16 peak = aie::add(product(aie::sub(top, row16(base)), multiplier), offset);
    const Row16 nearest = aie::sub(aie::add(peak, row16(kMagic)), row16(kMagic));
    const auto less = aie::lt(bits_of(aie::sub(nearest, Row16(m_before))), int32(0));
    const Floats m = aie::select(nearest.template to_vector<float>(), m_before, less);
    aie::store_v(m_at, m);

    // 2^(m_before - m): the bits of a bfloat16 are 2^7 (exponent + 127), and an fp32 number between 2^16 and 2^17 has
    // units of 2^-7. Below 2^-126 the factor is 0.
    const Row16 change = aie::sub(Row16(m_before), Row16(m));
    const Row16 exponent = aie::add(change, row16(127));
    const Floats kept = aie::select(exponent.template to_vector<float>(), aie::zeros<float, 16>(),
                                    aie::lt(bits_of(exponent), int32(0)));
    const auto halves =
        aie::add(Row16(kept), row16(98304)).template to_vector<float>().template cast_to<int16>();  // 1.5 2^16
    const auto [powers, unused] = aie::interleave_unzip(halves, halves, 1);

    Rows rows;
    rows.top = top.template to_vector<float>();
    rows.start = aie::sub(peak, Row16(m)).template to_vector<float>();
    rows.high = multiplier.template to_vector<bfloat16>();
    rows.low = aie::sub(multiplier, Row16(rows.high)).template to_vector<bfloat16>();
    rows.factor = powers.template extract<16>(0).template cast_to<bfloat16>();
    rows.grown = aie::lt(bits_of(change), int32(0)).to_uint32() != 0;
    return rows;
  }

  static TF_INLINE void weigh(const float* raw, unsigned block, const Tile& tile, const Rows& rows, unsigned which,
                              float* state, uint8_t* p) {
    const Bf16s factor = spread(rows.factor.template extract<8>(which));
    const auto grown = static_cast<int32_t>(rows.grown);
    aie::store_v(reinterpret_cast<bfloat16*>(p + kPFactors) + block * 64, factor);
    write(p + kPMarks + block * 4, grown);
    float* l_at = state + kRows + block * 64;
    Accum l = gemm::load_accum(l_at);
    if (rows.grown) l = scaled(l, factor);
    const Line line{spread(rows.top.template extract<8>(which)), spread(rows.start.template extract<8>(which)),
                    spread(rows.high.template extract<8>(which)), spread(rows.low.template extract<8>(which))};
    const Visible visible(tile, block);
    const float* at = raw + block * (kKeyBlocks * 64);
    uint8_t* out = p + block * (kKeyBlocks * kPair);
    if (visible.masks())
      weigh<true>(at, visible, line, l, out);
    else
      weigh<false>(at, visible, line, l, out);
    gemm::store_accum(l_at, l);
  }

  // exponent - m = start + (high + low) (raw - top), of the 8 rows of a block.
  struct Line {
    Accum top, start;
    Bf16s high, low;
  };

  template <bool Masked>
  static TF_INLINE void weigh(const float* raw, const Visible& visible, const Line& line, Accum& l, uint8_t* out) {
    const v64bfp16ebs8 minus_one = gemm::minus_identity();
    const Bf16s none = aie::zeros<bfloat16, 64>();
    OperandWriter writer(reinterpret_cast<bfp16ebs8*>(out));
    // 4 loads, 8 moves, 10 instructions of the store unit (6 conversions, 2 pushes), 7 of the multiplier: 10 cycles;
    // masked, 16.
    TF_REGION(weights);
    TF_LOOP_RANGE(8, 8)
    TF_LOOP_NO_UNROLL
    for (unsigned i = 0; i < kKeyBlocks; ++i) {
      const Accum below = aie::sub(gemm::load_accum(raw + 64 * i), line.top);
      const Accum exponent = add_product(line.start, below, line.high, line.low);
      const auto half = [&exponent](unsigned j) TF_INLINE_LAMBDA {
        return aie::exp2<bfloat16>(exponent.template extract<32>(j).template to_vector<float>());
      };
      Bf16s weights = aie::concat(half(0), half(1));
      if constexpr (Masked) weights = aie::select(none, weights, visible(i));
      const Accum wide(weights);
      l = aie::add(l, wide);
      const gemm::Split parts = gemm::split(wide, minus_one);
      writer.push(parts.high);
      writer.push(parts.low);
    }
  }
};

}  // namespace tilefuse::attention

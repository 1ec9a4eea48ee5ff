// Raw scores of a core's 32 query rows by a tile of 64 keys, from INT8 codes or from bfloat16, with what makes
// exponents of them: row by row a multiplier and an offset, so that softmax (attention_softmax.h) need not know which
// they were.
//
//   exponent (base 2) = multiplier (raw - base) + offset
//
// INT8: raw = 1.5 2^23 + the int32 score, exact, because sums of up to 128 products of codes stay below 2^21; such an
// fp32 number is what an integer accumulator holds that began as 1.5 2^23, so no score is ever converted. The offset
// puts back what smoothing took from the keys, q . mean: 1/64 of the tile's products, on the core, because a host would
// need as long for them as the array for everything else.
#pragma once

#include <stdint.h>

#include <aie_api/aie.hpp>

#include "attention_layout.h"
#include "attention_numbers.h"
#include "loops.h"
#include "unpack.h"

namespace tilefuse::attention {

// What softmax is told of a tile, at the end of its scores.
struct Tile {
  int32_t reach;   // the last key that row 0 sees under a causal mask, counted from the tile's first
  int32_t keys;    // keys from the tile's first to the sequence's end
  int32_t window;  // kNoWindow or fewer
  int32_t causal;
  float base;
};
inline constexpr int32_t kNoWindow = 1 << 24;  // no sequence is as long

inline constexpr unsigned kScoresMultiplier = kRows * kKeys * 4;
inline constexpr unsigned kScoresOffset = kScoresMultiplier + 4 * kRows;
inline constexpr unsigned kScoresTile = kScoresOffset + 4 * kRows;

template <unsigned D>
class Scores {
  using L = Layout<D>;
  static constexpr unsigned kSteps = L::channel_blocks;
  static constexpr unsigned kBlockStride = kKeyBlocks * 64;  // floats from a block of rows to the next

 public:
  // 8 rows of keys at a time, against all 32 queries: each of the tile's keys is loaded once.
  static TF_INLINE void of_codes(const uint8_t* q, const uint8_t* kv, uint8_t* scores) {
    using Block = aie::mmul<8, 8, 8, int8, int8>;
    const auto half = aie::accum<accfloat, 32>(aie::broadcast<float, 32>(kMagic));
    const auto zero = aie::concat(half, half).template cast_to<acc32>();
    const auto* keys = reinterpret_cast<const int8*>(kv);
    auto* raw = reinterpret_cast<float*>(scores);
    TF_LOOP_RANGE(8, 8)
    TF_LOOP_NO_UNROLL
    for (unsigned block = 0; block < kKeyBlocks; ++block) {
      Block c0(zero), c1(zero), c2(zero), c3(zero);
      const auto* codes = reinterpret_cast<const int8*>(q + kQCodes);
      {
        // 5 loads, 4 multiplications: 4 cycles.
        TF_REGION(scores);
        TF_LOOP_RANGE(8, 16)
        TF_LOOP_NO_UNROLL
        for (unsigned k = 0; k < kSteps; ++k) {
          const gemm::Codes b = aie::load_v<64>(keys);
          c0.mac(aie::load_v<64>(codes), b);
          c1.mac(aie::load_v<64>(codes + 64), b);
          c2.mac(aie::load_v<64>(codes + 128), b);
          c3.mac(aie::load_v<64>(codes + 192), b);
          keys += 64;
          codes += 256;
        }
      }
      float* out = raw + block * 64;
      store(out, {as_float(c0), as_float(c1), as_float(c2), as_float(c3)});
    }
    const std::array<Row16, 2> shift = means(q, kv + L::means);
    const Row16 s_k = row16(read<float>(kv + L::payload_bytes + 4));
    for (unsigned pair = 0; pair < 2; ++pair) {
      const Row16 s_q(aie::load_v<16>(reinterpret_cast<const float*>(q + kQHeader) + 16 * pair));
      put(scores + kScoresMultiplier, pair, product(s_q, s_k));
      put(scores + kScoresOffset, pair, product(s_q, shift[pair]));
    }
    describe(q, kv, kMagic, scores);
  }

  // 32 keys: `half` of the tile. high x high + rest x high + high x low, whose high queries are the codes.
  static TF_INLINE void of_bf16(const uint8_t* q, const uint8_t* kv, int32_t half, uint8_t* scores) {
    float* out = reinterpret_cast<float*>(scores) + half * (kKeyBlocks / 2 * 64);
    OperandStream keys = operand_stream(kv);
    TF_LOOP_RANGE(4, 4)
    TF_LOOP_NO_UNROLL
    for (unsigned block = 0; block < kKeyBlocks / 2; ++block) {
      std::array<Accum, 4> c;
      for (Accum& one : c) one = aie::zeros<accfloat, 64>();
      const auto* codes = reinterpret_cast<const int8*>(q + kQCodes);
      OperandStream rests = operand_stream(q + L::q_rest);
      {
        // 4 loads and 6 pops (2 loads each), 12 multiplications: 12 cycles.
        TF_REGION(scores);
        TF_LOOP_RANGE(8, 16)
        TF_LOOP_NO_UNROLL
        for (unsigned k = 0; k < kSteps; ++k) {
          const Operand high = keys.pop();
          const Operand low = keys.pop();
          TF_LOOP_UNROLL_FULL
          for (unsigned rows = 0; rows < kRowBlocks; ++rows) {
            const v64bfp16ebs8 code = gemm::as_operand(aie::load_v<64>(codes));
            const Operand rest = rests.pop();
            c[rows] = mac_8x8_8x8T(code, low, c[rows]);
            c[rows] = mac_8x8_8x8T(rest, high, c[rows]);
            c[rows] = mac_8x8_8x8T(code, high, c[rows]);
            codes += 64;
          }
        }
      }
      store(out, c);
      out += 64;
    }
    if (half != 0) return;
    for (unsigned pair = 0; pair < 2; ++pair) {
      const Row16 s_q(aie::load_v<16>(reinterpret_cast<const float*>(q + kQHeader) + 16 * pair));
      put(scores + kScoresMultiplier, pair, s_q);
      put(scores + kScoresOffset, pair, row16(0));
    }
    describe(q, kv, 0, scores);
  }

 private:
  static TF_INLINE Accum as_float(const aie::accum<acc32, 64>& sums) { return sums.template cast_to<accfloat>(); }

  static TF_INLINE void store(float* out, const std::array<Accum, 4>& c) {
    TF_LOOP_UNROLL_FULL
    for (unsigned rows = 0; rows < kRowBlocks; ++rows) gemm::store_accum(out + rows * kBlockStride, c[rows]);
  }

  static TF_INLINE void put(uint8_t* out, unsigned pair, const Row16& rows) {
    aie::store_v(reinterpret_cast<float*>(out) + 16 * pair, rows.template to_vector<float>());
  }

  // What is subtracted from every key of the tile, times the queries in codes and rest. One operand has the mean's
  // channels 8 i in row i, and exponents that leave of it one row, i, when it meets the queries' channels 8 i. So rows
  // of a sum are its parts.
  static TF_INLINE std::array<Row16, 2> means(const uint8_t* q, const uint8_t* mean) {
    std::array<Accum, 4> c;
    for (Accum& one : c) one = aie::zeros<accfloat, 64>();
    const auto* codes = reinterpret_cast<const int8*>(q + kQCodes);
    OperandStream rests = operand_stream(q + L::q_rest);
    TF_LOOP_RANGE(1, 2)
    for (unsigned part = 0; part < D / 64; ++part) {
      const gemm::Codes highs = aie::load_v<64>(reinterpret_cast<const int8*>(mean));
      const gemm::Codes lows = aie::load_v<64>(reinterpret_cast<const int8*>(mean) + 64);
      {
        // 4 loads and 4 pops, 12 multiplications: 12 cycles.
        TF_REGION(means);
        TF_LOOP_RANGE(8, 8)
        TF_LOOP_NO_UNROLL
        for (unsigned i = 0; i < 8; ++i) {
          const v64bfp16ebs8 high{highs.to_native(), read<v8int8>(mean + 128 + 8 * i)};
          const v64bfp16ebs8 low{lows.to_native(), read<v8int8>(mean + 192 + 8 * i)};
          TF_LOOP_UNROLL_FULL
          for (unsigned rows = 0; rows < kRowBlocks; ++rows) {
            const v64bfp16ebs8 code = gemm::as_operand(aie::load_v<64>(codes));
            const Operand rest = rests.pop();
            c[rows] = mac_8x8_8x8T(low, code, c[rows]);
            c[rows] = mac_8x8_8x8T(high, rest, c[rows]);
            c[rows] = mac_8x8_8x8T(high, code, c[rows]);
            codes += 64;
          }
        }
      }
      mean += kMeanBytes;
    }
    return {sum_of_rows(c[0], c[1]), sum_of_rows(c[2], c[3])};
  }

  // The sums over the 8 rows of two blocks, for each of their 8 + 8 lanes.
  static TF_INLINE Row16 sum_of_rows(const Accum& a, const Accum& b) {
    const auto two_rows = [](const Accum& block) TF_INLINE_LAMBDA {
      const auto four = aie::add(block.template extract<32>(0), block.template extract<32>(1));
      return aie::add(four.template extract<16>(0), four.template extract<16>(1)).template to_vector<float>();
    };
    const Floats x = two_rows(a);
    const Floats y = two_rows(b);
    return aie::add(Row16(Floats(aie::concat(x.template extract<8>(0), y.template extract<8>(0)))),
                    Row16(Floats(aie::concat(x.template extract<8>(1), y.template extract<8>(1)))));
  }

  static TF_INLINE void describe(const uint8_t* q, const uint8_t* kv, float base, uint8_t* scores) {
    const auto first = read<int32_t>(kv + L::payload_bytes);
    const Tile tile{.reach = read<int32_t>(q + 8) - first,
                    .keys = read<int32_t>(q + 12) - first,
                    .window = read<int32_t>(q + 16),
                    .causal = read<int32_t>(q + 24),
                    .base = base};
    write(scores + kScoresTile, tile);
  }
};

}  // namespace tilefuse::attention

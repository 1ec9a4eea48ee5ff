// The weighted sums of values, in fp32 over all of a query tile's keys, and their division by the sums of weights.
#pragma once

#include <stdint.h>

#include <aie_api/aie.hpp>
#include <array>

#include "attention_layout.h"
#include "attention_numbers.h"
#include "attention_softmax.h"
#include "loops.h"

namespace tilefuse::attention {

template <unsigned D>
class Values {
  using L = Layout<D>;
  static constexpr unsigned kQuads = D / 64;  // of four blocks of channels, in half of them

 public:
  static TF_INLINE void begin(float* state, float* o) {
    const Floats nothing = aie::zeros<float, 16>();
    const Floats lowest = aie::broadcast<float, 16>(kMasked);
    aie::store_v(state, lowest);
    aie::store_v(state + 16, lowest);
    TF_REGION(begin);
    TF_LOOP_RANGE(16, 16)
    for (unsigned i = kRows; i < kStateBytes / 4; i += 16) aie::store_v(state + i, nothing);
    TF_LOOP_RANGE(128, 256)
    for (unsigned i = 0; i < L::o_bytes / 4; i += 16) aie::store_v(o + i, nothing);
  }

  // o += p v, for half of the channels: high x high + low x high + high x low.
  static TF_INLINE void add(const uint8_t* p, const uint8_t* kv, int32_t half, float* o) {
    o += half * (L::channel_blocks / 2 * 64);
    TF_LOOP_RANGE(4, 4)
    TF_LOOP_NO_UNROLL
    for (unsigned rows = 0; rows < kRowBlocks; ++rows) {
      if (read<int32_t>(p + kPMarks + 4 * rows) == 1)
        rescale(aie::load_v<64>(reinterpret_cast<const bfloat16*>(p + kPFactors) + 64 * rows), o);
      OperandStream values = operand_stream(kv);
      TF_LOOP_RANGE(1, 2)
      TF_LOOP_NO_UNROLL
      for (unsigned quad = 0; quad < kQuads; ++quad) {
        float* at = o + quad * 256;
        std::array<Accum, 4> c;
        TF_LOOP_UNROLL_FULL
        for (unsigned i = 0; i < 4; ++i) c[i] = gemm::load_accum(at + 64 * i);
        OperandStream weights = operand_stream(p + rows * (kKeyBlocks * kPair));
        {
          // 10 pops (2 loads each), 12 multiplications: 12 cycles.
          TF_REGION(values);
          TF_LOOP_RANGE(8, 8)
          TF_LOOP_NO_UNROLL
          for (unsigned k = 0; k < kKeyBlocks; ++k) {
            const Operand high = weights.pop();
            const Operand low = weights.pop();
            TF_LOOP_UNROLL_FULL
            for (unsigned i = 0; i < 4; ++i) {
              const Operand v_high = values.pop();
              const Operand v_low = values.pop();
              c[i] = mac_8x8_8x8T(low, v_high, c[i]);
              c[i] = mac_8x8_8x8T(high, v_low, c[i]);
              c[i] = mac_8x8_8x8T(high, v_high, c[i]);
            }
          }
        }
        TF_LOOP_UNROLL_FULL
        for (unsigned i = 0; i < 4; ++i) gemm::store_accum(at + 64 * i, c[i]);
      }
      o += L::channel_blocks * 64;
    }
  }

  // 8 rows of results.
  static TF_INLINE void store(const float* o, const float* state, int32_t block, uint8_t* y) {
    const float* l_at = state + kRows + block * 64;
    std::array<Floats, 4> lanes;
    for (unsigned i = 0; i < 4; ++i) lanes[i] = aie::load_v<16>(l_at + 16 * i);
    // The 8 sums, twice.
    const Floats l = fold_rows(lanes, lanes, [](const Floats& v, const Floats& w) TF_INLINE_LAMBDA {
      return aie::add(Row16(v), Row16(w)).template to_vector<float>();
    });
    const Row16 inverse = reciprocal(l);
    const Bf16Rows high_rows = inverse.template to_vector<bfloat16>();
    const Bf16Rows low_rows = aie::sub(inverse, Row16(high_rows)).template to_vector<bfloat16>();
    const Bf16s high = spread(high_rows.template extract<8>(0));
    const Bf16s low = spread(low_rows.template extract<8>(0));
    const Accum zero = aie::zeros<accfloat, 64>();
    const float* from = o + block * (L::channel_blocks * 64);
    auto* out = reinterpret_cast<bfloat16*>(y);
    {
      TF_REGION(store);
      TF_LOOP_RANGE(8, 16)
      TF_LOOP_NO_UNROLL
      for (unsigned i = 0; i < L::channel_blocks; ++i) {
        const Accum result = add_product(zero, gemm::load_accum(from + 64 * i), high, low);
        aie::store_v(out + 64 * i, result.template to_vector<bfloat16>());
      }
    }
    auto* sums = reinterpret_cast<float*>(y + 16 * D);
    aie::store_v(sums, aie::vector<float, 8>(aie::load_v<8>(state + 8 * block)));
    aie::store_v(sums + 8, l.template extract<8>(0));
  }

 private:
  static TF_INLINE void rescale(const Bf16s& powers, float* o) {
    // 4 loads, 4 moves, 10 instructions of the store unit (3 x 2 conversions), 5 of the multiplier: 10 cycles.
    TF_REGION(rescale);
    TF_LOOP_RANGE(4, 8)
    TF_LOOP_NO_UNROLL
    for (unsigned i = 0; i < L::channel_blocks / 2; ++i)
      gemm::store_accum(o + 64 * i, scaled(gemm::load_accum(o + 64 * i), powers));
  }

  // 1 / l within 2^-22, or 1 where l is 0 (and so is everything that it would divide). The first guess, by the bits of
  // l, is within an eighth, and a step of Newton's squares what it is off by.
  static TF_INLINE Row16 reciprocal(const Floats& l) {
    const Floats one = aie::broadcast<float, 16>(1.0f);
    const Row16 x(aie::select(l, one, aie::lt(l.template cast_to<int32>(), int32(1))));
    Row16 y(aie::sub(aie::broadcast<int32, 16>(0x7ef311c3), bits_of(x)).template cast_to<float>());
    TF_LOOP_RANGE(4, 4)
    TF_LOOP_NO_UNROLL
    for (unsigned i = 0; i < 4; ++i) y = aie::add(y, product(y, aie::sub(Row16(one), product(x, y))));
    return y;
  }
};

}  // namespace tilefuse::attention

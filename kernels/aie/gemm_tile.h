// One band of activations times one tile of weights that prepare() has put into operand form: paths (a) and (b).
//
// Both hold a 2 x 2 group of 8 x 8 sums in accumulators over all of K (a core has five of that size; the fifth converts
// operands) and read each of their operands half as often as one at a time would.
//
// Bound: |acc - exact| <= sum |dA| |W| + |A| |dW| + |dA| |dW| + (24 2^-24) a tile of the products' magnitudes, where dA
// and dW are what operands lose, half a unit each, below 2^-6.98 of the largest of 8; in path (a) dW also has the 2^-8
// of weights narrowed to bfloat16. tests/oracle_gemm.py derives it.
#pragma once

#include <stdint.h>

#include <aie_api/aie.hpp>

#include "dequantise.h"
#include "epilogue.h"
#include "loops.h"
#include "packed_tile.h"

namespace tilefuse::gemm {

inline constexpr unsigned kPairs = kNBlocks / 2;

// A block of activations as an operand. Two halves, so that no accumulator is written in part.
TF_INLINE Operand to_operand(const bfloat16* a) {
  const Accum wide =
      aie::concat(aie::accum<accfloat, 32>(aie::load_v<32>(a)), aie::accum<accfloat, 32>(aie::load_v<32>(a + 32)));
  return wide.template to_vector<bfp16ebs8>();
}

// Path (b): weights are bfp16 in scratch, [n/16][k/8][2] blocks, 72 bytes each.
template <unsigned M>
class Bfp16Tile {
  static_assert(M % 16 == 0, "a band is a multiple of 16 rows");

 public:
  static constexpr unsigned scratch_bytes = kKBlocks * kNBlocks * kOperandBytes;
  static constexpr Order order = Order::kOutputRows;

  class Writer {
   public:
    TF_INLINE explicit Writer(uint8_t* scratch) : out_(reinterpret_cast<bfp16ebs8*>(scratch)) {}
    TF_INLINE void operator()(const Accum& weights) { out_.push(weights.template to_vector<bfp16ebs8>()); }
    TF_INLINE void operator()(const Bf16s& weights) { (*this)(Accum(weights)); }

   private:
    aie::block_vector_output_buffer_stream<bfp16ebs8, 64> out_;
  };

  static TF_INLINE void multiply(const bfloat16* a, const uint8_t* scratch, float* acc) {
    TF_LOOP_RANGE(1, 4)
    for (unsigned m = 0; m < M / 8; m += 2) {
      const bfloat16* rows = a + m * kKBlocks * 64;
      TF_LOOP_RANGE(4, 4)
      for (unsigned pair = 0; pair < kPairs; ++pair) {
        float* c0 = acc + (m * kNBlocks + 2 * pair) * 64;
        float* c1 = c0 + kNBlocks * 64;
        Accum c00 = load_accum(c0);
        Accum c01 = load_accum(c0 + 64);
        Accum c10 = load_accum(c1);
        Accum c11 = load_accum(c1 + 64);
        aie::block_vector_input_buffer_stream<bfp16ebs8, 64> weights(
            reinterpret_cast<const bfp16ebs8*>(scratch + pair * (2 * kKBlocks * kOperandBytes)));
        {
          // 4 loads and 2 pops (2 loads each), 4 widenings, 2 conversions, 4 multiplications: 4 cycles.
          TF_REGION(multiply);
          TF_LOOP_RANGE(16, 16)
          TF_LOOP_NO_UNROLL
          for (unsigned k = 0; k < kKBlocks; ++k) {
            const Operand a0 = to_operand(rows + k * 64);
            const Operand a1 = to_operand(rows + (kKBlocks + k) * 64);
            const Operand b0 = weights.pop();
            const Operand b1 = weights.pop();
            c00 = mac_8x8_8x8T(a0, b0, c00);
            c01 = mac_8x8_8x8T(a0, b1, c01);
            c10 = mac_8x8_8x8T(a1, b0, c10);
            c11 = mac_8x8_8x8T(a1, b1, c11);
          }
        }
        store_accum(c0, c00);
        store_accum(c0 + 64, c01);
        store_accum(c1, c10);
        store_accum(c1 + 64, c11);
      }
    }
  }
};

// Path (a): weights are bfloat16 in scratch, [n/16][k/8][2] blocks of [8 input][8 output]; the multiplication converts
// both operands, every time.
template <unsigned M>
class EmulatedTile {
  static_assert(M % 16 == 0, "a band is a multiple of 16 rows");
  using Block = aie::mmul<8, 8, 8, bfloat16, bfloat16, accauto>;

 public:
  static constexpr unsigned scratch_bytes = kKBlocks * kNBlocks * 64 * 2;
  static constexpr Order order = Order::kInputRows;

  class Writer {
   public:
    TF_INLINE explicit Writer(uint8_t* scratch) : out_(reinterpret_cast<bfloat16*>(scratch)) {}
    TF_INLINE void operator()(const Accum& weights) { (*this)(weights.template to_vector<bfloat16>()); }
    TF_INLINE void operator()(const Bf16s& weights) {
      aie::store_v(out_, weights);
      out_ += 64;
    }

   private:
    bfloat16* out_;
  };

  static TF_INLINE void multiply(const bfloat16* a, const uint8_t* scratch, float* acc) {
    TF_LOOP_RANGE(1, 4)
    for (unsigned m = 0; m < M / 8; m += 2) {
      const bfloat16* rows = a + m * kKBlocks * 64;
      TF_LOOP_RANGE(4, 4)
      for (unsigned pair = 0; pair < kPairs; ++pair) {
        float* c0 = acc + (m * kNBlocks + 2 * pair) * 64;
        float* c1 = c0 + kNBlocks * 64;
        Block c00(load_accum(c0));
        Block c01(load_accum(c0 + 64));
        Block c10(load_accum(c1));
        Block c11(load_accum(c1 + 64));
        const auto* weights = reinterpret_cast<const bfloat16*>(scratch) + pair * (2 * kKBlocks * 64);
        {
          // Each multiplication: 4 moves and 2 conversions of its own, 2 multiplier operations: 16 cycles for four.
          TF_REGION(multiply);
          TF_LOOP_RANGE(16, 16)
          TF_LOOP_NO_UNROLL
          for (unsigned k = 0; k < kKBlocks; ++k) {
            const Bf16s a0 = aie::load_v<64>(rows + k * 64);
            const Bf16s a1 = aie::load_v<64>(rows + (kKBlocks + k) * 64);
            const Bf16s b0 = aie::load_v<64>(weights + k * 128);
            const Bf16s b1 = aie::load_v<64>(weights + k * 128 + 64);
            c00.mac(a0, b0);
            c01.mac(a0, b1);
            c10.mac(a1, b0);
            c11.mac(a1, b1);
          }
        }
        store_accum(c0, c00);
        store_accum(c0 + 64, c01);
        store_accum(c1, c10);
        store_accum(c1 + 64, c11);
      }
    }
  }
};

// Either, from codes.
template <class Inner, unsigned Bits, unsigned Group, bool Minima>
struct Dequantised {
  using Tile = PackedTile<Bits, Group, Minima>;
  static constexpr unsigned scratch_bytes = Inner::scratch_bytes;

  static TF_INLINE void prepare(const uint8_t* w, uint8_t* scratch) {
    dequantise_tile<Tile, Bits, Minima, Inner::order>(w, typename Inner::Writer(scratch));
  }
  static TF_INLINE void multiply(const bfloat16* a, const uint8_t*, const uint8_t* scratch, float* acc) {
    Inner::multiply(a, scratch, acc);
  }
};

// Either, from bfloat16 weights in the packed tile's block order (UnquantizedTile).
template <class Inner>
struct Unquantized {
  static constexpr unsigned scratch_bytes = Inner::scratch_bytes;

  static TF_INLINE void prepare(const uint8_t* w, uint8_t* scratch) {
    typename Inner::Writer emit(scratch);
    TF_LOOP_RANGE(4, 4)
    for (unsigned pair = 0; pair < kPairs; ++pair) {
      TF_REGION(rearrange);
      TF_LOOP_RANGE(16, 16)
      TF_LOOP_NO_UNROLL
      for (unsigned k = 0; k < kKBlocks; ++k) {
        const auto* blocks = reinterpret_cast<const bfloat16*>(w + UnquantizedTile::block_offset(k, 2 * pair));
        emit(load(blocks));
        emit(load(blocks + 64));
      }
    }
  }
  static TF_INLINE void multiply(const bfloat16* a, const uint8_t*, const uint8_t* scratch, float* acc) {
    Inner::multiply(a, scratch, acc);
  }

 private:
  static TF_INLINE Bf16s load(const bfloat16* block) {
    const Bf16s weights = aie::load_v<64>(block);
    if constexpr (Inner::order == Order::kOutputRows)
      return weights;
    else
      return aie::transpose(weights, 8, 8);
  }
};

}  // namespace tilefuse::gemm

// One band of activations times one tile whose codes are the multiplier's mantissas: path (c).
//
// The inner loop multiplies integers and knows no scale: one block of activations, converted in registers, by four
// blocks of codes. At the end of a group its four sums S Q are split into two operands and multiplied by the scales'
// diagonal matrix (dequantise.h) into the fp32 accumulator. Weights are never rounded; what a group's sums lose is
// below 2^-12 of the largest of the 8 that share an exponent.
//
// Codes become mantissas by one integer operation in the MV slot. The inner loop has room there for two blocks in four;
// the other two are what prepare() writes, once for all bands.
//
// 4-bit zero points are taken off the codes, exactly. 8-bit codes are kept as q - 128, and z - 128 is folded: it
// multiplies the sum of the group's activations, row by row. Where every zero point of a tile is 128 (symmetric
// schemes) prepare() leaves a mark and the sums are not formed.
#pragma once

#include <stdint.h>
#include <string.h>

#include <aie_api/aie.hpp>

#include "dequantise.h"
#include "epilogue.h"
#include "gemm_tile.h"
#include "loops.h"
#include "packed_tile.h"

namespace tilefuse::gemm {

// Bound: |acc - exact| <= sum |A - bfp16(A)| |W| (half a unit, below 2^-6.98 of the largest of 8, each) + for each
// group 2^-12 s max |sums of 8| + (24 2^-24) a tile of the products' magnitudes; tests/oracle_gemm.py derives it.
template <unsigned Bits, unsigned Group, unsigned M>
class MantissaTile {
  using Tile = PackedTile<Bits, Group, false>;

  static constexpr unsigned kQuads = kNBlocks / 4;
  // Scratch: [n/32][k/8][2] blocks of mantissas, the first two in each four blocks of output channels; [group][n/8]
  // scale matrices, high and low; then, for 4-bit codes, [group][n/32][2] blocks of zero points for the other two in
  // four, for 8-bit codes [group][n/8] operands of zero points and the mark.
  static constexpr unsigned kQuadBytes = kKBlocks * 2 * 64;
  static constexpr unsigned kMatrixOffset = kQuads * kQuadBytes;
  static constexpr unsigned kMatrixBytes = 4 * 2 * kOperandBytes;  // of a group and four blocks of output channels
  static constexpr unsigned kZeroOffset = kMatrixOffset + kQuads * Tile::groups * kMatrixBytes;
  static constexpr unsigned kZeroBytes = (Bits == 8 ? 4 : 2) * 64;  // of a group and four blocks of output channels
  static constexpr unsigned kMarkOffset = kZeroOffset + kQuads * Tile::groups * kZeroBytes;

 public:
  static constexpr unsigned scratch_bytes = kMarkOffset + (Bits == 8 ? 64 : 0);

  static TF_INLINE void prepare(const uint8_t* w, uint8_t* scratch) {
    prepare_mantissas(w, scratch);
    write_scale_matrices<Tile>(w, scratch + kMatrixOffset);
    if constexpr (Bits == 8) prepare_zeros(w, scratch);
  }

  static TF_INLINE void multiply(const bfloat16* a, const uint8_t* w, const uint8_t* scratch, float* acc) {
    if constexpr (Bits == 8) {
      if (scratch[kMarkOffset] != 0) {
        multiply_band<true>(a, w, scratch, acc);
        return;
      }
    }
    multiply_band<false>(a, w, scratch, acc);
  }

 private:
  static TF_INLINE uint8_t* zeros_at(uint8_t* scratch, unsigned group, unsigned quad) {
    return scratch + kZeroOffset + (group * kQuads + quad) * kZeroBytes;
  }
  static TF_INLINE const int8* zeros_at(const uint8_t* scratch, unsigned group, unsigned quad) {
    return reinterpret_cast<const int8*>(scratch + kZeroOffset + (group * kQuads + quad) * kZeroBytes);
  }

  // What is subtracted from the codes of a block: their zero points, or nothing more than load_pair did.
  static TF_INLINE Codes centred(const Codes& codes, const Codes& zeros) {
    if constexpr (Bits == 4) return aie::sub(codes, zeros);
    return codes;
  }

  static TF_INLINE void prepare_mantissas(const uint8_t* w, uint8_t* scratch) {
    const Codes mid = midpoint<Bits>();
    TF_LOOP_RANGE(1, 4)
    for (unsigned group = 0; group < Tile::groups; ++group) {
      std::array<Bytes, 8> zeros;
      if constexpr (Bits == 4) {
        zeros = repeat_8(aie::load_v<64>(w + Tile::zero_offset + group * kNt));
        TF_LOOP_UNROLL_FULL
        for (unsigned quad = 0; quad < kQuads; ++quad) {
          aie::store_v(zeros_at(scratch, group, quad), zeros[4 * quad + 2]);
          aie::store_v(zeros_at(scratch, group, quad) + 64, zeros[4 * quad + 3]);
        }
      }
      const unsigned first = group * Tile::k_blocks_per_group;
      TF_REGION(unpack);
      TF_LOOP_RANGE(4, 16)
      TF_LOOP_NO_UNROLL
      for (unsigned k = first; k < first + Tile::k_blocks_per_group; ++k) {
        TF_LOOP_UNROLL_FULL
        for (unsigned quad = 0; quad < kQuads; ++quad) {
          auto* out = reinterpret_cast<int8*>(scratch + quad * kQuadBytes + k * 128);
          const CodePair q = load_pair<Bits>(w + Tile::block_offset(k, 4 * quad), mid);
          aie::store_v(out, centred(q[0], zeros[4 * quad].template cast_to<int8>()));
          aie::store_v(out + 64, centred(q[1], zeros[4 * quad + 1].template cast_to<int8>()));
        }
      }
    }
  }

  // B operands that are z - 128 for the first input channel of a block and 0 for the others.
  static TF_INLINE void prepare_zeros(const uint8_t* w, uint8_t* scratch) {
    const Codes nothing = aie::zeros<int8, 64>();
    uint32_t differing = 0;
    TF_LOOP_RANGE(1, 4)
    for (unsigned group = 0; group < Tile::groups; ++group) {
      const uint8_t* zeros = w + Tile::zero_offset + group * kNt;
      TF_LOOP_RANGE(16, 16)
      for (unsigned i = 0; i < kNt; i += 4) {
        uint32_t four;
        memcpy(&four, zeros + i, 4);
        differing |= four ^ 0x80808080u;
      }
      const Codes centred = aie::add(aie::load_v<64>(zeros).template cast_to<int8>(), midpoint<8>());
      const auto [a, b] = aie::interleave_zip(centred, nothing, 1);
      const auto halves = std::array<Codes, 2>{a, b};
      TF_REGION(zeros);
      TF_LOOP_RANGE(2, 2)
      for (unsigned quad = 0; quad < kQuads; ++quad) {
        const auto [c, d] = aie::interleave_zip(halves[quad], nothing, 2);
        const auto [v0, v1] = aie::interleave_zip(c, nothing, 4);
        const auto [v2, v3] = aie::interleave_zip(d, nothing, 4);
        auto* out = reinterpret_cast<int8*>(zeros_at(scratch, group, quad));
        aie::store_v(out, v0);
        aie::store_v(out + 64, v1);
        aie::store_v(out + 128, v2);
        aie::store_v(out + 192, v3);
      }
    }
    scratch[kMarkOffset] = differing != 0;
  }

  template <bool FoldZeros>
  static TF_INLINE void multiply_band(const bfloat16* a, const uint8_t* w, const uint8_t* scratch, float* acc) {
    const v64bfp16ebs8 minus_one = minus_identity();
    TF_LOOP_RANGE(1, 8)
    for (unsigned m = 0; m < M / 8; ++m) {
      TF_LOOP_RANGE(1, 4)
      for (unsigned group = 0; group < Tile::groups; ++group) {
        const unsigned first = group * Tile::k_blocks_per_group;
        const bfloat16* rows = a + (m * kKBlocks + first) * 64;
        Split row_sums;
        if constexpr (FoldZeros) row_sums = split(minus_row_sums(rows), minus_one);
        TF_LOOP_RANGE(2, 2)
        for (unsigned quad = 0; quad < kQuads; ++quad) {
          const int8* zeros = zeros_at(scratch, group, quad);
          std::array<Accum, 4> sums = group_sums(rows, scratch + quad * kQuadBytes + first * 128,
                                                 w + Tile::block_offset(first, 4 * quad + 2), zeros);
          if constexpr (FoldZeros) {
            TF_LOOP_UNROLL_FULL
            for (unsigned j = 0; j < 4; ++j) {
              const v64bfp16ebs8 z = as_operand(aie::load_v<64>(zeros + 64 * j));
              sums[j] = mac_8x8_8x8T(row_sums.low, z, sums[j]);
              sums[j] = mac_8x8_8x8T(row_sums.high, z, sums[j]);
            }
          }
          aie::block_vector_input_buffer_stream<bfp16ebs8, 64> matrices(
              reinterpret_cast<const bfp16ebs8*>(scratch + kMatrixOffset + (group * kQuads + quad) * kMatrixBytes));
          float* c = acc + (m * kNBlocks + 4 * quad) * 64;
          TF_LOOP_UNROLL_FULL
          for (unsigned j = 0; j < 4; ++j) {
            const Operand high = matrices.pop();
            const Operand low = matrices.pop();
            store_accum(c + 64 * j, add_scaled(load_accum(c + 64 * j), sums[j], high, low, minus_one));
          }
        }
      }
    }
  }

  // Activations times four blocks of weights, over a group: two of mantissas and two of codes.
  static TF_INLINE std::array<Accum, 4> group_sums(const bfloat16* a, const uint8_t* mantissas, const uint8_t* codes,
                                                   const int8* zeros) {
    const Codes mid = midpoint<Bits>();
    Codes z2, z3;
    if constexpr (Bits == 4) {
      z2 = aie::load_v<64>(zeros);
      z3 = aie::load_v<64>(zeros + 64);
    }
    Accum c0 = aie::zeros<accfloat, 64>();
    Accum c1 = aie::zeros<accfloat, 64>();
    Accum c2 = aie::zeros<accfloat, 64>();
    Accum c3 = aie::zeros<accfloat, 64>();
    const auto* b = reinterpret_cast<const int8*>(mantissas);
    {
      // 2 loads of activations, 2 of mantissas, 2 of codes (4 bits: one, and one unpack), 4 moves (2 to widen, 2 to
      // centre), a conversion, 4 multiplications: 4 cycles. It fills two slots; should a compiler copy the constant
      // exponents for each operand, that is a move more for each.
      TF_REGION(multiply);
      TF_LOOP_RANGE(4, 16)
      TF_LOOP_NO_UNROLL
      for (unsigned k = 0; k < Tile::k_blocks_per_group; ++k) {
        const Operand activations = to_operand(a);
        const CodePair q = load_pair<Bits>(codes, mid);
        c0 = mac_8x8_8x8T(activations, as_operand(aie::load_v<64>(b)), c0);
        c1 = mac_8x8_8x8T(activations, as_operand(aie::load_v<64>(b + 64)), c1);
        c2 = mac_8x8_8x8T(activations, as_operand(centred(q[0], z2)), c2);
        c3 = mac_8x8_8x8T(activations, as_operand(centred(q[1], z3)), c3);
        a += 64;
        b += 128;
        codes += kNBlocks * Tile::block_bytes;
      }
    }
    return {c0, c1, c2, c3};
  }

  // Minus the sum of each row of activations over a group, as the multiplier sees them, in all 8 columns. Two chains,
  // so that a product depends on the last but one; one widens by conversion and one by a product with 1, to share the
  // work between two slots.
  static TF_INLINE Accum minus_row_sums(const bfloat16* a) {
    const v64bfp16ebs8 minus_ones{Codes(aie::broadcast<int8, 64>(int8(-1))).to_native(), exponents(int8(133))};
    const Bf16s ones = aie::broadcast<bfloat16, 64>(bfloat16(1.0f));
    Accum even = aie::zeros<accfloat, 64>();
    Accum odd = aie::zeros<accfloat, 64>();
    {
      TF_REGION(row_sums);
      TF_LOOP_RANGE(2, 8)
      TF_LOOP_NO_UNROLL
      for (unsigned k = 0; k < Tile::k_blocks_per_group; k += 2) {
        even = mac_8x8_8x8T(to_operand(a), minus_ones, even);
        const Accum wide = aie::mul(Bf16s(aie::load_v<64>(a + 64)), ones);
        odd = mac_8x8_8x8T(wide.template to_vector<bfp16ebs8>(), minus_ones, odd);
        a += 128;
      }
    }
    return aie::add(even, odd);
  }
};

}  // namespace tilefuse::gemm

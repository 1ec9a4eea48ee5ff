// Path (c) on bands of bfp16 activations: codes are the multiplier's mantissas.
//
// As in gemm_mantissa.h the inner loop multiplies integers, and at the end of a group the sums S Q meet the scales'
// diagonal matrix. With no activations to convert, all codes become mantissas in registers, in the MV slot that is free
// now: prepare() writes the scale matrices and nothing else. What the zero points need is spread over registers once a
// group and two blocks of output channels, in the shadow of the fold's stores, and takes no scratch.
//
// 4-bit zero points come off the codes, exactly. 8-bit codes are kept as q - 128, and z - 128 multiplies the sum of the
// group's activations, row by row, formed once a band and group for all output channels. Where every zero point is 128
// (symmetric schemes) prepare() leaves a mark and there are no sums.
//
// Bound: that of gemm_mantissa.h; activations lose on the host what they would lose in the core.
#pragma once

#include <stdint.h>
#include <string.h>

#include <aie_api/aie.hpp>

#include "gemm_band.h"

namespace tilefuse::gemm {

template <unsigned Bits, unsigned Group, unsigned Tiles>
class BandMantissa {
  using Tile = PackedTile<Bits, Group, false>;

  // Scratch, for each tile: [group][n/8] scale matrices, high and low; then, for 8-bit codes, the mark.
  static constexpr unsigned kMatrixBytes = 2 * kOperandBytes;
  static constexpr unsigned kMarkOffset = Tile::groups * kNBlocks * kMatrixBytes;
  static constexpr unsigned kTileScratch = kMarkOffset + (Bits == 8 ? 64 : 0);

 public:
  static constexpr unsigned scratch_bytes = Tiles * kTileScratch;

  static TF_INLINE void prepare(const uint8_t* w, uint8_t* scratch) {
    TF_LOOP_RANGE(1, 2)
    TF_LOOP_NO_UNROLL
    for (unsigned tile = 0; tile < Tiles; ++tile) {
      const uint8_t* packed = w + tile * Tile::tile_bytes;
      uint8_t* own = scratch + tile * kTileScratch;
      write_scale_matrices<Tile>(packed, own);
      if constexpr (Bits == 8) own[kMarkOffset] = any_zero_point_but_128(packed + Tile::zero_offset);
    }
  }

  static TF_INLINE void multiply(const uint8_t* a, const uint8_t* w, const uint8_t* scratch, float* acc) {
    if constexpr (Bits == 8) {
      unsigned marks = 0;
      TF_LOOP_UNROLL_FULL
      for (unsigned tile = 0; tile < Tiles; ++tile) marks |= scratch[tile * kTileScratch + kMarkOffset];
      if (marks != 0) {
        multiply_band<true>(a, w, scratch, acc);
        return;
      }
    }
    multiply_band<false>(a, w, scratch, acc);
  }

 private:
  // Scalar work, which issues beside the vector slots.
  static TF_INLINE bool any_zero_point_but_128(const uint8_t* zeros) {
    uint32_t differing = 0;
    TF_LOOP_RANGE(16, 64)
    for (unsigned i = 0; i < Tile::groups * kNt; i += 4) {
      uint32_t four;
      memcpy(&four, zeros + i, 4);
      differing |= four ^ 0x80808080u;
    }
    return differing != 0;
  }

  template <bool FoldZeros>
  static TF_INLINE void multiply_band(const uint8_t* a, const uint8_t* w, const uint8_t* scratch, float* acc) {
    const v64bfp16ebs8 minus_one = minus_identity();
    const Codes mid = midpoint<Bits>();
    TF_LOOP_RANGE(1, 4)
    TF_LOOP_NO_UNROLL
    for (unsigned group = 0; group < Tile::groups; ++group) {
      const unsigned first = group * Tile::k_blocks_per_group;
      const uint8_t* rows = a + first * (2 * kOperandBytes);
      RowSums row_sums;
      if constexpr (FoldZeros) row_sums = minus_row_sums(rows, minus_one);
      TF_LOOP_RANGE(4, 8)
      TF_LOOP_NO_UNROLL
      for (unsigned pair = 0; pair < Tiles * kPairs; ++pair) {
        const unsigned tile = pair / kPairs;
        const unsigned n = 2 * (pair % kPairs);  // first of the two blocks of output channels
        const uint8_t* packed = w + tile * Tile::tile_bytes;
        Sums2x2 sums = group_sums(rows, packed, group, n, mid);
        if constexpr (FoldZeros) {
          const CodePair z = zero_operands(packed + Tile::zero_offset + group * kNt + n * 8, mid);
          sums.c00 = add_product(sums.c00, row_sums.first, z[0]);
          sums.c01 = add_product(sums.c01, row_sums.first, z[1]);
          sums.c10 = add_product(sums.c10, row_sums.second, z[0]);
          sums.c11 = add_product(sums.c11, row_sums.second, z[1]);
        }
        OperandStream matrices = operand_stream(scratch + tile * kTileScratch + (group * kNBlocks + n) * kMatrixBytes);
        const Operand high0 = matrices.pop();
        const Operand low0 = matrices.pop();
        const Operand high1 = matrices.pop();
        const Operand low1 = matrices.pop();
        float* c = acc + tile * kPieceFloats + n * 64;
        float* second = c + kNBlocks * 64;
        // One after the other: an accumulator of its own for each, beside the four sums, there is not.
        store_accum(c, add_scaled(load_accum(c), sums.c00, high0, low0, minus_one));
        store_accum(c + 64, add_scaled(load_accum(c + 64), sums.c01, high1, low1, minus_one));
        store_accum(second, add_scaled(load_accum(second), sums.c10, high0, low0, minus_one));
        store_accum(second + 64, add_scaled(load_accum(second + 64), sums.c11, high1, low1, minus_one));
      }
    }
  }

  // Activations times two blocks of codes over a group.
  static TF_INLINE Sums2x2 group_sums(const uint8_t* rows, const uint8_t* packed, unsigned group, unsigned n,
                                      const Codes& mid) {
    CodePair zeros;
    if constexpr (Bits == 4) zeros = load_offsets<Tile, Bits, false>(packed, group, n / 2, mid);
    const uint8_t* codes = packed + Tile::block_offset(group * Tile::k_blocks_per_group, n);
    OperandStream activations = operand_stream(rows);
    Accum c00 = aie::zeros<accfloat, 64>();
    Accum c01 = aie::zeros<accfloat, 64>();
    Accum c10 = aie::zeros<accfloat, 64>();
    Accum c11 = aie::zeros<accfloat, 64>();
    {
      // 2 pops (2 loads each), 2 loads of codes (4 bits: one, and one unpack), 2 moves to centre, 4 multiplications: 4
      // cycles, and room for two moves more, should a compiler copy the constant exponents for each operand.
      TF_REGION(multiply);
      TF_LOOP_RANGE(4, 16)
      TF_LOOP_NO_UNROLL
      for (unsigned k = 0; k < Tile::k_blocks_per_group; ++k) {
        const Operand a0 = activations.pop();
        const Operand a1 = activations.pop();
        const CodePair q = load_pair<Bits>(codes, mid);
        const v64bfp16ebs8 b0 = as_operand(centred(q[0], zeros[0]));
        const v64bfp16ebs8 b1 = as_operand(centred(q[1], zeros[1]));
        c00 = mac_8x8_8x8T(a0, b0, c00);
        c01 = mac_8x8_8x8T(a0, b1, c01);
        c10 = mac_8x8_8x8T(a1, b0, c10);
        c11 = mac_8x8_8x8T(a1, b1, c11);
        codes += kNBlocks * Tile::block_bytes;
      }
    }
    return {c00, c01, c10, c11};
  }

  static TF_INLINE Codes centred(const Codes& codes, const Codes& zeros) {
    if constexpr (Bits == 4) return aie::sub(codes, zeros);
    return codes;
  }

  // --- zero points of 8-bit codes ---

  struct RowSums {
    Split first, second;  // of the first and the second eight rows
  };

  // Minus the sum of each row of activations over a group, in all 8 columns. Two chains for each eight rows, so that a
  // product depends on the last but three.
  static TF_INLINE RowSums minus_row_sums(const uint8_t* rows, const v64bfp16ebs8& minus_one) {
    const v64bfp16ebs8 minus_ones{Codes(aie::broadcast<int8, 64>(int8(-1))).to_native(), exponents(int8(133))};
    OperandStream activations = operand_stream(rows);
    Accum even0 = aie::zeros<accfloat, 64>();
    Accum even1 = aie::zeros<accfloat, 64>();
    Accum odd0 = aie::zeros<accfloat, 64>();
    Accum odd1 = aie::zeros<accfloat, 64>();
    {
      TF_REGION(row_sums);
      TF_LOOP_RANGE(2, 8)
      TF_LOOP_NO_UNROLL
      for (unsigned k = 0; k < Tile::k_blocks_per_group; k += 2) {
        even0 = mac_8x8_8x8T(activations.pop(), minus_ones, even0);
        even1 = mac_8x8_8x8T(activations.pop(), minus_ones, even1);
        odd0 = mac_8x8_8x8T(activations.pop(), minus_ones, odd0);
        odd1 = mac_8x8_8x8T(activations.pop(), minus_ones, odd1);
      }
    }
    return {split(aie::add(even0, odd0), minus_one), split(aie::add(even1, odd1), minus_one)};
  }

  // z - 128 of 16 output channels as two operands: beside the first input channel of a block, and 0 for the others, as
  // every column of the row sums holds all of the sum.
  static TF_INLINE CodePair zero_operands(const uint8_t* zeros, const Codes& mid) {
    const Codes nothing = aie::zeros<int8, 64>();
    const aie::vector<int8, 16> z =
        aie::add(aie::load_v<16>(zeros).template cast_to<int8>(), mid.template extract<16>(0));
    const auto [a, b] = aie::interleave_zip(z, nothing.template extract<16>(0), 1);
    const auto [c, d] = aie::interleave_zip(aie::concat(a, b), nothing.template extract<32>(0), 2);
    const auto [v0, v1] = aie::interleave_zip(aie::concat(c, d), nothing, 4);
    return {v0, v1};
  }

  static TF_INLINE Accum add_product(const Accum& sums, const Split& rows, const Codes& zeros) {
    const v64bfp16ebs8 z = as_operand(zeros);
    return mac_8x8_8x8T(rows.high, z, mac_8x8_8x8T(rows.low, z, sums));
  }
};

}  // namespace tilefuse::gemm

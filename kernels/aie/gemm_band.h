// GEMM of activations that arrive as bfp16: what its paths share, and path (b), weights dequantised to bfp16.
//
// Every GEMM path multiplies bfp16 activations, and converting them costs a core half of its store unit. Here the host
// has done it, once for all columns of the array, in the same way: a stream of activations has 9/16 of the bytes, and
// both operands of the inner loop come out of memory or of an unpack.
//
// A band is 16 rows by one tile of input channels, [16 k blocks][2 blocks of 8 rows] operands of 72 bytes, so that the
// inner loop pops all of it in order. The sums of all bands of a core stay in its memory over all of K: fp32
// [band][tile][2][8] blocks of [8 rows][8 output channels].
#pragma once

#include <stdint.h>

#include <aie_api/aie.hpp>

#include "dequantise.h"
#include "epilogue.h"
#include "gemm_tile.h"
#include "loops.h"
#include "packed_tile.h"

namespace tilefuse::gemm {

inline constexpr unsigned kBandRows = 16;
inline constexpr unsigned kBandBytes = kKBlocks * 2 * kOperandBytes;
inline constexpr int32_t kPieceFloats = kBandRows * kNt;  // sums of a band and one tile

using OperandStream = aie::block_vector_input_buffer_stream<bfp16ebs8, 64>;

TF_INLINE OperandStream operand_stream(const uint8_t* bytes) {
  return OperandStream(reinterpret_cast<const bfp16ebs8*>(bytes));
}

// 2 x 2 blocks of sums: two blocks of 8 rows by two of 8 output channels.
struct Sums2x2 {
  Accum c00, c01, c10, c11;
};
// `c`: of the first block; those of the second eight rows lie a tile's row of blocks further.
TF_INLINE Sums2x2 load_sums(const float* c) {
  const float* second = c + kNBlocks * 64;
  return {load_accum(c), load_accum(c + 64), load_accum(second), load_accum(second + 64)};
}
TF_INLINE void store_sums(float* c, const Sums2x2& sums) {
  float* second = c + kNBlocks * 64;
  store_accum(c, sums.c00);
  store_accum(c + 64, sums.c01);
  store_accum(second, sums.c10);
  store_accum(second + 64, sums.c11);
}

// Path (b) on bands: the scratch of Bfp16Tile, one for each of `Tiles` tiles. Its bound is that path's (gemm_tile.h).
template <unsigned Bits, unsigned Group, bool Minima, unsigned Tiles>
class BandBfp16 {
  using Tile = PackedTile<Bits, Group, Minima>;
  using Inner = Bfp16Tile<kBandRows>;

 public:
  static constexpr unsigned scratch_bytes = Tiles * Inner::scratch_bytes;

  static TF_INLINE void prepare(const uint8_t* w, uint8_t* scratch) {
    TF_LOOP_RANGE(1, 2)
    TF_LOOP_NO_UNROLL
    for (unsigned tile = 0; tile < Tiles; ++tile)
      dequantise_tile<Tile, Bits, Minima, Inner::order>(w + tile * Tile::tile_bytes,
                                                        typename Inner::Writer(scratch + tile * Inner::scratch_bytes));
  }

  static TF_INLINE void multiply(const uint8_t* a, const uint8_t*, const uint8_t* scratch, float* acc) {
    TF_LOOP_RANGE(4, 8)
    TF_LOOP_NO_UNROLL
    for (unsigned pair = 0; pair < Tiles * kPairs; ++pair) {
      // Pairs of blocks follow one another within a tile, and tiles too.
      float* c = acc + pair / kPairs * kPieceFloats + pair % kPairs * 128;
      Sums2x2 sums = load_sums(c);
      OperandStream activations = operand_stream(a);
      OperandStream weights = operand_stream(scratch + pair * (2 * kKBlocks * kOperandBytes));
      {
        // 4 pops (2 loads each), 4 multiplications: 4 cycles.
        TF_REGION(multiply);
        TF_LOOP_RANGE(16, 16)
        TF_LOOP_NO_UNROLL
        for (unsigned k = 0; k < kKBlocks; ++k) {
          const Operand a0 = activations.pop();
          const Operand a1 = activations.pop();
          const Operand b0 = weights.pop();
          const Operand b1 = weights.pop();
          sums.c00 = mac_8x8_8x8T(a0, b0, sums.c00);
          sums.c01 = mac_8x8_8x8T(a0, b1, sums.c01);
          sums.c10 = mac_8x8_8x8T(a1, b0, sums.c10);
          sums.c11 = mac_8x8_8x8T(a1, b1, sums.c11);
        }
      }
      store_sums(c, sums);
    }
  }
};

}  // namespace tilefuse::gemm

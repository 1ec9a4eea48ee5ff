// What attention's cores are given and where it lies: the contract of its kernels (attention_bf16.cc), its designs and
// the host. `src/tilefuse/tilemix/npu_operands.py` writes these layouts; a test compares the two.
//
// A core has 32 query rows and takes the keys 64 at a time. Products of bfloat16 run on the bfp16 multiplier: AIE2P has
// none for bfloat16 matrices, and its library makes one of element-wise products and moves, 12 products a cycle. A
// number is two bfp16 operands, high + low: high = bfp16(x), low = bfp16(x - high), in fp32; three products (high high,
// low high, high low) make a bfloat16 product to 2^-14 of the largest of 8 by 8, at 170 products a cycle.
//
//   function                                     called
//   begin(state, o)                              once a query tile
//   scores_int8(q, kv, scores)                   once an INT8 tile, kv its codes
//   scores_bf16(q, kv, half, scores)             twice a 16-bit tile, half 0 and 1, kv those 32 keys
//   softmax(scores, state, p)                    once a tile of either kind
//   values(p, kv, half, o)                       twice a tile, half 0 and 1, kv those d/2 channels of all 64 values
//   store(o, state, block, y)                    for block 0 to 3: the results of 8 rows
//
// An operand is 72 bytes: 8 times an exponent and its 8 mantissas, 8 consecutive channels of 8 rows (keys, queries), or
// for values 8 consecutive keys of 8 channels. "Blocks" are 8 x 8 elements. All objects are multiples of 64 bytes.
//
//   q   64 + 128 + 68 d bytes
//       header, int32: [0] INT8 tiles, [1] 16-bit tiles (for the design), [2] position of row 0 among the keys: row i
//           stands at key position + i; [3] number of keys; [4] window: keys above position - window are seen, all of
//           them if it is 2^24 or more; [6] causal: 0 or 1. ([5] is free)
//       from 64: fp32 [32], s_q scale log2(e) of each row (s_q = 1 for a row of zeros, as everywhere)
//       from 192: int8 codes, blocks [d/8][4 of rows][8 rows][8 channels]
//       then: what codes leave of q / s_q, q in bfloat16: operands [d/8][4 of rows]. A row's q is s_q (code + rest).
//   kv  72 d + 64 bytes: payload, then meta, int32: [0] first key of the tile; [1] fp32 s_k of an INT8 tile
//       INT8 keys: codes, blocks [8 of keys][d/8][8 channels][8 keys], 64 d bytes; then of each 64 channels 256 bytes
//           for the bfloat16 mean as high and low: mantissas [8][8] of high, of low, and exponents twice as a diagonal
//           [8][8], of high and of low: entry (i, j) is the exponent of channels 8 i if i = j, and 0 otherwise (which
//           makes a row of an operand worth nothing). Zeros to the end of the payload.
//       16-bit keys: 32 of them, operands [4 of keys][d/8][high, low]
//       values: operands [d/64][8 of keys][4 of channels][high, low]: channels half d/2 + 32 i + 8 j of [i][.][j]
//   y   16 d + 64 bytes: bfloat16 [d/8] blocks of [8 rows][8 channels]; then fp32 [8] m and fp32 [8] l of the rows:
//       lse = (m + log2 l) / log2(e), and l = 0 for a row without keys, whose results are zeros
//   o   fp32 [4 of rows][d/8] blocks of [8][8]
//   scores, state, p: kScoresBytes, kStateBytes, kPBytes; the kernels' own.
//
// All operands are finite, and exponents, in base 2, below 2^29. Keys past the end of the sequence, in its last tile,
// are zeros: they are masked. So are the causal edge and the window, in the rows that they cross, and without a mask in
// memory: softmax compares positions.
#pragma once

#include <stdint.h>

namespace tilefuse::attention {

inline constexpr unsigned kRows = 32;
inline constexpr unsigned kKeys = 64;
inline constexpr unsigned kRowBlocks = kRows / 8;
inline constexpr unsigned kKeyBlocks = kKeys / 8;
inline constexpr unsigned kOperand = 72;         // bytes of 64 bfp16 values
inline constexpr unsigned kPair = 2 * kOperand;  // high and low

inline constexpr unsigned kQHeader = 64;
inline constexpr unsigned kQCodes = kQHeader + 4 * kRows;
inline constexpr unsigned kMetaBytes = 64;
inline constexpr unsigned kMeanBytes = 256;  // of 64 channels

// Raw scores fp32, blocks [4 of rows][8 of keys], a multiplier and an offset of each row, fp32 [32] each, and meta.
inline constexpr unsigned kScoresBytes = kRows * kKeys * 4 + 2 * kRows * 4 + kMetaBytes;
// Maxima fp32 [32]; sums fp32 [4 of rows][64], of which 8 neighbours make a row's.
inline constexpr unsigned kStateBytes = kRows * 4 + kRowBlocks * 64 * 4;
// Weights, operands [4 of rows][8 of keys][high, low]; what o is multiplied by, bfloat16 [4][64]; marks.
inline constexpr unsigned kPBytes = kRowBlocks * kKeyBlocks * kPair + kRowBlocks * 64 * 2 + 64;

template <unsigned D>
struct Layout {
  static_assert(D == 64 || D == 128, "heads have 64 or 128 channels");

  static constexpr unsigned channel_blocks = D / 8;
  static constexpr unsigned q_rest = kQCodes + kRows * D;
  static constexpr unsigned q_bytes = q_rest + kRowBlocks * channel_blocks * kOperand;
  static constexpr unsigned payload_bytes = 72 * D;
  static constexpr unsigned kv_bytes = payload_bytes + kMetaBytes;
  static constexpr unsigned means = 64 * D;
  static constexpr unsigned y_bytes = 16 * D + kMetaBytes;
  static constexpr unsigned o_bytes = kRows * D * 4;
};

}  // namespace tilefuse::attention

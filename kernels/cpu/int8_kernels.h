// What one instruction set provides to compute="int8": activations as signed 8-bit integers, products in exact 32-bit
// integers, one float step a group.
//
// In each group of tile_group input channels a row's activations are x = q_x s_x, s_x = max|x| / 127. With weights
// (q - z) s the group's share of a result is sum (q - z) q_x, an integer of at most 255 * 127 * 128 < 2^22, times s
// s_x. Minima, w = q s + m, are (q - z) s + (m + z s), z the integer next to -m / s: the second term times the sum of
// the group's x.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu_features.h"
#include "matmul.h"
#include "matmul_kernels.h"
#include "tile_layout.h"

namespace tilefuse {

// Rows that go through the weights together, interleaved: a kernel reads all rows' activations for four input channels
// from consecutive words.
struct Int8Rows {
  // For each k tile [32][rows]. A word holds four input channels of a row; a block of 8 is two words: channels 0 2 4 6
  // and 1 3 5 7 with 4-bit codes, 0 1 2 3 and 4 5 6 7 with 8-bit codes. Signed or, where the kernel wants that, plus
  // 128.
  uint32_t* words = nullptr;
  int64_t tile_stride = 0;  // from one k tile to the next, in words
  float* scales = nullptr;  // [k / tile_group][rows]; NaN where the group has a NaN or Inf
  int32_t* sums = nullptr;  // [k / tile_group][rows]: of the signed integers of a group
  int rows = 0;
};

inline constexpr int kInt8TileWords = kKt / 4;  // a row's words in a k tile
inline constexpr int kMaxInt8Rows = 16;         // of a pass, at any level
inline constexpr int64_t kInt8PreparedBytes = int64_t{kKt} * kNt * 2 + 1024;

struct Int8Kernels {
  // Rows that a pass takes at most.
  int max_rows;
  // Whether activations of a product of m rows are wanted plus 128.
  bool (*offset)(const TileLayout&, int64_t m);
  // Quantises k tiles [first, first + count) of rows [row0, row0 + x.rows) of args.x, permuted, zero beyond K.
  void (*quantise)(const MatmulArgs& args, int64_t row0, int64_t first, int64_t count, bool offset, const Int8Rows& x);
  // Writes to `prepared` (kInt8PreparedBytes, 64-byte aligned) what all passes need of one k tile.
  void (*prepare)(const TileRun&, int64_t k_tile, bool offset, std::byte* prepared);
  // acc[rows][64] += x * that k tile.
  void (*pass)(const TileRun&, int64_t k_tile, bool offset, const std::byte* prepared, const Int8Rows& x, float* acc);
  // Row `row` of y in output tile `n_tile`: acc[64] plus bias, rounded once.
  void (*store_row)(const MatmulArgs& args, int64_t row, int64_t n_tile, const float* acc);
};

[[nodiscard]] const Int8Kernels& int8_kernels(CpuLevel level);

const Int8Kernels& int8_kernels_portable();
#if defined(__x86_64__)
const Int8Kernels& int8_kernels_avx2();
const Int8Kernels& int8_kernels_vnni();
#endif

}  // namespace tilefuse

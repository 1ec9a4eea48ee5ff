// What one instruction set provides to the matmul driver. Every function works on one output tile (64 output channels).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu_features.h"
#include "matmul.h"
#include "tile_layout.h"

namespace tilefuse {

// With minima, w = q s + m, kernels that sum q x apart from x use w = (q - z) s + (m + z s) instead, z the integer next
// to -m / s: where q s and m all but cancel, so would the two sums, each with the rounding error of a large one.
// Further out than this no code comes near to cancelling m.
inline constexpr float kMaxFoldedZero = 512.0F;

// The k tiles of one output tile: contiguous.
struct TileRun {
  const TileLayout* layout = nullptr;
  const std::byte* tiles = nullptr;
  const std::byte* next = nullptr;  // the run that is read afterwards; null if not known
};

inline constexpr int kPanelTiles = 4;  // k tiles dequantised at a time: 512 x 64 weights stay in L2
inline constexpr int kMaxRowsPerPass = 6;

// Rows of bfloat16 activations that go through the weights together, interleaved: a kernel reads all rows' activations
// for one pair of input channels from consecutive words.
struct PassRows {
  // For each k tile uint32 [64][rows]: in each block of 8 k, word j of a row is bf16(x[j]) | bf16(x[j + 4]) << 16.
  const uint32_t* words = nullptr;
  int64_t tile_stride = 0;      // from one k tile to the next, in words
  const float* sums = nullptr;  // [k / tile_group][rows], sums of x over the groups; null unless the layer has minima
  int rows = 0;                 // at most kMaxPassRows
};
inline constexpr int kMaxPassRows = 16;
// As many rows as can be multiplied by two vectors of a panel at a time, with 32 registers.
inline constexpr int kMaxPanelRows = 14;

// 2^111 as bfloat16. From here on a group's sum of code differences (below 2^15 in all) times activations could
// overflow although the scale would bring it back into range: such activations take kernels that scale each weight.
inline constexpr int kLargestExactPass = (127 + 111) << 7;

// Kernels on interleaved bfloat16 rows.
struct PassKernels {
  // Writes k tiles [first, end) of rows [row0, row0 + rows) of args.x (permuted, rounded to bfloat16, zero beyond K) as
  // PassRows has them and, unless null, their sums. `words` and `sums` are those of all k tiles. False if one is 2^111
  // or more in magnitude, infinite or NaN: not for the fused kernels.
  bool (*write_pass)(const MatmulArgs& args, int64_t row0, int rows, int64_t first, int64_t end, uint32_t* words,
                     int64_t tile_stride, float* sums);
  // acc[rows][64] += x * one k tile, unpacked in registers: the faster way up to fused_rows rows of a product.
  void (*fused)(const TileRun&, int64_t k_tile, const PassRows& x, float* acc);
  int64_t (*fused_rows)(const TileLayout&);
  // Dequantises k tiles [first, first + count) into a panel, 16 KiB each.
  void (*dequantise)(const TileRun&, int64_t first, int count, void* panel);
  // acc[rows][64] += x * that panel, of which `channels` are before K.
  void (*panel_pass)(const void* panel, int64_t first, int count, int64_t channels, const PassRows& x, float* acc);
  // Row `row` of y in output tile `n_tile`: acc[64] plus bias, rounded once.
  void (*store_row)(const MatmulArgs& args, int64_t row, int64_t n_tile, const float* acc);
};

// Rows that go through FewRowsKernels together at most.
inline constexpr int kMaxFewRows = 64;

// Rows as digits in a format of the level's own.
struct FewRowsKernels {
  // Up to this many rows they are the faster way.
  int (*max_rows)(const TileLayout&);
  // Bytes of one row's digits, and of the scratch that writing them takes.
  int64_t (*row_bytes)(const TileLayout&);
  int64_t (*scratch_bytes)(const TileLayout&);
  // False if the row can't be held: the float kernels take it.
  bool (*write)(const MatmulArgs& args, int64_t row, std::byte* digits, std::byte* scratch);
  // `digits`: those of `rows` rows, at most kMaxFewRows, one after the other. acc[rows][64] is overwritten.
  void (*fused)(const TileRun&, const std::byte* digits, int rows, float* acc);
};

struct MatmulKernels {
  // Fused kernels: unpack in registers, no panel. acc[rows][64] is overwritten. Null where the panel path is better.
  void (*fused_w4_f32)(const TileRun&, const float* x, int64_t x_stride, int rows, float* acc);
  // Up to this many rows that is the faster one; 0: never.
  int fused_rows_w4;

  const FewRowsKernels* few = nullptr;  // null: none

  // More rows, by way of panels in float; null with `passes`.
  // Dequantises k tiles [first, first + count) into `panel`, which panel_rows reads.
  void (*dequantise)(const TileRun&, int64_t first, int count, void* panel);
  // acc[r][0..63] (+)= x[r][0..k) * panel for 1 <= rows <= kMaxRowsPerPass, x_stride floats apart.
  void (*panel_rows)(const void* panel, int64_t k, const void* x, int64_t x_stride, int rows, float* acc, bool first);

  // More rows, in bfloat16; null without AVX512_BF16.
  const PassKernels* passes;
};

[[nodiscard]] const MatmulKernels& matmul_kernels(CpuLevel level);

const MatmulKernels& matmul_kernels_portable();
#if defined(__x86_64__)
const MatmulKernels& matmul_kernels_avx2();
const MatmulKernels& matmul_kernels_avx512();
const MatmulKernels& matmul_kernels_avx512_vnni();
const MatmulKernels& matmul_kernels_avx512_bf16();
const MatmulKernels& matmul_kernels_avx512_bf16_model();
#endif

}  // namespace tilefuse

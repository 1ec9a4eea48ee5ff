// Activations as the array's GEMM takes them: bfp16 in bands of 16 rows, written straight into the buffer that the DMA
// reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "matmul.h"

namespace tilefuse {

inline constexpr int kBandRows = 16;
inline constexpr int kBandBytes = kBandRows * kKt / 8 * 9;

struct StagingArgs {
  const void* x = nullptr;  // [m][k], rows x_stride elements apart
  Dtype x_dtype = Dtype::f32;
  int64_t x_stride = 0;
  int64_t m = 0;
  int64_t k = 0;
  const int32_t* perm = nullptr;  // [k]: input channel i of the tiles is x[perm[i]]; null: identity

  // [row_blocks][4 rows of the array][k_tiles][bands][2304]. Of a row block, the first 16 * joined rows are the first
  // `joined` bands of array row 0, the next ones those of row 1, and so on. Zero beyond m and k.
  std::byte* out = nullptr;
  int64_t k_tiles = 0;
  int64_t bands = 0;  // a multiple of `joined`
  int64_t joined = 1;
  int64_t row_blocks = 0;
};

struct Place {
  int64_t row = 0;
  int64_t column = 0;
};

// x -> bfloat16, to nearest even, -> bfp16: a band is [16 k blocks][16 rows] of an exponent and 8 mantissas, the bits
// that a core makes of them in rounding mode conv_even. Runs at current_level() on the process's thread pool; the same
// bits at every level.
//
// Returns where x first has (row by row) what is not finite in bfloat16, which bfp16 can't hold; `out` is then of no
// use.
[[nodiscard]] std::optional<Place> stage_bfp16(const StagingArgs& args);

}  // namespace tilefuse

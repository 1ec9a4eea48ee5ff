// GEMV with 8-bit weights: a packed tile of 128 input x 64 output channels a call, fp32 sums in the caller's acc.
//
// TF_PATH_MANTISSA is the path to use; TF_PATH_ELEMENTWISE is the rung of the ladder below it. docs/kernels.md derives
// the error bound that both are held to.
//
// L1, groups of 128: tile 2 x 8384 B, scratch 1536 B, x 2 x 256 B, acc 256 B, the row above's sums 2 x 256 B, y 2 x 128
// B: 19.4 KiB of 64. Cycles of the mantissa path for a tile of 8192 weights, groups of 128 (modelled;
// benchmarks/microkernels.py counts them):
//   each k block: 8 loads, a FIFO pop (2 loads), 8 additions of -128 (MV), 4 multiplications: 8 cycles, MV-bound
//   each group: 8 additions of rows, 5 operations for the zero point, 5 for the scale: VEC 18
// A stream brings 4 codes a cycle, a tile in 2096 cycles: the core waits for its weights.
#include <aie_api/aie.hpp>

#include "config.h"
#include "gemv.h"

#define TF_BITS 8
#include "gemv_quantised.h"
#undef TF_BITS

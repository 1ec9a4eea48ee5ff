// GEMV with 8-bit weights: a packed tile of 128 input x 64 output channels a call, fp32 sums in the caller's acc.
//
// TF_PATH_MANTISSA is the default; TF_PATH_ELEMENTWISE is the rung of the ladder below it. docs/kernels.md derives the
// error bound of both: |acc - exact| <= (2^-27 + (k + 16) 2^-24) x the mass of the products, k additions deep.
//
// L1, group 128: tile 4288 B x 2, scratch 1536 B, x 256 B x 2, acc 256 B, partial 256 B x 2, y 128 B x 2: 11.4 KiB
// of 64. Cycles of the mantissa path, a tile of 8192 weights, group 128 (benchmarks/kernels.py counts them):
//   each k block: 4 loads, 4 unpacks (load unit B), a FIFO pop (2 loads), 4 multiplications: 5 cycles, load-bound; 16
//   of them each group: 8 additions to fold rows, 3 multiplications for the zero point, 3 for the scale; 7 conversions
//   and 4 stores
// The stream that feeds a core brings 8 codes a cycle and channel, a tile in 1072 cycles: the core waits for its
// weights.
#include <aie_api/aie.hpp>

#include "config.h"
#include "gemv.h"

#define TF_BITS 8
TF_CHECK_WEIGHTS;

#if TF_PATH == TF_PATH_ELEMENTWISE
#define TF_GEMV tilefuse::gemv::Elementwise<TF_BITS, TF_GROUP, TF_MINIMA>
#else
static_assert(TF_PATH == TF_PATH_MANTISSA, "a GEMV multiplies mantissas or elements");
#define TF_GEMV tilefuse::gemv::Mantissa<TF_BITS, TF_GROUP, TF_MINIMA>
#endif
#define TF_NAME TF_GEMV_NAME
#include "gemv_entry_points.h"
#undef TF_NAME
#undef TF_GEMV
#undef TF_BITS

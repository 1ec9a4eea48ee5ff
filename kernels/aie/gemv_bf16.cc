// GEMV with unquantised bfloat16 weights, in the packed tiles' block order: the full-precision baseline.
//
// L1: tile 16384 B x 2, scratch 2048 B, x 256 B x 2, acc 256 B, partial 256 B x 2, y 128 B x 2: 35.5 KiB of 64.
// Cycles, a tile of 8192 weights: each k block and half of the outputs, 10 loads and 4 multiplications: 5 cycles,
// load-bound; 32 of them. 56 shuffles then add the lanes. The stream brings 2 weights a cycle and channel: 4096 cycles.
#include <aie_api/aie.hpp>

#include "config.h"
#include "gemv.h"

#define TF_BITS 16
TF_CHECK_WEIGHTS;
static_assert(TF_PATH == TF_PATH_ELEMENTWISE, "bfloat16 weights are multiplied as elements");

#define TF_GEMV tilefuse::gemv::Unquantized
#define TF_NAME TF_GEMV_NAME
#include "gemv_entry_points.h"
#undef TF_NAME
#undef TF_GEMV
#undef TF_BITS

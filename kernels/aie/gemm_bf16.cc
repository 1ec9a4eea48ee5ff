// GEMM with unquantised bfloat16 weights: the baseline.
//
// L1 bytes: tile 16384, which leaves no room for a second; acc 16384; a band of 16 rows 4096 x 2; results 1024 x 2;
// constants 192; stack 3328; scratch emulated 16384, bfp16 9216. Of 65536: emulated 62912, bfp16 55744.
//
// Instructions by issue slot, counted on the host, and cycles, modelled (docs/kernels.md), of a tile and 64 rows:
// 524288 products. Region "-" is code between loops; in "multiply" reading and writing acc.
//   path      entry    region     entries  load   ldb    st    mv   vec  cycles
//   emulated  prepare  -                0     0     0     0     0     0       0
//   emulated  prepare  rearrange        4   256     0   256   256     0     296
//   emulated  multiply -                0   256     0   256     0     0     256
//   emulated  multiply multiply        16  2048     0  2048  4096  2048    4256
//   bfp16     prepare  -                0     0     0     0     0     0       0
//   bfp16     prepare  rearrange        4   256     0   384   256     0     424
//   bfp16     multiply -                0   256     0   256     0     0     256
//   bfp16     multiply multiply        16  2048     0   512  1024  1024    1184
//
// Cycles of all of it:
//   emulated   4808
//   bfp16      1864
#include <aie_api/aie.hpp>

#include "config.h"
#include "gemm_tile.h"

#define TF_BITS 16
TF_CHECK_WEIGHTS;
TF_CHECK_ROWS;

#if TF_PATH == TF_PATH_EMULATED
#if !AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16
#error "compile with -DAIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16=1"
#endif
#define TF_GEMM tilefuse::gemm::Unquantized<tilefuse::gemm::EmulatedTile<TF_M>>
#else
static_assert(TF_PATH == TF_PATH_BFP16, "bfloat16 weights are no mantissas");
#define TF_GEMM tilefuse::gemm::Unquantized<tilefuse::gemm::Bfp16Tile<TF_M>>
#endif
#define TF_NAME TF_GEMM_NAME
#include "gemm_entry_points.h"
#undef TF_NAME
#undef TF_GEMM
#undef TF_BITS

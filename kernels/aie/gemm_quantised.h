// A GEMM kernel on packed codes of TF_BITS bits: the arithmetic that TF_PATH names, and its entry points. Included by
// the kernels' .cc, any number of times by one host translation unit, so without a guard.

TF_CHECK_WEIGHTS;
TF_CHECK_GROUP;
TF_CHECK_ROWS;

#if TF_PATH == TF_PATH_EMULATED
#if !AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16
#error "compile with -DAIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16=1"
#endif
#define TF_GEMM tilefuse::gemm::Dequantised<tilefuse::gemm::EmulatedTile<TF_M>, TF_BITS, TF_GROUP, TF_MINIMA>
#elif TF_PATH == TF_PATH_BFP16
#define TF_GEMM tilefuse::gemm::Dequantised<tilefuse::gemm::Bfp16Tile<TF_M>, TF_BITS, TF_GROUP, TF_MINIMA>
#else
static_assert(TF_PATH == TF_PATH_MANTISSA && TF_MINIMA == 0, "path (c) has zero points only");
#define TF_GEMM tilefuse::gemm::MantissaTile<TF_BITS, TF_GROUP, TF_M>
#endif
#define TF_NAME TF_GEMM_NAME
#include "gemm_entry_points.h"
#undef TF_NAME
#undef TF_GEMM

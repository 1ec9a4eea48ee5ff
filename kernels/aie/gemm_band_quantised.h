// A GEMM kernel of bfp16 activations on packed codes of TF_BITS bits: the arithmetic that TF_PATH names, and its entry
// points. Included by the kernels' .cc, any number of times by one host translation unit, so without a guard.

TF_CHECK_WEIGHTS;
TF_CHECK_GROUP;
TF_CHECK_TILES;

#if TF_PATH == TF_PATH_BFP16
#define TF_GEMM tilefuse::gemm::BandBfp16<TF_BITS, TF_GROUP, TF_MINIMA, TF_TILES>
#else
static_assert(TF_PATH == TF_PATH_MANTISSA && TF_MINIMA == 0, "path (c) has zero points only");
#define TF_GEMM tilefuse::gemm::BandMantissa<TF_BITS, TF_GROUP, TF_TILES>
#endif
#define TF_NAME TF_BAND_NAME
#include "gemm_band_entry_points.h"
#undef TF_NAME
#undef TF_GEMM

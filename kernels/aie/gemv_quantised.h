// A GEMV kernel on packed codes of TF_BITS bits: the arithmetic that TF_PATH names, and its entry points. Included by
// the kernels' .cc, any number of times by one host translation unit, so without a guard.

TF_CHECK_WEIGHTS;
TF_CHECK_GROUP;

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

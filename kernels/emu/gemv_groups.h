// TF_SOURCE in both paths, for every group size and kind of zero point. Included once for each source.
#define TF_TILE PackedTile<TF_BITS, TF_GROUP, TF_MINIMA>

#define TF_PATH TF_PATH_MANTISSA
#include "gemv_zeros.h"
#undef TF_PATH
#define TF_PATH TF_PATH_ELEMENTWISE
#include "gemv_zeros.h"
#undef TF_PATH

#undef TF_TILE

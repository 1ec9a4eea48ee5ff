// TF_SOURCE in every path that takes the kind of zero point. Included once for each source.
#define TF_TILE PackedTile<TF_BITS, TF_GROUP, TF_MINIMA>

#define TF_MINIMA 0
#define TF_PATH TF_PATH_MANTISSA
#include "gemm_rows.h"
#undef TF_PATH
#define TF_PATH TF_PATH_BFP16
#include "gemm_rows.h"
#undef TF_PATH
#define TF_PATH TF_PATH_EMULATED
#include "gemm_rows.h"
#undef TF_PATH
#undef TF_MINIMA

#define TF_MINIMA 1
#define TF_PATH TF_PATH_BFP16
#include "gemm_rows.h"
#undef TF_PATH
#define TF_PATH TF_PATH_EMULATED
#include "gemm_rows.h"
#undef TF_PATH
#undef TF_MINIMA

#undef TF_TILE

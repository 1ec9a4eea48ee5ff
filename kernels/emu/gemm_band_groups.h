// TF_SOURCE with one tile, for every group size and kind of zero point. Included once for each source.
#define TF_TILES 1

#define TF_PATH TF_PATH_MANTISSA
#define TF_MINIMA 0
#define TF_GROUP 32
#include "gemm_band_variant.h"
#undef TF_GROUP
#define TF_GROUP 64
#include "gemm_band_variant.h"
#undef TF_GROUP
#define TF_GROUP 128
#include "gemm_band_variant.h"
#undef TF_GROUP
#undef TF_MINIMA
#undef TF_PATH

#define TF_PATH TF_PATH_BFP16
#define TF_MINIMA 1
#define TF_GROUP 32
#include "gemm_band_variant.h"
#undef TF_GROUP
#define TF_GROUP 64
#include "gemm_band_variant.h"
#undef TF_GROUP
#define TF_GROUP 128
#include "gemm_band_variant.h"
#undef TF_GROUP
#undef TF_MINIMA
#undef TF_PATH

#undef TF_TILES

// The GEMM kernels of bfp16 activations, for every scheme: zero points on path (c), minima on path (b).
#include "variant.h"

#define TF_WEIGHT_BITS 4
#define TF_SOURCE "gemm_bfp16_w4.cc"
#include "gemm_band_groups.h"
#undef TF_SOURCE
#undef TF_WEIGHT_BITS

#define TF_WEIGHT_BITS 8
#define TF_SOURCE "gemm_bfp16_w8.cc"
#include "gemm_band_groups.h"
#undef TF_SOURCE
#undef TF_WEIGHT_BITS

// Two tiles side by side leave room in a core for 4-bit weights only.
#define TF_WEIGHT_BITS 4
#define TF_SOURCE "gemm_bfp16_w4.cc"
#define TF_TILES 2
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

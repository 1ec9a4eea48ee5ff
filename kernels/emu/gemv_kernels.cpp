// The GEMV kernels in every configuration.
#include "variant.h"

#define TF_WEIGHT_BITS 4
#define TF_SOURCE "gemv_bf16_w4.cc"
#include "gemv_groups.h"
#undef TF_SOURCE
#undef TF_WEIGHT_BITS

#define TF_WEIGHT_BITS 8
#define TF_SOURCE "gemv_bf16_w8.cc"
#include "gemv_groups.h"
#undef TF_SOURCE
#undef TF_WEIGHT_BITS

// Unquantised: neither groups nor zero points.
#define TF_WEIGHT_BITS 16
#define TF_SOURCE "gemv_bf16.cc"
#define TF_PATH TF_PATH_ELEMENTWISE
#define TF_MINIMA 0
#define TF_GROUP 0
#define TF_TILE UnquantizedTile
#include "gemv_variant.h"

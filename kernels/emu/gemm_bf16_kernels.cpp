// The GEMM kernels for unquantised weights.
#include "variant.h"

#define TF_WEIGHT_BITS 16
#define TF_SOURCE "gemm_bf16.cc"
#define TF_TILE UnquantizedTile
#define TF_GROUP 0
#define TF_MINIMA 0

#define TF_PATH TF_PATH_BFP16
#define TF_M 64
#include "gemm_variant.h"
#undef TF_M
#define TF_M 32
#include "gemm_variant.h"
#undef TF_M
#define TF_M 16
#include "gemm_variant.h"
#undef TF_M
#undef TF_PATH
#define TF_PATH TF_PATH_EMULATED
#define TF_M 64
#include "gemm_variant.h"
#undef TF_M
#define TF_M 32
#include "gemm_variant.h"
#undef TF_M
#define TF_M 16
#include "gemm_variant.h"

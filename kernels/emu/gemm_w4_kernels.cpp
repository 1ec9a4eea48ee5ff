// The GEMM kernels for 4-bit weights.
#include "variant.h"

#define TF_WEIGHT_BITS 4
#define TF_SOURCE "gemm_bf16_w4.cc"
#include "gemm_paths.h"

// The GEMM kernels for 8-bit weights.
#include "variant.h"

#define TF_WEIGHT_BITS 8
#define TF_SOURCE "gemm_bf16_w8.cc"
#include "gemm_paths.h"

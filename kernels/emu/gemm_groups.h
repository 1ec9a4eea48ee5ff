// TF_SOURCE in the path, kind of zero point and number of rows that stand, for every group size.
#define TF_GROUP 32
#include "gemm_variant.h"
#undef TF_GROUP
#define TF_GROUP 64
#include "gemm_variant.h"
#undef TF_GROUP
#define TF_GROUP 128
#include "gemm_variant.h"
#undef TF_GROUP

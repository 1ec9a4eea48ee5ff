// TF_SOURCE in the path and with the kind of zero point that stand, for every group size and number of rows (feasible
// activation objects have 64, 32 or 16).
#define TF_M 64
#include "gemm_groups.h"
#undef TF_M
#define TF_M 32
#include "gemm_groups.h"
#undef TF_M
#define TF_M 16
#include "gemm_groups.h"
#undef TF_M

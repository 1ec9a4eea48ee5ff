// TF_SOURCE in every path with bands of 64 rows, and, with the smaller bands that leave room in a core's memory
// (feasible activation objects have 32 or 16 rows), in the path that a design would take: codes as mantissas, and
// weights dequantised to bfp16 where the tile has minima. Included once for each source.
#define TF_TILE PackedTile<TF_BITS, TF_GROUP, TF_MINIMA>

#define TF_MINIMA 0
#define TF_PATH TF_PATH_MANTISSA
#define TF_M 64
#include "gemm_groups.h"
#undef TF_M
#define TF_M 32
#include "gemm_groups.h"
#undef TF_M
#define TF_M 16
#include "gemm_groups.h"
#undef TF_M
#undef TF_PATH
#define TF_M 64
#define TF_PATH TF_PATH_BFP16
#include "gemm_groups.h"
#undef TF_PATH
#define TF_PATH TF_PATH_EMULATED
#include "gemm_groups.h"
#undef TF_PATH
#undef TF_M
#undef TF_MINIMA

#define TF_MINIMA 1
#define TF_PATH TF_PATH_BFP16
#define TF_M 64
#include "gemm_groups.h"
#undef TF_M
#define TF_M 32
#include "gemm_groups.h"
#undef TF_M
#define TF_M 16
#include "gemm_groups.h"
#undef TF_M
#undef TF_PATH
#define TF_PATH TF_PATH_EMULATED
#define TF_M 64
#include "gemm_groups.h"
#undef TF_M
#undef TF_PATH
#undef TF_MINIMA

#undef TF_TILE

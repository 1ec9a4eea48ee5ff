// GEMM with unquantised bfloat16 weights: the baseline.
#include <aie_api/aie.hpp>

#include "config.h"
#include "gemm_tile.h"

#define TF_BITS 16
TF_CHECK_WEIGHTS;
TF_CHECK_ROWS;

#if TF_PATH == TF_PATH_EMULATED
#if !AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16
#error "compile with -DAIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16=1"
#endif
#define TF_GEMM tilefuse::gemm::Unquantized<tilefuse::gemm::EmulatedTile<TF_M>>
#else
static_assert(TF_PATH == TF_PATH_BFP16, "bfloat16 weights are no mantissas");
#define TF_GEMM tilefuse::gemm::Unquantized<tilefuse::gemm::Bfp16Tile<TF_M>>
#endif
#define TF_NAME TF_GEMM_NAME
#include "gemm_entry_points.h"
#undef TF_NAME
#undef TF_GEMM
#undef TF_BITS

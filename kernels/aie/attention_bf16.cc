// Routed attention of bfloat16 queries, keys and values on a core: 32 rows, 64 keys at a time, scores from INT8 codes
// or from bfloat16 by tile (attention_layout.h).
//
// L1 bytes, d = 64 and 128: outputs 8192, 16384; queries 4544, 8896; keys and values 2 x 4672, 2 x 9280; scores 8512;
// weights 5184; maxima and sums 1152; results 1088, 2112; stack 3328: 40.4 and 62.6 KiB of 64. Constants: 320.
//
// Cycles of a tile, modelled (docs/kernels.md): INT8 2378 and 3716, 16-bit 2936 and 4680; docs/benchmarks/kernels.md
// has them by call.
#include <aie_api/aie.hpp>

#include "attention_layout.h"
#include "attention_scores.h"
#include "attention_softmax.h"
#include "attention_values.h"
#include "config.h"

static_assert(TF_D == 64 || TF_D == 128, "TF_D is 64 or 128");

#define TF_NAME TF_ATTENTION_NAME
#include "attention_entry_points.h"
#undef TF_NAME

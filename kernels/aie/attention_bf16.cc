// Routed attention of bfloat16 queries, keys and values on a core: 32 rows, 64 keys at a time, scores from INT8 codes
// or from bfloat16 by tile (attention_layout.h).
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

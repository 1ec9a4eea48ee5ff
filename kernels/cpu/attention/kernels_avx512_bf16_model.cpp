#define TILEFUSE_MODEL_BF16
#include "attention/kernels_avx512_bf16.h"

namespace tilefuse {

const AttentionKernels& attention_kernels_avx512_bf16_model() { return kAvx512Kernels; }

}  // namespace tilefuse

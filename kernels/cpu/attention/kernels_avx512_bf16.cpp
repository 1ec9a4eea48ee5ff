#include "attention/kernels_avx512_bf16.h"

namespace tilefuse {

const AttentionKernels& attention_kernels_avx512_bf16() { return kAvx512Kernels; }

}  // namespace tilefuse

#define TILEFUSE_MODEL_BF16
#include "kernels_avx512_bf16.h"

namespace tilefuse {

const MatmulKernels& matmul_kernels_avx512_bf16_model() { return kBf16Kernels; }

}  // namespace tilefuse

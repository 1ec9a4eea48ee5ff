#include "kernels_avx512_bf16.h"

namespace tilefuse {

const MatmulKernels& matmul_kernels_avx512_bf16() { return kBf16Kernels; }

}  // namespace tilefuse

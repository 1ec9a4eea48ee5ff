// Rows of activations, rounded to bfloat16 and laid out as a kernel reads them.
#pragma once

#include "matmul.h"
#include "matmul_kernels.h"

namespace tilefuse {
namespace {

// 2^exponent, which must be that of a normal number. Unnamed, as each level's code has its own copy.
inline float power_of_two(int exponent) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(exponent + 127) << 23);
}

}  // namespace

// Writes row `row` of args.x (permuted, rounded to bfloat16, zero beyond K) to float out[k].
void write_row(const MatmulArgs& args, int64_t row, int64_t k, float* out);

}  // namespace tilefuse

// Rows of activations, rounded to bfloat16 and laid out as a kernel reads them (XFormat).
#pragma once

#include "matmul.h"
#include "matmul_kernels.h"

namespace tilefuse {

// Bytes of `rows` rows in a float or pair format, k padded.
[[nodiscard]] int64_t rows_bytes(XFormat format, int64_t rows, int64_t k);

// Writes row `row` of args.x (permuted, rounded to bfloat16, zero beyond K) to out: float[k] or uint32[k / 2].
void write_row(const MatmulArgs& args, int64_t row, int64_t k, XFormat format, void* out);

// Writes the digits, scales, digit sums and rests of one row. False if the row can't be held: it has a NaN or Inf, a
// group whose largest magnitude is below 2^-100 but not zero (its scale would be denormal), or too many rests; the
// float kernels take such rows.
[[nodiscard]] bool write_digits(const MatmulArgs& args, int64_t row, int64_t k, XFormat format, float* scratch,
                                int8_t* digits, float* scales, int32_t* sums, DigitRest* rests);

}  // namespace tilefuse

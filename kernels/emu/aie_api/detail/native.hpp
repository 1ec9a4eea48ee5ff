// The device compiler's own names for registers, as far as kernels write them: vectors that can be indexed, and the
// block floating-point register, whose mantissas and exponents a kernel may set itself.
//
// bfp16ebs8: 8 values share an exponent, value = mantissa * 2^(exponent - 127) / 64, mantissas in two's complement.
#pragma once

#include <cstdint>

using v64int8 [[gnu::vector_size(64)]] = int8_t;
using v64uint8 [[gnu::vector_size(64)]] = uint8_t;
using v8int8 [[gnu::vector_size(8)]] = int8_t;

struct v64bfp16ebs8 {
  v64int8 mantissa;
  v8int8 exponent;  // biased exponents, the bits of uint8
};

struct v128bfp16ebs8 {
  v64int8 mantissaX0;
  v64int8 mantissaX1;
  v8int8 exponentE0;
  v8int8 exponentE1;
};

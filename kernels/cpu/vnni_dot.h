// VPDPBUSD, the AVX512_VNNI instruction that multiplies unsigned by signed bytes.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "bf16.h"

namespace tilefuse {
namespace {

// Sums have the type that the instruction's operand has inside the compiler: with __m512i GCC 12 keeps two copies of
// each. Passed and returned by value, arrays of them stay in registers.
using Sums16 = int32_t __attribute__((vector_size(64)));

// sum + u8 * s8 in each lane of four bytes.
TILEFUSE_ALWAYS_INLINE Sums16 dot_u8_s8(Sums16 sum, __m512i u8, __m512i s8) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u8), "v"(s8));
  return sum;
}

}  // namespace
}  // namespace tilefuse

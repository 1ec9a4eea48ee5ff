// GEMM with 8-bit weights: a band of activations times a packed tile of 128 input x 64 output channels a call.
//
// L1 bytes, groups of 128 (64, 32): tile 8384 (8576, 8960) x 2; acc 16384; a band of 32 rows 8192 x 2; results 1024 x
// 2; constants 192; stack 3328; scratch emulated 16384, bfp16 9216, mantissa 5824 (7488, 10816). Of 65536: bfp16 64320
// (64704, 65472), mantissa 60928 (62976; 58880 in bands of 16). Emulated takes bands of 16: 63296 (63680, 64448).
//
// Instructions by issue slot, counted on the host, and cycles, modelled (docs/kernels.md), of a tile of groups of 128
// and 64 rows: 524288 products. Region "-" is code between loops; in "multiply" mostly reading and writing acc.
//   path      entry    region     entries  load   ldb    st    mv   vec  cycles
//   emulated  prepare  -                0    15     0    20    69    24      69
//   emulated  prepare  dequantise       4   128     0   512   256   384     552
//   emulated  multiply -                0   256     0   256     0     0     256
//   emulated  multiply multiply        16  2048     0  2048  4096  2048    4256
//   bfp16     prepare  -                0    15     0    20   101    24     101
//   bfp16     prepare  dequantise       4   128     0   384   256   384     424
//   bfp16     multiply -                0   256     0   256     0     0     256
//   bfp16     multiply multiply        16  2048     0   512  1024  1024    1184
//   mantissa  prepare  -                0     4     0     0     6     0       6
//   mantissa  prepare  unpack           1    64     0    64    64     0      74
//   mantissa  prepare  scales           1     8     0    48    24    16      58
//   mantissa  prepare  zeros            1     0     0     8    12     0      22
//   mantissa  multiply -                0   577     0   400   120   400     400
//   mantissa  multiply row_sums         8   256     0   128   128   192     272
//   mantissa  multiply multiply        16  1536     0   256  1024  1024    1184
//
// Where every zero point is 128 the mantissa path has no row sums. What bounds the paths: see gemm_bf16_w4.cc. Cycles
// of all of it:
//   groups       32    64   128
//   emulated   5457  5241  5133
//   bfp16      2385  2105  1965
//   mantissa   4188  2740  2016
#include <aie_api/aie.hpp>

#include "config.h"
#include "gemm_mantissa.h"
#include "gemm_tile.h"

#define TF_BITS 8
#include "gemm_quantised.h"
#undef TF_BITS

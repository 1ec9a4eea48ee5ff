// GEMM with 4-bit weights: a band of activations times a packed tile of 128 input x 64 output channels a call.
//
// L1 bytes, groups of 128 (64, 32): tile 4288 (4480, 4864) x 2; acc 16384; a band of 32 rows 8192 x 2; results 1024 x
// 2; constants 192; stack 3328; scratch emulated 16384, bfp16 9216, mantissa 5504 (6912, 9728). Of 65536: emulated
// 63296 (63680, 64448), bfp16 56128 (56512, 57280), mantissa 52416 (54208, 57792). A band of 64 rows, not doubled,
// takes the same.
//
// Instructions by issue slot, counted on the host, and cycles, modelled (docs/kernels.md), of a tile of groups of 128
// and 64 rows: 524288 products. Region "-" is code between loops; in "multiply" mostly reading and writing acc.
//   path      entry    region     entries  load   ldb    st    mv   vec  cycles
//   emulated  prepare  -                0    15     0    16    48    16      48
//   emulated  prepare  dequantise       4    64    64   512   256   256     552
//   emulated  multiply -                0   256     0   256     0     0     256
//   emulated  multiply multiply        16  2048     0  2048  4096  2048    4256
//   bfp16     prepare  -                0    15     0    16    48    16      48
//   bfp16     prepare  dequantise       4    64    64   384   256   256     424
//   bfp16     multiply -                0   256     0   256     0     0     256
//   bfp16     multiply multiply        16  2048     0   512  1024  1024    1184
//   mantissa  prepare  -                0     4     0     4    14     0      14
//   mantissa  prepare  unpack           1    32    32    64    64     0      74
//   mantissa  prepare  scales           1     8     0    48    24    16      58
//   mantissa  multiply -                0   545     0   384    64   256     384
//   mantissa  multiply multiply        16  1280   256   256  1024  1024    1184
//
// What bounds them: emulated, the shuffles and widenings that every multiplication repeats (MV 16 for 4); bfp16, the
// multiplier, then the store unit: of a block of weights, a conversion and two stores; mantissa, the multiplier, then
// the store unit: of each 8 x 8 sums, two conversions and four stores. Cycles of all of it:
//   groups       32    64   128
//   emulated   5376  5200  5112
//   bfp16      2176  2000  1912
//   mantissa   3562  2330  1714
#include <aie_api/aie.hpp>

#include "config.h"
#include "gemm_mantissa.h"
#include "gemm_tile.h"

#define TF_BITS 4
#include "gemm_quantised.h"
#undef TF_BITS

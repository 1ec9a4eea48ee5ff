// GEMM with 8-bit weights and activations that arrive as bfp16: a band of 16 rows times a packed tile of 128 input x 64
// output channels a call.
//
// L1 bytes, groups of 128 (64, 32): tile 8384 (8576, 8960) x 2, with minima 8448 (8704, 9216) x 2; scratch mantissa
// 1216 (2368, 4672), bfp16 9216; a band 2304 x 2; results 2048 x 2; constants 192; stack 3328. That leaves room for 8
// (8, 7) bands of sums, 4096 bytes each, with minima for 6.
//
// Instructions by issue slot, counted on the host, and cycles, modelled (docs/kernels.md), of a call with one tile of
// groups of 128; bfp16 has minima. Region "-" is code between loops; in "multiply" mostly reading and writing acc.
//   path      entry    region     entries  load   ldb    st    mv   vec  cycles
//   mantissa  prepare  -                0     3     0     0     0     0       2
//   mantissa  prepare  scales           1     8     0    48    24    16      58
//   mantissa  multiply -                0   101     0   100    62   100     100
//   mantissa  multiply row_sums         1    64     0     0     0    32      42
//   mantissa  multiply multiply         4   384     0     0   128   256     296
//   bfp16     prepare  -                0    15     0    16   121    16     121
//   bfp16     prepare  dequantise       4   128     0   384   256   512     552
//   bfp16     multiply -                0    64     0    64     0     0      64
//   bfp16     multiply multiply         4   512     0     0     0   256     296
//
// What bounds them: mantissa, the multiplier, then the store unit: of each 8 x 8 sums of a group, two conversions and
// four stores; bfp16, the loads and the multiplier alike, and in prepare the store unit. Cycles to prepare, and of a
// band:
//   groups         32          64         128
//   mantissa    204   888   108   588    60   438
//   bfp16      1153   360   833   360   673   360
// Where every zero point is 128 the mantissa path has no row sums: 392 cycles a band of groups of 128, and four bands
// have 322 products a cycle.
#include <aie_api/aie.hpp>

#include "config.h"
#include "gemm_band.h"
#include "gemm_band_mantissa.h"

#define TF_BITS 8
#include "gemm_band_quantised.h"
#undef TF_BITS

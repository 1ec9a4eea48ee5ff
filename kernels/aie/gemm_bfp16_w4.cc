// GEMM with 4-bit weights and activations that arrive as bfp16: a band of 16 rows times one packed tile of 128 input x
// 64 output channels a call, or two of them side by side (TF_TILES).
//
// L1 bytes, groups of 128 (64, 32): tile 4288 (4480, 4864) x 2, with minima 4352 (4608, 5120) x 2; scratch mantissa
// 1152 (2304, 4608), bfp16 9216; a band 2304 x 2; results 2048 x 2; constants 192; stack 3328. That leaves room for 10
// (10, 9) bands of sums, 4096 bytes each, with minima for 8. Two tiles take twice as much of weights, scratch and sums:
// 4 (3, 3) bands.
//
// Instructions by issue slot, counted on the host, and cycles, modelled (docs/kernels.md), of a call with one tile of
// groups of 128; bfp16 has minima. Region "-" is code between loops; in "multiply" mostly reading and writing acc.
//   path      entry    region     entries  load   ldb    st    mv   vec  cycles
//   mantissa  prepare  -                0     3     0     0     0     0       2
//   mantissa  prepare  scales           1     8     0    48    24    16      58
//   mantissa  multiply -                0   101     0    96    40    64      96
//   mantissa  multiply multiply         4   320    64     0   128   256     296
//   bfp16     prepare  -                0    15     0    16   104    16     104
//   bfp16     prepare  dequantise       4    64    64   384   128   384     424
//   bfp16     multiply -                0    64     0    64     0     0      64
//   bfp16     multiply multiply         4   512     0     0     0   256     296
//
// What bounds them: mantissa, the multiplier, then the store unit: of each 8 x 8 sums of a group, two conversions and
// four stores; bfp16, the loads and the multiplier alike, and in prepare the store unit. Cycles to prepare, and of a
// band:
//   groups         32          64         128
//   mantissa    204   800   108   528    60   392
//   bfp16       960   360   672   360   528   360
// Two tiles take twice the cycles, and one cycle less to prepare. Four bands of groups of 128: 322 products a cycle.
#include <aie_api/aie.hpp>

#include "config.h"
#include "gemm_band.h"
#include "gemm_band_mantissa.h"

#define TF_BITS 4
#include "gemm_band_quantised.h"
#undef TF_BITS

// What a kernel object is built for, and the names of its entry points, which are the same on the device and on the
// host.
//
// A kernel's .cc is configured by macros, given by the build:
//   TF_BITS    bits of a weight: 4, 8, or 16 for unquantised bfloat16 weights
//   TF_GROUP   input channels that share a scale in a tile: 32, 64 or 128 (not for TF_BITS 16)
//   TF_MINIMA  0: zero points, w = (q - z) s;  1: minima, w = q s + m (0 for TF_BITS 16)
//   TF_PATH    how weights reach the multiplier: one of the TF_PATH_* below
//   TF_M       rows of an activation band: 8 to 64, a multiple of 8 (GEMM of bfloat16 activations only)
//   TF_TILES   packed tiles of weights side by side, 1 or 2 (GEMM of bfp16 activations only, whose bands have 16 rows)
//   TF_D       channels of a head, 64 or 128 (attention only, which takes none of the others)
//
// Names follow one grammar, <op>_<activation>_<weights>_<path>_<tile>: gemm_bf16_w4g128_bfp16_64x128x64,
// gemv_bf16_w8g32m_mantissa_128x64 (m: minima), gemm_bf16_bf16_emulated_32x128x64, and with activations that are bfp16
// when they arrive gemm_bfp16_w4g128_mantissa_16x128x128 (two tiles). The activation is in the name of the .cc, too.
// Attention has channels in place of weights, and no path: attention_bf16_d64_32x64, of 32 rows and 64 keys.
//
// A host translation unit includes one .cc several times, each time with other values: every macro here is expanded
// where it is used, and a .cc keeps all that it defines, except entry points, in `namespace TF_NAMESPACE`.
#pragma once

// Weights dequantised to bfloat16; both operands converted to bfp16 by every multiplication.
#define TF_PATH_EMULATED 1
// Weights dequantised to bfp16 once a tile.
#define TF_PATH_BFP16 2
// Codes are bfp16 mantissas; scales multiply the group's accumulator.
#define TF_PATH_MANTISSA 3
// bfloat16 element-wise multiply-accumulate, with no shared exponents anywhere.
#define TF_PATH_ELEMENTWISE 4

// Pasting is told apart by level: the preprocessor does not expand a macro inside its own expansion.
#define TF_CHOOSE_(a, b) a##b
#define TF_CHOOSE(a, b) TF_CHOOSE_(a, b)
#define TF_WEIGHTS_(a, group, minima) a##group##minima
#define TF_WEIGHTS(a, group, minima) TF_WEIGHTS_(a, group, minima)
#define TF_FULL_NAME_(op, weights, path, tile) op##weights##path##tile
#define TF_FULL_NAME(op, weights, path, tile) TF_FULL_NAME_(op, weights, path, tile)
#define TF_SUFFIXED_(name, suffix) name##suffix
#define TF_SUFFIXED(name, suffix) TF_SUFFIXED_(name, suffix)

#define TF_PATH_NAME_1 _emulated_
#define TF_PATH_NAME_2 _bfp16_
#define TF_PATH_NAME_3 _mantissa_
#define TF_PATH_NAME_4 _elementwise_
#define TF_PATH_NAME TF_CHOOSE(TF_PATH_NAME_, TF_PATH)

#define TF_WEIGHTS_NAME_4_0 TF_WEIGHTS(w4g, TF_GROUP, )
#define TF_WEIGHTS_NAME_4_1 TF_WEIGHTS(w4g, TF_GROUP, m)
#define TF_WEIGHTS_NAME_8_0 TF_WEIGHTS(w8g, TF_GROUP, )
#define TF_WEIGHTS_NAME_8_1 TF_WEIGHTS(w8g, TF_GROUP, m)
#define TF_WEIGHTS_NAME_16_0 bf16
#define TF_WEIGHTS_CHOOSE_(bits, minima) TF_WEIGHTS_NAME_##bits##_##minima
#define TF_WEIGHTS_CHOOSE(bits, minima) TF_WEIGHTS_CHOOSE_(bits, minima)
#define TF_WEIGHTS_NAME TF_WEIGHTS_CHOOSE(TF_BITS, TF_MINIMA)

#define TF_GEMM_TILE_(m) m##x128x64
#define TF_GEMM_TILE(m) TF_GEMM_TILE_(m)
#define TF_GEMM_NAME TF_FULL_NAME(gemm_bf16_, TF_WEIGHTS_NAME, TF_PATH_NAME, TF_GEMM_TILE(TF_M))
#define TF_BAND_TILE_1 16x128x64
#define TF_BAND_TILE_2 16x128x128
#define TF_BAND_TILE TF_CHOOSE(TF_BAND_TILE_, TF_TILES)
#define TF_BAND_NAME TF_FULL_NAME(gemm_bfp16_, TF_WEIGHTS_NAME, TF_PATH_NAME, TF_BAND_TILE)
#define TF_GEMV_NAME TF_FULL_NAME(gemv_bf16_, TF_WEIGHTS_NAME, TF_PATH_NAME, 128x64)
#define TF_ATTENTION_NAME TF_FULL_NAME(attention_bf16_d, TF_D, _, 32x64)

// A .cc defines TF_NAME as TF_GEMM_NAME, TF_BAND_NAME, TF_GEMV_NAME or TF_ATTENTION_NAME (and undefines it at its end).
// The main entry point is TF_NAME, the others are TF_KERNEL(zero), TF_KERNEL(prepare), ...
#define TF_KERNEL(stem) TF_SUFFIXED(TF_NAME, _##stem)
#define TF_NAMESPACE TF_SUFFIXED(TF_NAME, _impl)

#define TF_CHECK_WEIGHTS                                                                     \
  static_assert(TF_BITS == 4 || TF_BITS == 8 || TF_BITS == 16, "TF_BITS is 4, 8 or 16");     \
  static_assert(TF_MINIMA == 0 || (TF_MINIMA == 1 && TF_BITS != 16), "TF_MINIMA is 0 or 1"); \
  static_assert(TF_PATH >= TF_PATH_EMULATED && TF_PATH <= TF_PATH_ELEMENTWISE, "TF_PATH is one of TF_PATH_*")
// Apart from the above: a build of unquantised weights need not define TF_GROUP.
#define TF_CHECK_GROUP static_assert(TF_GROUP == 32 || TF_GROUP == 64 || TF_GROUP == 128, "TF_GROUP is 32, 64 or 128")
#define TF_CHECK_ROWS static_assert(TF_M >= 8 && TF_M <= 64 && TF_M % 8 == 0, "TF_M is a multiple of 8 up to 64")
#define TF_CHECK_TILES static_assert(TF_TILES == 1 || TF_TILES == 2, "TF_TILES is 1 or 2")

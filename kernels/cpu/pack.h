// From a checkpoint's codes, scales and zero points to packed tiles, and back.
#pragma once

#include "tile_layout.h"

namespace tilefuse {

// How the codes lie in the checkpoint's array; defined by tilefuse.quantized.CodeOrder, in the same order.
enum class CodeOrder : int { kn, words_n, words_n_awq, words_k, rows_n, rows_n_int8, rows_n_fast };

enum class FloatKind : int { f16, bf16, f32 };

// A [G, N] array; strides in elements, since some formats store it transposed.
struct FloatGrid {
  const void* data = nullptr;
  FloatKind kind = FloatKind::f16;
  int64_t group_stride = 0;
  int64_t channel_stride = 0;
};

struct ByteGrid {
  const uint8_t* data = nullptr;
  int64_t group_stride = 0;
  int64_t channel_stride = 0;
};

struct PackSource {
  const uint8_t* codes = nullptr;  // contiguous, shaped as `order` says
  CodeOrder order = CodeOrder::kn;
  const int32_t* perm = nullptr;  // [K]: checkpoint row of each sorted row; null: the rows are in order
  int64_t group = 0;              // input channels that share a scale, K at most
  FloatGrid scales;
  ByteGrid zeros;  // for ZeroKind::z8
  FloatGrid mins;  // for ZeroKind::m16
};

// The first value, in row-major order, that the packed format cannot hold.
struct PackIssue {
  enum class Kind : int { none, scale, min, zero, code };
  Kind kind = Kind::none;
  int64_t row = 0;  // group, or sorted input channel for a code
  int64_t channel = 0;
};

// Writes all layout.nbytes() bytes of `out` (64-byte aligned), on all threads of the pool. On an issue the contents of
// `out` are of no use.
PackIssue pack(const TileLayout& layout, const PackSource& source, uint8_t* out);

struct UnpackTarget {
  uint8_t* codes = nullptr;    // [K, N], rows back in the checkpoint's order
  uint16_t* scales = nullptr;  // [G, N] bfloat16
  uint8_t* zeros = nullptr;    // [G, N], for ZeroKind::z8
  uint16_t* mins = nullptr;    // [G, N] bfloat16, for ZeroKind::m16
};

// The inverse of pack().
void unpack(const TileLayout& layout, const uint8_t* packed, int64_t group, const int32_t* perm,
            const UnpackTarget& target);

// bfloat16 [K, N] in the checkpoint's row order: round((q - z) s), or round(float32(q s + m)).
void dequantize(const TileLayout& layout, const uint8_t* packed, const int32_t* perm, uint16_t* out);

}  // namespace tilefuse

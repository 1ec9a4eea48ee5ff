// y = x W + bias straight from packed tiles, on the CPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tile_layout.h"

namespace tilefuse {

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2 };

// Bytes of an element.
constexpr int64_t item_size(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

struct MatmulArgs {
  TileLayout layout;
  const std::byte* weights = nullptr;  // layout.nbytes() bytes, 64-byte aligned

  const void* x = nullptr;  // [m][layout.k], rows x_stride elements apart
  Dtype x_dtype = Dtype::f32;
  int64_t x_stride = 0;
  int64_t m = 0;

  const int32_t* perm = nullptr;  // [layout.k]: tile row i multiplies x[perm[i]]; null: identity
  const float* bias = nullptr;    // [layout.n], or null

  void* y = nullptr;  // [m][layout.n], rows y_stride elements apart
  Dtype y_dtype = Dtype::f32;
  int64_t y_stride = 0;
};

// Runs at current_level() on the process's thread pool. Activations are rounded to bfloat16 once; products are summed
// in float over all of K; the result is rounded once. The same bits for every number of threads.
//
// Error against the float64 product of bf16(x) and bf16((q - z) s), elementwise, as a fraction of |x| @ |W|: at most
// 2^-8 from rounding the weight (paths that keep it exact differ from the reference by that much) plus K 2^-24 from the
// sum, plus half a unit in the last place of y's type.
void matmul(const MatmulArgs& args);

// The same with activations quantised to signed 8 bits, per row and group of tile_group input channels: x as q_x s_x,
// s_x = max|x| / 127. Products are summed exactly over a group, in float over groups.
//
// Error against the float64 product of q_x s_x and (q - z) s, elementwise, as a fraction of |q_x s_x| @ |W|: at most
// (K / tile_group + 3) 2^-24, with minima three times that, plus half a unit in the last place of y's type. A NaN or
// Inf in a row makes all its results NaN.
void matmul_int8(const MatmulArgs& args);

}  // namespace tilefuse

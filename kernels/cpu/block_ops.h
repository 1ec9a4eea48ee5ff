// What lies between the products of a decoder block, for one token. One translation unit a level.
#pragma once

#include <cstdint>

#include "matmul.h"

namespace tilefuse {

enum class Activation : int { silu = 0, gelu_tanh = 1 };

// Arrays are of `dtype` T. Each operation rounds to T where transformers' modules do, so that a block's results are
// theirs but for the order of sums.
struct BlockOps {
  // y = w T(x / sqrt(mean x^2 + eps)); with plus_one T(x / sqrt(...) (1 + w)), as Gemma's.
  void (*norm)(Dtype dtype, const void* x, const void* w, int64_t n, float eps, bool plus_one, void* y);
  // out = T(T(x cos) + T(rotated x sin)), halves rotated; out may be x.
  void (*rotate)(Dtype dtype, const void* x, const void* cos, const void* sin, int64_t d, void* out);
  // Attention of `group` queries [group][d], side by side, on one head of keys and values [length][d]; sums in float.
  // scratch: attend_scratch() floats.
  void (*attend)(Dtype dtype, const void* q, const void* keys, const void* values, int64_t group, int64_t d,
                 int64_t length, float scale, float* scratch, void* out);
  // out = T(T(f(gate)) up)
  void (*gate)(Dtype dtype, const void* gate, const void* up, int64_t n, Activation activation, void* out);
  // out = T(a + b); out may be a or b.
  void (*add)(Dtype dtype, const void* a, const void* b, int64_t n, void* out);
};

// Heads' sizes are multiples of it.
inline constexpr int64_t kBlockLanes = 16;

constexpr int64_t attend_scratch(int64_t group, int64_t d, int64_t length) { return group * (length + 2 * d) + d; }

const BlockOps& block_ops_portable();
#if defined(__x86_64__)
const BlockOps& block_ops_avx2();
const BlockOps& block_ops_avx512();
#endif

}  // namespace tilefuse

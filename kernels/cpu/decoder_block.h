// A decoder block of a language model for one token: norm, attention with its cache, norm, gated MLP, straight from
// packed tiles, in one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "block_ops.h"
#include "matmul.h"
#include "tile_layout.h"

namespace tilefuse {

struct PackedMatrix {
  TileLayout layout;
  const std::byte* weights = nullptr;
  const int32_t* perm = nullptr;
  const float* bias = nullptr;
};

struct DecoderBlock {
  PackedMatrix qkv, o, gate_up, down;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  float scale = 0.0F;  // of the scores
  float eps_in = 0.0F, eps_post = 0.0F, eps_q = 0.0F, eps_k = 0.0F;
  bool plus_one = false;  // norms multiply by 1 + w
  Activation activation = Activation::silu;

  // Why the sizes don't fit each other; null if they do.
  [[nodiscard]] const char* misfit() const;
};

// One call's arrays, all of one dtype.
struct BlockStep {
  Dtype dtype = Dtype::bf16;
  const void* x = nullptr;          // [D]
  const void* norm_in = nullptr;    // [D]
  const void* norm_post = nullptr;  // [D]
  const void* q_norm = nullptr;     // [head_dim], or null
  const void* k_norm = nullptr;
  const void* cos = nullptr;  // [head_dim]
  const void* sin = nullptr;
  void* keys = nullptr;  // [kv_heads][capacity][head_dim]; the token's are written at `length`
  void* values = nullptr;
  int64_t length = 0;  // tokens before this one, less than capacity
  int64_t capacity = 0;
  void* y = nullptr;  // [D]; may be x
};

// Of a block: norm_in, norm_post, q_norm, k_norm, keys, values, and the capacity, which is no address.
inline constexpr int64_t kBlockAddresses = 7;

// Runs at current_level() on the process's thread pool. The same bits for every number of threads.
void run_block(const DecoderBlock& block, const BlockStep& step);

// Blocks one after the other. `shared` has what is the same in all of them, `addresses` the rest, as
// [blocks][kBlockAddresses].
void run_blocks(std::span<const DecoderBlock* const> blocks, const std::uintptr_t* addresses, const BlockStep& shared);

// What follows the blocks: a norm over the model's width and, unless it is null, the head.
struct ModelEnd {
  const void* norm = nullptr;  // [D]
  float eps = 0.0F;
  bool plus_one = false;
  const PackedMatrix* head = nullptr;
};

// Blocks, likewise, and their end: y is [head's N] or, without one, [D].
void run_model(std::span<const DecoderBlock* const> blocks, const std::uintptr_t* addresses, const BlockStep& shared,
               const ModelEnd& end);

}  // namespace tilefuse

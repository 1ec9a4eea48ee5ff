// softmax(q k^T) v with score tiles routed to a 16-bit or an INT8 path (TileMix), on the CPU.
//
// A row tile is 128 queries, a key tile 64 keys; the bit of a group of key tiles in a row tile's words says whether
// their scores are products of bfloat16 (0) or of 8-bit codes (1). docs/attention.md has the arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/key_blocks.h"
#include "matmul.h"

namespace tilefuse {

inline constexpr int kRowTile = 128;

// [rows][heads][channels], channels contiguous; strides in elements.
template <typename T>
struct HeadRows {
  T* data = nullptr;
  Dtype dtype = Dtype::f32;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

// One sequence of a batch. `*_at`: its first row in the arrays, in elements.
struct AttentionSequence {
  int64_t query_len = 0;
  int64_t key_len = 0;
  int64_t position = 0;  // of query 0 among the keys: key_len - query_len where the queries are the last
  int64_t q_at = 0;
  int64_t k_at = 0;
  int64_t v_at = 0;
  int64_t out_at = 0;
  int64_t lse_at = 0;
  int64_t row_tile = 0;  // its first row tile in the words
  int64_t group = 1;     // key tiles to a bit

  // With `sealed`, keys and values come from there in place of k and v. Blocks 0 .. key_len / 64 - 1 of key head h are
  // at sealed + h * sealed_stride + block * AttentionProblem::sealed.bytes; the last block, unless full, is at
  // open + h * open_stride and always takes the 16-bit path.
  const std::byte* sealed = nullptr;
  const std::byte* open = nullptr;
  int64_t sealed_stride = 0;
  int64_t open_stride = 0;
  const std::byte* sink = nullptr;  // block 0 once it is full, as `open` has its block; null: with the others
};

struct AttentionProblem {
  HeadRows<const void> q;
  HeadRows<const void> k;
  HeadRows<const void> v;
  HeadRows<void> out;
  float* lse = nullptr;  // natural logarithm of the sum of exponentials; null: not wanted
  int64_t lse_row_stride = 0;
  int64_t lse_head_stride = 0;

  const AttentionSequence* sequences = nullptr;
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;  // divides heads
  int64_t d = 0;         // multiples of 8, 8 to 512
  int64_t dv = 0;
  float scale = 1.0F;  // positive
  bool causal = true;  // query i sees keys j <= i + position
  int64_t window = 0;  // > 0: also j > i + position - window

  // uint64 [map heads][map row tiles][row words], map heads 1 or kv_heads; null: all 16-bit.
  const uint64_t* words = nullptr;
  int64_t map_heads = 1;
  int64_t map_row_tiles = 0;
  int64_t row_words = 1;

  bool scale_per_row = true;  // of the queries' codes; else one for each head and row tile
  Smoothing smoothing = Smoothing::block;

  BlockLayout sealed;  // of the sequences' cached blocks
  BlockLayout open;
};

// Runs at current_level() on the process's thread pool; the same bits for every number of threads. Arithmetic: inputs
// rounded to bfloat16, products summed in float, or exact sums of products of codes; softmax and output in float, with
// probabilities rounded to bfloat16 for their product with v; the result rounded once to out's type.
void attend(const AttentionProblem& problem);

// What the INT8 path makes of one head of one sequence, for tests.
struct Int8Probe {
  int8_t* q_codes = nullptr;  // [query_len][d]
  float* q_scales = nullptr;  // [query_len]
  int8_t* k_codes = nullptr;  // [key_len][d]
  float* k_scales = nullptr;  // [blocks]
  float* means = nullptr;     // [blocks][d]
  int32_t* scores = nullptr;  // [query_len][key_len]
  float* bias = nullptr;      // [query_len][blocks]: q_i . mean_b
};
void probe_int8(const AttentionProblem& problem, int64_t head, const Int8Probe& probe);

}  // namespace tilefuse

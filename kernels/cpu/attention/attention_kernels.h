// What one instruction set provides to the attention driver.
//
// A row block is up to `rows` queries, all of one key head, whatever their position and query head. Scores of a row
// block and up to kChunkBlocks key blocks, a chunk, are in float [rows][kChunkKeys]; a block's own are those of its 64
// columns, of which only the first `keys` (a multiple of 16) count.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/key_blocks.h"
#include "cpu_features.h"
#include "matmul.h"

namespace tilefuse {

inline constexpr int kMaxBlockRows = 16;
inline constexpr int kChunkBlocks = 4;
inline constexpr int kChunkKeys = kChunkBlocks * kKeyBlock;
inline constexpr int kSumLanes = 16;

// A row block's queries as codes.
struct RowCodes {
  std::byte* codes = nullptr;     // in the level's layout
  int32_t starts[kMaxBlockRows];  // what the row's sums start from, to undo the keys' bias
  float scales[kMaxBlockRows];
};

// Softmax state of a row block; base 2.
struct RowState {
  float max[kMaxBlockRows];
  alignas(64) float sums[kMaxBlockRows][kSumLanes];  // their sum over the lanes counts
};

struct Chunk {
  int blocks = 0;
  int keys[kChunkBlocks] = {};                    // of each block; 0: none
  const std::byte* v16[kChunkBlocks] = {};        // as BlockLayout has it
  const float* v_scales[kChunkBlocks] = {};       // [64], or null: 1
  float multiplier[kChunkBlocks][kMaxBlockRows];  // exponent = score * multiplier + offset
  float offset[kChunkBlocks][kMaxBlockRows];
};

struct AttentionKernels {
  int rows = 0;  // of a row block, at most kMaxBlockRows
  // Bytes of a full row block in the level's layouts, for each of d (a multiple of 8).
  int row16_bytes = 0;
  int row8_bytes = 0;

  // channels [0, d) of a row, rounded to bfloat16; `from` is not read past its d elements.
  void (*load_row)(const void* from, Dtype dtype, int64_t d, uint16_t* to);
  void (*pack_rows16)(const uint16_t* const* from, int rows, int64_t d, void* to);  // from[r]: bf16 [d]
  // Codes and starts of the same rows, as they are and as pack_rows16 has packed them, given their scales.
  void (*pack_rows8)(const uint16_t* const* from, const void* rows16, int rows, int64_t d, RowCodes& to);
  float (*largest)(const uint16_t* from, int64_t count);  // magnitude of bf16 [count]

  // A block of keys, bf16 [64][d] with zeros beyond `keys`.
  void (*pack_keys16)(const uint16_t* from, int64_t d, std::byte* to);
  void (*mean_of_keys)(const uint16_t* from, int keys, int64_t d, uint16_t* mean);
  // The codes of k - mean (null: 0), and their scale.
  float (*pack_keys8)(const uint16_t* from, int keys, int64_t d, const uint16_t* mean, std::byte* to);
  // bf16 [64][dv] with zeros beyond the block's keys.
  void (*pack_values16)(const uint16_t* from, int64_t dv, std::byte* to);
  void (*widen_values)(const std::byte* v8, int64_t padded_dv, std::byte* v16);

  // scores[r][0..keys) of one block, of codes as the exact integers.
  void (*scores16)(const void* rows16, int rows, const std::byte* k16, int64_t d, int keys, float* scores);
  void (*scores8)(const RowCodes& codes, int rows, const std::byte* k8, int64_t d, int keys, float* scores);
  // to[i][r] = the product of row r and means[i], bf16 [d], i < count; up to a multiple of 8 of them may be
  // written. Null: scores16, with the means as keys.
  void (*biases)(const void* rows16, int rows, const std::byte* const* means, int64_t count, int64_t d,
                 float (*to)[kMaxBlockRows]);
  // Updates the state and writes probabilities, bf16 [rows][kChunkKeys]; `rescale`[r]: what earlier sums and outputs
  // are worth now. Scores may be -inf.
  void (*softmax)(const float* scores, int rows, const Chunk& chunk, RowState& state, float* rescale, uint16_t* p);
  // out[r][0..padded_dv) = rescale[r] * out + p v; null rescale: out is written, not read.
  void (*values)(const uint16_t* p, int rows, const Chunk& chunk, int64_t padded_dv, const float* rescale, float* out);
  // to[0..dv) = from * factor, rounded once.
  void (*store_row)(const float* from, float factor, int64_t dv, Dtype dtype, void* to);
};

[[nodiscard]] const AttentionKernels& attention_kernels(CpuLevel level);

const AttentionKernels& attention_kernels_portable();
#if defined(__x86_64__)
const AttentionKernels& attention_kernels_avx2();
const AttentionKernels& attention_kernels_avx512_bf16();
const AttentionKernels& attention_kernels_avx512_bf16_model();
#endif

}  // namespace tilefuse

// The keys and values of one head of one sequence: packed from arrays, or as a cache keeps them.
#pragma once

#include <cmath>
#include <cstring>

#include "attention/attention_kernels.h"
#include "attention/tiles.h"
#include "bf16.h"

namespace tilefuse {
namespace {

inline constexpr uint16_t kInfinityBf16 = 0x7f80;
inline constexpr uint16_t kQuietBf16 = 0x0040;

// One block, wherever it is; null: not there.
struct KeyBlock {
  const std::byte* k16 = nullptr;
  const std::byte* k8 = nullptr;
  const std::byte* mean = nullptr;
  float k_scale = 0.0F;
  const std::byte* v16 = nullptr;
  const std::byte* v8 = nullptr;
  const float* v_scales = nullptr;
  mutable int finite = -1;  // whether its values are; -1: not looked at yet
};

inline KeyBlock block_at(const BlockLayout& layout, const std::byte* at) {
  const auto part = [&](int64_t offset) { return offset == kAbsent ? nullptr : at + offset; };
  KeyBlock block = {.k16 = part(layout.k16),
                    .k8 = part(layout.k8),
                    .mean = part(layout.mean),
                    .v16 = part(layout.v16),
                    .v8 = part(layout.v8),
                    .v_scales = reinterpret_cast<const float*>(part(layout.v_scales))};
  if (block.k8 != nullptr) std::memcpy(&block.k_scale, at + layout.k_scale, sizeof(float));
  return block;
}

inline bool all_finite(const uint16_t* x, int64_t count) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < count; ++i) bad |= static_cast<uint32_t>((x[i] & 0x7f80U) == 0x7f80U);
  return bad == 0;
}

inline bool values_finite(const KeyBlock& block, const BlockLayout& layout) {
  if (block.finite < 0) {
    bool finite = all_finite(reinterpret_cast<const uint16_t*>(block.v16), kKeyBlock * layout.padded_dv());
    for (int64_t j = 0; block.v_scales != nullptr && j < kKeyBlock; ++j) {
      finite = finite && (__builtin_bit_cast(uint32_t, block.v_scales[j]) & kFloatExponent) != kFloatExponent;
    }
    block.finite = finite ? 1 : 0;
  }
  return block.finite == 1;
}

inline KeyBlock cached_block(const AttentionProblem& p, const AttentionSequence& s, int64_t kv_head, int64_t t) {
  if (t == 0 && s.sink != nullptr && s.key_len >= kKeyBlock) {
    return block_at(p.open, s.sink + kv_head * s.open_stride);
  }
  if (t < s.key_len / kKeyBlock) return block_at(p.sealed, s.sealed + kv_head * s.sealed_stride + t * p.sealed.bytes);
  return block_at(p.open, s.open + kv_head * s.open_stride);
}

// Rows [first, first + rows) of one head as bf16 [rows][channels].
inline void load_rows(const AttentionKernels& kernels, const HeadRows<const void>& array, int64_t at, int64_t head,
                      int64_t first, int64_t rows, int64_t channels, uint16_t* to) {
  const int64_t size = array.dtype == Dtype::f32 ? 4 : 2;
  const auto* from =
      static_cast<const std::byte*>(array.data) + (at + head * array.head_stride + first * array.row_stride) * size;
  for (int64_t r = 0; r < rows; ++r, from += array.row_stride * size, to += channels) {
    kernels.load_row(from, array.dtype, channels, to);
  }
}

// Queries and keys that are Inf become NaN: their scores would be weights of 0 where they are -inf.
inline void spread_infinite(const AttentionKernels& kernels, uint16_t* x, int64_t count) {
  if (std::isfinite(kernels.largest(x, count))) return;
  for (int64_t i = 0; i < count; ++i) {
    if ((x[i] & 0x7fffU) == kInfinityBf16) x[i] |= kQuietBf16;
  }
}

inline constexpr int64_t kRowsBuffer = int64_t{kKeyBlock} * 512;

// Packs block t; `rows` is scratch, kRowsBuffer. `mean`: of the whole sequence, for Smoothing::global.
inline void pack_block(const AttentionKernels& kernels, const AttentionProblem& p, const AttentionSequence& s,
                       int64_t kv_head, int64_t t, bool want16, bool want8, const uint16_t* mean,
                       const BlockLayout& layout, uint16_t* rows, std::byte* to) {
  const int64_t first = t * kKeyBlock;
  const int keys = static_cast<int>(std::min<int64_t>(kKeyBlock, s.key_len - first));
  load_rows(kernels, p.k, s.k_at, kv_head, first, keys, p.d, rows);
  spread_infinite(kernels, rows, keys * p.d);
  std::fill(rows + keys * p.d, rows + kKeyBlock * p.d, uint16_t{0});
  if (want16) kernels.pack_keys16(rows, p.d, to + layout.k16);
  if (want8) {
    auto* own = reinterpret_cast<uint16_t*>(to + layout.mean);
    if (p.smoothing == Smoothing::block) kernels.mean_of_keys(rows, keys, p.d, own);
    if (p.smoothing == Smoothing::global) std::copy_n(mean, p.d, own);
    const float scale =
        kernels.pack_keys8(rows, keys, p.d, p.smoothing == Smoothing::none ? nullptr : own, to + layout.k8);
    std::memcpy(to + layout.k_scale, &scale, sizeof(scale));
  }
  load_rows(kernels, p.v, s.v_at, kv_head, first, keys, p.dv, rows);
  std::fill(rows + keys * p.dv, rows + kKeyBlock * p.dv, uint16_t{0});
  kernels.pack_values16(rows, p.dv, to + layout.v16);
}

// The mean of all keys of a sequence: in key order, as that of a block.
inline void mean_of_sequence(const AttentionKernels& kernels, const AttentionProblem& p, const AttentionSequence& s,
                             int64_t kv_head, uint16_t* row, uint16_t* mean) {
  float sums[512] = {};
  for (int64_t j = 0; j < s.key_len; ++j) {
    load_rows(kernels, p.k, s.k_at, kv_head, j, 1, p.d, row);
    for (int64_t c = 0; c < p.d; ++c) sums[c] += bf16_to_float(row[c]);
  }
  const float part = 1.0F / static_cast<float>(s.key_len);
  for (int64_t c = 0; c < p.d; ++c) mean[c] = float_to_bf16(sums[c] * part);
}

}  // namespace
}  // namespace tilefuse

// One row tile of one key head: some of the query heads that share it, as rows (position, head), heads inner.
#pragma once

#include <cmath>
#include <limits>

#include "attention/key_store.h"
#include "attention/packing.h"
#include "prefetch.h"
#include "scratch.h"

namespace tilefuse {
namespace {

inline constexpr float kLog2e = 1.44269504088896340736F;
inline constexpr float kLn2 = 0.693147180559945309417F;

struct RowTileTask {
  const AttentionSequence* sequence = nullptr;
  int64_t kv_head = 0;
  int64_t row_tile = 0;
  int64_t head = 0;  // the first, and how many
  int64_t heads = 0;
  const std::byte* store = nullptr;  // packed blocks; null: from a cache, or packed as they are needed
  const uint16_t* mean = nullptr;    // of the sequence's keys, for Smoothing::global
};

class RowTile {
 public:
  RowTile(const AttentionKernels& kernels, const AttentionProblem& problem, const BlockLayout& layout,
          const RowTileTask& task, Scratch& scratch)
      : k_(kernels),
        p_(problem),
        s_(*task.sequence),
        layout_(layout),
        task_(task),
        row0_(task.row_tile * kRowTile),
        rows_(std::min<int64_t>(kRowTile, s_.query_len - row0_) * task.heads),
        row_blocks_(divide_up(rows_, k_.rows)),
        exponent_scale_(problem.scale * kLog2e) {
    list_tiles(scratch);
  }

  void run() {
    for (int64_t i = 0; i < row_blocks_; ++i) load_rows_of(i);
    for (int64_t at = 0; at < tiles_; at += kChunkBlocks) run_chunk(at);
    for (int64_t i = 0; i < row_blocks_; ++i) finish(i);
  }

  // The INT8 path of every key block of a stored head, whatever the routing.
  void probe(int64_t key_blocks, const Int8Probe& to) {
    for (int64_t i = 0; i < row_blocks_; ++i) {
      load_rows_of(i);
      const int rows = rows_in(i);
      RowCodes& codes = codes_[i];
      auto* x = reinterpret_cast<uint16_t*>(panel_);
      for (int r = 0; r < rows; ++r) {
        const int64_t row = i * k_.rows + r;
        load_rows(k_, p_.q, s_.q_at, head_of(row), position_of(row), 1, p_.d, x + r * p_.d);
        codes.scales[r] = scale_of(p_.scale_per_row ? k_.largest(x + r * p_.d, p_.d) : largest_of_head(row));
      }
      for (int r = 0; r < rows; ++r) {
        const int64_t row = position_of(i * k_.rows + r);
        to.q_scales[row] = codes.scales[r];
        for (int64_t c = 0; c < p_.d; ++c) {
          to.q_codes[row * p_.d + c] = static_cast<int8_t>(code_of(bf16_to_float(x[r * p_.d + c]), codes.scales[r]));
        }
      }
      for (int64_t t = 0; t < key_blocks; ++t) {
        const KeyBlock block = block_of(t);
        k_.scores8(codes, rows, block.k8, p_.d, kKeyBlock, scores_);
        for (int r = 0; r < rows; ++r) {
          const int64_t row = position_of(i * k_.rows + r);
          for (int64_t j = t * kKeyBlock; j < std::min((t + 1) * kKeyBlock, s_.key_len); ++j) {
            to.scores[row * s_.key_len + j] = static_cast<int32_t>(scores_[r * kChunkKeys + j - t * kKeyBlock]);
          }
        }
        if (p_.smoothing == Smoothing::none) continue;
        add_bias(&block, 1, 0);
        for (int r = 0; r < rows; ++r)
          to.bias[position_of(i * k_.rows + r) * key_blocks + t] = bias_[i * bias_width_][r];
      }
    }
  }

 private:
  // Memory: what lives as long as the tile, then what a chunk needs.
  void list_tiles(Scratch& scratch) {
    const TileRange range = tiles_of(p_, s_, task_.row_tile);
    const RouteRow route(p_, s_, task_.kv_head, task_.row_tile);
    const int64_t most = std::max<int64_t>(0, range.last - range.first);
    for (int64_t t = range.first; t < range.last; ++t) tiles8_ += route.int8(t) ? 1 : 0;
    tiles_ = most;
    bias_width_ = p_.smoothing == Smoothing::none || tiles8_ == 0 ? 0
                  : packs_here()                                  ? kKeyBlock
                                                                  : divide_up(tiles8_, kKeyBlock) * kKeyBlock;
    row16_stride_ = divide_up(k_.row16_bytes * p_.d, 64) * 64;
    row8_stride_ = divide_up(k_.row8_bytes * p_.d, 64) * 64;

    int64_t bytes = 0;
    const auto reserve = [&](int64_t size) {
      const int64_t at = bytes;
      bytes += divide_up(size, 64) * 64;
      return at;
    };
    const int64_t dv = layout_.padded_dv();
    const int64_t at_tiles = reserve(most * int64_t{sizeof(int64_t)});
    const int64_t at_rows16 = reserve(row_blocks_ * row16_stride_);
    const int64_t at_rows8 = reserve(tiles8_ > 0 ? row_blocks_ * row8_stride_ : 0);
    const int64_t at_codes = reserve(row_blocks_ * int64_t{sizeof(RowCodes)});
    const int64_t at_states = reserve(row_blocks_ * int64_t{sizeof(RowState)});
    const int64_t at_started = reserve(row_blocks_);
    const int64_t at_bias = reserve(row_blocks_ * bias_width_ * int64_t{sizeof(*bias_)});
    const int64_t at_out = reserve(row_blocks_ * k_.rows * dv * 4);
    const int64_t at_scores = reserve(int64_t{kMaxBlockRows} * kChunkKeys * 4);
    const int64_t at_p = reserve(int64_t{kMaxBlockRows} * kChunkKeys * 2);
    const int64_t at_buffer = reserve(kRowsBuffer * 2);
    const int64_t at_panel = reserve(kKeyBlock * p_.d * 2);
    const int64_t at_blocks = reserve(packs_here() ? kChunkBlocks * layout_.bytes : 0);
    const int64_t at_widened = reserve(p_.sealed.v8 == kAbsent ? 0 : kChunkBlocks * kKeyBlock * dv * 2);
    std::byte* base = scratch.at_least(bytes);
    const auto at = [&]<typename T>(T*& to, int64_t offset) { to = reinterpret_cast<T*>(base + offset); };
    at(tile_list_, at_tiles);
    at(rows16_, at_rows16);
    at(rows8_, at_rows8);
    at(codes_, at_codes);
    at(states_, at_states);
    at(started_, at_started);
    at(bias_, at_bias);
    at(out_, at_out);
    at(scores_, at_scores);
    at(probabilities_, at_p);
    at(buffer_, at_buffer);
    at(panel_, at_panel);
    at(packed_, at_blocks);
    at(widened_, at_widened);

    // INT8 tiles first: one kernel stays hot, and the order of the keys doesn't matter to the sum.
    int64_t at8 = 0;
    int64_t at16 = tiles8_;
    for (int64_t t = range.first; t < range.last; ++t) tile_list_[route.int8(t) ? at8++ : at16++] = t;
  }

  [[nodiscard]] bool packs_here() const { return s_.sealed == nullptr && task_.store == nullptr; }
  [[nodiscard]] int rows_in(int64_t block) const {
    return static_cast<int>(std::min<int64_t>(k_.rows, rows_ - block * k_.rows));
  }
  [[nodiscard]] int64_t position_of(int64_t row) const { return row0_ + row / task_.heads; }
  [[nodiscard]] int64_t head_of(int64_t row) const { return task_.head + row % task_.heads; }

  [[nodiscard]] KeyBlock block_of(int64_t t) const {
    if (s_.sealed != nullptr) return cached_block(p_, s_, task_.kv_head, t);
    return block_at(layout_, task_.store + t * layout_.bytes);
  }

  void load_rows_of(int64_t block) {
    const int rows = rows_in(block);
    started_[block] = 0;
    std::fill_n(states_[block].max, k_.rows, -std::numeric_limits<float>::infinity());
    std::fill_n(states_[block].sums[0], k_.rows * kSumLanes, 0.0F);
    const uint16_t* from[kMaxBlockRows];
    float largest[kMaxBlockRows];
    for (int r = 0; r < rows; ++r) {
      const int64_t row = block * k_.rows + r;
      uint16_t* copy = buffer_ + r * p_.d;
      if (p_.q.dtype == Dtype::bf16) {
        from[r] = query_of(row);
        if (row + k_.rows < rows_) fetch(query_of(row + k_.rows));
      } else {
        load_rows(k_, p_.q, s_.q_at, head_of(row), position_of(row), 1, p_.d, copy);
        from[r] = copy;
      }
      largest[r] = k_.largest(from[r], p_.d);
      if (std::isfinite(largest[r])) continue;
      if (from[r] != copy) std::copy_n(from[r], p_.d, copy);
      spread_infinite(k_, copy, p_.d);
      from[r] = copy;
    }
    std::byte* rows16 = rows16_ + block * row16_stride_;
    k_.pack_rows16(from, rows, p_.d, rows16);
    if (tiles8_ == 0) return;
    RowCodes& codes = codes_[block];
    codes.codes = rows8_ + block * row8_stride_;
    for (int r = 0; r < rows; ++r) {
      codes.scales[r] = scale_of(p_.scale_per_row ? largest[r] : largest_of_head(block * k_.rows + r));
    }
    k_.pack_rows8(from, rows16, rows, p_.d, codes);
    for (int r = 0; r < rows; ++r) codes.scales[r] *= exponent_scale_;
  }

  // In place, for bf16.
  [[nodiscard]] const uint16_t* query_of(int64_t row) const {
    return static_cast<const uint16_t*>(p_.q.data) + s_.q_at + head_of(row) * p_.q.head_stride +
           position_of(row) * p_.q.row_stride;
  }

  TILEFUSE_ALWAYS_INLINE void fetch(const uint16_t* row) const {
    for (int64_t c = 0; c < p_.d; c += 32) prefetch(row + c);
  }

  // Over the row tile, which one scale serves.
  float largest_of_head(int64_t row) {
    uint16_t* one = buffer_ + kMaxBlockRows * p_.d;
    float largest = 0.0F;
    const int64_t count = rows_ / task_.heads;
    for (int64_t i = 0; i < count; ++i) {
      load_rows(k_, p_.q, s_.q_at, head_of(row), row0_ + i, 1, p_.d, one);
      const float x = k_.largest(one, p_.d);
      if (!std::isnan(largest) && !(x <= largest)) largest = x;
    }
    return largest;
  }

  // Products of the queries and the means of tiles [first, end) of the list, at most 64, into column `column` on.
  void add_bias(const KeyBlock* blocks, int64_t count, int64_t column) {
    if (k_.biases != nullptr) {
      const std::byte* means[kKeyBlock];
      for (int64_t i = 0; i < count; ++i) means[i] = blocks[i].mean;
      for (int64_t i = 0; i < row_blocks_; ++i) {
        k_.biases(rows16_ + i * row16_stride_, rows_in(i), means, count, p_.d, bias_ + i * bias_width_ + column);
      }
      return;
    }
    std::memset(buffer_, 0, static_cast<size_t>(kKeyBlock * p_.d * 2));
    for (int64_t i = 0; i < count; ++i) std::memcpy(buffer_ + i * p_.d, blocks[i].mean, static_cast<size_t>(p_.d * 2));
    k_.pack_keys16(buffer_, p_.d, panel_);
    const int keys = static_cast<int>(divide_up(count, 16) * 16);
    for (int64_t i = 0; i < row_blocks_; ++i) {
      k_.scores16(rows16_ + i * row16_stride_, rows_in(i), panel_, p_.d, keys, scores_);
      for (int r = 0; r < rows_in(i); ++r) {
        for (int64_t t = 0; t < count; ++t) bias_[i * bias_width_ + column + t][r] = scores_[r * kChunkKeys + t];
      }
    }
  }

  void run_chunk(int64_t at) {
    const int count = static_cast<int>(std::min<int64_t>(kChunkBlocks, tiles_ - at));
    KeyBlock blocks[kChunkBlocks];
    for (int b = 0; b < count; ++b) blocks[b] = ready_block(at + b, b);
    if (bias_width_ > 0 && at < tiles8_) {
      if (packs_here()) {
        add_bias(blocks, std::min<int64_t>(count, tiles8_ - at), 0);
      } else if (at % kKeyBlock == 0) {
        KeyBlock many[kKeyBlock];
        const int64_t end = std::min<int64_t>(tiles8_, at + kKeyBlock);
        for (int64_t i = at; i < end; ++i) many[i - at] = block_of(tile_list_[i]);
        add_bias(many, end - at, at);
      }
    }
    Ahead ahead;
    if (!packs_here()) {
      look_ahead(row_blocks_ == 1 ? at : at + count, ahead);
      if (row_blocks_ == 1) ahead.read();
    }
    for (int64_t i = 0; i < row_blocks_; ++i) {
      ahead.fetch(i, row_blocks_);
      run_row_block(i, at, blocks, count);
    }
  }

  // What the next chunk reads, fetched into the L2 cache a part at a time: the first row block would wait for each
  // line.
  struct Ahead {
    const std::byte* at[2 * kChunkBlocks];
    int64_t bytes[2 * kChunkBlocks];
    int parts = 0;

    void add(const std::byte* from, int64_t size) {
      at[parts] = from;
      bytes[parts++] = size;
    }

    // At once: few rows would wait for memory all along, and more comes of reading in the order of memory, which
    // hardware prefetchers follow.
    void read() {
      uint64_t all = 0;
      for (int part = 0; part < parts; ++part) {
        for (int64_t i = 0; i < bytes[part]; i += 64) {
          uint64_t word;
          std::memcpy(&word, at[part] + i, sizeof(word));
          all |= word;
        }
      }
      asm volatile("" : : "r"(all));
      parts = 0;
    }

    // Part i of `of`.
    TILEFUSE_ALWAYS_INLINE void fetch(int64_t i, int64_t of) const {
      for (int part = 0; part < parts; ++part) {
        const int64_t lines = bytes[part] / 64;
        for (int64_t line = i * lines / of; line < (i + 1) * lines / of; ++line) {
          prefetch_l2(at[part] + line * 64);
        }
      }
    }
  };

  void look_ahead(int64_t first, Ahead& ahead) const {
    const int64_t values = kKeyBlock * layout_.padded_dv();
    for (int64_t i = first; i < std::min(first + kChunkBlocks, tiles_); ++i) {
      const KeyBlock block = block_of(tile_list_[i]);
      ahead.add(i < tiles8_ ? block.k8 : block.k16, kKeyBlock * p_.d * (i < tiles8_ ? 1 : 2));
      ahead.add(block.v16 != nullptr ? block.v16 : block.v8, values * (block.v16 != nullptr ? 2 : 1));
    }
  }

  KeyBlock ready_block(int64_t index, int b) {
    const int64_t t = tile_list_[index];
    if (packs_here()) {
      std::byte* to = packed_ + b * layout_.bytes;
      pack_block(k_, p_, s_, task_.kv_head, t, index >= tiles8_, index < tiles8_, task_.mean, layout_, buffer_, to);
      return block_at(layout_, to);
    }
    KeyBlock block = block_of(t);
    if (block.v16 == nullptr) {
      std::byte* to = widened_ + b * kKeyBlock * layout_.padded_dv() * 2;
      k_.widen_values(block.v8, layout_.padded_dv(), to);
      block.v16 = to;
    }
    return block;
  }

  void run_row_block(int64_t i, int64_t at, const KeyBlock* blocks, int count) {
    const int rows = rows_in(i);
    const int64_t row = i * k_.rows;
    const Sight top = sight_of(p_, s_, position_of(row));
    const Sight bottom = sight_of(p_, s_, position_of(row + rows - 1));
    Chunk chunk;
    chunk.blocks = count;
    int any = 0;
    bool leaks = false;
    for (int b = 0; b < count; ++b) {
      const int64_t key0 = tile_list_[at + b] * kKeyBlock;
      const int64_t end = std::clamp<int64_t>(bottom.end - key0, 0, kKeyBlock);
      const int keys = top.begin >= key0 + end ? 0 : static_cast<int>(divide_up(end, 16) * 16);
      chunk.keys[b] = keys;
      chunk.v16[b] = blocks[b].v16;
      chunk.v_scales[b] = blocks[b].v_scales;
      any |= keys;
      if (keys == 0) continue;
      float* scores = scores_ + b * kKeyBlock;
      if (at + b < tiles8_) {
        k_.scores8(codes_[i], rows, blocks[b].k8, p_.d, keys, scores);
        const int64_t column = packs_here() ? b : at + b;
        set_multipliers(codes_[i].scales, blocks[b].k_scale, chunk.multiplier[b]);
        if (bias_width_ == 0) {
          std::fill_n(chunk.offset[b], kMaxBlockRows, 0.0F);
        } else {
          times(bias_[i * bias_width_ + column], exponent_scale_, chunk.offset[b]);
        }
      } else {
        k_.scores16(rows16_ + i * row16_stride_, rows, blocks[b].k16, p_.d, keys, scores);
        std::fill_n(chunk.multiplier[b], kMaxBlockRows, std::max(exponent_scale_, kSmallest));
        std::fill_n(chunk.offset[b], kMaxBlockRows, 0.0F);
      }
      if (top.end < key0 + keys || bottom.begin > key0) {
        mask(i, key0, keys, scores, chunk, b);
        leaks = leaks || !values_finite(blocks[b], layout_);
      }
    }
    if (any == 0) return;
    float rescale[kMaxBlockRows];
    k_.softmax(scores_, rows, chunk, states_[i], rescale, probabilities_);
    const int64_t dv = layout_.padded_dv();
    const float* worth = started_[i] == 0 ? nullptr : rescale;
    if (leaks) {
      values_row_by_row(i, at, chunk, worth);
    } else {
      k_.values(probabilities_, rows, chunk, dv, worth, out_ + row * dv);
    }
    started_[i] = 1;
  }

  // Of all lanes, whatever lies beyond a block's rows: loops of a known length are a few vectors. (Inlined, what
  // __restrict says is lost, and they are scalar.)
  [[gnu::noinline]] static void set_multipliers(const float* __restrict scales, float k_scale, float* __restrict to) {
    for (int r = 0; r < kMaxBlockRows; ++r) to[r] = std::max(scales[r] * k_scale, kSmallest);
  }

  [[gnu::noinline]] static void times(const float* __restrict from, float factor, float* __restrict to) {
    for (int r = 0; r < kMaxBlockRows; ++r) to[r] = from[r] * factor;
  }

  // A masked score times 0 would be NaN. (std::max returns its first argument if one is NaN.)
  static constexpr float kSmallest = std::numeric_limits<float>::min();

  void mask(int64_t block, int64_t key0, int keys, float* scores, Chunk& chunk, int b) const {
    for (int r = 0; r < rows_in(block); ++r, scores += kChunkKeys) {
      const Sight sight = sight_of(p_, s_, position_of(block * k_.rows + r));
      const int64_t begin = std::clamp<int64_t>(sight.begin - key0, 0, keys);
      const int64_t end = std::clamp<int64_t>(sight.end - key0, begin, keys);
      std::fill(scores, scores + begin, -std::numeric_limits<float>::infinity());
      std::fill(scores + end, scores + keys, -std::numeric_limits<float>::infinity());
      if (begin == end) {
        // The scale of a block that the row doesn't see may be NaN.
        chunk.multiplier[b][r] = 1.0F;
        chunk.offset[b][r] = 0.0F;
      }
    }
  }

  // Where a value that isn't finite is hidden from some rows of a block: a probability of 0 would not keep it out.
  void values_row_by_row(int64_t block, int64_t at, const Chunk& chunk, const float* worth) {
    const int64_t dv = layout_.padded_dv();
    Scratch memory;
    auto* copies = reinterpret_cast<uint16_t*>(memory.at_least(kChunkKeys * dv * 2));
    for (int r = 0; r < rows_in(block); ++r) {
      const int64_t row = block * k_.rows + r;
      const Sight sight = sight_of(p_, s_, position_of(row));
      Chunk own = chunk;
      for (int b = 0; b < chunk.blocks; ++b) {
        if (chunk.keys[b] == 0) continue;
        uint16_t* copy = copies + b * kKeyBlock * dv;
        std::memcpy(copy, chunk.v16[b], static_cast<size_t>(kKeyBlock * dv * 2));
        own.v16[b] = reinterpret_cast<const std::byte*>(copy);
        for (int64_t j = 0; j < chunk.keys[b]; ++j) {
          const int64_t key = tile_list_[at + b] * kKeyBlock + j;
          if (key >= sight.begin && key < sight.end) continue;
          probabilities_[r * kChunkKeys + b * kKeyBlock + j] = 0;
          for (int64_t c = 0; c < dv; ++c) copy[(j / 2 * dv + c) * 2 + j % 2] = 0;
        }
      }
      k_.values(probabilities_ + r * kChunkKeys, 1, own, dv, worth == nullptr ? nullptr : worth + r, out_ + row * dv);
    }
  }

  void finish(int64_t block) {
    const int64_t dv = layout_.padded_dv();
    const int64_t size = p_.out.dtype == Dtype::f32 ? 4 : 2;
    for (int r = 0; r < rows_in(block); ++r) {
      const int64_t row = block * k_.rows + r;
      float sum = 0.0F;
      for (const float x : states_[block].sums[r]) sum += x;
      if (sum == 0.0F) {
        // No keys, or only ones whose scores overflowed to -inf.
        const Sight sight = sight_of(p_, s_, position_of(row));
        if (sight.begin < sight.end) sum = std::numeric_limits<float>::quiet_NaN();
      }
      if (sum == 0.0F) std::fill_n(out_ + row * dv, p_.dv, 0.0F);
      auto* to = static_cast<std::byte*>(p_.out.data) +
                 (s_.out_at + head_of(row) * p_.out.head_stride + position_of(row) * p_.out.row_stride) * size;
      k_.store_row(out_ + row * dv, sum == 0.0F ? 0.0F : 1.0F / sum, p_.dv, p_.out.dtype, to);
      if (p_.lse != nullptr) {
        p_.lse[s_.lse_at + head_of(row) * p_.lse_head_stride + position_of(row) * p_.lse_row_stride] =
            sum == 0.0F ? -std::numeric_limits<float>::infinity() : (states_[block].max[r] + std::log2(sum)) * kLn2;
      }
    }
  }

  const AttentionKernels& k_;
  const AttentionProblem& p_;
  const AttentionSequence& s_;
  const BlockLayout& layout_;
  const RowTileTask& task_;
  int64_t row0_;
  int64_t rows_;
  int64_t row_blocks_;
  float exponent_scale_;

  int64_t tiles_ = 0;
  int64_t tiles8_ = 0;  // of them by the INT8 path, the first of the list
  int64_t bias_width_ = 0;
  int64_t row16_stride_ = 0;
  int64_t row8_stride_ = 0;

  int64_t* tile_list_ = nullptr;
  std::byte* rows16_ = nullptr;
  std::byte* rows8_ = nullptr;
  RowCodes* codes_ = nullptr;
  RowState* states_ = nullptr;
  uint8_t* started_ = nullptr;
  float (*bias_)[kMaxBlockRows] = nullptr;  // [row blocks][bias_width_]
  float* out_ = nullptr;
  float* scores_ = nullptr;
  uint16_t* probabilities_ = nullptr;
  uint16_t* buffer_ = nullptr;
  std::byte* panel_ = nullptr;
  std::byte* packed_ = nullptr;
  std::byte* widened_ = nullptr;
};

}  // namespace
}  // namespace tilefuse

// One reader a source order. Where the order allows, a whole word of 8 codes moves at once: GPTQ's words are the packed
// format's own, compressed-tensors' are those transposed, and AutoAWQ's take an 8x8 transpose of nibbles.
#include "code_blocks.h"

#include <algorithm>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tilefuse {
namespace {

inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What a reader knows of the tile that it reads.
struct TileAt {
  const PackSource& source;
  int64_t k;  // of the layer
  int64_t n;
  int64_t k0;  // of the tile
  int64_t n0;
  int real_k;  // input channels of the tile that are real, 1 to 128
  int real_n;  // output channels, 1 to 64
  int tiles;   // of a band: those from n0 on

  // Row of the checkpoint that holds sorted row k0 + i.
  [[nodiscard]] int64_t row(int i) const { return source.perm != nullptr ? source.perm[k0 + i] : k0 + i; }
};

// --- One row an input channel: kn, words_n, words_n_awq ---

// Stores a block row of a tile past the caches: nothing reads it soon, and a line that is written whole need not be
// read first. The thread that stored must call `end_stores` before another may read.
template <int Bits>
inline void store_block(const void* from, Word<Bits>* to) {
#if defined(__SSE2__)
  for (size_t i = 0; i < kNt * sizeof(Word<Bits>) / 16; ++i)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, _mm_loadu_si128(static_cast<const __m128i*>(from) + i));
#else
  std::memcpy(to, from, kNt * sizeof(Word<Bits>));
#endif
}

inline void end_stores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Calls fn(tile, block, rows) for each block row of each tile of the band, with pointers to the bytes of its 8 rows,
// `Bytes` each; what lies outside the matrix reads as 0. The tiles are the inner loop: the rows are read from one end
// of the band to the other, as the hardware foresees it.
template <int Bytes, typename Fn>
void for_each_row_block(const TileAt& at, int64_t row_bytes, Fn&& fn) {
  alignas(64) static constexpr uint8_t kZeroRow[Bytes] = {};
  uint8_t edge[kBlock][Bytes];
  const int64_t first = at.n0 / kNt * Bytes;
  for (int block = 0; block < ceil_div(at.real_k, kBlock); ++block) {
    const uint8_t* band[kBlock];
    const uint8_t* next[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      const int k = block * kBlock + i;
      band[i] = k < at.real_k ? at.source.codes + at.row(k) * row_bytes + first : nullptr;
      next[i] = at.k0 + k + kBlock < at.k ? at.source.codes + at.row(k + kBlock) * row_bytes + first : nullptr;
    }
    for (int tile = 0; tile < at.tiles; ++tile) {
      const int64_t offset = int64_t{tile} * Bytes;
      const auto there = static_cast<size_t>(std::min<int64_t>(Bytes, row_bytes - first - offset));
      const uint8_t* rows[kBlock];
      for (int i = 0; i < kBlock; ++i) {
        if (next[i] != nullptr && offset % 64 == 0) prefetch(next[i] + offset);
        rows[i] = kZeroRow;
        if (band[i] == nullptr) continue;
        rows[i] = band[i] + offset;
        if (there < Bytes) {
          std::memcpy(edge[i], rows[i], there);
          std::memset(edge[i] + there, 0, Bytes - there);
          rows[i] = edge[i];
        }
      }
      fn(tile, block, rows);
    }
  }
}

template <int Bits>
void read_words_n(const TileAt& at, bool awq, Word<Bits>* const* tiles) {
  constexpr int kBytes = kNt * Bits / 8;
  for_each_row_block<kBytes>(at, ceil_div(at.n * Bits, 32) * 4, [&](int tile, int block, const uint8_t* const* rows) {
    CodeGrid<Bits> grid;
    for (int i = 0; i < kBlock; ++i) std::memcpy(grid.row(i), rows[i], kBytes);
    grid.rows_to_packed(awq);
    store_block<Bits>(grid.v, tiles[tile] + block * kNt);
  });
}

template <int Bits>
bool read_kn(const TileAt& at, Word<Bits>* const* tiles) {
  uint8_t all = 0;
  for_each_row_block<kNt>(at, at.n, [&](int tile, int block, const uint8_t* const* rows) {
    CodeGrid<Bits> grid;
    for (int i = 0; i < kBlock; ++i) {
      const uint8_t* from = rows[i];
      uint8_t* to = grid.row(i);
      if constexpr (Bits == 4) {
        for (int n = 0; n < kNt; ++n) all |= from[n];
        uint16_t pairs[kNt / 2];
        std::memcpy(pairs, from, sizeof(pairs));
        for (int n = 0; n < kNt / 2; ++n) to[n] = static_cast<uint8_t>(pairs[n] | (pairs[n] >> 4));
      } else {
        std::memcpy(to, from, kNt);
      }
    }
    grid.rows_to_packed();
    store_block<Bits>(grid.v, tiles[tile] + block * kNt);
  });
  return Bits == 8 || (all & 0xf0) == 0;
}

// --- Words of consecutive input channels, one column an output channel: words_k ---

// Without a permutation, and all of the tiles real.
template <int Bits>
void read_words_k_band(const TileAt& at, Word<Bits>* const* tiles) {
  constexpr int kPerWord = 32 / Bits;
  constexpr size_t kBytes = kNt * 4;
  for (int block = 0; block < kKBlocks; ++block) {
    const uint8_t* low = at.source.codes + ((at.k0 + block * kBlock) / kPerWord * at.n + at.n0) * 4;
    for (int tile = 0; tile < at.tiles; ++tile, low += kBytes) {
      if constexpr (Bits == 4) {
        store_block<Bits>(low, tiles[tile] + block * kNt);
      } else {
        uint32_t words[kNt][2];
        uint32_t halves[2][kNt];
        std::memcpy(halves[0], low, kBytes);
        std::memcpy(halves[1], low + at.n * 4, kBytes);
        for (int n = 0; n < kNt; ++n) {
          words[n][0] = halves[0][n];
          words[n][1] = halves[1][n];
        }
        store_block<Bits>(words, tiles[tile] + block * kNt);
      }
    }
  }
}

template <int Bits>
void read_words_k(const TileAt& at, Word<Bits>* tile) {
  constexpr int kPerWord = 32 / Bits;
  const auto column = [&](int64_t word_row) { return at.source.codes + (word_row * at.n + at.n0) * 4; };
  const auto real_n = static_cast<size_t>(at.real_n);
  for (int block = 0; block < ceil_div(at.real_k, kBlock); ++block) {
    Word<Bits>* out = tile + block * kNt;
    uint32_t words[kNt];
    if (at.source.perm == nullptr) {
      const int64_t first = (at.k0 + block * kBlock) / kPerWord;
      if constexpr (Bits == 4) {
        std::memcpy(out, column(first), 4 * real_n);
      } else {
        uint32_t high[kNt] = {};
        std::memcpy(words, column(first), 4 * real_n);
        if (first + 1 < ceil_div(at.k, kPerWord)) std::memcpy(high, column(first + 1), 4 * real_n);
        for (size_t n = 0; n < real_n; ++n) out[n] = words[n] | (static_cast<uint64_t>(high[n]) << 32);
      }
      continue;
    }
    std::fill(out, out + kNt, Word<Bits>{0});
    for (int i = 0; i < std::min(kBlock, at.real_k - block * kBlock); ++i) {
      const int64_t row = at.row(block * kBlock + i);
      const int shift = static_cast<int>(row % kPerWord) * Bits;
      std::memcpy(words, column(row / kPerWord), 4 * real_n);
      for (size_t n = 0; n < real_n; ++n) {
        out[n] |= static_cast<Word<Bits>>((words[n] >> shift) & ((1u << Bits) - 1)) << (Bits * i);
      }
    }
  }
}

// --- One row an output channel: rows_n, rows_n_int8, rows_n_fast ---

// Calls code(n, row) for each code of the tile, in the packed order.
template <int Bits, typename Code>
void gather_codes(const TileAt& at, Code&& code, Word<Bits>* tile) {
  for (int n = 0; n < at.real_n; ++n) {
    for (int block = 0; block < ceil_div(at.real_k, kBlock); ++block) {
      Word<Bits> word = 0;
      for (int i = 0; i < std::min(kBlock, at.real_k - block * kBlock); ++i) {
        word |= static_cast<Word<Bits>>(code(at.n0 + n, at.row(block * kBlock + i))) << (Bits * i);
      }
      tile[block * kNt + n] = word;
    }
  }
}

template <int Bits>
void read_rows_n(const TileAt& at, int64_t row_bytes, uint8_t flip, Word<Bits>* tile) {
  constexpr int kBytes = kKt * Bits / 8;
  if (at.source.perm != nullptr) {
    const auto code = [&](int64_t n, int64_t k) -> uint8_t {
      const uint8_t byte = at.source.codes[n * row_bytes + k * Bits / 8];
      if constexpr (Bits == 8) return byte ^ flip;
      return (byte >> (4 * (k & 1))) & 15;
    };
    return gather_codes<Bits>(at, code, tile);
  }
  const int64_t offset = at.k0 * Bits / 8;
  const auto there = static_cast<size_t>(std::min<int64_t>(kBytes, row_bytes - offset));
  const Word<Bits> flips = ~Word<Bits>{0} / 255 * flip;
  for (int n = 0; n < at.real_n; ++n) {
    Word<Bits> words[kKBlocks] = {};
    const uint8_t* row = at.source.codes + (at.n0 + n) * row_bytes + offset;
    prefetch(row + kBytes);  // the tile below comes next
    std::memcpy(words, row, there);
    for (int block = 0; block < kKBlocks; ++block) tile[block * kNt + n] = words[block] ^ flips;
  }
}

// Four 16-bit words, the lowest nibble of each -> 16 bits.
[[nodiscard]] inline uint32_t squeeze_low_nibbles(uint64_t words) {
  words &= 0x000f000f000f000fu;
  words = (words | (words >> 12)) & 0x000000ff000000ffu;
  return static_cast<uint32_t>((words | (words >> 24)) & 0xffffu);
}

void read_rows_n_fast(const TileAt& at, uint32_t* tile) {
  constexpr int kRun = 32;  // input channels in 8 words
  const auto word_at = [&](int64_t n, int64_t k) {
    return at.source.codes + 2 * (n / 4 * at.k + k / 64 * 64 + n % 4 * 16 + k % 64 / kRun * 8 + k % 8);
  };
  if (at.source.perm != nullptr) {
    const auto code = [&](int64_t n, int64_t k) {
      uint16_t word;
      std::memcpy(&word, word_at(n, k), sizeof(word));
      return (word >> (k % kRun / 8 * 4)) & 15;
    };
    return gather_codes<4>(at, code, tile);
  }
  for (int n = 0; n < at.real_n; ++n) {
    for (int k = 0; k < at.real_k; k += kRun) {
      uint64_t words[2];
      std::memcpy(words, word_at(at.n0 + n, at.k0 + k), sizeof(words));
      for (int i = 0; i < kRun / kBlock; ++i) {
        tile[(k / kBlock + i) * kNt + n] =
            squeeze_low_nibbles(words[0] >> (4 * i)) | (squeeze_low_nibbles(words[1] >> (4 * i)) << 16);
      }
    }
  }
}

}  // namespace

template <int Bits>
bool read_code_band(const TileLayout& layout, const PackSource& source, int64_t k0, int64_t n0, int count,
                    Word<Bits>* const* tiles) {
  TileAt at{.source = source,
            .k = layout.k,
            .n = layout.n,
            .k0 = k0,
            .n0 = n0,
            .real_k = static_cast<int>(std::min<int64_t>(kKt, layout.k - k0)),
            .real_n = static_cast<int>(std::min<int64_t>(kNt, layout.n - n0)),
            .tiles = count};
  bool fit = true;
  const auto each = [&](auto&& read) {
    for (int i = 0; i < count; ++i) {
      at.n0 = n0 + i * kNt;
      at.real_n = static_cast<int>(std::min<int64_t>(kNt, layout.n - at.n0));
      read(tiles[i]);
    }
  };
  switch (source.order) {
    case CodeOrder::kn:
      fit = read_kn<Bits>(at, tiles);
      break;
    case CodeOrder::words_n:
      read_words_n<Bits>(at, false, tiles);
      break;
    case CodeOrder::words_n_awq:
      if constexpr (Bits == 4) read_words_n<Bits>(at, true, tiles);
      break;
    case CodeOrder::words_k:
      if (source.perm == nullptr && at.real_k == kKt && n0 + count * kNt <= layout.n) {
        read_words_k_band<Bits>(at, tiles);
      } else {
        each([&](Word<Bits>* tile) { read_words_k<Bits>(at, tile); });
      }
      break;
    case CodeOrder::rows_n:
      each([&](Word<Bits>* tile) { read_rows_n<Bits>(at, ceil_div(layout.k * Bits, 32) * 4, 0, tile); });
      break;
    case CodeOrder::rows_n_int8:
      if constexpr (Bits == 8) each([&](Word<Bits>* tile) { read_rows_n<Bits>(at, layout.k, 0x80, tile); });
      break;
    case CodeOrder::rows_n_fast:
      if constexpr (Bits == 4) each([&](Word<Bits>* tile) { read_rows_n_fast(at, tile); });
      break;
  }
  end_stores();
  return fit;
}

template bool read_code_band<4>(const TileLayout&, const PackSource&, int64_t, int64_t, int, uint32_t* const*);
template bool read_code_band<8>(const TileLayout&, const PackSource&, int64_t, int64_t, int, uint64_t* const*);

}  // namespace tilefuse

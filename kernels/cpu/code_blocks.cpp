// One reader a source order. Where the order allows, a whole word of 8 codes moves at once: GPTQ's words are the packed
// format's own, compressed-tensors' are those transposed, and AutoAWQ's take an 8x8 transpose of nibbles.
#include "code_blocks.h"

#include <algorithm>
#include <memory>

#include "prefetch.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tilefuse {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Stores whole cache lines past the caches: nothing reads them soon, and a line that is written whole need not be read
// first. The thread that stored must call `end_stores` before another may read.
template <size_t Bytes>
inline void store_lines(const void* from, void* to) {
  static_assert(Bytes % 64 == 0);
#if defined(__SSE2__)
  for (size_t i = 0; i < Bytes / 16; ++i)
    _mm_stream_si128(static_cast<__m128i*>(to) + i, _mm_loadu_si128(static_cast<const __m128i*>(from) + i));
#else
  std::memcpy(to, from, Bytes);
#endif
}

// A block row of a tile.
template <int Bits>
inline void store_block(const void* from, Word<Bits>* to) {
  store_lines<kNt * sizeof(Word<Bits>)>(from, to);
}

inline void end_stores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

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
        if (next[i] != nullptr && offset % 64 == 0) prefetch_l2(next[i] + offset);
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

// A block row of 8-bit codes from its words' low and high halves.
inline void store_interleaved(const uint32_t (&low)[kNt], const uint32_t (&high)[kNt], uint64_t* to) {
  uint32_t words[kNt][2];
  for (int n = 0; n < kNt; ++n) {
    words[n][0] = low[n];
    words[n][1] = high[n];
  }
  store_block<8>(words, to);
}

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
        uint32_t halves[2][kNt];
        std::memcpy(halves[0], low, kBytes);
        std::memcpy(halves[1], low + at.n * 4, kBytes);
        store_interleaved(halves[0], halves[1], tiles[tile] + block * kNt);
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
    const int64_t first = (at.k0 + block * kBlock) / kPerWord;
    if constexpr (Bits == 4) {
      std::memcpy(out, column(first), 4 * real_n);
    } else {
      uint32_t low[kNt];
      uint32_t high[kNt] = {};
      std::memcpy(low, column(first), 4 * real_n);
      if (first + 1 < ceil_div(at.k, kPerWord)) std::memcpy(high, column(first + 1), 4 * real_n);
      for (size_t n = 0; n < real_n; ++n) out[n] = low[n] | (static_cast<uint64_t>(high[n]) << 32);
    }
  }
}

// Permuted: the 8 rows of a block lie anywhere in the column of 64 output channels. The column is copied first, for it
// is spread over a page or more a row, and each of its words is read by several blocks.
template <int Bits>
void read_words_k_permuted(const TileAt& at, int k_tiles, Word<Bits>* const* tiles) {
  constexpr int kPerWord = 32 / Bits;
  constexpr int kAhead = 16;
  const int64_t rows = ceil_div(at.k, kPerWord);
  const auto words = std::make_unique_for_overwrite<uint32_t[]>(static_cast<size_t>(rows * kNt));
  const uint8_t* from = at.source.codes + at.n0 * 4;
  for (int64_t row = 0; row < rows; ++row, from += at.n * 4) {
    for (int line = 0; row + kAhead < rows && line < at.real_n * 4; line += 64)
      prefetch_l2(from + kAhead * at.n * 4 + line);
    uint32_t* to = words.get() + row * kNt;
    std::memcpy(to, from, 4 * static_cast<size_t>(at.real_n));
    std::fill(to + at.real_n, to + kNt, 0);
  }
  using Vector __attribute__((vector_size(16))) = uint32_t;
  constexpr int kHalves = kBlock / kPerWord;
  for (int64_t k = 0; k < std::min<int64_t>(at.k - at.k0, int64_t{k_tiles} * kKt); k += kBlock) {
    alignas(64) uint32_t halves[kHalves][kNt];
    for (int half = 0; half < kHalves; ++half) {
      const uint32_t* in[kPerWord];
      int shift[kPerWord];
      for (int i = 0; i < kPerWord; ++i) {
        const int64_t channel = std::min(at.k0 + k + half * kPerWord + i, at.k - 1);
        const int64_t row = at.source.perm[channel];
        in[i] = words.get() + row / kPerWord * kNt;
        shift[i] = static_cast<int>(row % kPerWord) * Bits;
      }
      for (int n = 0; n < kNt; n += 4) {
        Vector out{};
#pragma GCC unroll 8
        for (int i = 0; i < kPerWord; ++i) {
          Vector word;
          std::memcpy(&word, in[i] + n, sizeof(word));
          out |= ((word >> shift[i]) & ((1u << Bits) - 1)) << (Bits * i);
        }
        std::memcpy(halves[half] + n, &out, sizeof(out));
      }
    }
    Word<Bits>* to = tiles[k / kKt] + k % kKt / kBlock * kNt;
    if constexpr (Bits == 4) {
      store_block<Bits>(halves, to);
    } else {
      store_interleaved(halves[0], halves[1], to);
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

// Without a permutation, and all of the tiles real: a line of a tile holds the words of as many output channels as a
// vector of 64 bytes, whose rows are read from one end of the column of tiles to the other.
template <int Bits>
void read_rows_n_column(const TileAt& at, int64_t row_bytes, uint8_t flip, int k_tiles, Word<Bits>* const* tiles) {
  constexpr int kBytes = kKt * Bits / 8;
  constexpr int kLine = 64 / sizeof(Word<Bits>);
  constexpr int kAhead = 4 * 64;
  const Word<Bits> flips = ~Word<Bits>{0} / 255 * flip;
  for (int n = 0; n < kNt; n += kLine) {
    const uint8_t* rows = at.source.codes + (at.n0 + n) * row_bytes + at.k0 * Bits / 8;
    for (int tile = 0; tile < k_tiles; ++tile, rows += kBytes) {
      Word<Bits> lines[kKBlocks][kLine];
      for (int i = 0; i < kLine; ++i) {
        Word<Bits> words[kKBlocks];
        std::memcpy(words, rows + i * row_bytes, kBytes);
        for (int at_byte = 0; at_byte < kBytes; at_byte += 64) prefetch_l2(rows + i * row_bytes + kAhead + at_byte);
        for (int block = 0; block < kKBlocks; ++block) lines[block][i] = words[block] ^ flips;
      }
      for (int block = 0; block < kKBlocks; ++block) store_lines<64>(lines[block], tiles[tile] + block * kNt + n);
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
    prefetch_l2(row + kBytes);  // the tile below comes next
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

// Where the checkpoint's rows run along N, a patch of one row of tiles reads 128 rows, 2 or 4 KiB of each, from end to
// end. Where they run along K, one column of tiles reads 64 rows so. A permuted column of words is taken whole.
PatchShape best_patch(const PackSource& source) {
  switch (source.order) {
    case CodeOrder::rows_n:
    case CodeOrder::rows_n_int8:
    case CodeOrder::rows_n_fast:
      return {.k_tiles = 32, .n_tiles = 1};
    case CodeOrder::words_k:
      if (source.perm != nullptr) return {.k_tiles = kMostPatchTiles, .n_tiles = 1};
      break;
    case CodeOrder::kn:
    case CodeOrder::words_n:
    case CodeOrder::words_n_awq:
      break;
  }
  return {.k_tiles = 1, .n_tiles = 64};
}

template <int Bits>
bool read_code_patch(const TileLayout& layout, const PackSource& source, const Patch& patch, Word<Bits>* const* tiles) {
  const auto tile_at = [&](int row, int column) {
    const int64_t k0 = patch.k0 + int64_t{row} * kKt;
    const int64_t n0 = patch.n0 + int64_t{column} * kNt;
    return TileAt{.source = source,
                  .k = layout.k,
                  .n = layout.n,
                  .k0 = k0,
                  .n0 = n0,
                  .real_k = static_cast<int>(std::min<int64_t>(kKt, layout.k - k0)),
                  .real_n = static_cast<int>(std::min<int64_t>(kNt, layout.n - n0)),
                  .tiles = patch.n_tiles - column};
  };
  const auto each_row = [&](auto&& read) {
    bool fit = true;
    for (int row = 0; row < patch.k_tiles; ++row) fit = read(tile_at(row, 0), tiles + row * patch.n_tiles) && fit;
    return fit;
  };
  const auto each_column = [&](auto&& read) {
    for (int column = 0; column < patch.n_tiles; ++column) {
      Word<Bits>* of_column[kMostPatchTiles];
      for (int row = 0; row < patch.k_tiles; ++row) of_column[row] = tiles[row * patch.n_tiles + column];
      read(tile_at(0, column), of_column);
    }
    return true;
  };
  const auto each_tile = [&](int first_row, auto&& read) {
    for (int row = first_row; row < patch.k_tiles; ++row) {
      for (int column = 0; column < patch.n_tiles; ++column)
        read(tile_at(row, column), tiles[row * patch.n_tiles + column]);
    }
    return true;
  };
  const int whole_rows = static_cast<int>(std::min<int64_t>(patch.k_tiles, (layout.k - patch.k0) / kKt));
  const bool whole_columns = patch.n0 + int64_t{patch.n_tiles} * kNt <= layout.n;

  const auto rows_along_k = [&](int64_t row_bytes, uint8_t flip) {
    const int whole = source.perm == nullptr && whole_columns ? whole_rows : 0;
    each_column([&](const TileAt& at, Word<Bits>* const* of_column) {
      read_rows_n_column<Bits>(at, row_bytes, flip, whole, of_column);
    });
    return each_tile(whole, [&](const TileAt& at, Word<Bits>* tile) { read_rows_n<Bits>(at, row_bytes, flip, tile); });
  };

  const bool fit = [&] {
    switch (source.order) {
      case CodeOrder::kn:
        return each_row([](const TileAt& at, Word<Bits>* const* row) { return read_kn<Bits>(at, row); });
      case CodeOrder::words_n:
      case CodeOrder::words_n_awq:
        return each_row([&](const TileAt& at, Word<Bits>* const* row) {
          read_words_n<Bits>(at, Bits == 4 && source.order == CodeOrder::words_n_awq, row);
          return true;
        });
      case CodeOrder::words_k:
        if (source.perm != nullptr) {
          return each_column([&](const TileAt& at, Word<Bits>* const* of_column) {
            read_words_k_permuted<Bits>(at, patch.k_tiles, of_column);
          });
        }
        for (int row = 0; whole_columns && row < whole_rows; ++row)
          read_words_k_band<Bits>(tile_at(row, 0), tiles + row * patch.n_tiles);
        return each_tile(whole_columns ? whole_rows : 0,
                         [](const TileAt& at, Word<Bits>* tile) { read_words_k<Bits>(at, tile); });
      case CodeOrder::rows_n:
        return rows_along_k(ceil_div(layout.k * Bits, 32) * 4, 0);
      case CodeOrder::rows_n_int8:
        return rows_along_k(layout.k, 0x80);
      case CodeOrder::rows_n_fast:
        if constexpr (Bits == 4)
          return each_tile(0, [](const TileAt& at, Word<Bits>* tile) { read_rows_n_fast(at, tile); });
        break;
    }
    return true;
  }();
  end_stores();
  return fit;
}

template bool read_code_patch<4>(const TileLayout&, const PackSource&, const Patch&, uint32_t* const*);
template bool read_code_patch<8>(const TileLayout&, const PackSource&, const Patch&, uint64_t* const*);

}  // namespace tilefuse

#include <algorithm>
#include <cstring>

#include "int8_kernels.h"
#include "matmul.h"
#include "matmul_driver.h"
#include "thread_pool.h"

namespace tilefuse {
namespace {

// Rows that share one quantisation and one reading of the weights.
constexpr int64_t kRowsPerChunk = 384;

// Elements of x that a thread quantises at a time, at least: some microseconds.
constexpr int64_t kQuantisedAtOnce = 8192;

thread_local Scratch t_activations;  // of the calling thread
thread_local Scratch t_tile;         // of each thread that computes tiles

// A chunk of rows in passes of nearly equal size.
struct Chunk {
  int64_t row0 = 0;  // of the product
  int64_t rows = 0;
  int64_t passes = 0;
  int64_t groups = 0;
  bool offset = false;
  uint32_t* words = nullptr;  // [k tiles][passes][32][rows of the pass]
  float* scales = nullptr;    // [passes][groups][rows of the pass]
  int32_t* sums = nullptr;    // likewise

  [[nodiscard]] int64_t first_row(int64_t pass) const { return pass * rows / passes; }
  [[nodiscard]] Int8Rows pass(int64_t i) const {
    const int64_t first = first_row(i);
    return {.words = words + first * kInt8TileWords,
            .tile_stride = rows * kInt8TileWords,
            .scales = scales + first * groups,
            .sums = sums + first * groups,
            .rows = static_cast<int>(first_row(i + 1) - first)};
  }
};

void quantise_chunk(const MatmulArgs& args, const Int8Kernels& kernels, const Chunk& chunk) {
  const int64_t k_tiles = args.layout.k_tiles_used();
  const int64_t tiles_at_once = std::max<int64_t>(1, kQuantisedAtOnce * chunk.passes / (chunk.rows * kKt));
  const int64_t runs = (k_tiles + tiles_at_once - 1) / tiles_at_once;
  parallel_unless_small(chunk.passes * runs, chunk.rows * k_tiles * kKt * 4, [&](int64_t item) {
    const int64_t p = item / runs;
    const int64_t first = item % runs * tiles_at_once;
    kernels.quantise(args, chunk.row0 + chunk.first_row(p), first, std::min(tiles_at_once, k_tiles - first),
                     chunk.offset, chunk.pass(p));
  });
}

// Passes [begin, end) of a chunk for one output tile.
void chunk_tile(const MatmulArgs& args, const Int8Kernels& kernels, const Chunk& chunk, int64_t n_tile, int64_t begin,
                int64_t end) {
  const int64_t first = chunk.first_row(begin);
  const int64_t rows = chunk.first_row(end) - first;
  static_assert(kInt8PreparedBytes % 64 == 0);
  std::byte* prepared = t_tile.at_least(kInt8PreparedBytes + rows * kNt * 4);
  auto* acc = reinterpret_cast<float*>(prepared + kInt8PreparedBytes);
  std::memset(acc, 0, static_cast<size_t>(rows * kNt * 4));
  const TileRun run = run_of(args, n_tile);
  const int64_t k_tiles = args.layout.k_tiles_used();
  const int64_t bytes = chunk.offset ? args.layout.tile_bytes : 0;  // of the next tile
  for (int64_t kt = 0; kt < k_tiles; ++kt) {
    kernels.prepare(run, kt, chunk.offset, prepared);
    const std::byte* next = run.tiles + (kt + 1) * args.layout.tile_bytes;
    for (int64_t p = begin; p < end; ++p) {
      const Int8Rows x = chunk.pass(p);
      const int64_t row = chunk.first_row(p);
      float* sums = acc + (row - first) * kNt;
      prefetch_part(next, bytes, p - begin, end - begin);
      if (kt + 1 < k_tiles) {
        kernels.pass(run, kt, chunk.offset, prepared, x, sums);
        continue;
      }
      prefetch_results(args, chunk.row0 + row, x.rows, n_tile);
      kernels.pass(run, kt, chunk.offset, prepared, x, sums);
      for (int r = 0; r < x.rows; ++r) kernels.store_row(args, chunk.row0 + row + r, n_tile, sums + r * kNt);
    }
  }
}

}  // namespace

const Int8Kernels& int8_kernels(CpuLevel level) {
#if defined(__x86_64__)
  switch (level) {
    case CpuLevel::avx2:
    case CpuLevel::avx512:
      return int8_kernels_avx2();
    case CpuLevel::avx512_vnni:
    case CpuLevel::avx512_bf16:
    case CpuLevel::avx512_bf16_model:
      return int8_kernels_vnni();
    case CpuLevel::portable:
      break;
  }
#else
  static_cast<void>(level);
#endif
  return int8_kernels_portable();
}

void matmul_int8(const MatmulArgs& args) {
  if (args.m == 0) return;
  const Int8Kernels& kernels = int8_kernels(current_level());
  const int64_t k = args.layout.k_tiles_used() * kKt;
  const int64_t n_tiles = args.layout.n_tiles_used();
  const int64_t chunks = (args.m + kRowsPerChunk - 1) / kRowsPerChunk;
  for (int64_t c = 0; c < chunks; ++c) {
    Chunk chunk = {.row0 = c * args.m / chunks,
                   .groups = k / args.layout.tile_group,
                   .offset = kernels.offset(args.layout, args.m)};
    chunk.rows = (c + 1) * args.m / chunks - chunk.row0;
    chunk.passes = (chunk.rows + kernels.max_rows - 1) / kernels.max_rows;
    const int64_t values = chunk.rows * chunk.groups;
    std::byte* memory = t_activations.at_least(chunk.rows * k + 2 * values * 4);
    chunk.words = reinterpret_cast<uint32_t*>(memory);
    chunk.scales = reinterpret_cast<float*>(memory + chunk.rows * k);
    chunk.sums = reinterpret_cast<int32_t*>(chunk.scales + values);
    quantise_chunk(args, kernels, chunk);
    const int64_t parts = std::min(row_parts(n_tiles, chunk.rows), chunk.passes);
    const int64_t bytes = chunk.rows * weight_bytes(args);
    parallel_passes(args.layout, parts, chunk.passes, bytes, [&](int64_t n_tile, int64_t begin, int64_t end) {
      chunk_tile(args, kernels, chunk, n_tile, begin, end);
    });
  }
}

}  // namespace tilefuse

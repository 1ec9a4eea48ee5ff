// What the matmul drivers share: the split over threads, and results on any CPU. Included by
// translation units of several instruction sets, hence the unnamed namespace: of one out-of-line copy for all, the
// linker might keep the one that not every CPU can run.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "bf16.h"
#include "matmul.h"
#include "matmul_kernels.h"
#include "prefetch.h"
#include "scratch.h"
#include "thread_pool.h"

namespace tilefuse {
namespace {

// Below this many bytes of tiles (times rows), a matmul takes some microseconds, as long as waking a thread: stay on
// one.
inline constexpr int64_t kSerialBytes = 128 * 1024;

// Row `row` of y in output tile `n_tile`: acc[64] plus bias, rounded once.
inline void store_row(const MatmulArgs& args, int64_t row, int64_t n_tile, const float* acc) {
  const int64_t n0 = n_tile * kNt;
  const int64_t count = std::min<int64_t>(kNt, args.layout.n - n0);
  float sums[kNt];
  for (int64_t i = 0; i < count; ++i) sums[i] = acc[i] + (args.bias == nullptr ? 0.0F : args.bias[n0 + i]);
  const int64_t at = row * args.y_stride + n0;
  switch (args.y_dtype) {
    case Dtype::f32:
      std::memcpy(static_cast<float*>(args.y) + at, sums, sizeof(float) * static_cast<size_t>(count));
      break;
    case Dtype::bf16:
      for (int64_t i = 0; i < count; ++i) static_cast<uint16_t*>(args.y)[at + i] = float_to_bf16(sums[i]);
      break;
    case Dtype::f16:
      for (int64_t i = 0; i < count; ++i) static_cast<uint16_t*>(args.y)[at + i] = float_to_half(sums[i]);
      break;
  }
}

// Asks for the results' memory of some rows of an output tile, each of which is on a page of its own. Lines of
// different rows lie in the same few sets of a cache, so no earlier than just before they are written.
TILEFUSE_ALWAYS_INLINE void prefetch_results(const MatmulArgs& args, int64_t row0, int64_t rows, int64_t n_tile) {
  const int64_t size = item_size(args.y_dtype);
  const int64_t bytes = std::min<int64_t>(kNt, args.layout.n - n_tile * kNt) * size;
  const auto* to = static_cast<const std::byte*>(args.y) + (row0 * args.y_stride + n_tile * kNt) * size;
  for (int64_t r = 0; r < rows; ++r, to += args.y_stride * size) {
    for (int64_t i = 0; i < bytes; i += 64) prefetch_to_write(to + i);
  }
}

inline TileRun run_of(const MatmulArgs& args, int64_t n_tile) {
  return {.layout = &args.layout, .tiles = args.weights + args.layout.tile_offset(n_tile, 0)};
}

// Of an output tile of parallel_tiles.
inline TileRun run_of(const MatmulArgs& args, int64_t n_tile, int64_t next_tile) {
  TileRun run = run_of(args, n_tile);
  if (next_tile >= 0) run.next = args.weights + args.layout.tile_offset(next_tile, 0);
  return run;
}

// Runs fn(item) for each item, on this thread alone if `bytes` of weights (times rows) are soon done.
template <typename Fn>
void parallel_unless_small(int64_t items, int64_t bytes, Fn&& fn) {
  if (bytes < kSerialBytes) {
    for (int64_t i = 0; i < items; ++i) fn(i);
  } else {
    ThreadPool::instance().parallel_for(items, [&](int64_t i, int) { fn(i); });
  }
}

// The i-th output tile in the order of memory.
inline int64_t tile_in_memory(const TileLayout& layout, int64_t i) {
  const int64_t full = layout.n_tiles_used() / layout.columns;  // tiles in every column
  const int64_t longer = layout.n_tiles_used() % layout.columns;
  // The first columns have one more.
  if (i < longer * (full + 1)) return i % (full + 1) * layout.columns + i / (full + 1);
  i -= longer * (full + 1);
  return i % full * layout.columns + longer + i / full;
}

// Runs fn(n_tile, next_tile) for each output tile, likewise; next_tile is the one that follows it, or -1. A thread
// takes stretches of tiles that follow each other in memory, long ones first: starting somewhere else costs a matmul
// that waits for memory a tenth of a run of tiles. Before its first tile it runs begin(), and none at all if that is
// false.
template <typename Begin, typename Fn>
void parallel_tiles(const TileLayout& layout, int64_t bytes, Begin&& begin, Fn&& fn) {
  const int64_t end = layout.n_tiles_used();
  const auto at = [&](int64_t i) { return i < end ? tile_in_memory(layout, i) : -1; };
  if (bytes < kSerialBytes) {
    if (!begin()) return;
    for (int64_t i = 0; i < end; ++i) fn(at(i), at(i + 1));
    return;
  }
  ThreadPool& pool = ThreadPool::instance();
  const int64_t threads = pool.num_threads();
  std::atomic<int64_t> next{0};
  pool.parallel_for(threads, [&](int64_t, int) {
    // [first, last) of the stretch that nobody else takes; empty at the end.
    const auto take = [&] {
      int64_t first = next.load(std::memory_order_relaxed);
      while (first < end) {
        const int64_t last = first + std::max<int64_t>(1, (end - first) / (2 * threads));
        if (next.compare_exchange_weak(first, last, std::memory_order_relaxed)) return std::pair(first, last);
      }
      return std::pair(end, end);
    };
    auto [first, last] = take();
    if (first == last || !begin()) return;
    while (first < last) {
      for (int64_t i = first; i < last - 1; ++i) fn(at(i), at(i + 1));
      // Taken before it is needed: what comes next has to be known while the last tile is computed.
      const auto [next_first, next_last] = take();
      fn(at(last - 1), at(next_first));
      first = next_first;
      last = next_last;
    }
  });
}

template <typename Fn>
void parallel_tiles(const TileLayout& layout, int64_t bytes, Fn&& fn) {
  parallel_tiles(layout, bytes, [] { return true; }, fn);
}

// Runs fn(n_tile, begin, end) for each output tile and, in `parts`, all of `passes`: [begin, end) of them at a time.
template <typename Fn>
void parallel_passes(const TileLayout& layout, int64_t parts, int64_t passes, int64_t bytes, Fn&& fn) {
  if (parts == 1)
    return parallel_tiles(layout, bytes, [&](int64_t n_tile, int64_t) { fn(n_tile, int64_t{0}, passes); });
  parallel_unless_small(layout.n_tiles_used() * parts, bytes, [&](int64_t item) {
    const int64_t part = item % parts;
    fn(item / parts, part * passes / parts, (part + 1) * passes / parts);
  });
}

inline int64_t weight_bytes(const MatmulArgs& args) {
  return args.layout.n_tiles_used() * args.layout.k_tiles_used() * args.layout.tile_bytes;
}

// A layer with few output tiles, or some that leave threads idle for a sixteenth of the time at the end, is also split
// by rows, in halves while every part keeps 96 rows: enough that dequantising a tile once more stays cheap.
inline int64_t row_parts(int64_t n_tiles, int64_t rows) {
  const int64_t threads = ThreadPool::instance().num_threads();
  const auto uneven = [threads](int64_t items) {
    const int64_t idle = (threads - items % threads) % threads;
    return items < 4 * threads || 16 * idle > items + idle;
  };
  int64_t parts = 1;
  while (uneven(n_tiles * parts) && rows / (2 * parts) >= 96) parts *= 2;
  return parts;
}

}  // namespace
}  // namespace tilefuse

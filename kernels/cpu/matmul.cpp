#include "matmul.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "activations.h"
#include "matmul_driver.h"
#include "matmul_kernels.h"
#include "thread_pool.h"

namespace tilefuse {
namespace {

// Rows that share one conversion of the activations and one dequantisation of each tile. At 384 rows dequantising is
// below 3 % of the multiplications on every level; a multiple of kMaxRowsPerPass and of kMaxPassRows.
constexpr int64_t kRowsPerChunk = 384;

constexpr int64_t kRowsForSmallPanel = 24;

constexpr int64_t kOwnDigitRows = 2;

thread_local Scratch t_activations;  // of the calling thread, or of each that writes its own
thread_local Scratch t_tile;         // of each thread that computes tiles

template <typename Fn>
void fused_over_tiles(const MatmulArgs& args, Fn&& kernel) {
  parallel_tiles(args.layout, args.m * weight_bytes(args), [&](int64_t n_tile, int64_t next_tile) {
    auto* acc = reinterpret_cast<float*>(t_tile.at_least(args.m * kNt * 4));
    kernel(run_of(args, n_tile, next_tile), acc);
    for (int64_t r = 0; r < args.m; ++r) store_row(args, r, n_tile, acc + r * kNt);
  });
}

// One or two rows as digits, which each thread writes for itself: that takes as long as fetching them from the cache of
// another core. False if a row can't be held that way.
bool matmul_own_digits(const MatmulArgs& args, const FewRowsKernels& kernels) {
  const int64_t row_bytes = kernels.row_bytes(args.layout);
  std::atomic<bool> held{true};
  const auto write = [&] {
    std::byte* digits = t_activations.at_least(args.m * row_bytes);
    for (int64_t r = 0; r < args.m; ++r) {
      std::byte* scratch = t_tile.at_least(kernels.scratch_bytes(args.layout));
      if (!kernels.write(args, r, digits + r * row_bytes, scratch)) {
        held.store(false, std::memory_order_relaxed);
        return false;
      }
    }
    return true;
  };
  parallel_tiles(args.layout, args.m * weight_bytes(args), write, [&](int64_t n_tile, int64_t next_tile) {
    const std::byte* digits = t_activations.at_least(args.m * row_bytes);
    auto* acc = reinterpret_cast<float*>(t_tile.at_least(args.m * kNt * 4));
    kernels.fused(run_of(args, n_tile, next_tile), digits, static_cast<int>(args.m), acc);
    for (int64_t r = 0; r < args.m; ++r) store_row(args, r, n_tile, acc + r * kNt);
  });
  return held.load(std::memory_order_relaxed);
}

// Few rows as digits; false if a row can't be held that way. Of a product of many rows some may have been written when
// one is refused.
bool matmul_few(const MatmulArgs& args, const FewRowsKernels& kernels) {
  if (args.m <= kOwnDigitRows) return matmul_own_digits(args, kernels);
  const int64_t row_bytes = kernels.row_bytes(args.layout);
  const int64_t n_tiles = args.layout.n_tiles_used();
  for (int64_t row0 = 0; row0 < args.m; row0 += kRowsPerChunk) {
    const int64_t rows = std::min(kRowsPerChunk, args.m - row0);
    const int64_t bytes = rows * weight_bytes(args);
    std::byte* digits = t_activations.at_least(rows * row_bytes);
    std::atomic<bool> held{true};
    // Writing a few rows takes as long as waking a thread.
    parallel_unless_small(rows, rows < 4 ? 0 : bytes, [&](int64_t r) {
      std::byte* scratch = t_tile.at_least(kernels.scratch_bytes(args.layout));
      if (!kernels.write(args, row0 + r, digits + r * row_bytes, scratch)) held.store(false, std::memory_order_relaxed);
    });
    if (!held.load(std::memory_order_relaxed)) return false;
    const int64_t parts = (rows + kMaxFewRows - 1) / kMaxFewRows;
    const auto part_tile = [&](int64_t part, int64_t n_tile, int64_t next_tile) {
      const int64_t first = part * rows / parts;
      const int64_t count = (part + 1) * rows / parts - first;
      auto* acc = reinterpret_cast<float*>(t_tile.at_least(count * kNt * 4));
      kernels.fused(run_of(args, n_tile, next_tile), digits + first * row_bytes, static_cast<int>(count), acc);
      for (int64_t r = 0; r < count; ++r) store_row(args, row0 + first + r, n_tile, acc + r * kNt);
    };
    if (parts == 1) {
      parallel_tiles(args.layout, bytes, [&](int64_t n_tile, int64_t next_tile) { part_tile(0, n_tile, next_tile); });
    } else {
      parallel_unless_small(n_tiles * parts, bytes,
                            [&](int64_t item) { part_tile(item / n_tiles, item % n_tiles, -1); });
    }
  }
  return true;
}

void matmul_fused_f32(const MatmulArgs& args, const MatmulKernels& kernels) {
  const int64_t k = args.layout.k_tiles_used() * kKt;
  auto* x = reinterpret_cast<float*>(t_activations.at_least(args.m * k * 4));
  for (int64_t r = 0; r < args.m; ++r) write_row(args, r, k, x + r * k);
  fused_over_tiles(
      args, [&](const TileRun& run, float* acc) { kernels.fused_w4_f32(run, x, k, static_cast<int>(args.m), acc); });
}

// Rows [row0, row0 + rows) of one output tile by way of panels in float. `x` holds those rows.
void panel_tile(const MatmulArgs& args, const MatmulKernels& kernels, int64_t n_tile, int64_t row0, int64_t rows,
                const float* x) {
  const int64_t k = args.layout.k_tiles_used() * kKt;
  constexpr int64_t kPanelBytes = int64_t{kPanelTiles} * kKt * kNt * 4;
  std::byte* memory = t_tile.at_least(kPanelBytes + rows * kNt * 4);
  auto* acc = reinterpret_cast<float*>(memory + kPanelBytes);
  const TileRun run = run_of(args, n_tile);
  const int64_t k_tiles = args.layout.k_tiles_used();
  // Few rows read a panel once or twice: one tile at a time stays in L1. Many rows: fewer passes over the sums.
  const int64_t step = rows <= kRowsForSmallPanel ? 1 : kPanelTiles;
  for (int64_t kt = 0; kt < k_tiles; kt += step) {
    const auto count = static_cast<int>(std::min<int64_t>(step, k_tiles - kt));
    kernels.dequantise(run, kt, count, memory);
    for (int64_t r = 0; r < rows; r += kMaxRowsPerPass) {
      const auto here = static_cast<int>(std::min<int64_t>(kMaxRowsPerPass, rows - r));
      kernels.panel_rows(memory, int64_t{count} * kKt, x + r * k + kt * kKt, k, here, acc + r * kNt, kt == 0);
    }
  }
  for (int64_t r = 0; r < rows; ++r) store_row(args, row0 + r, n_tile, acc + r * kNt);
}

void matmul_panels(const MatmulArgs& args, const MatmulKernels& kernels) {
  ThreadPool& pool = ThreadPool::instance();
  const int64_t k = args.layout.k_tiles_used() * kKt;
  const int64_t n_tiles = args.layout.n_tiles_used();
  for (int64_t row0 = 0; row0 < args.m; row0 += kRowsPerChunk) {
    const int64_t rows = std::min(kRowsPerChunk, args.m - row0);
    auto* x = reinterpret_cast<float*>(t_activations.at_least(rows * k * 4));
    pool.parallel_for(rows, [&](int64_t r, int) { write_row(args, row0 + r, k, x + r * k); });
    const int64_t parts = row_parts(n_tiles, rows);
    const int64_t part_rows = (rows / parts + kMaxRowsPerPass) / kMaxRowsPerPass * kMaxRowsPerPass;
    pool.parallel_for(n_tiles * parts, [&](int64_t item, int) {
      const int64_t begin = item % parts * part_rows;
      const int64_t count = std::min(part_rows, rows - begin);
      if (count > 0) panel_tile(args, kernels, item / parts, row0 + begin, count, x + begin * k);
    });
  }
}

// A chunk of rows in passes of nearly equal size: none is left with so few rows that its registers are idle.
struct Chunk {
  int64_t row0 = 0;  // of the product
  int64_t rows = 0;
  int64_t passes = 0;
  uint32_t* words = nullptr;  // [k tiles][passes][64][rows of the pass]
  float* sums = nullptr;      // [passes][groups][rows of the pass], or null
  int64_t groups = 0;

  [[nodiscard]] int64_t first_row(int64_t pass) const { return pass * rows / passes; }
  [[nodiscard]] PassRows pass(int64_t i) const {
    const int64_t first = first_row(i);
    return {.words = words + first * (kKt / 2),
            .tile_stride = rows * (kKt / 2),
            .sums = sums == nullptr ? nullptr : sums + first * groups,
            .rows = static_cast<int>(first_row(i + 1) - first)};
  }
};

// Passes [begin, end) of a chunk for one output tile.
void passes_tile(const MatmulArgs& args, const PassKernels& kernels, bool fused, const Chunk& chunk, int64_t n_tile,
                 int64_t begin, int64_t end) {
  const int64_t first = chunk.first_row(begin);
  const int64_t rows = chunk.first_row(end) - first;
  constexpr int64_t kPanelBytes = int64_t{kPanelTiles} * kKt * kNt * 2;
  std::byte* memory = t_tile.at_least(kPanelBytes + rows * kNt * 4);
  auto* acc = reinterpret_cast<float*>(memory + kPanelBytes);
  std::memset(acc, 0, static_cast<size_t>(rows * kNt * 4));
  const TileRun run = run_of(args, n_tile);
  const int64_t k_tiles = args.layout.k_tiles_used();
  const int64_t step = fused || rows <= kRowsForSmallPanel ? 1 : kPanelTiles;
  for (int64_t kt = 0; kt < k_tiles; kt += step) {
    const auto count = static_cast<int>(std::min<int64_t>(step, k_tiles - kt));
    if (!fused) kernels.dequantise(run, kt, count, memory);
    // Dequantising reads weights faster than memory delivers them, the products take long enough.
    const std::byte* next = run.tiles + (kt + count) * args.layout.tile_bytes;
    for (int64_t p = begin; p < end; ++p) {
      if (!fused) prefetch_part(next, step * args.layout.tile_bytes, p - begin, end - begin);
      float* to = acc + (chunk.first_row(p) - first) * kNt;
      if (kt + step >= k_tiles) prefetch_results(args, chunk.row0 + chunk.first_row(p), chunk.pass(p).rows, n_tile);
      if (fused) {
        kernels.fused(run, kt, chunk.pass(p), to);
      } else {
        kernels.panel_pass(memory, kt, count, args.layout.k - kt * kKt, chunk.pass(p), to);
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) kernels.store_row(args, chunk.row0 + first + r, n_tile, acc + r * kNt);
}

void matmul_passes(const MatmulArgs& args, const PassKernels& kernels) {
  const int64_t k = args.layout.k_tiles_used() * kKt;
  const int64_t n_tiles = args.layout.n_tiles_used();
  const int64_t groups = k / args.layout.tile_group;
  const bool minima = args.layout.zero == ZeroKind::m16;
  const bool few = args.m <= kernels.fused_rows(args.layout);
  const int64_t chunks = (args.m + kRowsPerChunk - 1) / kRowsPerChunk;
  for (int64_t c = 0; c < chunks; ++c) {
    Chunk chunk = {.row0 = c * args.m / chunks, .groups = groups};
    chunk.rows = (c + 1) * args.m / chunks - chunk.row0;
    const int64_t pass_rows = few ? kMaxPassRows : kMaxPanelRows;
    chunk.passes = (chunk.rows + pass_rows - 1) / pass_rows;
    const int64_t words_bytes = chunk.rows * k * 2;
    std::byte* memory = t_activations.at_least(words_bytes + (minima ? chunk.rows * groups * 4 : 0));
    chunk.words = reinterpret_cast<uint32_t*>(memory);
    if (minima) chunk.sums = reinterpret_cast<float*>(memory + words_bytes);
    std::atomic<bool> exact{true};
    const int64_t bytes = chunk.rows * weight_bytes(args);
    // Few passes are also split along K, so that every thread has work.
    const int64_t k_tiles = args.layout.k_tiles_used();
    const int64_t k_parts = std::clamp<int64_t>(2 * ThreadPool::instance().num_threads() / chunk.passes, 1, k_tiles);
    parallel_unless_small(chunk.passes * k_parts, bytes, [&](int64_t item) {
      const int64_t p = item / k_parts;
      const int64_t part = item % k_parts;
      const PassRows pass = chunk.pass(p);
      const bool fits =
          kernels.write_pass(args, chunk.row0 + chunk.first_row(p), pass.rows, part * k_tiles / k_parts,
                             (part + 1) * k_tiles / k_parts, chunk.words + chunk.first_row(p) * (kKt / 2),
                             pass.tile_stride, minima ? chunk.sums + chunk.first_row(p) * groups : nullptr);
      if (!fits) exact.store(false, std::memory_order_relaxed);
    });
    const bool fused = few && exact.load(std::memory_order_relaxed);
    const int64_t parts = row_parts(n_tiles, chunk.rows);
    parallel_passes(args.layout, parts, chunk.passes, bytes, [&](int64_t n_tile, int64_t begin, int64_t end) {
      passes_tile(args, kernels, fused, chunk, n_tile, begin, end);
    });
  }
}

}  // namespace

const MatmulKernels& matmul_kernels(CpuLevel level) {
#if defined(__x86_64__)
  switch (level) {
    case CpuLevel::avx2:
      return matmul_kernels_avx2();
    case CpuLevel::avx512:
      return matmul_kernels_avx512();
    case CpuLevel::avx512_vnni:
      return matmul_kernels_avx512_vnni();
    case CpuLevel::avx512_bf16:
      return matmul_kernels_avx512_bf16();
    case CpuLevel::avx512_bf16_model:
      return matmul_kernels_avx512_bf16_model();
    case CpuLevel::portable:
      break;
  }
#else
  static_cast<void>(level);
#endif
  return matmul_kernels_portable();
}

void matmul(const MatmulArgs& args) {
  if (args.m == 0) return;
  const MatmulKernels& kernels = matmul_kernels(current_level());
  if (kernels.few != nullptr && args.m <= kernels.few->max_rows(args.layout) && matmul_few(args, *kernels.few)) return;
  if (args.layout.bits == 4 && args.m <= kernels.fused_rows_w4) return matmul_fused_f32(args, kernels);
  if (kernels.passes != nullptr) return matmul_passes(args, *kernels.passes);
  matmul_panels(args, kernels);
}

}  // namespace tilefuse

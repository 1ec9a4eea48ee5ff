#include "matmul.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "activations.h"
#include "bf16.h"
#include "matmul_kernels.h"
#include "thread_pool.h"

namespace tilefuse {
namespace {

// Rows that share one conversion of the activations and one dequantisation of each tile. At 384 rows dequantising is
// below 3 % of the multiplications on every level; a multiple of kMaxRowsPerPass.
constexpr int64_t kRowsPerChunk = 384;

constexpr int64_t kRowsForSmallPanel = 24;

// Below this many bytes of tiles (times rows), a matmul takes some microseconds, as long as waking a thread: stay on
// one.
constexpr int64_t kSerialBytes = 128 * 1024;

// Scratch that grows and is kept, one a thread and purpose: no allocation per call once warm.
class Scratch {
 public:
  std::byte* at_least(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      const auto rounded = static_cast<size_t>((bytes + 4095) / 4096 * 4096);
      memory_.reset(static_cast<std::byte*>(std::aligned_alloc(4096, rounded)));
      if (!memory_) throw std::bad_alloc();
      size_ = static_cast<int64_t>(rounded);
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  int64_t size_ = 0;
};

thread_local Scratch t_activations;  // of the calling thread
thread_local Scratch t_tile;         // of each thread that computes tiles

void store_row(const MatmulArgs& args, int64_t row, int64_t n_tile, const float* acc) {
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

TileRun run_of(const MatmulArgs& args, int64_t n_tile) {
  return {.layout = &args.layout, .tiles = args.weights + args.layout.tile_offset(n_tile, 0)};
}

template <typename Fn>
void fused_over_tiles(const MatmulArgs& args, Fn&& kernel) {
  const int64_t n_tiles = args.layout.n_tiles_used();
  const auto one_tile = [&](int64_t n_tile, int) {
    auto* acc = reinterpret_cast<float*>(t_tile.at_least(args.m * kNt * 4));
    kernel(run_of(args, n_tile), acc);
    for (int64_t r = 0; r < args.m; ++r) store_row(args, r, n_tile, acc + r * kNt);
  };
  if (args.m * n_tiles * args.layout.k_tiles_used() * args.layout.tile_bytes < kSerialBytes) {
    for (int64_t n_tile = 0; n_tile < n_tiles; ++n_tile) one_tile(n_tile, 0);
  } else {
    ThreadPool::instance().parallel_for(n_tiles, one_tile);
  }
}

// Few rows as digits; false if a row can't be held that way (nothing has been written then).
bool matmul_digits(const MatmulArgs& args, const MatmulKernels& kernels) {
  const int64_t k = args.layout.k_tiles_used() * kKt;
  const int64_t groups = k / args.layout.tile_group;
  const XFormat format = args.layout.bits == 4 ? XFormat::digits4 : XFormat::digits8;
  const int64_t sums_bytes = args.m * groups * kDigits * 4;
  const int64_t scales_bytes = args.m * groups * 4;
  const int64_t rests_bytes = args.m * rest_capacity(k) * static_cast<int64_t>(sizeof(DigitRest));
  std::byte* memory = t_activations.at_least(rests_bytes + sums_bytes + scales_bytes + k * 4 + args.m * k * kDigits);
  auto* rests = reinterpret_cast<DigitRest*>(memory);
  auto* sums = reinterpret_cast<int32_t*>(memory += rests_bytes);
  auto* scales = reinterpret_cast<float*>(memory += sums_bytes);
  auto* floats = reinterpret_cast<float*>(memory += scales_bytes);
  auto* digits = reinterpret_cast<int8_t*>(memory += k * 4);
  for (int64_t r = 0; r < args.m; ++r) {
    if (!write_digits(args, r, k, format, floats, digits + r * k * kDigits, scales + r * groups,
                      sums + r * groups * kDigits, rests + r * rest_capacity(k))) {
      return false;
    }
  }
  const DigitRows x = {.digits = digits, .scales = scales, .sums = sums, .rests = rests, .k = k};
  fused_over_tiles(
      args, [&](const TileRun& run, float* acc) { kernels.fused_digits(run, x, static_cast<int>(args.m), acc); });
  return true;
}

void matmul_fused_f32(const MatmulArgs& args, const MatmulKernels& kernels) {
  const int64_t k = args.layout.k_tiles_used() * kKt;
  auto* x = reinterpret_cast<float*>(t_activations.at_least(rows_bytes(XFormat::f32, args.m, k)));
  for (int64_t r = 0; r < args.m; ++r) write_row(args, r, k, XFormat::f32, x + r * k);
  fused_over_tiles(
      args, [&](const TileRun& run, float* acc) { kernels.fused_w4_f32(run, x, k, static_cast<int>(args.m), acc); });
}

// Rows [row0, row0 + rows) of one output tile by way of panels. `x` holds those rows.
void panel_tile(const MatmulArgs& args, const MatmulKernels& kernels, int64_t n_tile, int64_t row0, int64_t rows,
                const std::byte* x) {
  const int64_t k = args.layout.k_tiles_used() * kKt;
  const bool pairs = kernels.panel_format == XFormat::bf16_pairs;
  const int64_t x_stride = pairs ? k / 2 : k;
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
    const std::byte* from = x + rows_bytes(kernels.panel_format, 1, kt * kKt);
    for (int64_t r = 0; r < rows; r += kMaxRowsPerPass) {
      const auto here = static_cast<int>(std::min<int64_t>(kMaxRowsPerPass, rows - r));
      kernels.panel_rows(memory, int64_t{count} * kKt, from + r * x_stride * 4, x_stride, here, acc + r * kNt, kt == 0);
    }
  }
  for (int64_t r = 0; r < rows; ++r) store_row(args, row0 + r, n_tile, acc + r * kNt);
}

void matmul_panels(const MatmulArgs& args, const MatmulKernels& kernels) {
  ThreadPool& pool = ThreadPool::instance();
  const int64_t k = args.layout.k_tiles_used() * kKt;
  const int64_t row_bytes = rows_bytes(kernels.panel_format, 1, k);
  const int64_t n_tiles = args.layout.n_tiles_used();
  for (int64_t row0 = 0; row0 < args.m; row0 += kRowsPerChunk) {
    const int64_t rows = std::min(kRowsPerChunk, args.m - row0);
    std::byte* x = t_activations.at_least(rows * row_bytes);
    pool.parallel_for(rows,
                      [&](int64_t r, int) { write_row(args, row0 + r, k, kernels.panel_format, x + r * row_bytes); });
    // A layer with few output tiles is also split by rows, in halves while every part keeps 96 rows: enough that
    // dequantising a tile once more stays cheap, and every thread has work.
    int64_t parts = 1;
    while (n_tiles * parts < 4 * pool.num_threads() && rows / (2 * parts) >= 96) parts *= 2;
    const int64_t part_rows = (rows / parts + kMaxRowsPerPass) / kMaxRowsPerPass * kMaxRowsPerPass;
    pool.parallel_for(n_tiles * parts, [&](int64_t item, int) {
      const int64_t begin = item % parts * part_rows;
      const int64_t count = std::min(part_rows, rows - begin);
      if (count > 0) panel_tile(args, kernels, item / parts, row0 + begin, count, x + begin * row_bytes);
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
  if (args.m <= kernels.fused_rows) {
    if (kernels.fused_digits != nullptr && matmul_digits(args, kernels)) return;
    if (kernels.fused_w4_f32 != nullptr && args.layout.bits == 4) return matmul_fused_f32(args, kernels);
  }
  matmul_panels(args, kernels);
}

}  // namespace tilefuse

#include "staging.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu_features.h"
#include "staging_kernels.h"
#include "thread_pool.h"

namespace tilefuse {
namespace {

// K tiles of 16 rows that a thread takes at a time: 32 KiB to 64 KiB of x.
constexpr int64_t kTilesPerItem = 8;

// Below this many activations waking threads takes as long as the work.
constexpr int64_t kSerialActivations = 64 * 1024;

// One row of eight values at a time.
struct Rows1 {
  static uint16_t write_band(const uint16_t* rows, std::byte* out) {
    int seen = 0;
    for (int k = 0; k < kKt; k += kBlock) {
      for (int r = 0; r < kBandRows; ++r) {
        seen = std::max(seen, write_row(rows + r * kKt + k, out));
        out += 9;
      }
    }
    return static_cast<uint16_t>(seen);
  }

 private:
  // As write_band in staging_kernels.h; returns the largest magnitude.
  static int write_row(const uint16_t* values, std::byte* out) {
    int largest = 0;
    int most_positive = 0;
    int bits[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      const int magnitude = values[i] & 0x7fff;
      bits[i] = magnitude > 0x7f ? values[i] : 0;
      largest = std::max(largest, bits[i] & 0x7fff);
      most_positive = std::max(most_positive, bits[i] < 0x8000 ? bits[i] : 0);
    }
    const int exponent = (largest >> 7) + (most_positive == (largest | 0x7f) ? 1 : 0);
    out[0] = static_cast<std::byte>(exponent);
    for (int i = 0; i < kBlock; ++i) {
      const int magnitude = bits[i] & 0x7fff;
      const int shift = std::min(exponent + 1 - (magnitude >> 7), 15);
      const int significand = magnitude == 0 ? 0 : 0x80 | (magnitude & 0x7f);
      const int quotient = significand >> shift;
      const int half = (1 << shift) >> 1;
      const int rest = significand - (quotient << shift);
      const int rounded = quotient + (rest + (quotient & 1) > half ? 1 : 0);
      out[1 + i] = static_cast<std::byte>(bits[i] < 0x8000 ? rounded : -rounded);
    }
    return largest;
  }
};

const StagingKernels& kernels_of(CpuLevel level) {
#if defined(__x86_64__)
  if (level == CpuLevel::avx2) return staging_kernels_avx2();
  if (level != CpuLevel::portable) return staging_kernels_avx512();
#else
  static_cast<void>(level);
#endif
  return staging_kernels_portable();
}

// Sixteen rows of x, from `row0` on, over k tiles [first, last), to their places. False: something is not finite.
bool stage_rows(const StagingArgs& args, const StagingKernels& kernels, int64_t row0, int64_t first, int64_t last) {
  const int64_t group = row0 / kBandRows;
  const int64_t block = group / (kRows * args.bands);
  const int64_t array_row = group / args.joined % kRows;
  const int64_t band = group % (kRows * args.bands) / (kRows * args.joined) * args.joined + group % args.joined;
  std::byte* out = args.out + (((block * kRows + array_row) * args.k_tiles + first) * args.bands + band) * kBandBytes;
  const int64_t element = item_size(args.x_dtype);
  const auto rows = static_cast<int>(std::clamp<int64_t>(args.m - row0, 0, kBandRows));
  alignas(64) uint16_t piece[kBandRows * kKt] = {};
  bool finite = true;
  for (int64_t tile = first; tile < last; ++tile, out += args.bands * kBandBytes) {
    const int64_t k0 = tile * kKt;
    const int64_t count = std::clamp<int64_t>(args.k - k0, 0, kKt);
    if (rows == 0 || count == 0) {
      std::memset(out, 0, kBandBytes);  // what zeros become
      continue;
    }
    for (int r = 0; r < rows; ++r) {
      const auto* row = static_cast<const std::byte*>(args.x) + (row0 + r) * args.x_stride * element;
      uint16_t* to = piece + r * kKt;
      if (args.perm == nullptr) {
        kernels.load(row + k0 * element, args.x_dtype, nullptr, count, to);
      } else {
        kernels.load(row, args.x_dtype, args.perm + k0, count, to);
      }
      std::fill(to + count, to + kKt, uint16_t{0});
    }
    finite &= kernels.write_band(piece, out) < kBf16Infinity;
  }
  return finite;
}

std::optional<Place> first_not_finite(const StagingArgs& args) {
  const int64_t element = item_size(args.x_dtype);
  for (int64_t row = 0; row < args.m; ++row) {
    const auto* at = static_cast<const std::byte*>(args.x) + row * args.x_stride * element;
    for (int64_t i = 0; i < args.k; ++i) {
      uint16_t bits = 0;
      staging_kernels_portable().load(at + i * element, args.x_dtype, nullptr, 1, &bits);
      if ((bits & 0x7fff) >= kBf16Infinity) return Place{.row = row, .column = i};
    }
  }
  return std::nullopt;
}

}  // namespace

const StagingKernels& staging_kernels_portable() {
  static constexpr StagingKernels kernels = {.load = load_row, .write_band = Rows1::write_band};
  return kernels;
}

std::optional<Place> stage_bfp16(const StagingArgs& args) {
  const StagingKernels& kernels = kernels_of(current_level());
  const int64_t parts = (args.k_tiles + kTilesPerItem - 1) / kTilesPerItem;
  const int64_t items = args.row_blocks * kRows * args.bands * parts;
  std::atomic<bool> finite{true};
  const auto stage = [&](int64_t item, int) {
    const int64_t first = item % parts * kTilesPerItem;
    const int64_t last = std::min(first + kTilesPerItem, args.k_tiles);
    if (!stage_rows(args, kernels, item / parts * kBandRows, first, last))
      finite.store(false, std::memory_order_relaxed);
  };
  if (args.m * args.k < kSerialActivations) {
    for (int64_t item = 0; item < items; ++item) stage(item, 0);
  } else {
    ThreadPool::instance().parallel_for(items, stage);
  }
  return finite.load(std::memory_order_relaxed) ? std::nullopt : first_not_finite(args);
}

}  // namespace tilefuse

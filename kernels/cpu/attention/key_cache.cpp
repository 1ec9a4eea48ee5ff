#include "attention/key_cache.h"

#include <algorithm>
#include <cstring>

#include "attention/key_store.h"
#include "attention/packing.h"
#include "thread_pool.h"

namespace tilefuse {
namespace {

// Below this many elements waking a thread takes longer.
constexpr int64_t kSerialElements = int64_t{1} << 15;

// The open block of one head.
class OpenBlock {
 public:
  OpenBlock(const BlockLayout& layout, std::byte* at)
      : layout_(layout),
        at_(at),
        keys_(reinterpret_cast<uint16_t*>(at + layout.bytes)),
        values_(keys_ + kKeyBlock * layout.d) {}

  [[nodiscard]] uint16_t* keys() const { return keys_; }
  [[nodiscard]] uint16_t* values() const { return values_; }

  // Writes rows [first, last) into the packed form. What lies beyond is zero: a probability of 0 times NaN is NaN.
  void pack(int64_t first, int64_t last) const {
    if (first == 0) std::memset(at_, 0, static_cast<size_t>(layout_.bytes));
    auto* k = reinterpret_cast<uint16_t*>(at_ + layout_.k16);
    auto* v = reinterpret_cast<uint16_t*>(at_ + layout_.v16);
    const int64_t dv = layout_.padded_dv();
    for (int64_t j = first; j < last; ++j) {
      for (int64_t c = 0; c < layout_.d; ++c) k[(c / 2 * kKeyBlock + j) * 2 + c % 2] = keys_[j * layout_.d + c];
      for (int64_t c = 0; c < layout_.dv; ++c) v[(j / 2 * dv + c) * 2 + j % 2] = values_[j * layout_.dv + c];
    }
  }

  // The rows of a packed block, the first `count` of them.
  void unpack(const KeyBlock& from, int64_t count) const {
    const auto* k = reinterpret_cast<const uint16_t*>(from.k16);
    const auto* v = reinterpret_cast<const uint16_t*>(from.v16);
    const int64_t dv = layout_.padded_dv();
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t c = 0; c < layout_.d; ++c) keys_[j * layout_.d + c] = k[(c / 2 * kKeyBlock + j) * 2 + c % 2];
      for (int64_t c = 0; c < layout_.dv; ++c) values_[j * layout_.dv + c] = v[(j / 2 * dv + c) * 2 + j % 2];
    }
  }

 private:
  const BlockLayout& layout_;
  std::byte* at_;
  uint16_t* keys_;
  uint16_t* values_;
};

// bf16 [64][dv] as codes, a scale for each token.
void quantise_values(const AttentionKernels& kernels, const uint16_t* from, const BlockLayout& layout, std::byte* to) {
  auto* codes = reinterpret_cast<int8_t*>(to + layout.v8);
  auto* scales = reinterpret_cast<float*>(to + layout.v_scales);
  const int64_t dv = layout.padded_dv();
  for (int64_t j = 0; j < kKeyBlock; ++j, from += layout.dv) {
    scales[j] = scale_of(kernels.largest(from, layout.dv));
    for (int64_t c = 0; c < layout.dv; ++c) {
      codes[(j / 2 * dv + c) * 2 + j % 2] = static_cast<int8_t>(code_of(bf16_to_float(from[c]), scales[j]));
    }
  }
}

void seal(const AttentionKernels& kernels, const KeyCache& cache, const OpenBlock& block, std::byte* to) {
  const BlockLayout& layout = cache.sealed;
  std::memset(to, 0, static_cast<size_t>(layout.bytes));  // also what lies between the parts
  if (layout.k16 != kAbsent) kernels.pack_keys16(block.keys(), layout.d, to + layout.k16);
  if (layout.k8 != kAbsent) {
    auto* mean = reinterpret_cast<uint16_t*>(to + layout.mean);
    const bool smooth = cache.smoothing != Smoothing::none;
    if (smooth) kernels.mean_of_keys(block.keys(), kKeyBlock, layout.d, mean);
    const float scale = kernels.pack_keys8(block.keys(), kKeyBlock, layout.d, smooth ? mean : nullptr, to + layout.k8);
    std::memcpy(to + layout.k_scale, &scale, sizeof(scale));
  }
  if (layout.v16 != kAbsent) kernels.pack_values16(block.values(), layout.dv, to + layout.v16);
  if (layout.v8 != kAbsent) quantise_values(kernels, block.values(), layout, to);
}

void append_head(const AttentionKernels& kernels, const KeyCache& cache, const HeadRows<const void>& k,
                 const HeadRows<const void>& v, const CachedSequence& s, int64_t head) {
  const OpenBlock block(cache.open, s.open + head * s.open_stride);
  for (int64_t done = 0; done < s.count;) {
    const int64_t at = s.length + done;
    const int64_t filled = at % kKeyBlock;
    const int64_t rows = std::min(kKeyBlock - filled, s.count - done);
    load_rows(kernels, k, s.k_at, head, done, rows, cache.open.d, block.keys() + filled * cache.open.d);
    spread_infinite(kernels, block.keys() + filled * cache.open.d, rows * cache.open.d);
    load_rows(kernels, v, s.v_at, head, done, rows, cache.open.dv, block.values() + filled * cache.open.dv);
    const bool full = filled + rows == kKeyBlock;
    const bool to_sink = s.sink != nullptr && at < kKeyBlock;
    if (!full || to_sink) block.pack(filled, filled + rows);
    if (full) {
      seal(kernels, cache, block, s.sealed + head * s.sealed_stride + at / kKeyBlock * cache.sealed.bytes);
      if (to_sink) {
        std::memcpy(s.sink + head * s.open_stride, s.open + head * s.open_stride,
                    static_cast<size_t>(cache.open.bytes));
      }
    }
    done += rows;
  }
}

void reopen_head(const KeyCache& cache, const CachedSequence& s, int64_t head) {
  const int64_t kept = s.count % kKeyBlock;
  if (kept == 0) return;
  std::byte* at = s.open + head * s.open_stride;
  const OpenBlock block(cache.open, at);
  const int64_t t = s.count / kKeyBlock;
  if (t < s.length / kKeyBlock) {
    const bool from_sink = t == 0 && s.sink != nullptr;
    const std::byte* from =
        from_sink ? s.sink + head * s.open_stride : s.sealed + head * s.sealed_stride + t * cache.sealed.bytes;
    block.unpack(block_at(from_sink ? cache.open : cache.sealed, from), kept);
  }
  block.pack(0, kept);
}

}  // namespace

void append(const KeyCache& cache, const HeadRows<const void>& k, const HeadRows<const void>& v,
            const CachedSequence* sequences, int64_t batch) {
  const AttentionKernels& kernels = attention_kernels(current_level());
  int64_t elements = 0;
  for (int64_t b = 0; b < batch; ++b) elements += sequences[b].count * cache.heads * (cache.open.d + cache.open.dv);
  const auto item = [&](int64_t i, int) {
    append_head(kernels, cache, k, v, sequences[i / cache.heads], i % cache.heads);
  };
  const int64_t items = batch * cache.heads;
  if (elements < kSerialElements) {
    for (int64_t i = 0; i < items; ++i) item(i, 0);
  } else {
    ThreadPool::instance().parallel_for(items, item);
  }
}

void reopen(const KeyCache& cache, const CachedSequence* sequences, int64_t batch) {
  for (int64_t i = 0; i < batch * cache.heads; ++i) reopen_head(cache, sequences[i / cache.heads], i % cache.heads);
}

}  // namespace tilefuse

#include "attention/attention.h"

#include <vector>

#include "attention/row_tile.h"
#include "thread_pool.h"

namespace tilefuse {
namespace {

thread_local Scratch t_store;  // of the calling thread: packed keys and values
thread_local Scratch t_tile;   // of each thread that attends

// Packed keys and values that are held at a time; heads that need more come in turn.
constexpr int64_t kStoreBytes = int64_t{128} << 20;
constexpr int64_t kPackBlocks = 8;  // to a task of a thread

// Rows of a row tile that are attended together, so that their state stays in the L2 cache.
constexpr int64_t kStateBytes = 512 << 10;

// Below this many products a call takes some microseconds, as long as waking a thread.
constexpr int64_t kSerialProducts = int64_t{1} << 19;

// Time of a tile by the INT8 path and by the 16-bit one.
constexpr int64_t kCost8 = 3;
constexpr int64_t kCost16 = 4;

// One key head of one sequence, packed for this call.
struct Head {
  const AttentionSequence* sequence;
  int64_t kv_head;
  int64_t at;        // of what follows, in the calling thread's store
  std::byte* store;  // [blocks]; null: from the cache, or packed as needed
  uint16_t* mean;    // [d], for Smoothing::global
  size_t wanted;     // of its first block, in Lists::wanted
};

struct Task {
  RowTileTask tile;
  int64_t cost;
};

struct Piece {
  const Head* head;
  int64_t first;
  int64_t last;
};

// What a call has to do; kept, so that a warm call allocates nothing.
struct Lists {
  std::vector<Head> heads;
  std::vector<Task> tasks;
  std::vector<Piece> pieces;
  std::vector<uint8_t> wanted;  // of each stored block: bit 0 by the 16-bit path, bit 1 by the INT8 path
};
thread_local Lists t_lists;

class Attention {
 public:
  explicit Attention(const AttentionProblem& problem)
      : p_(problem),
        kernels_(attention_kernels(current_level())),
        layout_(BlockLayout::of(problem.d, problem.dv, true, problem.words != nullptr, true, false)) {}

  void run() {
    const int64_t heads = p_.batch * p_.kv_heads;
    for (int64_t next = 0; next < heads;) {
      int64_t bytes = 0;
      heads_.clear();
      // At least one, however large.
      for (; next < heads; ++next) {
        const AttentionSequence& s = p_.sequences[next / p_.kv_heads];
        const int64_t own = store_bytes(s);
        if (bytes > 0 && bytes + own > kStoreBytes) break;
        heads_.push_back({&s, next % p_.kv_heads, bytes, nullptr, nullptr, 0});
        bytes += own;
      }
      run_heads(bytes);
    }
  }

 private:
  // A block that only one task reads is packed by it, while it is in its cache.
  [[nodiscard]] bool stored(const AttentionSequence& s) const {
    return s.sealed == nullptr && row_tiles_of(s) * head_parts(s) > 1;
  }

  [[nodiscard]] int64_t mean_bytes() const { return divide_up(p_.d * 2, 64) * 64; }

  [[nodiscard]] bool global_mean(const AttentionSequence& s) const {
    return s.sealed == nullptr && p_.words != nullptr && p_.smoothing == Smoothing::global;
  }

  [[nodiscard]] int64_t store_bytes(const AttentionSequence& s) const {
    return (stored(s) ? key_blocks_of(s) * layout_.bytes : 0) + (global_mean(s) ? mean_bytes() : 0);
  }

  // How many parts the query heads of a key head are split into.
  [[nodiscard]] int64_t head_parts(const AttentionSequence& s) const {
    const int64_t group = p_.heads / p_.kv_heads;
    const int64_t rows = std::min<int64_t>(kRowTile, s.query_len) * group;
    const int64_t row_bytes = layout_.padded_dv() * 4 + p_.d * 3;
    return std::clamp<int64_t>(divide_up(rows * row_bytes, kStateBytes), 1, group);
  }

  template <typename Fn>
  void each(int64_t items, Fn&& fn) {
    if (serial_) {
      for (int64_t i = 0; i < items; ++i) fn(i);
    } else {
      ThreadPool::instance().parallel_for(items, [&](int64_t i, int) { fn(i); });
    }
  }

  void run_heads(int64_t bytes) {
    std::byte* store = t_store.at_least(bytes);
    tasks_.clear();
    pieces_.clear();
    wanted_.clear();
    int64_t products = 0;
    for (Head& head : heads_) {
      const AttentionSequence& s = *head.sequence;
      std::byte* at = store + head.at;
      if (global_mean(s)) {
        head.mean = reinterpret_cast<uint16_t*>(at);
        at += mean_bytes();
      }
      if (stored(s)) head.store = at;
      products += add_tasks(head);
    }
    serial_ = products < kSerialProducts;
    if (p_.words != nullptr && p_.smoothing == Smoothing::global) {
      each(static_cast<int64_t>(heads_.size()), [&](int64_t i) {
        const Head& head = heads_[static_cast<size_t>(i)];
        if (head.mean == nullptr || head.sequence->key_len == 0) return;
        mean_of_sequence(kernels_, p_, *head.sequence, head.kv_head,
                         reinterpret_cast<uint16_t*>(t_tile.at_least(p_.d * 2)), head.mean);
      });
    }
    each(static_cast<int64_t>(pieces_.size()), [&](int64_t i) { pack(pieces_[static_cast<size_t>(i)]); });
    // Long ones first: the last to finish is then a short one.
    std::sort(tasks_.begin(), tasks_.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
    each(static_cast<int64_t>(tasks_.size()),
         [&](int64_t i) { RowTile(kernels_, p_, layout_, tasks_[static_cast<size_t>(i)].tile, t_tile).run(); });
  }

  int64_t add_tasks(Head& head) {
    const AttentionSequence& s = *head.sequence;
    const int64_t blocks = key_blocks_of(s);
    head.wanted = wanted_.size();
    if (head.store != nullptr) wanted_.resize(wanted_.size() + static_cast<size_t>(blocks));
    const int64_t group = p_.heads / p_.kv_heads;
    const int64_t parts = head_parts(s);
    int64_t products = 0;
    for (int64_t m = 0; m < row_tiles_of(s); ++m) {
      const RouteRow route(p_, s, head.kv_head, m);
      const TileRange range = tiles_of(p_, s, m);
      const int64_t rows = std::min<int64_t>(kRowTile, s.query_len - m * kRowTile);
      int64_t cost = 1;
      for (int64_t t = range.first; t < range.last; ++t) {
        const bool int8 = route.int8(t);
        cost += int8 ? kCost8 : kCost16;
        if (head.store != nullptr) wanted_[head.wanted + static_cast<size_t>(t)] |= int8 ? 2 : 1;
      }
      products += rows * group * std::max<int64_t>(0, range.last - range.first) * kKeyBlock * (p_.d + p_.dv);
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = part * group / parts;
        const int64_t count = (part + 1) * group / parts - first;
        tasks_.push_back({{.sequence = &s,
                           .kv_head = head.kv_head,
                           .row_tile = m,
                           .head = head.kv_head * group + first,
                           .heads = count,
                           .store = head.store,
                           .mean = head.mean},
                          cost * rows * count});
      }
    }
    if (head.store != nullptr) {
      for (int64_t t = 0; t < blocks; t += kPackBlocks)
        pieces_.push_back({&head, t, std::min(blocks, t + kPackBlocks)});
    }
    return products;
  }

  void pack(const Piece& piece) {
    const Head& head = *piece.head;
    auto* rows = reinterpret_cast<uint16_t*>(t_tile.at_least(kRowsBuffer * 2));
    for (int64_t t = piece.first; t < piece.last; ++t) {
      const uint8_t wanted = wanted_[head.wanted + static_cast<size_t>(t)];
      if (wanted == 0) continue;
      pack_block(kernels_, p_, *head.sequence, head.kv_head, t, (wanted & 1) != 0, (wanted & 2) != 0, head.mean,
                 layout_, rows, head.store + t * layout_.bytes);
    }
  }

  const AttentionProblem& p_;
  const AttentionKernels& kernels_;
  BlockLayout layout_;
  bool serial_ = false;
  std::vector<Head>& heads_ = t_lists.heads;
  std::vector<Task>& tasks_ = t_lists.tasks;
  std::vector<Piece>& pieces_ = t_lists.pieces;
  std::vector<uint8_t>& wanted_ = t_lists.wanted;
};

}  // namespace

const AttentionKernels& attention_kernels(CpuLevel level) {
  switch (level) {
#if defined(__x86_64__)
    case CpuLevel::avx2:
    case CpuLevel::avx512:
    case CpuLevel::avx512_vnni:
      return attention_kernels_avx2();
    case CpuLevel::avx512_bf16:
      return attention_kernels_avx512_bf16();
    case CpuLevel::avx512_bf16_model:
      return attention_kernels_avx512_bf16_model();
#endif
    default:
      return attention_kernels_portable();
  }
}

void attend(const AttentionProblem& problem) {
  if (problem.heads == 0) return;
  Attention(problem).run();
}

void probe_int8(const AttentionProblem& problem, int64_t head, const Int8Probe& probe) {
  const AttentionKernels& kernels = attention_kernels(current_level());
  const AttentionSequence& s = problem.sequences[0];
  const int64_t kv_head = head / (problem.heads / problem.kv_heads);
  const int64_t d = problem.d;
  const int64_t blocks = key_blocks_of(s);
  // Every tile by the INT8 path.
  AttentionProblem all = problem;
  const std::vector<uint64_t> words(static_cast<size_t>(divide_up(std::max<int64_t>(blocks, 1), 64) * row_tiles_of(s)),
                                    ~uint64_t{0});
  all.causal = false;
  all.window = 0;
  all.words = words.data();
  all.map_heads = 1;
  all.map_row_tiles = row_tiles_of(s);
  all.row_words = divide_up(std::max<int64_t>(blocks, 1), 64);
  const BlockLayout layout = BlockLayout::of(d, problem.dv, true, true, true, false);
  std::vector<uint16_t> rows(kRowsBuffer);
  std::vector<uint16_t> mean(static_cast<size_t>(d));
  if (all.smoothing == Smoothing::global) mean_of_sequence(kernels, all, s, kv_head, rows.data(), mean.data());
  Scratch store;
  std::byte* packed = store.at_least(std::max<int64_t>(blocks, 1) * layout.bytes);
  for (int64_t t = 0; t < blocks; ++t) {
    std::byte* at = packed + t * layout.bytes;
    std::memset(at, 0, static_cast<size_t>(layout.bytes));
    pack_block(kernels, all, s, kv_head, t, true, true, mean.data(), layout, rows.data(), at);
    const KeyBlock block = block_at(layout, at);
    probe.k_scales[t] = block.k_scale;
    for (int64_t c = 0; c < d; ++c) {
      probe.means[t * d + c] = bf16_to_float(reinterpret_cast<const uint16_t*>(block.mean)[c]);
      for (int64_t j = 0; j < std::min<int64_t>(kKeyBlock, s.key_len - t * kKeyBlock); ++j) {
        const auto stored = static_cast<int>(block.k8[(c / 4 * kKeyBlock + j) * 4 + c % 4]);
        probe.k_codes[(t * kKeyBlock + j) * d + c] = static_cast<int8_t>(stored - kKeyCodeBias);
      }
    }
  }
  for (int64_t m = 0; m < row_tiles_of(s); ++m) {
    const RowTileTask task = {
        .sequence = &s, .kv_head = kv_head, .row_tile = m, .head = head, .heads = 1, .store = packed};
    RowTile(kernels, all, layout, task, t_tile).probe(blocks, probe);
  }
}

}  // namespace tilefuse

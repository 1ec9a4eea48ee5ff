#include "decoder_block.h"

#include <algorithm>

#include "cpu_features.h"
#include "matmul_driver.h"

namespace tilefuse {
namespace {

thread_local Scratch t_block;      // of the calling thread
thread_local Scratch t_model;      // likewise, of what lasts longer than a block
thread_local Scratch t_attention;  // of each thread that attends: their number may change before they start

const BlockOps& ops() {
#if defined(__x86_64__)
  switch (current_level()) {
    case CpuLevel::portable:
      return block_ops_portable();
    case CpuLevel::avx2:
      return block_ops_avx2();
    default:
      return block_ops_avx512();
  }
#else
  return block_ops_portable();
#endif
}

void multiply(const PackedMatrix& matrix, Dtype dtype, const void* x, void* y) {
  matmul({.layout = matrix.layout,
          .weights = matrix.weights,
          .x = x,
          .x_dtype = dtype,
          .x_stride = matrix.layout.k,
          .m = 1,
          .perm = matrix.perm,
          .bias = matrix.bias,
          .y = y,
          .y_dtype = dtype,
          .y_stride = matrix.layout.n});
}

constexpr int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

const char* DecoderBlock::misfit() const {
  const int64_t d = down.layout.n;
  if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0) return "heads are no multiple of key and value heads";
  if (head_dim < 1 || head_dim % kBlockLanes != 0) return "the head size is no multiple of 16";
  if (qkv.layout.k != d || o.layout.n != d || gate_up.layout.k != d) return "layers differ in the model's width";
  if (qkv.layout.n != (heads + 2 * kv_heads) * head_dim || o.layout.k != heads * head_dim)
    return "attention layers don't have the heads' sizes";
  if (gate_up.layout.n != 2 * down.layout.k) return "MLP layers differ in the inner width";
  return nullptr;
}

void run_block(const DecoderBlock& block, const BlockStep& step) {
  const BlockOps& op = ops();
  const Dtype dtype = step.dtype;
  const int64_t item = item_size(dtype);
  const int64_t d = block.down.layout.n;
  const int64_t inner = block.down.layout.k;
  const int64_t head = block.head_dim * item;
  const int64_t group = block.heads / block.kv_heads;
  const int64_t length = step.length + 1;
  const int64_t floats = attend_scratch(group, block.head_dim, length);

  const int64_t wide = aligned(std::max(d, block.heads * block.head_dim) * item);
  const int64_t wider = aligned(std::max(block.qkv.layout.n, 2 * inner) * item);
  std::byte* const normed = t_block.at_least(2 * wide + 2 * wider);
  std::byte* const other = normed + wide;
  std::byte* const fused = other + wide;
  std::byte* const gated = fused + wider;

  op.norm(dtype, step.x, step.norm_in, d, block.eps_in, block.plus_one, normed);
  multiply(block.qkv, dtype, normed, fused);
  auto* const keys = static_cast<std::byte*>(step.keys);
  auto* const values = static_cast<std::byte*>(step.values);
  const auto place = [&](int64_t kv) { return (kv * step.capacity + step.length) * head; };
  for (int64_t h = 0; h < block.heads + block.kv_heads; ++h) {
    std::byte* const at = fused + h * head;
    const bool query = h < block.heads;
    if (const void* weights = query ? step.q_norm : step.k_norm; weights != nullptr)
      op.norm(dtype, at, weights, block.head_dim, query ? block.eps_q : block.eps_k, block.plus_one, at);
    op.rotate(dtype, at, step.cos, step.sin, block.head_dim, query ? at : keys + place(h - block.heads));
  }
  for (int64_t kv = 0; kv < block.kv_heads; ++kv) {
    std::copy_n(fused + (block.heads + block.kv_heads + kv) * head, head, values + place(kv));
  }
  parallel_unless_small(block.kv_heads, block.kv_heads * length * head, [&](int64_t kv) {
    const int64_t from = kv * step.capacity * head;
    op.attend(dtype, fused + kv * group * head, keys + from, values + from, group, block.head_dim, length, block.scale,
              reinterpret_cast<float*>(t_attention.at_least(floats * 4)), normed + kv * group * head);
  });
  multiply(block.o, dtype, normed, other);
  op.add(dtype, step.x, other, d, other);

  op.norm(dtype, other, step.norm_post, d, block.eps_post, block.plus_one, normed);
  multiply(block.gate_up, dtype, normed, fused);
  op.gate(dtype, fused, fused + inner * item, inner, block.activation, gated);
  multiply(block.down, dtype, gated, normed);
  op.add(dtype, other, normed, d, step.y);
}

void run_blocks(std::span<const DecoderBlock* const> blocks, const std::uintptr_t* addresses, const BlockStep& shared) {
  BlockStep one = shared;
  const auto in = [](std::uintptr_t address) { return reinterpret_cast<const void*>(address); };
  for (const DecoderBlock* block : blocks) {
    one.norm_in = in(addresses[0]);
    one.norm_post = in(addresses[1]);
    one.q_norm = in(addresses[2]);
    one.k_norm = in(addresses[3]);
    one.keys = reinterpret_cast<void*>(addresses[4]);
    one.values = reinterpret_cast<void*>(addresses[5]);
    one.capacity = static_cast<int64_t>(addresses[6]);
    run_block(*block, one);
    one.x = one.y;
    addresses += kBlockAddresses;
  }
}

void run_model(std::span<const DecoderBlock* const> blocks, const std::uintptr_t* addresses, const BlockStep& shared,
               const ModelEnd& end) {
  const int64_t width = blocks.front()->down.layout.n;
  const int64_t bytes = aligned(width * item_size(shared.dtype));
  std::byte* const hidden = t_model.at_least(2 * bytes);
  std::byte* const normed = hidden + bytes;
  BlockStep inside = shared;
  inside.y = hidden;
  run_blocks(blocks, addresses, inside);
  ops().norm(shared.dtype, hidden, end.norm, width, end.eps, end.plus_one, end.head == nullptr ? shared.y : normed);
  if (end.head != nullptr) multiply(*end.head, shared.dtype, normed, shared.y);
}

}  // namespace tilefuse

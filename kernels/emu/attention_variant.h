// One configuration of the attention kernel: compiles its source for heads of TF_D channels, and registers its entry
// points. Included once for each configuration, so without a guard.
#include "attention_bf16.cc"

#define TF_NAME TF_ATTENTION_NAME
namespace tilefuse::emu::TF_NAMESPACE {
using Bytes = attention::Layout<TF_D>;
constexpr int64_t kBlocks = attention::kRowBlocks;
constexpr Said q{"q", {Bytes::q_bytes}};
constexpr Said kv{"kv", {Bytes::kv_bytes}};
constexpr Said scores{"scores", {attention::kScoresBytes}};
constexpr Said state{"state", {attention::kStateBytes / 4}};
constexpr Said p{"p", {attention::kPBytes}};
// Blocks of 8x8: [rows/8][channels/8][8][8].
constexpr Said o{"o", {kBlocks, TF_D / 8, 8, 8}};
constexpr Said y{"y", {Bytes::y_bytes}};
constexpr Said half_of_scores{.name = "half", .indexes = "scores", .step = attention::kRows * 32 * 4, .extent = 2};
constexpr Said half{.name = "half", .indexes = "o", .step = TF_D / 16 * 64, .extent = 2};
constexpr Said block{.name = "block", .indexes = "o", .step = TF_D / 8 * 64, .extent = kBlocks};

constexpr Kernel kernel{
    .name = TF_TEXT(TF_NAME),
    .op = "attention",
    .activation = "bf16",
    .bits = 16,
    .path = "",
    .m = attention::kRows,
    .d = TF_D,
    .entry_points = {entry_point<TF_KERNEL(begin)>("begin", state, o),
                     entry_point<TF_KERNEL(scores_int8)>("scores_int8", q, kv, scores),
                     entry_point<TF_KERNEL(scores_bf16)>("scores_bf16", q, kv, half_of_scores, scores),
                     entry_point<TF_KERNEL(softmax)>("softmax", scores, state, p),
                     entry_point<TF_KERNEL(values)>("values", p, kv, half, o),
                     entry_point<TF_KERNEL(store)>("store", o, state, block, y)}};
const Registration registration(kernel);
}  // namespace tilefuse::emu::TF_NAMESPACE
#undef TF_NAME

// One configuration of a GEMM kernel: compiles TF_SOURCE, whose weights are TF_WEIGHT_BITS wide, with the macros as
// they stand, and registers its entry points. Included once for each configuration, so without a guard.
#include TF_SOURCE

#define TF_BITS TF_WEIGHT_BITS
#define TF_NAME TF_GEMM_NAME
namespace tilefuse::emu::TF_NAMESPACE {
constexpr Said w{"w", {TF_TILE::tile_bytes}};
constexpr Said scratch{"scratch", {kScratch}};
// Blocks of 8x8: [m/8][k/8][8][8] and [m/8][n/8][8][8].
constexpr Said a{"a", {TF_M / 8, kKBlocks, 8, 8}};
constexpr Said c{"c", {TF_M / 8, kNBlocks, 8, 8}};
constexpr Said acc{"acc", c.shape};

constexpr Kernel kernel{
    .name = TF_TEXT(TF_NAME),
    .op = "gemm",
    .activation = "bf16",
    .bits = TF_BITS,
    .group = TF_BITS == 16 ? 0 : TF_GROUP,
    .minima = TF_MINIMA,
    .path = path_name(TF_PATH),
    .m = TF_M,
    .scratch_bytes = &TF_KERNEL(scratch_bytes),
    .entry_points = {entry_point<TF_NAME>("", a, w, scratch, acc), entry_point<TF_KERNEL(zero)>("zero", acc),
                     entry_point<TF_KERNEL(prepare)>("prepare", w, scratch),
                     entry_point<TF_KERNEL(store_bf16)>("store_bf16", acc, c),
                     entry_point<TF_KERNEL(store_f32)>("store_f32", acc, c)}};
const Registration registration(kernel);
}  // namespace tilefuse::emu::TF_NAMESPACE
#undef TF_NAME
#undef TF_BITS

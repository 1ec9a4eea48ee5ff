// One configuration of a GEMM kernel of bfp16 activations: compiles TF_SOURCE, whose weights are TF_WEIGHT_BITS wide,
// with the macros as they stand, and registers its entry points. Included once for each configuration, so without a
// guard.
#include TF_SOURCE

#define TF_BITS TF_WEIGHT_BITS
#define TF_NAME TF_BAND_NAME
namespace tilefuse::emu::TF_NAMESPACE {
constexpr Said a{"a", {gemm::kBandBytes}};
constexpr Said w{"w", {TF_TILES * PackedTile<TF_BITS, TF_GROUP, TF_MINIMA>::tile_bytes}};
constexpr Said scratch{"scratch", {kScratch}};
// Blocks of 8x8: [band][tile][m/8][n/8][8][8] and [m/8][n/8][8][8].
constexpr Said acc{"acc", {kAny, TF_TILES, 2, kNBlocks, 8, 8}};
constexpr Said c{"c", {2, kNBlocks, 8, 8}};
constexpr Said band{.name = "band", .indexes = "acc", .step = TF_TILES * gemm::kPieceFloats};
constexpr Said half{.name = "half", .indexes = "acc", .step = gemm::kPieceFloats, .extent = TF_TILES};

constexpr Kernel kernel{.name = TF_TEXT(TF_NAME),
                        .op = "gemm",
                        .activation = "bfp16",
                        .bits = TF_BITS,
                        .group = TF_GROUP,
                        .minima = TF_MINIMA,
                        .path = path_name(TF_PATH),
                        .m = gemm::kBandRows,
                        .tiles = TF_TILES,
                        .scratch_bytes = &TF_KERNEL(scratch_bytes),
                        .entry_points = {entry_point<TF_NAME>("", a, w, scratch, acc, band),
                                         entry_point<TF_KERNEL(zero)>("zero", acc, band),
                                         entry_point<TF_KERNEL(prepare)>("prepare", w, scratch),
                                         entry_point<TF_KERNEL(store_bf16)>("store_bf16", acc, band, half, c)}};
const Registration registration(kernel);
}  // namespace tilefuse::emu::TF_NAMESPACE
#undef TF_NAME
#undef TF_BITS

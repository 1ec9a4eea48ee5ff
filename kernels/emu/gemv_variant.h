// One configuration of a GEMV kernel: compiles TF_SOURCE, whose weights are TF_WEIGHT_BITS wide, with the macros as
// they stand, and registers its entry points. Included once for each configuration, so without a guard.
#include TF_SOURCE

#define TF_BITS TF_WEIGHT_BITS
#define TF_NAME TF_GEMV_NAME
namespace tilefuse::emu::TF_NAMESPACE {
constexpr Said w{"w", {TF_TILE::tile_bytes}};
constexpr Said x{"x", {kKt}};
constexpr Said x_scratch{"x_scratch", {kScratch}};
constexpr Said acc{"acc", {kNt}};
constexpr Said partial{"partial", {kNt}};
constexpr Said y{"y", {kNt}};
// Four rows' k tiles of x; x of 64 k tiles, which come in quarters, each within an object of a tile's size.
constexpr Said x_rows{"x", {4 * kKt}};
constexpr Said row{.name = "row", .indexes = "x", .step = gemv::kTileOfX, .extent = 4};
constexpr Said object{"object", {TF_TILE::tile_bytes}};
constexpr Said x_resident{"x_resident", {64 * kKt}};
constexpr Said index{.name = "index", .indexes = "x_resident", .step = gemv::kQuarterOfX, .extent = 4};
constexpr Said k_tile{.name = "k_tile", .indexes = "x_resident", .step = gemv::kTileOfX, .extent = 64};

constexpr Kernel kernel{
    .name = TF_TEXT(TF_NAME),
    .op = "gemv",
    .activation = "bf16",
    .bits = TF_BITS,
    .group = TF_BITS == 16 ? 0 : TF_GROUP,
    .minima = TF_MINIMA,
    .path = path_name(TF_PATH),
    .m = 1,
    .scratch_bytes = &TF_KERNEL(scratch_bytes),
    .entry_points = {entry_point<TF_NAME>("", x_scratch, w, acc), entry_point<TF_KERNEL(zero)>("zero", acc),
                     entry_point<TF_KERNEL(prepare)>("prepare", x, x_scratch),
                     entry_point<TF_KERNEL(keep_row)>("keep_row", x_rows, row, k_tile, x_resident),
                     entry_point<TF_KERNEL(keep)>("keep", object, index, x_resident),
                     entry_point<TF_KERNEL(prepare_resident)>("prepare_resident", x_resident, k_tile, x_scratch),
                     entry_point<TF_KERNEL(add)>("add", partial, acc),
                     entry_point<TF_KERNEL(store_bf16)>("store_bf16", acc, y)}};
const Registration registration(kernel);
}  // namespace tilefuse::emu::TF_NAMESPACE
#undef TF_NAME
#undef TF_BITS

// One configuration of a GEMM kernel: compiles TF_SOURCE, whose weights are TF_WEIGHT_BITS wide, with the macros as
// they stand, and registers its entry points. Included once for each configuration, so without a guard.
#include TF_SOURCE

#define TF_BITS TF_WEIGHT_BITS
#define TF_NAME TF_GEMM_NAME
namespace tilefuse::emu {
[[maybe_unused]] static const bool TF_KERNEL(registered) = [] {
  const int64_t scratch = TF_KERNEL(scratch_bytes)();
  constexpr int64_t tile = TF_TILE::tile_bytes;
  // Blocks of 8x8: [m/8][k/8][8][8] and [m/8][n/8][8][8].
  const Said a{"a", {TF_M / 8, kKBlocks, 8, 8}};
  const Said c{"c", {TF_M / 8, kNBlocks, 8, 8}};
  const Said acc{"acc", c.shape};
  kernels().push_back(
      {.name = TF_TEXT(TF_NAME),
       .op = "gemm",
       .bits = TF_BITS,
       .group = TF_BITS == 16 ? 0 : TF_GROUP,
       .minima = TF_MINIMA,
       .path = path_name(TF_PATH),
       .m = TF_M,
       .scratch_bytes = scratch,
       .entry_points = {entry_point<TF_NAME>("", a, Said{"w", {tile}}, Said{"scratch", {scratch}}, acc),
                        entry_point<TF_KERNEL(zero)>("zero", acc),
                        entry_point<TF_KERNEL(prepare)>("prepare", Said{"w", {tile}}, Said{"scratch", {scratch}}),
                        entry_point<TF_KERNEL(store_bf16)>("store_bf16", acc, c),
                        entry_point<TF_KERNEL(store_f32)>("store_f32", acc, c)}});
  return true;
}();
}  // namespace tilefuse::emu
#undef TF_NAME
#undef TF_BITS

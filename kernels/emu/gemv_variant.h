// One configuration of a GEMV kernel: compiles TF_SOURCE, whose weights are TF_WEIGHT_BITS wide, with the macros as
// they stand, and registers its entry points. Included once for each configuration, so without a guard.
#include TF_SOURCE

#define TF_BITS TF_WEIGHT_BITS
#define TF_NAME TF_GEMV_NAME
namespace tilefuse::emu {
[[maybe_unused]] static const bool TF_KERNEL(registered) = [] {
  const int64_t scratch = TF_KERNEL(scratch_bytes)();
  constexpr int64_t tile = TF_TILE::tile_bytes;
  kernels().push_back(
      {.name = TF_TEXT(TF_NAME),
       .op = "gemv",
       .bits = TF_BITS,
       .group = TF_BITS == 16 ? 0 : TF_GROUP,
       .minima = TF_MINIMA,
       .path = path_name(TF_PATH),
       .m = 1,
       .scratch_bytes = scratch,
       .entry_points = {entry_point<TF_NAME>("", Said{"x_scratch", {scratch}}, Said{"w", {tile}}, Said{"acc", {kNt}}),
                        entry_point<TF_KERNEL(zero)>("zero", Said{"acc", {kNt}}),
                        entry_point<TF_KERNEL(prepare)>("prepare", Said{"x", {kKt}}, Said{"x_scratch", {scratch}}),
                        entry_point<TF_KERNEL(add)>("add", Said{"partial", {kNt}}, Said{"acc", {kNt}}),
                        entry_point<TF_KERNEL(store_bf16)>("store_bf16", Said{"acc", {kNt}}, Said{"y", {kNt}})}});
  return true;
}();
}  // namespace tilefuse::emu
#undef TF_NAME
#undef TF_BITS

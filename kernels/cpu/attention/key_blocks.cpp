#include "attention/key_blocks.h"

namespace tilefuse {

BlockLayout BlockLayout::of(int64_t d, int64_t dv, bool k16, bool k8, bool v16, bool v8) {
  BlockLayout layout;
  layout.d = d;
  layout.dv = dv;
  const auto add = [&](bool wanted, int64_t bytes) {
    if (!wanted) return kAbsent;
    const int64_t at = layout.bytes;
    layout.bytes += (bytes + 63) / 64 * 64;
    return at;
  };
  layout.k16 = add(k16, kKeyBlock * d * 2);
  layout.k8 = add(k8, kKeyBlock * d);
  layout.mean = add(k8, d * 2);
  layout.k_scale = add(k8, sizeof(float));
  layout.v16 = add(v16, kKeyBlock * layout.padded_dv() * 2);
  layout.v8 = add(v8, kKeyBlock * layout.padded_dv());
  layout.v_scales = add(v8, kKeyBlock * sizeof(float));
  return layout;
}

}  // namespace tilefuse

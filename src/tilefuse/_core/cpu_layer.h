// What the CPU kernels need of a layer, as Python holds it.
#pragma once

#include "decoder_block.h"

namespace tilefuse {

// The layer that keeps it owns the memory.
struct CpuLayer {
  TileLayout layout;
  const std::byte* weights;
  const int32_t* perm;
  const float* bias;
};

}  // namespace tilefuse

// Which instruction sets this CPU and operating system offer, and which level the kernels run at.
#pragma once

#include <string_view>
#include <vector>

namespace tilefuse {

// From the least to the most demanding; a CPU that has one has all before it (avx512_bf16_model apart).
enum class CpuLevel : int {
  portable = 0,  // plain C++
  avx2,          // AVX2, FMA
  avx512,        // + AVX-512 F, BW, DQ, VL
  avx512_vnni,   // + AVX512_VNNI
  avx512_bf16,   // + AVX512_BF16
  // The avx512_bf16 kernels with VDPBF16PS and VCVTNE2PS2BF16 modelled by AVX-512 F instructions: a way to test them on
  // a CPU that lacks those two. Never chosen unless asked for.
  avx512_bf16_model,
};

[[nodiscard]] std::string_view name_of(CpuLevel level);

// Levels that this CPU can run, best last, the model level (where it runs) before all others.
[[nodiscard]] const std::vector<CpuLevel>& available_levels();

// The level in force: TILEFUSE_CPU_LEVEL if it names an available one, else the best; changed by set_level.
[[nodiscard]] CpuLevel current_level();
void set_level(CpuLevel level);

}  // namespace tilefuse

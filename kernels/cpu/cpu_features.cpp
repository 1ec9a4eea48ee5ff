#include "cpu_features.h"

#include <array>
#include <atomic>
#include <cstdlib>

namespace tilefuse {
namespace {

constexpr std::array<std::string_view, 6> kNames = {"portable",    "avx2",        "avx512",
                                                    "avx512_vnni", "avx512_bf16", "avx512_bf16_model"};

std::vector<CpuLevel> detect() {
  std::vector<CpuLevel> levels;
#if defined(__x86_64__)
  // __builtin_cpu_supports also checks that the operating system saves the wider registers (XCR0).
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  if (vnni) levels.push_back(CpuLevel::avx512_bf16_model);
  levels.push_back(CpuLevel::portable);
  if (avx2) levels.push_back(CpuLevel::avx2);
  if (avx512) levels.push_back(CpuLevel::avx512);
  if (vnni) levels.push_back(CpuLevel::avx512_vnni);
  if (bf16) levels.push_back(CpuLevel::avx512_bf16);
#else
  levels.push_back(CpuLevel::portable);
#endif
  return levels;
}

CpuLevel initial_level() {
  if (const char* wanted = std::getenv("TILEFUSE_CPU_LEVEL")) {
    for (const CpuLevel level : available_levels()) {
      if (name_of(level) == wanted) return level;
    }
  }
  return available_levels().back();
}

std::atomic<CpuLevel>& level_slot() {
  static std::atomic<CpuLevel> slot{initial_level()};
  return slot;
}

}  // namespace

std::string_view name_of(CpuLevel level) { return kNames[static_cast<size_t>(level)]; }

const std::vector<CpuLevel>& available_levels() {
  static const std::vector<CpuLevel> levels = detect();
  return levels;
}

CpuLevel current_level() { return level_slot().load(std::memory_order_relaxed); }

void set_level(CpuLevel level) { level_slot().store(level, std::memory_order_relaxed); }

}  // namespace tilefuse

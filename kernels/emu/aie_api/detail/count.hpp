// The state of one emulated core: its modes, its count of issue slots, the faults that it ran into. One core a thread.
//
// docs/emulated-core.md has the costs. No fusion is assumed: a load followed by an unpack counts as both. The scalar
// slots (address arithmetic, loop control, scalar loads) are not counted: they issue beside the vector slots.
#pragma once

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace aie {

// The core's numbers. Nearest modes differ only where a value is exactly half-way.
enum class rounding_mode : unsigned {
  floor = 0,            // to negative infinity; what a core powers up with
  ceil = 1,             // to positive infinity
  symmetric_floor = 2,  // to zero
  symmetric_ceil = 3,   // away from zero
  negative_inf = 8,     // nearest, half-way to negative infinity
  positive_inf = 9,     // nearest, half-way to positive infinity
  symmetric_zero = 10,  // nearest, half-way to zero
  symmetric_inf = 11,   // nearest, half-way away from zero
  conv_even = 12,       // nearest, half-way to even
  conv_odd = 13,        // nearest, half-way to odd
};

enum class saturation_mode : unsigned { none = 0, saturate = 1, symmetric = 3 };

namespace detail::count {

// Instructions by the issue slot that they need.
struct slots {
  unsigned long load = 0;  // either load unit
  unsigned long ldb = 0;   // the second load unit only: unpack
  unsigned long st = 0;    // the store unit: stores, and conversions to bfloat16 and bfp16
  unsigned long mv = 0;    // shuffles, broadcasts, integer vector arithmetic, bfloat16 -> fp32, vups
  unsigned long vec = 0;   // multiplications, and arithmetic on accumulators
};

struct region {
  const char* name = nullptr;
  unsigned long entries = 0;
  slots spent;
};

inline constexpr unsigned max_regions = 16;

struct core_state {
  rounding_mode rounding = rounding_mode::floor;
  bool hold_rounding = false;  // set_rounding does nothing: shows what becomes of a kernel that never called it
  saturation_mode saturation = saturation_mode::none;
  // regions[0] takes what is outside any named region.
  std::array<region, max_regions> regions{};
  unsigned used = 1;
  unsigned current = 0;
  // The first fault since `catch_faults`, if that is set; without it a fault ends the process.
  bool catch_faults = false;
  std::array<char, 160> fault{};
};

inline constinit thread_local core_state core{};

inline slots& now() { return core.regions[core.current].spent; }

// RAII: what follows in the block belongs to the region `name`, a string literal.
class scope {
 public:
  explicit scope(const char* name) : outer_(core.current) {
    unsigned i = 1;
    while (i < core.used && std::strcmp(core.regions[i].name, name) != 0) ++i;
    if (i == core.used) {
      if (i == max_regions) {
        std::fputs("tilefuse emulator: more than 15 TF_REGION names in one call\n", stderr);
        std::abort();
      }
      core.regions[i].name = name;
      ++core.used;
    }
    ++core.regions[i].entries;
    core.current = i;
  }
  ~scope() { core.current = outer_; }
  scope(const scope&) = delete;
  scope& operator=(const scope&) = delete;

 private:
  unsigned outer_;
};

inline void reset() {
  core.regions = {};
  core.used = 1;
  core.current = 0;
}

// What the hardware would do silently wrong.
[[gnu::cold, gnu::noinline]] inline void fault(const char* what, unsigned long value, unsigned long limit) {
  std::array<char, 160> text{};
  std::snprintf(text.data(), text.size(), what, value, limit);
  if (!core.catch_faults) {
    std::fprintf(stderr, "tilefuse emulator: %s\n", text.data());
    std::abort();
  }
  if (core.fault[0] == '\0') core.fault = text;
}

}  // namespace detail::count

inline void set_rounding(rounding_mode mode) {
  if (!detail::count::core.hold_rounding) detail::count::core.rounding = mode;
}
[[nodiscard]] inline rounding_mode get_rounding() { return detail::count::core.rounding; }
inline rounding_mode swap_rounding(rounding_mode mode) {
  const rounding_mode before = get_rounding();
  set_rounding(mode);
  return before;
}
inline void set_saturation(saturation_mode mode) { detail::count::core.saturation = mode; }
[[nodiscard]] inline saturation_mode get_saturation() { return detail::count::core.saturation; }

}  // namespace aie

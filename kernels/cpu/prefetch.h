// Prefetches. A function that does nothing but prefetch has to be inlined always: GCC 12 finds it without effect (its
// pass `modref`) and drops the calls that it hasn't inlined by then.
#pragma once

#include <cstddef>
#include <cstdint>

#include "always_inline.h"

namespace tilefuse {

TILEFUSE_ALWAYS_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
TILEFUSE_ALWAYS_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// Lines that lie in other cores' caches, too. Without -mprfchw GCC has no PREFETCHW, which CPUs without it skip.
TILEFUSE_ALWAYS_INLINE void prefetch_to_write(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p, 1, 3);
#endif
}

// Part i of `of` of some bytes, into the L2 cache.
TILEFUSE_ALWAYS_INLINE void prefetch_part(const std::byte* p, int64_t bytes, int64_t i, int64_t of) {
  for (int64_t at = bytes * i / of / 64 * 64; at < bytes * (i + 1) / of; at += 64) prefetch_l2(p + at);
}

}  // namespace tilefuse

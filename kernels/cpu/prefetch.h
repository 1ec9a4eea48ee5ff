// Prefetches. A function that does nothing but prefetch has to be inlined always: GCC 12 finds it without effect (its
// pass `modref`) and drops the calls that it hasn't inlined by then.
#pragma once

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

}  // namespace tilefuse

// For functions of headers that translation units of different instruction sets include: of one out-of-line copy for
// all, the linker might keep the one that not every CPU can run.
#pragma once

#define TILEFUSE_ALWAYS_INLINE __attribute__((always_inline)) inline

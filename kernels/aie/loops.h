// What a loop states about itself: trip-count bounds and unrolling for the device compiler, the name of its region for
// the host's count of issue slots; and what has to be inlined. On the compiler that a macro says nothing to, it expands
// to nothing.
#pragma once

#define TF_PRAGMA_(text) _Pragma(#text)

#if defined(__AIECC__)  // Peano
#define TF_LOOP_RANGE(least, most) \
  TF_PRAGMA_(clang loop min_iteration_count(least)) TF_PRAGMA_(clang loop max_iteration_count(most))
#define TF_LOOP_UNROLL_FULL TF_PRAGMA_(clang loop unroll(full))
// Keeps the loop rolled, so that the zero-overhead hardware loop and the software pipeliner see it whole.
#define TF_LOOP_NO_UNROLL TF_PRAGMA_(clang loop unroll(disable))
// For helpers on registers: a call would pass accumulators through the stack, which has 1 KiB.
#define TF_INLINE __attribute__((always_inline)) inline
#define TF_INLINE_LAMBDA __attribute__((always_inline))
#else
#define TF_LOOP_RANGE(least, most)
#define TF_LOOP_UNROLL_FULL
#define TF_LOOP_NO_UNROLL
#define TF_INLINE inline
#define TF_INLINE_LAMBDA
#endif

// The rest of the enclosing block is one region of the cycle model: put it in front of a pipelined loop, in a block of
// its own. Regions don't nest. `name` is an identifier; regions of one name add up.
#if defined(TF_EMULATED_CORE)
#define TF_REGION(name) const ::aie::detail::count::scope tf_region_##name(#name)
#else
#define TF_REGION(name)
#endif

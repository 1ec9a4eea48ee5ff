// A host implementation of the part of AMD's aie_api (AIE2P) that tilefuse's kernels use, so that the very same sources
// run on a PC: same names, same template parameters, same restrictions. Written from the public interface.
//
// It models the arithmetic bit by bit (each header states its model where the hardware's is not documented), counts
// issue slots (count.hpp), and turns what the hardware would do silently wrong into a fault.
#pragma once

#define TF_EMULATED_CORE 1

#include "detail/accum.hpp"
#include "detail/arithmetic.hpp"
#include "detail/bfp16.hpp"
#include "detail/block_vector.hpp"
#include "detail/compare.hpp"
#include "detail/convert.hpp"
#include "detail/count.hpp"
#include "detail/memory.hpp"
#include "detail/mmul.hpp"
#include "detail/native.hpp"
#include "detail/rounding.hpp"
#include "detail/shuffle.hpp"
#include "detail/types.hpp"
#include "detail/vector.hpp"

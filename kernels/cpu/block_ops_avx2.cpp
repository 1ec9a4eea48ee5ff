#include "block_ops_impl.h"

namespace tilefuse {

const BlockOps& block_ops_avx2() { return kOps; }

}  // namespace tilefuse

#include "block_ops_impl.h"

namespace tilefuse {

const BlockOps& block_ops_portable() { return kOps; }

}  // namespace tilefuse

#include "activations.h"

#include <cstring>

#include "bf16.h"

namespace tilefuse {
namespace {

// NumPy's arrays need not be aligned to their elements, hence the copies, which compile to plain loads.
template <Dtype kType>
float load(const void* row, int64_t i) {
  if constexpr (kType == Dtype::f32) {
    float value;
    std::memcpy(&value, static_cast<const std::byte*>(row) + i * 4, sizeof(value));
    return value;
  } else {
    uint16_t bits;
    std::memcpy(&bits, static_cast<const std::byte*>(row) + i * 2, sizeof(bits));
    return kType == Dtype::bf16 ? bf16_to_float(bits) : half_to_float(bits);
  }
}

template <Dtype kType>
void load_row(const void* row, const int32_t* perm, int64_t k_real, float* out) {
  for (int64_t i = 0; i < k_real; ++i) out[i] = round_to_bf16(load<kType>(row, perm == nullptr ? i : perm[i]));
}

}  // namespace

void write_row(const MatmulArgs& args, int64_t row, int64_t k, float* out) {
  const int64_t element = item_size(args.x_dtype);
  const void* from = static_cast<const std::byte*>(args.x) + row * args.x_stride * element;
  switch (args.x_dtype) {
    case Dtype::f32:
      load_row<Dtype::f32>(from, args.perm, args.layout.k, out);
      break;
    case Dtype::bf16:
      load_row<Dtype::bf16>(from, args.perm, args.layout.k, out);
      break;
    case Dtype::f16:
      load_row<Dtype::f16>(from, args.perm, args.layout.k, out);
      break;
  }
  std::memset(out + args.layout.k, 0, sizeof(float) * static_cast<size_t>(k - args.layout.k));
}

}  // namespace tilefuse

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <vector>

#include "bindings.h"
#include "cpu_layer.h"
#include "decoder_block.h"

namespace py = pybind11;

namespace tilefuse {
namespace {

PackedMatrix matrix_of(const CpuLayer& layer) {
  return {.layout = layer.layout, .weights = layer.weights, .perm = layer.perm, .bias = layer.bias};
}

DecoderBlock make(const CpuLayer& qkv, const CpuLayer& o, const CpuLayer& gate_up, const CpuLayer& down, int64_t heads,
                  int64_t kv_heads, int64_t head_dim, float scale, const std::array<float, 4>& eps, bool plus_one,
                  int activation) {
  const DecoderBlock block = {.qkv = matrix_of(qkv),
                              .o = matrix_of(o),
                              .gate_up = matrix_of(gate_up),
                              .down = matrix_of(down),
                              .heads = heads,
                              .kv_heads = kv_heads,
                              .head_dim = head_dim,
                              .scale = scale,
                              .eps_in = eps[0],
                              .eps_post = eps[1],
                              .eps_q = eps[2],
                              .eps_k = eps[3],
                              .plus_one = plus_one,
                              .activation = static_cast<Activation>(activation)};
  if (const char* why = block.misfit(); why != nullptr) throw std::invalid_argument(why);
  return block;
}

void step(const DecoderBlock& block, int dtype, uintptr_t x, uintptr_t norm_in, uintptr_t norm_post, uintptr_t q_norm,
          uintptr_t k_norm, uintptr_t cos, uintptr_t sin, uintptr_t keys, uintptr_t values, int64_t length,
          int64_t capacity, uintptr_t y) {
  if (length < 0 || length >= capacity) throw std::invalid_argument("the cache is full");
  const auto in = [](uintptr_t address) { return reinterpret_cast<const void*>(address); };
  const auto out = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  const py::gil_scoped_release release;
  run_block(block, {.dtype = static_cast<Dtype>(dtype),
                    .x = in(x),
                    .norm_in = in(norm_in),
                    .norm_post = in(norm_post),
                    .q_norm = in(q_norm),
                    .k_norm = in(k_norm),
                    .cos = in(cos),
                    .sin = in(sin),
                    .keys = out(keys),
                    .values = out(values),
                    .length = length,
                    .capacity = capacity,
                    .y = out(y)});
}

using Addresses = py::array_t<uintptr_t, py::array::c_style>;

// A model's blocks, one after the other.
class DecoderBlocks {
 public:
  explicit DecoderBlocks(const py::tuple& blocks) {
    for (const py::handle block : blocks) blocks_.push_back(&block.cast<const DecoderBlock&>());
    if (blocks_.empty()) throw std::invalid_argument("there are no blocks");
    for (const DecoderBlock* block : blocks_) {
      if (block->down.layout.n != blocks_.front()->down.layout.n)
        throw std::invalid_argument("blocks differ in the model's width");
    }
  }

  void step(int dtype, uintptr_t x, const Addresses& addresses, uintptr_t cos, uintptr_t sin, int64_t length,
            uintptr_t y) const {
    const uintptr_t* const at = checked(addresses, length);
    const py::gil_scoped_release release;
    run_blocks(blocks_, at, shared(dtype, x, cos, sin, length, y));
  }

  // With the model's norm behind them and, unless it is None, its head.
  void step_to_end(int dtype, uintptr_t x, const Addresses& addresses, uintptr_t cos, uintptr_t sin, int64_t length,
                   uintptr_t norm, float eps, bool plus_one, const CpuLayer* head, uintptr_t y) const {
    const uintptr_t* const at = checked(addresses, length);
    if (head != nullptr && head->layout.k != blocks_.front()->down.layout.n)
      throw std::invalid_argument("the head takes another width than the blocks have");
    const PackedMatrix matrix = head == nullptr ? PackedMatrix{} : matrix_of(*head);
    const py::gil_scoped_release release;
    run_model(blocks_, at, shared(dtype, x, cos, sin, length, y),
              {.norm = reinterpret_cast<const void*>(norm),
               .eps = eps,
               .plus_one = plus_one,
               .head = head == nullptr ? nullptr : &matrix});
  }

 private:
  [[nodiscard]] const uintptr_t* checked(const Addresses& addresses, int64_t length) const {
    const auto count = static_cast<int64_t>(blocks_.size());
    if (addresses.ndim() != 2 || addresses.shape(0) != count || addresses.shape(1) != kBlockAddresses)
      throw std::invalid_argument("addresses have another shape than [blocks, 7]");
    const uintptr_t* const at = addresses.data();
    for (int64_t i = 0; i < count; ++i) {
      if (length < 0 || length >= static_cast<int64_t>(at[i * kBlockAddresses + kBlockAddresses - 1]))
        throw std::invalid_argument("the cache is full");
    }
    return at;
  }

  static BlockStep shared(int dtype, uintptr_t x, uintptr_t cos, uintptr_t sin, int64_t length, uintptr_t y) {
    return {.dtype = static_cast<Dtype>(dtype),
            .x = reinterpret_cast<const void*>(x),
            .cos = reinterpret_cast<const void*>(cos),
            .sin = reinterpret_cast<const void*>(sin),
            .length = length,
            .y = reinterpret_cast<void*>(y)};
  }

  std::vector<const DecoderBlock*> blocks_;
};

}  // namespace

void bind_block(py::module_& m) {
  // The layers own the memory: the block keeps them alive, and they their weights by whoever holds both.
  py::class_<DecoderBlock>(m, "DecoderBlock")
      .def(py::init(&make), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>(),
           py::keep_alive<1, 5>())
      .def("step", &step);
  py::class_<DecoderBlocks>(m, "DecoderBlocks")
      .def(py::init<const py::tuple&>(), py::keep_alive<1, 2>())
      .def("step", &DecoderBlocks::step)
      .def("step_to_end", &DecoderBlocks::step_to_end);
}

}  // namespace tilefuse

// The host aie_api operation by operation, on arrays, so that tests can hold each to an independent model of it
// (tests/test_emu_api.py). Arrays hold the bits: uint16 for bfloat16.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <aie_api/aie.hpp>
#include <array>
#include <string>

#include "bindings.h"

namespace py = pybind11;

namespace tilefuse::emu {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
using element_of = std::conditional_t<std::is_same_v<T, bfloat16>, uint16_t, aie::detail::element_t<T>>;

// Arrays are copied in and out: they need no alignment here, and loads are tested apart.
template <typename T, unsigned Elems>
aie::vector<T, Elems> take(const Array<element_of<T>>& in, size_t at = 0) {
  aie::vector<T, Elems> v;
  if (static_cast<size_t>(in.size()) < (at + 1) * v.stored) throw py::value_error("too few elements");
  std::memcpy(v.data.data(), in.data() + at * v.stored, sizeof v.data);
  return v;
}

template <typename T, unsigned Elems>
void give(const aie::vector<T, Elems>& v, Array<element_of<T>>& out, size_t at = 0) {
  std::memcpy(out.mutable_data() + at * v.stored, v.data.data(), sizeof v.data);
}

// Applies a function of vectors of `Elems` to as many of them as the array holds.
template <typename To, typename From, unsigned Elems, typename F>
Array<element_of<To>> map(const Array<element_of<From>>& in, F&& f) {
  const size_t n = static_cast<size_t>(in.size()) / aie::vector<From, Elems>::stored;
  Array<element_of<To>> out(static_cast<py::ssize_t>(n * aie::vector<To, Elems>::stored));
  for (size_t i = 0; i < n; ++i) give(f(take<From, Elems>(in, i)), out, i);
  return out;
}

template <typename From>
void bind_integers(py::module_& m, const std::string& name) {
  m.def(("to_bf16_" + name).c_str(), [](const Array<element_of<From>>& in) {
    return map<bfloat16, From, 64>(in, [](const auto& v) { return aie::to_float<bfloat16>(v); });
  });
  if constexpr (requires { typename aie::detail::unpacked<From>::type; }) {
    using To = aie::detail::unpacked_t<From>;
    m.def(("unpack_" + name).c_str(), [](const Array<element_of<From>>& in) {
      return map<To, From, 64>(in, [](const auto& v) { return aie::unpack(v); });
    });
  }
}

// 64 fp32 values -> 8 x [exponent][8 mantissas]
Array<uint8_t> to_bfp16(const Array<float>& in) {
  const size_t n = static_cast<size_t>(in.size()) / 64;
  Array<uint8_t> out(static_cast<py::ssize_t>(n * 72));
  // What a stream writes is what the test reads: a block type has no other way to memory.
  aie::block_vector_output_buffer_stream<bfp16ebs8, 64> stream(reinterpret_cast<bfp16ebs8*>(out.mutable_data()));
  for (size_t i = 0; i < n; ++i)
    stream.push(aie::accum<accfloat, 64>(take<float, 64>(in, i)).template to_vector<bfp16ebs8>());
  return out;
}

// acc [8][8] + A [8][8] . B [8][8] transposed, operands as 72 bytes.
Array<float> bfp16_mac(const Array<uint8_t>& a, const Array<uint8_t>& b, const Array<float>& acc) {
  aie::block_vector_input_buffer_stream<bfp16ebs8, 64> a_stream(reinterpret_cast<const bfp16ebs8*>(a.data()));
  aie::block_vector_input_buffer_stream<bfp16ebs8, 64> b_stream(reinterpret_cast<const bfp16ebs8*>(b.data()));
  const auto a_block = a_stream.pop();
  const auto b_block = b_stream.pop();
  aie::mmul<8, 8, 8, bfp16ebs8, bfp16ebs8> product(aie::accum<accfloat, 64>(take<float, 64>(acc)));
  product.mac(a_block, aie::op_transpose(b_block));
  Array<float> out(64);
  give(product.to_vector<float>(), out);
  return out;
}

Array<float> from_bfp16(const Array<uint8_t>& in) {
  const size_t n = static_cast<size_t>(in.size()) / 72;
  Array<float> out(static_cast<py::ssize_t>(n * 64));
  aie::block_vector_input_buffer_stream<bfp16ebs8, 64> stream(reinterpret_cast<const bfp16ebs8*>(in.data()));
  for (size_t i = 0; i < n; ++i) give(aie::accum<accfloat, 64>(stream.pop()).to_vector<float>(), out, i);
  return out;
}

// acc [4][16] + the first four rows of A [8][8] . B [16][8] transposed; B as 2 x 72 bytes.
Array<float> bfp16_mac_4x16(const Array<uint8_t>& a, const Array<uint8_t>& b, const Array<float>& acc) {
  aie::block_vector_input_buffer_stream<bfp16ebs8, 64> a_stream(reinterpret_cast<const bfp16ebs8*>(a.data()));
  aie::block_vector_input_buffer_stream<bfp16ebs8, 64> b_stream(reinterpret_cast<const bfp16ebs8*>(b.data()));
  auto b_block = b_stream.pop().grow<128>();
  b_block.insert(1, b_stream.pop());
  Array<float> out(64);
  give(mac_4x8_8x16T(a_stream.pop(), b_block, aie::accum<accfloat, 64>(take<float, 64>(acc))).to_vector<float>(), out);
  return out;
}

template <typename T, unsigned Elems>
py::tuple interleave(const Array<element_of<T>>& a, const Array<element_of<T>>& b, unsigned chunk, bool zip) {
  const auto v = take<T, Elems>(a);
  const auto w = take<T, Elems>(b);
  const auto [first, second] = zip ? aie::interleave_zip(v, w, chunk) : aie::interleave_unzip(v, w, chunk);
  Array<element_of<T>> one(Elems), other(Elems);
  give(first, one);
  give(second, other);
  return py::make_tuple(one, other);
}

// (smaller, larger, bits of less, bits of not less, lanes of `a` where they are clear and of `b` where they are set)
template <typename T, unsigned Elems>
void bind_choices(py::module_& m, const std::string& name) {
  m.def(("choices_" + name).c_str(), [](const Array<T>& a, const Array<T>& b) {
    const auto v = take<T, Elems>(a);
    const auto w = take<T, Elems>(b);
    std::array<Array<T>, 3> out{Array<T>(Elems), Array<T>(Elems), Array<T>(Elems)};
    give(aie::min(v, w), out[0]);
    give(aie::max(v, w), out[1]);
    const auto less = aie::lt(v, w);
    give(aie::select(v, w, less), out[2]);
    const auto bits = [](const aie::mask<Elems>& mask) {
      if constexpr (Elems == 64)
        return mask.to_uint64();
      else
        return static_cast<uint64_t>(mask.to_uint32());
    };
    return py::make_tuple(out[0], out[1], bits(less), bits(aie::ge(v, w)), out[2]);
  });
}

// Sequences whose slots the reference's table gives (section 7 there); the counts are read with `counts()`.
void sequence(const std::string& name) {
  alignas(64) static const std::array<uint8_t, 4096> memory{};
  const auto* bf16s = reinterpret_cast<const bfloat16*>(memory.data());
  aie::detail::count::reset();
  if (name == "bf16_8x8x8") {
    aie::mmul<8, 8, 8, bfloat16, bfloat16> product(aie::accum<accfloat, 64>(aie::zeros<accfloat, 64>()));
    const aie::detail::count::scope region("loop");
    product.mac(aie::load_v<64>(bf16s), aie::load_v<64>(bf16s + 64));
  } else if (name == "bfp16_weights_4_tiles") {
    std::array<aie::accum<accfloat, 64>, 4> acc;
    for (auto& one : acc) one = aie::zeros<accfloat, 64>();
    const auto ones = aie::broadcast<bfloat16, 64>(bfloat16(1.0f));
    aie::block_vector_input_buffer_stream<bfp16ebs8, 64> weights(reinterpret_cast<const bfp16ebs8*>(memory.data()));
    const aie::detail::count::scope region("loop");
    const auto a0 = aie::accum<accfloat, 64>(aie::load_v<64>(bf16s)).to_vector<bfp16ebs8>();
    const auto a1 = aie::mul(aie::load_v<64>(bf16s + 64), ones).to_vector<bfp16ebs8>();
    const auto b0 = weights.pop();
    const auto b1 = weights.pop();
    acc[0] = mac_8x8_8x8T(a0, b0, acc[0]);
    acc[1] = mac_8x8_8x8T(a0, b1, acc[1]);
    acc[2] = mac_8x8_8x8T(a1, b0, acc[2]);
    acc[3] = mac_8x8_8x8T(a1, b1, acc[3]);
  } else if (name == "dequant_gemv_32") {
    auto acc = aie::zeros<accfloat, 32>();
    const auto scale = aie::broadcast<bfloat16, 32>(bfloat16(1.0f));
    const aie::detail::count::scope region("loop");
    const auto codes = aie::unpack(aie::unpack(aie::load_v<32>(reinterpret_cast<const uint4*>(memory.data()))));
    const auto weights = aie::mul(aie::to_float<bfloat16>(codes), scale).to_vector<bfloat16>();
    acc = aie::mac(acc, aie::load_v<32>(bf16s), weights);
  } else if (name == "scores_int8") {
    const auto* codes = reinterpret_cast<const int8*>(memory.data());
    aie::mmul<8, 8, 8, int8, int8> first, second;
    const aie::detail::count::scope region("loop");
    const auto b = aie::load_v<64>(codes + 128);
    first.mac(aie::load_v<64>(codes), b);
    second.mac(aie::load_v<64>(codes + 64), b);
  } else if (name == "weights_16") {
    const auto x = aie::load_v<16>(reinterpret_cast<const float*>(memory.data()));
    const aie::detail::count::scope region("loop");
    const auto bits = x.cast_to<int32>();
    const auto kept = aie::select(bits, aie::max(bits, bits), aie::lt(bits, bits));
    (void)aie::exp2<bfloat16>(kept.cast_to<float>());
  } else {
    throw py::value_error("no sequence '" + name + "'");
  }
}

// Does something with `value` that is a fault for some values, and returns what the core says to it.
std::string fault_of(const std::string& what, unsigned value) {
  alignas(64) const std::array<uint8_t, 192> memory{};
  alignas(64) std::array<uint8_t, 128> out{};
  namespace count = aie::detail::count;
  count::core.catch_faults = true;
  count::core.fault = {};
  if (what == "load") {
    (void)aie::load_v<64>(memory.data() + value);
  } else if (what == "load of 16") {
    (void)aie::load_v<16>(memory.data() + value);
  } else if (what == "store") {
    aie::store_v(out.data() + value, aie::zeros<uint8, 64>());
  } else if (what == "unaligned load") {
    (void)aie::load_unaligned_v<64>(memory.data() + value, 4);
  } else if (what == "interleave") {
    const auto v = aie::zeros<uint8, 64>();
    (void)aie::interleave_zip(v, v, value);
  } else if (what == "transpose") {
    (void)aie::transpose(aie::zeros<uint8, 64>(), value, 8);
  } else if (what == "bfp16") {
    const float x = std::bit_cast<float>(value);
    (void)aie::accum<accfloat, 64>(aie::broadcast<float, 64>(x)).to_vector<bfp16ebs8>();
  } else if (what == "subtracting mac") {
    const aie::block_vector<bfp16ebs8, 64> zero = aie::zeros<accfloat, 64>().to_vector<bfp16ebs8>();
    (void)mac_8x8_8x8T_conf(zero, zero, aie::zeros<accfloat, 64>(), 0, static_cast<int>(value), 0);
  } else {
    count::fault("no such operation", 0, 0);
  }
  count::core.catch_faults = false;
  return count::core.fault.data();
}

}  // namespace

void bind_operations(py::module_& m) {
  py::module_ ops = m.def_submodule("operations", "Operations of the host aie_api, for tests.");
  bind_integers<int4>(ops, "int4");
  bind_integers<uint4>(ops, "uint4");
  bind_integers<int8>(ops, "int8");
  bind_integers<uint8>(ops, "uint8");
  bind_integers<int16>(ops, "int16");
  bind_integers<uint16>(ops, "uint16");
  ops.def("to_bf16_float32", [](const Array<float>& in) {
    return map<bfloat16, float, 64>(
        in, [](const auto& v) { return aie::accum<accfloat, 64>(v).template to_vector<bfloat16>(); });
  });
  ops.def("to_float32_bf16", [](const Array<uint16_t>& in) {
    return map<float, bfloat16, 64>(
        in, [](const auto& v) { return aie::accum<accfloat, 64>(v).template to_vector<float>(); });
  });
  ops.def("to_bfp16", &to_bfp16);
  ops.def("from_bfp16", &from_bfp16);
  ops.def("bfp16_mac", &bfp16_mac);
  ops.def("bfp16_mac_4x16", &bfp16_mac_4x16);
  ops.def("mac", [](const Array<float>& acc, const Array<uint16_t>& a, const Array<uint16_t>& b) {
    Array<float> out(64);
    give(aie::mac(aie::accum<accfloat, 64>(take<float, 64>(acc)), take<bfloat16, 64>(a), take<bfloat16, 64>(b))
             .to_vector<float>(),
         out);
    return out;
  });
  ops.def("mmul_bf16", [](const Array<uint16_t>& a, const Array<uint16_t>& b) {
    aie::mmul<8, 8, 8, bfloat16, bfloat16> product;
    product.mac(take<bfloat16, 64>(a), take<bfloat16, 64>(b));
    Array<float> out(64);
    give(product.to_vector<float>(), out);
    return out;
  });
  ops.def("mmul_int8", [](const Array<int8_t>& a, const Array<int8_t>& b, const Array<int32_t>& acc) {
    aie::mmul<8, 8, 8, int8, int8> product(aie::accum<acc32, 64>(take<int32, 64>(acc)));
    product.mac(take<int8, 64>(a), take<int8, 64>(b));
    Array<int32_t> out(64);
    std::memcpy(out.mutable_data(), product.to_accum().data.data(), 256);
    return out;
  });
  ops.def("exp2", [](const Array<float>& in) {
    return map<bfloat16, float, 32>(in, [](const auto& v) { return aie::exp2<bfloat16>(v); });
  });
  bind_choices<int8, 64>(ops, "int8_64");
  bind_choices<int32, 16>(ops, "int32_16");
  ops.def("interleave_u8_64", &interleave<uint8, 64>);
  ops.def("interleave_bf16_64", &interleave<bfloat16, 64>);
  ops.def("interleave_bf16_16", &interleave<bfloat16, 16>);
  ops.def("transpose_u8_64", [](const Array<uint8_t>& in, unsigned rows, unsigned columns) {
    return map<uint8, uint8, 64>(in, [=](const auto& v) { return aie::transpose(v, rows, columns); });
  });
  ops.def("transpose_bf16_64", [](const Array<uint16_t>& in, unsigned rows, unsigned columns) {
    return map<bfloat16, bfloat16, 64>(in, [=](const auto& v) { return aie::transpose(v, rows, columns); });
  });
  ops.def("sequence", &sequence);
  ops.def("fault", &fault_of);
}

}  // namespace tilefuse::emu

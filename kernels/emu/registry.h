// What the host build knows about each kernel: its configuration, its entry points and the shapes of their arguments.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

struct bfloat16;

namespace tilefuse::emu {

enum class Dtype : uint8_t { u8, bf16, f32 };

struct Argument {
  std::string name;
  std::vector<int64_t> shape;
  Dtype dtype = Dtype::u8;
  bool written = false;
};

struct EntryPoint {
  std::string stem;  // empty for the main one
  std::vector<Argument> arguments;
  void (*call)(void* const* arguments) = nullptr;
};

// Configuration macros of a kernel object (kernels/aie/config.h), by their names; 0 for what does not apply.
struct Kernel {
  std::string name;
  std::string op;  // "gemm" or "gemv"
  int bits = 0;
  int group = 0;
  int minima = 0;
  std::string path;
  int m = 0;
  int64_t scratch_bytes = 0;
  std::vector<EntryPoint> entry_points;
};

// All kernels of the module, in the order of their registration.
std::vector<Kernel>& kernels();

namespace detail {

template <typename T>
struct DtypeOf;
template <>
struct DtypeOf<uint8_t> {
  static constexpr Dtype value = Dtype::u8;
};
template <>
struct DtypeOf<bfloat16> {
  static constexpr Dtype value = Dtype::bf16;
};
template <>
struct DtypeOf<float> {
  static constexpr Dtype value = Dtype::f32;
};

struct NameAndShape {
  const char* name;
  std::vector<int64_t> shape;
};

template <auto Function>
struct Call;

// Dtypes and directions come from the function's own parameters; only names and shapes are said again.
template <typename... T, void (*Function)(T*...)>
struct Call<Function> {
  static void run(void* const* arguments) { expand(arguments, std::index_sequence_for<T...>{}); }

  static EntryPoint describe(const char* stem, std::array<NameAndShape, sizeof...(T)> said) {
    EntryPoint entry{.stem = stem, .arguments = {}, .call = &run};
    size_t i = 0;
    ((entry.arguments.push_back({.name = said[i].name,
                                 .shape = said[i].shape,
                                 .dtype = DtypeOf<std::remove_const_t<T>>::value,
                                 .written = !std::is_const_v<T>}),
      ++i),
     ...);
    return entry;
  }

 private:
  template <size_t... I>
  static void expand(void* const* arguments, std::index_sequence<I...>) {
    Function(static_cast<T*>(arguments[I])...);
  }
};

}  // namespace detail

template <auto Function, typename... Said>
EntryPoint entry_point(const char* stem, Said&&... said) {
  return detail::Call<Function>::describe(stem, {detail::NameAndShape(std::forward<Said>(said))...});
}

}  // namespace tilefuse::emu

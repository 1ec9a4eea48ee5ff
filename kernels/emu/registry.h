// What the host build knows about each kernel: its configuration, its entry points and the shapes of their arguments.
//
// Plain constant data: there are dozens of kernels, and code that builds strings and vectors for each would take as
// long to compile as the kernels.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

struct bfloat16;

namespace tilefuse::emu {

enum class Dtype : uint8_t { u8, bf16, f32 };

// Stands for scratch_bytes() in a shape.
inline constexpr int64_t kScratch = -1;

struct Said {
  const char* name = nullptr;
  std::array<int64_t, 4> shape{};  // ends at the first 0
};

struct Argument {
  Said said;
  Dtype dtype = Dtype::u8;
  bool written = false;
};

struct EntryPoint {
  const char* stem = nullptr;  // empty for the main one
  std::array<Argument, 4> arguments{};
  size_t num_arguments = 0;
  void (*call)(void* const* arguments) = nullptr;
};

// Configuration macros of a kernel object (kernels/aie/config.h), by their names; 0 for what does not apply.
struct Kernel {
  const char* name = nullptr;
  const char* op = nullptr;  // "gemm" or "gemv"
  int bits = 0;
  int group = 0;
  int minima = 0;
  const char* path = nullptr;
  int m = 0;
  unsigned (*scratch_bytes)() = nullptr;
  std::array<EntryPoint, 5> entry_points{};
};

// All kernels of the module, in the order of their registration.
std::vector<const Kernel*>& kernels();

// At namespace scope, in a translation unit of the module: adds `kernel`, which has to stay.
struct Registration {
  explicit Registration(const Kernel& kernel) { kernels().push_back(&kernel); }
};

namespace detail {

template <typename T>
constexpr Dtype dtype_of() {
  if constexpr (std::is_same_v<T, uint8_t>) {
    return Dtype::u8;
  } else if constexpr (std::is_same_v<T, bfloat16>) {
    return Dtype::bf16;
  } else {
    static_assert(std::is_same_v<T, float>);
    return Dtype::f32;
  }
}

template <auto Function>
struct Call;

// Dtypes and directions come from the function's own parameters; only names and shapes are said again.
template <typename... T, void (*Function)(T*...)>
struct Call<Function> {
  static void run(void* const* arguments) { expand(arguments, std::index_sequence_for<T...>{}); }

  static constexpr EntryPoint describe(const char* stem, const std::array<Said, sizeof...(T)>& said) {
    EntryPoint entry{.stem = stem, .num_arguments = sizeof...(T), .call = &run};
    size_t i = 0;
    ((entry.arguments[i] = {said[i], dtype_of<std::remove_const_t<T>>(), !std::is_const_v<T>}, ++i), ...);
    return entry;
  }

 private:
  template <size_t... I>
  static void expand(void* const* arguments, std::index_sequence<I...>) {
    Function(static_cast<T*>(arguments[I])...);
  }
};

}  // namespace detail

template <auto Function, typename... S>
constexpr EntryPoint entry_point(const char* stem, const S&... said) {
  return detail::Call<Function>::describe(stem, {said...});
}

}  // namespace tilefuse::emu

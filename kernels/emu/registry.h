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

enum class Dtype : uint8_t { u8, bf16, f32, i32 };

// Stands for scratch_bytes() in a shape.
inline constexpr int64_t kScratch = -1;
// Leading extent of an array that may have any number of items.
inline constexpr int64_t kAny = -2;

// What is said of an argument that is an array (shape), or of an integer by value, which chooses an item of an array.
struct Said {
  const char* name = nullptr;
  std::array<int64_t, 6> shape{};  // ends at the first 0
  const char* indexes = "";        // name of the array that an integer is an index of
  int64_t step = 0;                // its elements from one index to the next
  int64_t extent = 0;              // how many values an index has; 0: as many as the array has room for
};

struct Argument {
  Said said;
  Dtype dtype = Dtype::u8;
  bool written = false;
  bool by_value = false;
};

inline constexpr size_t kMaxArguments = 5;

struct EntryPoint {
  const char* stem = nullptr;  // empty for the main one
  std::array<Argument, kMaxArguments> arguments{};
  size_t num_arguments = 0;
  // Each an address, or an int32_t converted to an unsigned word.
  void (*call)(const uintptr_t* arguments) = nullptr;
};

// Configuration macros of a kernel object (kernels/aie/config.h), by their names; 0 for what does not apply.
struct Kernel {
  const char* name = nullptr;
  const char* op = nullptr;          // "gemm", "gemv" or "attention"
  const char* activation = nullptr;  // "bf16" or "bfp16"
  int bits = 0;
  int group = 0;
  int minima = 0;
  const char* path = nullptr;
  int m = 0;
  int tiles = 1;                             // packed tiles of weights side by side
  int d = 0;                                 // channels of a head
  unsigned (*scratch_bytes)() = nullptr;     // none, if there is none
  std::array<EntryPoint, 9> entry_points{};  // ends at the first without a function
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
  } else if constexpr (std::is_same_v<T, float>) {
    return Dtype::f32;
  } else {
    static_assert(std::is_same_v<T, int32_t>);
    return Dtype::i32;
  }
}

// Of a parameter: a pointer to the elements of an array, or int32_t by value.
template <typename P>
constexpr Argument argument_of(const Said& said) {
  using T = std::remove_pointer_t<P>;
  static_assert(std::is_pointer_v<P> || std::is_same_v<P, int32_t>);
  return {.said = said,
          .dtype = dtype_of<std::remove_const_t<T>>(),
          .written = std::is_pointer_v<P> && !std::is_const_v<T>,
          .by_value = !std::is_pointer_v<P>};
}

template <typename P>
P argument_from(uintptr_t word) {
  if constexpr (std::is_pointer_v<P>)
    return reinterpret_cast<P>(word);
  else
    return static_cast<P>(word);
}

template <auto Function>
struct Call;

// Dtypes and directions come from the function's own parameters; only names and shapes are said again.
template <typename... P, void (*Function)(P...)>
struct Call<Function> {
  static_assert(sizeof...(P) <= kMaxArguments);

  static void run(const uintptr_t* arguments) { expand(arguments, std::index_sequence_for<P...>{}); }

  static constexpr EntryPoint describe(const char* stem, const std::array<Said, sizeof...(P)>& said) {
    EntryPoint entry{.stem = stem, .num_arguments = sizeof...(P), .call = &run};
    size_t i = 0;
    ((entry.arguments[i] = argument_of<P>(said[i]), ++i), ...);
    return entry;
  }

 private:
  template <size_t... I>
  static void expand(const uintptr_t* arguments, std::index_sequence<I...>) {
    Function(argument_from<P>(arguments[I])...);
  }
};

}  // namespace detail

template <auto Function, typename... S>
constexpr EntryPoint entry_point(const char* stem, const S&... said) {
  return detail::Call<Function>::describe(stem, {said...});
}

}  // namespace tilefuse::emu

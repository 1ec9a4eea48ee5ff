// aie::block_vector<bfp16ebs8, 64 or 128> and the streams that are its only way to and from memory: 64 values are 72
// bytes, eight times [exponent][8 mantissas], so no aligned load fits. Streams are byte-granular here as they are on
// the device.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "count.hpp"
#include "native.hpp"
#include "types.hpp"

namespace aie {

namespace detail {
template <unsigned Elems>
struct native_block;
template <>
struct native_block<64> {
  using type = v64bfp16ebs8;
};
template <>
struct native_block<128> {
  using type = v128bfp16ebs8;
};
}  // namespace detail

template <BlockType T, unsigned Elems>
class block_vector {
  static_assert(Elems == 64 || Elems == 128, "a block vector has 64 or 128 values");

 public:
  using value_type = T;
  using native_type = typename detail::native_block<Elems>::type;

  static constexpr unsigned size() { return Elems; }
  static constexpr unsigned block_size() { return 8; }
  static constexpr unsigned blocks() { return Elems / block_size(); }
  static constexpr unsigned memory_bytes() { return Elems + blocks(); }

  block_vector() {
#ifndef NDEBUG
    std::memset(&native_, 0xff, sizeof native_);
#endif
  }
  block_vector(const native_type& native) : native_(native) {}

  [[nodiscard]] native_type to_native() const { return native_; }
  operator native_type() const { return native_; }

  // The other half is undefined.
  template <unsigned ElemsOut>
  [[nodiscard]] block_vector<T, ElemsOut> grow(unsigned i = 0) const {
    static_assert(ElemsOut >= Elems);
    if constexpr (ElemsOut == Elems) {
      return *this;
    } else {
      block_vector<T, ElemsOut> result;
      result.insert(i, *this);
      return result;
    }
  }

  // Registers are aliases of their halves: no instruction.
  block_vector& insert(unsigned i, const block_vector<T, 64>& half)
    requires(Elems == 128)
  {
    const v64bfp16ebs8 part = half.to_native();
    (i == 0 ? native_.mantissaX0 : native_.mantissaX1) = part.mantissa;
    (i == 0 ? native_.exponentE0 : native_.exponentE1) = part.exponent;
    return *this;
  }

 private:
  native_type native_;
};

namespace detail {
template <typename V>
struct block_vector_traits : std::false_type {};
template <typename T, unsigned Elems>
struct block_vector_traits<block_vector<T, Elems>> : std::true_type {};

// A pop is a fill of the load queue and the pop itself, each a load.
inline v64bfp16ebs8 pop_block(const uint8_t* bytes) {
  count::now().load += 2;
  std::array<int8_t, 64> mantissas;
  std::array<uint8_t, 8> exponents;
  for (unsigned block = 0; block < 8; ++block) {
    exponents[block] = bytes[9 * block];
    std::memcpy(mantissas.data() + 8 * block, bytes + 9 * block + 1, 8);
  }
  v64bfp16ebs8 result;
  std::memcpy(&result.mantissa, mantissas.data(), 64);
  std::memcpy(&result.exponent, exponents.data(), 8);
  return result;
}

// A push and the flush after it: 72 bytes are two stores.
inline void push_block(const v64bfp16ebs8& v, uint8_t* bytes) {
  count::now().st += 2;
  std::array<int8_t, 64> mantissas;
  std::array<uint8_t, 8> exponents;
  std::memcpy(mantissas.data(), &v.mantissa, 64);
  std::memcpy(exponents.data(), &v.exponent, 8);
  for (unsigned block = 0; block < 8; ++block) {
    bytes[9 * block] = exponents[block];
    std::memcpy(bytes + 9 * block + 1, mantissas.data() + 8 * block, 8);
  }
}
}  // namespace detail

template <typename V>
concept BlockVector = detail::block_vector_traits<V>::value;

template <BlockType T, unsigned Elems, aie_dm_resource Resource = aie_dm_resource::none>
class block_vector_input_buffer_stream {
  static_assert(Elems == 64, "streams of 64 values are emulated");

 public:
  using vector_type = block_vector<T, Elems>;

  explicit(false) constexpr block_vector_input_buffer_stream(const T* ptr) : at_(ptr) {}

  vector_type pop() {
    const vector_type result = detail::pop_block(&at_->byte);
    seek(1);
    return result;
  }
  // Pops, then skips.
  vector_type pop_seek(int blocks) {
    const vector_type result = pop();
    seek(blocks);
    return result;
  }
  // Counts vectors of 72 bytes.
  void seek(int blocks) { at_ += blocks * static_cast<int>(vector_type::memory_bytes()); }
  block_vector_input_buffer_stream& operator>>(vector_type& v) {
    v = pop();
    return *this;
  }

 private:
  const T* at_;
};

template <BlockType T, unsigned Elems, aie_dm_resource Resource = aie_dm_resource::none>
class block_vector_output_buffer_stream {
  static_assert(Elems == 64, "streams of 64 values are emulated");

 public:
  using vector_type = block_vector<T, Elems>;

  explicit(false) constexpr block_vector_output_buffer_stream(T* ptr) : at_(ptr) {}

  void push(const vector_type& v) {
    detail::push_block(v, &at_->byte);
    seek(1);
  }
  void seek(int blocks) { at_ += blocks * static_cast<int>(vector_type::memory_bytes()); }
  block_vector_output_buffer_stream& operator<<(const vector_type& v) {
    push(v);
    return *this;
  }

 private:
  T* at_;
};

template <BlockType T, unsigned Elems, aie_dm_resource Resource = aie_dm_resource::none>
using block_vector_restrict_input_buffer_stream = block_vector_input_buffer_stream<T, Elems, Resource>;
template <BlockType T, unsigned Elems, aie_dm_resource Resource = aie_dm_resource::none>
using block_vector_restrict_output_buffer_stream = block_vector_output_buffer_stream<T, Elems, Resource>;

}  // namespace aie

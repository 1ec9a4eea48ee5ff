// The operations of block_ops.h in plain C++, which the compiler vectorises at the level of the including file. Loops
// over kBlockLanes partial sums are what lets it vectorise sums without being allowed to reorder them.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "bf16.h"
#include "block_ops.h"

namespace tilefuse {
namespace {

template <Dtype kType>
struct Element {
  using Type = std::conditional_t<kType == Dtype::f32, float, uint16_t>;

  TILEFUSE_ALWAYS_INLINE static float load(Type value) {
    if constexpr (kType == Dtype::f32) return value;
    if constexpr (kType == Dtype::bf16) return bf16_to_float(value);
    if constexpr (kType == Dtype::f16) return half_to_float(value);
  }
  TILEFUSE_ALWAYS_INLINE static Type store(float value) {
    if constexpr (kType == Dtype::f32) return value;
    if constexpr (kType == Dtype::bf16) return float_to_bf16(value);
    if constexpr (kType == Dtype::f16) return float_to_half(value);
  }
  TILEFUSE_ALWAYS_INLINE static float round(float value) { return load(store(value)); }
};

// Calls fn.operator()<kType>().
template <typename Fn>
TILEFUSE_ALWAYS_INLINE void with_type(Dtype dtype, Fn&& fn) {
  switch (dtype) {
    case Dtype::f32:
      return fn.template operator()<Dtype::f32>();
    case Dtype::bf16:
      return fn.template operator()<Dtype::bf16>();
    case Dtype::f16:
      return fn.template operator()<Dtype::f16>();
  }
}

TILEFUSE_ALWAYS_INLINE float sum_of(const float* partial) {
  float sum = 0.0F;
  for (int64_t j = 0; j < kBlockLanes; ++j) sum += partial[j];
  return sum;
}

// e^x within 2^-22 of it: 2^n e^r, |r| <= ln 2 / 2, by the series up to r^6 / 6!. NaN stays NaN; beyond float's range
// the argument is clamped.
TILEFUSE_ALWAYS_INLINE float exponential(float x) {
  constexpr float kRound = 12582912.0F;  // 1.5 2^23: adding it leaves the nearest integer in the low bits
  const float low = x < -87.0F ? -87.0F : x;
  const float t = low > 88.0F ? 88.0F : low;
  const float shifted = t * 1.44269504F + kRound;
  const float n = shifted - kRound;
  const float r = (t - n * 0.693359375F) + n * 2.12194440e-4F;  // ln 2 in two parts
  float p = 1.0F / 720.0F;
  p = p * r + 1.0F / 120.0F;
  p = p * r + 1.0F / 24.0F;
  p = p * r + 1.0F / 6.0F;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  const uint32_t exponent = __builtin_bit_cast(uint32_t, shifted) - __builtin_bit_cast(uint32_t, kRound) + 127u;
  return p * __builtin_bit_cast(float, exponent << 23);
}

template <Dtype kType>
void norm_as(const void* x_, const void* w_, int64_t n, float eps, bool plus_one, void* y_) {
  using E = Element<kType>;
  const auto* x = static_cast<const typename E::Type*>(x_);
  const auto* w = static_cast<const typename E::Type*>(w_);
  auto* y = static_cast<typename E::Type*>(y_);
  float partial[kBlockLanes] = {};
  int64_t i = 0;
  for (; i + kBlockLanes <= n; i += kBlockLanes) {
    for (int64_t j = 0; j < kBlockLanes; ++j) {
      const float value = E::load(x[i + j]);
      partial[j] += value * value;
    }
  }
  float squares = sum_of(partial);
  for (; i < n; ++i) squares += E::load(x[i]) * E::load(x[i]);
  const float factor = 1.0F / std::sqrt(squares / static_cast<float>(n) + eps);
  if (plus_one) {
    for (i = 0; i < n; ++i) y[i] = E::store(E::load(x[i]) * factor * (1.0F + E::load(w[i])));
  } else {
    for (i = 0; i < n; ++i) y[i] = E::store(E::load(w[i]) * E::round(E::load(x[i]) * factor));
  }
}

void norm(Dtype dtype, const void* x, const void* w, int64_t n, float eps, bool plus_one, void* y) {
  with_type(dtype, [&]<Dtype kType>() { norm_as<kType>(x, w, n, eps, plus_one, y); });
}

template <Dtype kType>
void rotate_as(const void* x_, const void* cos_, const void* sin_, int64_t d, void* out_) {
  using E = Element<kType>;
  const auto* x = static_cast<const typename E::Type*>(x_);
  const auto* cos = static_cast<const typename E::Type*>(cos_);
  const auto* sin = static_cast<const typename E::Type*>(sin_);
  auto* out = static_cast<typename E::Type*>(out_);
  const int64_t half = d / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = E::load(x[i]);
    const float b = E::load(x[i + half]);
    const float first = E::round(a * E::load(cos[i])) + E::round(-b * E::load(sin[i]));
    const float second = E::round(b * E::load(cos[i + half])) + E::round(a * E::load(sin[i + half]));
    out[i] = E::store(first);
    out[i + half] = E::store(second);
  }
}

void rotate(Dtype dtype, const void* x, const void* cos, const void* sin, int64_t d, void* out) {
  with_type(dtype, [&]<Dtype kType>() { rotate_as<kType>(x, cos, sin, d, out); });
}

template <Dtype kType>
void attend_as(const void* q_, const void* keys_, const void* values_, int64_t group, int64_t d, int64_t length,
               float scale, float* scratch, void* out_) {
  using E = Element<kType>;
  const auto* q = static_cast<const typename E::Type*>(q_);
  const auto* keys = static_cast<const typename E::Type*>(keys_);
  const auto* values = static_cast<const typename E::Type*>(values_);
  auto* out = static_cast<typename E::Type*>(out_);
  float* const queries = scratch;
  float* const sums = queries + group * d;
  float* const row = sums + group * d;
  float* const scores = row + d;
  for (int64_t i = 0; i < group * d; ++i) {
    queries[i] = E::load(q[i]) * scale;
    sums[i] = 0.0F;
  }
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t i = 0; i < d; ++i) row[i] = E::load(keys[t * d + i]);
    for (int64_t g = 0; g < group; ++g) {
      const float* query = queries + g * d;
      float partial[kBlockLanes] = {};
      for (int64_t i = 0; i < d; i += kBlockLanes) {
        for (int64_t j = 0; j < kBlockLanes; ++j) partial[j] += query[i + j] * row[i + j];
      }
      scores[g * length + t] = sum_of(partial);
    }
  }
  for (int64_t g = 0; g < group; ++g) {
    float* weights = scores + g * length;
    float most = weights[0];
    for (int64_t t = 1; t < length; ++t) most = weights[t] > most ? weights[t] : most;
    for (int64_t t = 0; t < length; ++t) weights[t] = exponential(weights[t] - most);
    float total = 0.0F;
    for (int64_t t = 0; t < length; ++t) total += weights[t];
    const float factor = 1.0F / total;
    for (int64_t t = 0; t < length; ++t) weights[t] *= factor;
  }
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t i = 0; i < d; ++i) row[i] = E::load(values[t * d + i]);
    for (int64_t g = 0; g < group; ++g) {
      const float weight = scores[g * length + t];
      float* sum = sums + g * d;
      for (int64_t i = 0; i < d; ++i) sum[i] += weight * row[i];
    }
  }
  for (int64_t i = 0; i < group * d; ++i) out[i] = E::store(sums[i]);
}

void attend(Dtype dtype, const void* q, const void* keys, const void* values, int64_t group, int64_t d, int64_t length,
            float scale, float* scratch, void* out) {
  with_type(dtype, [&]<Dtype kType>() { attend_as<kType>(q, keys, values, group, d, length, scale, scratch, out); });
}

template <Dtype kType, Activation kActivation>
void gate_as(const void* gate_, const void* up_, int64_t n, void* out_) {
  using E = Element<kType>;
  const auto* gate = static_cast<const typename E::Type*>(gate_);
  const auto* up = static_cast<const typename E::Type*>(up_);
  auto* out = static_cast<typename E::Type*>(out_);
  for (int64_t i = 0; i < n; ++i) {
    const float x = E::load(gate[i]);
    // tanh(u) = 2 / (1 + e^-2u) - 1
    const float u = kActivation == Activation::silu ? x : 1.5957691216F * (x + 0.044715F * x * x * x);
    out[i] = E::store(E::round(x / (1.0F + exponential(-u))) * E::load(up[i]));
  }
}

void gate(Dtype dtype, const void* gate, const void* up, int64_t n, Activation activation, void* out) {
  with_type(dtype, [&]<Dtype kType>() {
    if (activation == Activation::silu) {
      gate_as<kType, Activation::silu>(gate, up, n, out);
    } else {
      gate_as<kType, Activation::gelu_tanh>(gate, up, n, out);
    }
  });
}

template <Dtype kType>
void add_as(const void* a_, const void* b_, int64_t n, void* out_) {
  using E = Element<kType>;
  const auto* a = static_cast<const typename E::Type*>(a_);
  const auto* b = static_cast<const typename E::Type*>(b_);
  auto* out = static_cast<typename E::Type*>(out_);
  for (int64_t i = 0; i < n; ++i) out[i] = E::store(E::load(a[i]) + E::load(b[i]));
}

void add(Dtype dtype, const void* a, const void* b, int64_t n, void* out) {
  with_type(dtype, [&]<Dtype kType>() { add_as<kType>(a, b, n, out); });
}

constexpr BlockOps kOps = {norm, rotate, attend, gate, add};

}  // namespace
}  // namespace tilefuse

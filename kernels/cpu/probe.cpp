#include "probe.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <new>

#include "thread_pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tilefuse {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
// Read in one go by one thread: long enough for the prefetchers, short enough to even out threads of unequal speed.
constexpr size_t kChunk = size_t{1} << 20;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Makes the compiler believe that `value` is used, at no cost.
template <typename T>
void keep(const T& value) {
  asm volatile("" : : "m"(value));
}

void read_portable(const std::byte* data, size_t bytes) {
  uint64_t sums[8] = {};
  for (size_t i = 0; i < bytes; i += sizeof(sums)) {
    uint64_t words[8];
    std::memcpy(words, data + i, sizeof(words));
    for (int j = 0; j < 8; ++j) sums[j] ^= words[j];
  }
  keep(sums);
}

// Each arithmetic loop keeps this many independent chains going: more than latency (4 to 6 cycles) times units (2) of
// any current core, few enough for 16 registers.
constexpr int kChains = 12;
// Multiply-adds of one chain between two looks at the clock: some 10 us.
constexpr int kSteps = 4096;

// Makes the compiler believe that chain `v` takes a value of its own here: equal chains would be computed once.
template <typename T>
void separate([[maybe_unused]] T& v) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(v));
#else
  asm volatile("" : "+w"(v));
#endif
}

// Returns the floating-point operations done.
double fp32_portable() {
  constexpr int kLanes = 4;
  using Vector = float __attribute__((vector_size(16)));
  Vector sums[kChains] = {};
  volatile float source = 1.0f;
  const Vector factor = {source, source, source, source};
  for (Vector& sum : sums) separate(sum);
  for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) sums[j] = sums[j] * factor + factor;
  }
  keep(sums);
  return 2.0 * kSteps * kChains * kLanes;
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) void read_avx2(const std::byte* data, size_t bytes) {
  __m256i sums[4] = {};
  for (size_t i = 0; i < bytes; i += sizeof(sums)) {
    const auto* p = reinterpret_cast<const __m256i*>(data + i);
    for (int j = 0; j < 4; ++j) sums[j] = _mm256_xor_si256(sums[j], _mm256_load_si256(p + j));
  }
  keep(sums);
}

__attribute__((target("avx512f"))) void read_avx512(const std::byte* data, size_t bytes) {
  __m512i sums[4] = {};
  for (size_t i = 0; i < bytes; i += sizeof(sums)) {
    const std::byte* p = data + i;
    for (int j = 0; j < 4; ++j) sums[j] = _mm512_xor_si512(sums[j], _mm512_load_si512(p + 64 * j));
  }
  keep(sums);
}

__attribute__((target("avx2,fma"))) double fp32_avx2() {
  __m256 sums[kChains] = {};
  for (auto& sum : sums) separate(sum);
  volatile float source = 1.0f;
  const __m256 factor = _mm256_set1_ps(source);
  for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) sums[j] = _mm256_fmadd_ps(sums[j], factor, factor);
  }
  keep(sums);
  return 2.0 * kSteps * kChains * 8;
}

__attribute__((target("avx512f"))) double fp32_avx512() {
  __m512 sums[kChains] = {};
  for (auto& sum : sums) separate(sum);
  volatile float source = 1.0f;
  const __m512 factor = _mm512_set1_ps(source);
  for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) sums[j] = _mm512_fmadd_ps(sums[j], factor, factor);
  }
  keep(sums);
  return 2.0 * kSteps * kChains * 16;
}

__attribute__((target("avx512f,avx512bf16"))) double bf16_dot_avx512() {
  __m512 sums[kChains] = {};
  for (auto& sum : sums) separate(sum);
  volatile float source = 1.0f;
  const __m512bh factor = _mm512_cvtne2ps_pbh(_mm512_set1_ps(source), _mm512_set1_ps(source));
  for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) sums[j] = _mm512_dpbf16_ps(sums[j], factor, factor);
  }
  keep(sums);
  return 2.0 * kSteps * kChains * 32;
}

__attribute__((target("avx512f,avx512bw,avx512vnni"))) double int8_dot_avx512() {
  __m512i sums[kChains] = {};
  for (auto& sum : sums) separate(sum);
  volatile int8_t source = 1;
  const __m512i factor = _mm512_set1_epi8(source);
  for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) sums[j] = _mm512_dpbusd_epi32(sums[j], factor, factor);
  }
  keep(sums);
  return 2.0 * kSteps * kChains * 64;
}

#endif

using Read = void (*)(const std::byte* data, size_t bytes);
using Arithmetic = double (*)();

Read best_read() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return read_avx512;
  if (__builtin_cpu_supports("avx2")) return read_avx2;
#endif
  return read_portable;
}

Arithmetic arithmetic(const std::string& kind) {
#if defined(__x86_64__)
  if (kind == "bf16-dot") return bf16_dot_avx512;
  if (kind == "int8-dot") return int8_dot_avx512;
  if (__builtin_cpu_supports("avx512f")) return fp32_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return fp32_avx2;
#else
  (void)kind;
#endif
  return fp32_portable;
}

}  // namespace

ReadProbe::ReadProbe(size_t bytes) : size_((std::max(bytes, size_t{1}) + kHugePage - 1) / kHugePage * kHugePage) {
  // One page more than needed, so that a start on a huge page boundary lies in it; the ends are given back.
  void* mapped = mmap(nullptr, size_ + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* begin = static_cast<std::byte*>(mapped);
  const size_t head = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  if (head != 0) munmap(begin, head);
  data_ = begin + head;
  munmap(data_ + size_, kHugePage - head);
  madvise(data_, size_, MADV_HUGEPAGE);
  // An untouched page is the system's one page of zeros: reading it would measure the cache.
  ThreadPool::instance().parallel_for(static_cast<int64_t>(size_ / kHugePage), [this](int64_t page, int) {
    std::memset(data_ + static_cast<size_t>(page) * kHugePage, 1, kHugePage);
  });
}

ReadProbe::~ReadProbe() { munmap(data_, size_); }

double ReadProbe::run() const {
  const Read read = best_read();
  const auto start = std::chrono::steady_clock::now();
  ThreadPool::instance().parallel_for(static_cast<int64_t>(size_ / kChunk), [&](int64_t chunk, int) {
    read(data_ + static_cast<size_t>(chunk) * kChunk, kChunk);
  });
  return static_cast<double>(size_) / seconds_since(start);
}

std::vector<std::string> arithmetic_probes() {
  std::vector<std::string> kinds = {"fp32"};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bf16")) kinds.emplace_back("bf16-dot");
#endif
  return kinds;
}

std::vector<std::string> integer_probes() {
  std::vector<std::string> kinds;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni")) kinds.emplace_back("int8-dot");
#endif
  return kinds;
}

double run_arithmetic_probe(const std::string& kind, double seconds) {
  const Arithmetic body = arithmetic(kind);
  ThreadPool& pool = ThreadPool::instance();
  std::vector<double> rates(static_cast<size_t>(pool.num_threads()), 0.0);
  // Every item runs for the whole time, so that each thread takes one; a thread that found two counts the second alone.
  pool.parallel_for(static_cast<int64_t>(rates.size()), [&](int64_t, int thread) {
    const auto start = std::chrono::steady_clock::now();
    double done = 0;
    double elapsed = 0;
    do {
      done += body();
      elapsed = seconds_since(start);
    } while (elapsed < seconds);
    rates[static_cast<size_t>(thread)] = done / elapsed;
  });
  double sum = 0;
  for (const double rate : rates) sum += rate;
  return sum;
}

}  // namespace tilefuse

// What this machine can do at most, measured: the limits that benchmarks set a kernel's speed against.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace tilefuse {

// A buffer in huge pages (where the system grants them), read from end to end by all threads of the pool.
class ReadProbe {
 public:
  // `bytes` is rounded up to whole huge pages. Throws std::bad_alloc.
  explicit ReadProbe(size_t bytes);
  ~ReadProbe();
  ReadProbe(const ReadProbe&) = delete;
  ReadProbe& operator=(const ReadProbe&) = delete;

  // Reads the buffer once; returns bytes a second.
  [[nodiscard]] double run() const;

  [[nodiscard]] size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// The multiply-add instructions that this CPU has, best last: "fp32" (the widest of AVX-512, AVX2 and what the compiler
// makes of plain C++) and, with AVX512_BF16, "bf16-dot".
std::vector<std::string> arithmetic_probes();

// Likewise for integers: "int8-dot", VPDPBUSD on 512 bits, with AVX512_VNNI.
std::vector<std::string> integer_probes();

// Operations a second (a multiply-add is two) of `kind`, all threads of the pool together, over about `seconds`. `kind`
// is one of arithmetic_probes() or integer_probes().
double run_arithmetic_probe(const std::string& kind, double seconds);

}  // namespace tilefuse

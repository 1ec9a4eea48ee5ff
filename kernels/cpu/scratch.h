// Scratch memory that grows and is kept: no allocation per call once warm. Included by translation units of several
// instruction sets, hence the unnamed namespace: of one out-of-line copy for all, the linker might keep the one that
// not every CPU can run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace tilefuse {
namespace {

inline constexpr int64_t kHugePage = int64_t{2} << 20;

// One a thread and purpose.
class Scratch {
 public:
  std::byte* at_least(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      const int64_t page = bytes > kHugePage / 8 ? kHugePage : 4096;
      const auto rounded = static_cast<size_t>((bytes + page - 1) / page * page);
      memory_.reset(static_cast<std::byte*>(std::aligned_alloc(static_cast<size_t>(page), rounded)));
      if (!memory_) throw std::bad_alloc();
#if defined(__linux__)
      // Kernels read some of it with long strides: with small pages they would wait for translations.
      if (page == kHugePage) madvise(memory_.get(), rounded, MADV_HUGEPAGE);
#endif
      size_ = static_cast<int64_t>(rounded);
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  int64_t size_ = 0;
};

}  // namespace
}  // namespace tilefuse

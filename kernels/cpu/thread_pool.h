// A pool of worker threads for the CPU kernels.
//
// One job runs at a time. A caller that finds the pool busy (another Python thread is in a kernel) runs its job on its
// own thread instead of waiting, so that callers never add up to more running threads than the pool was sized for plus
// callers. Kernels give each output tile to exactly one thread, so results don't depend on how many threads took part.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace tilefuse {

class ThreadPool {
 public:
  // The process's pool. Sized by TILEFUSE_NUM_THREADS, else OMP_NUM_THREADS, else the CPUs this process may run on.
  static ThreadPool& instance();

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }

  // Takes effect at the next job. `n` is clamped to [1, kMaxThreads].
  void set_num_threads(int n);

  // Calls fn(item, thread) for every item in [0, items), each once, on at most num_threads() threads; thread is in
  // [0, num_threads()). Returns when all are done. Items are handed out in order, one at a time. When fn throws, the
  // items not yet handed out are dropped and the first exception is rethrown here, once no thread runs fn any more. fn
  // must not call parallel_for.
  template <typename Fn>
  void parallel_for(int64_t items, Fn&& fn) {
    using F = std::remove_reference_t<Fn>;
    run(
        items, [](void* context, int64_t item, int thread) { (*static_cast<F*>(context))(item, thread); },
        const_cast<void*>(static_cast<const void*>(&fn)));
  }

  static constexpr int kMaxThreads = 256;

 private:
  using Task = void (*)(void* context, int64_t item, int thread);

  explicit ThreadPool(int threads);
  void run(int64_t items, Task task, void* context);
  void work(int thread, uint32_t seen);
  void drain(int thread) noexcept;
  void shut_down();
  void resize_locked(int threads);
  void stop_locked();

  std::atomic<int> num_threads_;
  std::mutex owner_;                  // held by the caller whose job runs
  std::vector<std::thread> workers_;  // guarded by owner_

  // The running job; written by the owner before open_ is set.
  Task task_ = nullptr;
  void* context_ = nullptr;
  int64_t items_ = 0;

  std::mutex error_mutex_;
  std::exception_ptr error_;  // of the running job: the first that was thrown

  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  // Workers that are in the running job, or about to see that there is none.
  alignas(64) std::atomic<uint32_t> active_{0};
  std::atomic<bool> open_{false};  // whether a job runs that a worker may still enter
  std::atomic<bool> stop_{false};
};

}  // namespace tilefuse

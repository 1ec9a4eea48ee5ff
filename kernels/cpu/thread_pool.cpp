#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace tilefuse {
namespace {

// How long an idle worker polls for the next job before it sleeps: a decode step issues its next matmul within some
// tens of microseconds, and a futex wake-up costs about as much. 4000 pauses are 40 to 160 us on current x86.
constexpr int kSpins = 4000;

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int positive_env(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr) return 0;
  // OMP_NUM_THREADS may be a list, one entry a nesting level; the first is ours.
  int value = 0;
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
  const bool whole = error == std::errc{} && (*end == '\0' || *end == ',');
  return whole && value > 0 ? value : 0;
}

int default_threads() {
  for (const char* name : {"TILEFUSE_NUM_THREADS", "OMP_NUM_THREADS"}) {
    if (const int n = positive_env(name); n > 0) return std::min(n, ThreadPool::kMaxThreads);
  }
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return std::clamp(CPU_COUNT(&set), 1, ThreadPool::kMaxThreads);
  }
#endif
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, ThreadPool::kMaxThreads);
}

std::atomic<ThreadPool*> g_pool{nullptr};
std::mutex g_pool_mutex;
int g_inherited_threads = 0;  // of the parent's pool, in a child made by fork(); else 0

// Worker threads do not survive fork(): the child forgets its parent's pool (its memory is leaked on purpose, since its
// threads can be neither joined nor destroyed there) and makes one of the same size at its first job.
void forget_pool_in_child() {
  if (const ThreadPool* pool = g_pool.load(std::memory_order_acquire)) g_inherited_threads = pool->num_threads();
  new (&g_pool_mutex) std::mutex;
  g_pool.store(nullptr, std::memory_order_release);
}

}  // namespace

ThreadPool& ThreadPool::instance() {
  if (ThreadPool* pool = g_pool.load(std::memory_order_acquire)) return *pool;
  const std::lock_guard lock(g_pool_mutex);
  if (ThreadPool* pool = g_pool.load(std::memory_order_acquire)) return *pool;
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, &forget_pool_in_child);
    // Joins the workers before static destructors and library unloading pull their code away. The pool itself stays: a
    // daemon thread may still be about to use it.
    std::atexit([] {
      if (ThreadPool* pool = g_pool.load(std::memory_order_acquire)) pool->shut_down();
    });
  });
  auto* pool = new ThreadPool(g_inherited_threads > 0 ? g_inherited_threads : default_threads());
  g_pool.store(pool, std::memory_order_release);
  return *pool;
}

ThreadPool::ThreadPool(int threads) : num_threads_(threads) {}

// From here on every job runs on its caller's thread.
void ThreadPool::shut_down() {
  const std::lock_guard lock(owner_);
  stop_locked();
  set_num_threads(1);
}

void ThreadPool::set_num_threads(int n) {
  num_threads_.store(std::clamp(n, 1, kMaxThreads), std::memory_order_relaxed);
}

void ThreadPool::stop_locked() {
  stop_.store(true, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
  stop_.store(false, std::memory_order_relaxed);
}

void ThreadPool::resize_locked(int threads) {
  const auto wanted = static_cast<size_t>(threads - 1);
  if (workers_.size() == wanted) return;
  stop_locked();
  workers_.reserve(wanted);
  // A worker starts with the generation that it has already seen, so it can't miss a job issued before it first runs.
  const uint32_t seen = generation_.load(std::memory_order_relaxed);
  try {
    for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t, seen] { work(t, seen); });
  } catch (const std::system_error&) {
    // The system grants no more threads: go on with those that started.
    num_threads_.store(static_cast<int>(workers_.size()) + 1, std::memory_order_relaxed);
  }
}

void ThreadPool::run(int64_t items, Task task, void* context) {
  if (items <= 0) return;
  const int threads = num_threads();
  std::unique_lock lock(owner_, std::defer_lock);
  if (threads == 1 || items == 1 || !lock.try_lock()) {
    for (int64_t i = 0; i < items; ++i) task(context, i, 0);
    return;
  }
  resize_locked(threads);
  task_ = task;
  context_ = context;
  items_ = items;
  next_.store(0, std::memory_order_relaxed);
  open_.store(true, std::memory_order_seq_cst);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  drain(0);
  // Workers that have not woken up by now are not waited for. A worker counts itself in and then looks whether the job
  // is open; this closes the job and then looks who is counted in: in one total order, so that one of the two sees the
  // other.
  open_.store(false, std::memory_order_seq_cst);
  for (int spins = 0; active_.load(std::memory_order_seq_cst) != 0; ++spins) {
    if (spins < kSpins) {
      cpu_pause();
    } else {
      std::this_thread::yield();
    }
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::drain(int thread) noexcept {
  try {
    for (int64_t i = next_.fetch_add(1, std::memory_order_relaxed); i < items_;
         i = next_.fetch_add(1, std::memory_order_relaxed)) {
      task_(context_, i, thread);
    }
  } catch (...) {
    next_.store(items_, std::memory_order_relaxed);
    const std::lock_guard lock(error_mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void ThreadPool::work(int thread, uint32_t seen) {
  for (;;) {
    uint32_t now = generation_.load(std::memory_order_acquire);
    for (int spins = 0; now == seen && spins < kSpins; ++spins) {
      cpu_pause();
      now = generation_.load(std::memory_order_acquire);
    }
    while (now == seen) {
      generation_.wait(seen, std::memory_order_acquire);
      now = generation_.load(std::memory_order_acquire);
    }
    seen = now;
    if (stop_.load(std::memory_order_relaxed)) return;
    active_.fetch_add(1, std::memory_order_seq_cst);
    if (open_.load(std::memory_order_seq_cst)) drain(thread);
    active_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace tilefuse

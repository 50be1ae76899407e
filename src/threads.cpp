#include "threads.h"

#include <pthread.h>

#include <atomic>

namespace matmuls {
namespace {

std::atomic<bool> forked{false};
[[maybe_unused]] const int watching = pthread_atfork(nullptr, nullptr, [] { forked = true; });

}  // namespace

bool is_forked() { return forked.load(std::memory_order_relaxed); }

}  // namespace matmuls

// Work shared among torch's threads on the CPU.
#pragma once

#include <ATen/Parallel.h>

#include <cstdint>

namespace matmuls {

constexpr int64_t kGrain = 32768;  // elements worth a thread: at::internal::GRAIN_SIZE

// Whether this process is a child of fork(): OpenMP's threads stayed with its parent, and what waits for them hangs.
bool is_forked();

// f(begin, end) over parts of a range, of `grain` at least: at::parallel_for, but for a forked child, which has one
// thread.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  if (begin >= end) return;
  is_forked() ? f(begin, end) : at::parallel_for(begin, end, grain, f);
}

}  // namespace matmuls

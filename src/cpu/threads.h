// Work shared among torch's threads on the CPU. What a child of fork() has of them: cpu/threads.cpp.
#pragma once

#include <ATen/Parallel.h>

#include <cstdint>

namespace matmuls {

constexpr int64_t kGrain = 32768;  // elements worth a thread: at::internal::GRAIN_SIZE

using at::parallel_for;  // f(begin, end) over parts of a range, of `grain` at least

}  // namespace matmuls

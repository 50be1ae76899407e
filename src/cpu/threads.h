// Parallel loops on torch's CPU threads. For the state after fork() see threads.cpp.
#pragma once

#include <ATen/Parallel.h>

#include <cstdint>

namespace matmuls {

constexpr int64_t kGrain = 32768;  // elements per thread that pay for starting it: at::internal::GRAIN_SIZE

using at::parallel_for;  // f(begin, end) over parts of a range, each of at least `grain`

}  // namespace matmuls

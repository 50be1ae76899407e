// Slots of counters in global memory that are zero between launches: launches that may run concurrently use different
// slots.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

namespace matmuls {

constexpr int kCounterSlots = 512;  // per GPU

// The slot of this stream, or of the graph that it captures: until the graph and its executables are destroyed. Two
// launches of one captured node write over the same memory, so they never run concurrently. None if all are taken.
std::optional<int> counter_slot(cudaStream_t stream);

}  // namespace matmuls

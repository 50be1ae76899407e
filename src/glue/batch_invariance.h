// The switch of handles(batch_invariant=True): a row's result must not depend on how many rows come with it.
#pragma once

#include <atomic>
#include <cstdint>

namespace matmuls {

// How many such scopes are open, in all threads: gradients are computed in threads of their own.
inline std::atomic<int64_t> batch_invariant_scopes{0};

inline bool is_batch_invariant() { return batch_invariant_scopes.load(std::memory_order_relaxed) > 0; }

}  // namespace matmuls

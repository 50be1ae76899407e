// Reads the constants and merges the warps of even_rows and nearly_even, whose rows divide evenly among the threads: no
// branch tests whether a vector exists, and addresses are a register plus an immediate. That halves the instructions of
// one_pass, which limit 16-bit layer norm (8192 columns: 15 instructions per column against 34, 0.94 of a copy against
// 0.85).
#pragma once

#include "rows/device/operation.cuh"

namespace matmuls {

// Reads the constants in a span's columns.
template <class T, int V, class Op, class Columns>
__device__ auto even_constants(const Op& op, const Columns& span) {
  return [&op, span](int c, int i, typename Op::F(&numbers)[V]) {
    Words<T, V> words{};
    if (span.begins(i)) load_words<16>(op.constant(c) + span.column(i), words.at);
    unpack(words, numbers);
  };
}
// Merges the states of a block's warps, each of `each` columns.
template <int threads, class Op, class State>
__device__ State merge_even_warps(const Op& op, const State& state, int each) {
  constexpr int kWarps = threads / 32;
  __shared__ State warps[kWarps];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = state;
  __syncthreads();
  return op.template merge_even<kWarps>(warps[threadIdx.x % kWarps], each);
}

}  // namespace matmuls

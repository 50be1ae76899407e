// What the sparse kernels share on the GPU: indices, vectors that may be cut short, groups of lanes.
#pragma once

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "device.cuh"
#include "sparse.h"

namespace matmuls {

constexpr int kSparseThreads = 256;

// The row that nonzero p belongs to: the last row that begins at or before p and is not empty.
template <class I>
__device__ int64_t row_of(const I* crow, int64_t rows, int64_t p) {
  int64_t low = 0, high = rows;  // crow[low] <= p < crow[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (static_cast<int64_t>(crow[middle]) <= p)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// V numbers of a row from column c on, those at n and beyond left 0.
template <class T, int V>
__device__ Words<T, V> load_vector(const T* row, int64_t c, int64_t n) {
  Words<T, V> words{};
  if (c >= n) return words;
  if constexpr (V > 1) {
    if (c + V <= n) {
      load_constant<16>(row + c, words.at);
      return words;
    }
  }
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (c + v >= n) break;
    const Words<T, 1> one = load_once<T, 1>(row + c + v);
    if constexpr (sizeof(T) == 2) {
      words.at[v / 2] |= one.at[0] << (16 * (v % 2));
    } else {
#pragma unroll
      for (int w = 0; w < Words<T, 1>::kCount; ++w) words.at[v * Words<T, 1>::kCount + w] = one.at[w];
    }
  }
  return words;
}

template <class T, int V, class F>
__device__ void store_vector(T* row, int64_t c, int64_t n, const F (&numbers)[V]) {
  if constexpr (V > 1) {
    if (c + V <= n) {
      store_once(row + c, pack<T, V>(numbers));
      return;
    }
  }
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (c + v < n) row[c + v] = T(numbers[v]);
}

// The sum over L lanes that lie side by side, the same bits in every one of them.
template <int L, class F>
__device__ F sum_of_group(F x) {
#pragma unroll
  for (int step = L / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
template <int L, class F>
__device__ F largest_of_group(F x) {
#pragma unroll
  for (int step = L / 2; step > 0; step /= 2) x = larger(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

inline bool on_16_bytes(const at::Tensor& t, int64_t row_stride, int64_t batch_stride) {
  const int64_t size = t.element_size();
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && row_stride * size % 16 == 0 &&
         batch_stride * size % 16 == 0;
}

inline int64_t ceil_of(int64_t x, int64_t y) { return (x + y - 1) / y; }

}  // namespace matmuls

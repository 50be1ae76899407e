// Device functions shared by the sparse kernels: row lookup in CSR, prefix sums, vector loads, reductions over lane
// groups.
#pragma once

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "gpu/vector_io.cuh"
#include "sparse/csr.h"

namespace matmuls {

// The row that holds nonzero p: the last row r with crow[r] <= p. It is not empty.
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

// As row_of, for a row that is not before `low` and mostly soon after it. Gallops first: thousands of empty rows may
// lie between.
template <class I>
__device__ int64_t row_from(const I* crow, int64_t rows, int64_t low, int64_t p) {
  int64_t step = 1;
  while (low + step < rows && static_cast<int64_t>(crow[low + step]) <= p) low += step, step *= 2;
  return low + row_of(crow + low, min(step, rows - low), p);
}

// As row_of, for one p per group of L lanes: an L-ary search with one probe per lane. All lanes of the warp must call
// it.
template <int L, class I>
__device__ int64_t row_of_group(const I* crow, int64_t rows, int64_t p) {
  const int lane = threadIdx.x % L, shift = threadIdx.x % 32 / L * L;
  int64_t low = 0;
  for (int64_t span = rows; span > 1;) {  // the row is in [low, low + span)
    const int64_t step = (span + L - 1) / L, probe = low + lane * step;
    const bool begun = lane == 0 || (lane * step < span && probe < rows && static_cast<int64_t>(crow[probe]) <= p);
    const unsigned votes = __ballot_sync(0xffffffffu, begun) >> shift;
    low += (__popc(L == 32 ? votes : votes & ((1u << L % 32) - 1)) - 1) * step;
    span = step;
  }
  return low;
}

// Inclusive prefix sum of `own` over the lanes of a warp.
__device__ inline int up_to_lane(int own) {
  const int lane = threadIdx.x % 32;
  for (int step = 1; step < 32; step *= 2) {
    const int left = __shfl_up_sync(0xffffffffu, own, step);
    if (lane >= step) own += left;
  }
  return own;
}

// Exclusive prefix sum over a block of kSparseThreads threads, and the block's total.
struct Before {
  int before, all;
};
__device__ inline Before count_before(int own) {
  __shared__ int of_warps[kSparseThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int upto = up_to_lane(own);
  int before = 0, all = 0;
  __syncthreads();  // earlier results have been read
  if (lane == 31) of_warps[warp] = upto;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kSparseThreads / 32; ++w) before += w < warp ? of_warps[w] : 0, all += of_warps[w];
  return {before + upto - own, all};
}

// Loads V numbers. The address is a multiple of their size in bytes, which is a power of two or a multiple of 16.
// `constant` as for load_words. Cached, since other rows read the same data again.
template <class T, int V, bool constant = true>
__device__ Words<T, V> load_vector(const T* from) {
  Words<T, V> words;
  if constexpr (V * sizeof(T) == 2)
    words.at[0] = load_word<constant>(reinterpret_cast<const unsigned short*>(from));
  else
    load_words<V * sizeof(T), constant>(from, words.at);
  return words;
}
template <class T, int V, class F>
__device__ void store_vector(T* to, const F (&numbers)[V]) {
  if constexpr (V == 1)
    *to = T(numbers[0]);
  else
    store_once(to, pack<T, V>(numbers));
}

template <int L, class F>
__device__ F largest_of_group(F x) {
#pragma unroll
  for (int step = L / 2; step > 0; step /= 2) x = larger(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// Whether every row of t, [batch, rows, n], is 16-byte aligned and a multiple of 16 bytes long.
inline bool of_vectors(const at::Tensor& t) {
  const int64_t size = t.element_size();
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && t.size(2) * size % 16 == 0 &&
         t.stride(1) * size % 16 == 0 && t.stride(0) * size % 16 == 0;
}

}  // namespace matmuls

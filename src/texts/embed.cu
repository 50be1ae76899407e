// embed (embed.h) on a GPU: one block for each token, whose row stays in its registers.
#ifdef __CUDACC__
#include <ATen/Dispatch.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/macros/Macros.h>

#include "gpu/vector_io.cuh"
#include "texts/embed.h"

namespace matmuls::texts {
namespace {

constexpr int kEmbedWarps = kEmbedThreads / 32;

// The sum over all threads of the block. of_warps: shared, not in use by an earlier sum.
template <class F>
__device__ F sum_of_block(F own, F* of_warps) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) own += __shfl_xor_sync(~0u, own, step);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
  __syncthreads();
  F all = 0;
#pragma unroll
  for (int w = 0; w < kEmbedWarps; ++w) all += of_warps[w];
  return all;
}

// NV: vectors of a row that a thread holds, kEmbedThreads apart.
template <class T, int NV>
__global__ void __launch_bounds__(kEmbedThreads) embed_kernel(const __grid_constant__ Embedding e) {
  using F = arithmetic_t<T>;
  constexpr int V = 16 / sizeof(T);
  __shared__ F of_warps[2][kEmbedWarps];
  const int64_t token = blockIdx.x;
  const int vectors = static_cast<int>(e.columns / V);
  F h[NV][V] = {};
  const T* rows[3];
#pragma unroll
  for (int t = 0; t < 3; ++t) {
    const int64_t id = e.tables[t].ids ? e.tables[t].ids[token] : 0;
    CUDA_KERNEL_ASSERT(id >= 0 && id < e.tables[t].count);
    rows[t] = static_cast<const T*>(e.tables[t].rows) + id * e.columns;
  }
  const auto load = [&](const void* from, int vector, F(&values)[V]) {
    Words<T, V> words;
    load_words<16, false>(static_cast<const T*>(from) + vector * V, words.at);
    unpack(words, values);
  };
  F sum = 0, squares = 0;
#pragma unroll
  for (int n = 0; n < NV; ++n) {
    const int vector = threadIdx.x + n * kEmbedThreads;
    if (vector >= vectors) break;
#pragma unroll
    for (int t = 0; t < 3; ++t) {
      F values[V];
      load(rows[t], vector, values);
#pragma unroll
      for (int v = 0; v < V; ++v) h[n][v] += values[v];
    }
#pragma unroll
    for (int v = 0; v < V; ++v) sum += h[n][v];
  }
  const F mean = sum_of_block(sum, of_warps[0]) / static_cast<F>(e.columns);
#pragma unroll
  for (int n = 0; n < NV; ++n) {
    if (threadIdx.x + n * kEmbedThreads >= vectors) break;
#pragma unroll
    for (int v = 0; v < V; ++v) squares += (h[n][v] - mean) * (h[n][v] - mean);
  }
  const F variance = sum_of_block(squares, of_warps[1]) / static_cast<F>(e.columns);
  const F scale = F(1) / sqrt(variance + static_cast<F>(e.eps));
#pragma unroll
  for (int n = 0; n < NV; ++n) {
    const int vector = threadIdx.x + n * kEmbedThreads;
    if (vector >= vectors) break;
    F weight[V], bias[V];
    load(e.weight, vector, weight);
    load(e.bias, vector, bias);
#pragma unroll
    for (int v = 0; v < V; ++v) h[n][v] = (h[n][v] - mean) * scale * weight[v] + bias[v];
    store_vector(static_cast<T*>(e.out) + token * e.columns + vector * V, pack<T, V>(h[n]));
  }
}

template <class T>
void launch(const Embedding& e) {
  const auto run = [&](auto kernel) {
    kernel<<<static_cast<unsigned>(e.tokens), kEmbedThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(e);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  };
  const int64_t each = ceil_of(e.columns * static_cast<int64_t>(sizeof(T)) / 16, kEmbedThreads);
  each == 1 ? run(embed_kernel<T, 1>) : each == 2 ? run(embed_kernel<T, 2>) : run(embed_kernel<T, kMostVectors>);
}

}  // namespace

void embed_on_gpu(const Embedding& e, at::ScalarType dtype) {
  const int64_t bytes = e.columns * static_cast<int64_t>(c10::elementSize(dtype));
  bool aligned = bytes % 16 == 0;
  for (const void* at : {e.tables[0].rows, e.tables[1].rows, e.tables[2].rows, e.weight, e.bias})
    aligned = aligned && reinterpret_cast<uintptr_t>(at) % 16 == 0;
  TORCH_CHECK(aligned && bytes <= 16 * kEmbedThreads * kMostVectors && e.tokens <= INT32_MAX,
              "embed: expected rows of a multiple of 16 bytes, at most ", 16 * kEmbedThreads * kMostVectors,
              ", that begin at one, got ", e.columns, " columns in ", dtype);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "embed", [&] { launch<scalar_t>(e); });
}

}  // namespace matmuls::texts
#endif

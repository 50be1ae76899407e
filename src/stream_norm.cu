// layer_norm_ of middle rows of 16-bit numbers that do not start on 16 bytes. A block has a row for itself; it keeps
// weight and bias of its columns in registers and several rows on their way in shared memory, and writes a row after it
// has folded the next, so that nobody waits for its statistics.
//
// All rows of a block start equally far from a multiple of 16 bytes, so that its columns stay the same; of a row the
// columns before its first whole vector and after its last are one thread's of the first warp each. No vector then has
// to ask where the row ends: 17 instructions a column where rows.cuh's kernel takes 32.
#ifdef __CUDACC__
#include "stream_norm.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "device.cuh"
#include "launch.cuh"

namespace matmuls {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBlocks = 2;   // of a multiprocessor
constexpr int kHeld = 4;     // vectors that a thread has
constexpr int kStages = 6;   // rows in shared memory
constexpr int kVectors = 8;  // numbers of a vector
constexpr int kPhases = 4;   // statistics of rows that others may yet have to read
constexpr int kBytes = 16 * kHeld * kStages * kThreads;

// Some columns' mean and the squares of their distances from it.
struct State {
  float mean, squares;
};

#if __CUDA_ARCH__ >= 900
__device__ float positive(float v) { return v < 0 ? 0 : v; }  // or NaN
#endif

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks) stream_norm_kernel(const __grid_constant__ StreamNorm<T> c) {
#if __CUDA_ARCH__ >= 900
  constexpr int V = kVectors, NV = kHeld, S = kStages, kStep = kThreads * V;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ State partials[kPhases][kWarps];
  __shared__ uint64_t folded[kPhases];
  auto* const slots = reinterpret_cast<Words<T, V>*>(shared) + threadIdx.x;
  const auto held = [&](int s, int i) -> Words<T, V>& { return slots[(s * NV + i) * kThreads]; };
  const int team = blockIdx.x, teams = gridDim.x;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int rows = static_cast<int>(c.rows);
  const int mine = rows > team ? (rows - team + teams - 1) / teams : 0;  // rows of this block

  const auto begin = reinterpret_cast<uintptr_t>(c.x + team * c.strides[0]);
  const int head = min(static_cast<int>((16 - begin % 16) % 16 / sizeof(T)), c.columns);  // before the first vector
  const int vectors = (c.columns - head) / V;
  const auto has = [&](int i) { return thread + i * kThreads < vectors; };
  const int column = head + thread * V;                              // of the first vector
  const bool full = (NV - 1) * kThreads + warp * 32 + 31 < vectors;  // all the warp's vectors are there
  const auto for_vectors = [&](const auto& body) {
    if (full) {
#pragma unroll
      for (int i = 0; i < NV; ++i) body(i);
    } else {
#pragma unroll
      for (int i = 0; i < NV; ++i)
        if (has(i)) body(i);
    }
  };
  // A column beside the whole vectors, of a thread of the first warp.
  const int edge = thread < V ? thread : head + (vectors - 1) * V + thread;
  const bool has_edge = thread < V ? edge < head : thread < 2 * V && edge < c.columns;

  const auto columns_of = [&](int w) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < NV; ++i) count += max(0, min(32, vectors - i * kThreads - w * 32));
    return static_cast<float>(count * V + (w == 0 ? c.columns - vectors * V : 0));
  };
  const float part_of_warp = 1.0f / fmaxf(columns_of(warp), 1.0f), part = 1.0f / static_cast<float>(c.columns);
  const float count = columns_of(lane % kWarps), share = count * part;  // of a lane's warp when they merge

  const T* x = c.x + team * c.strides[0] + column;  // of the row to fetch next
  int fetched = 0;
  const auto fetch = [&](int s) {
    if (fetched < mine) {
      for_vectors([&](int i) { ptx::copy_ahead(&held(s, i), x + i * kStep); });
      x += teams * c.strides[0];
      ++fetched;
    }
    ptx::end_group_ahead();
  };
  const auto edge_of = [&](int n) {
    if (!has_edge || n >= mine) return 0.0f;
    return static_cast<float>(c.x[(team + static_cast<int64_t>(n) * teams) * c.strides[0] + edge]);
  };

  if (thread == 0)
    for (int p = 0; p < kPhases; ++p) ptx::barrier_init(&folded[p], kWarps);
#pragma unroll 1
  for (int s = 0; s < S; ++s) fetch(s);
  Words<T, V> weight[NV], bias[NV];
  const auto constant = [&](const T* from, float absent, int i) {
    float w[V];
#pragma unroll
    for (int j = 0; j < V; ++j) w[j] = from && has(i) ? static_cast<float>(from[column + i * kStep + j]) : absent;
    return pack<T, V>(w);
  };
#pragma unroll
  for (int i = 0; i < NV; ++i) {
    weight[i] = constant(c.weight, 1, i);
    bias[i] = constant(c.bias, 0, i);
  }
  const float edge_weight = has_edge && c.weight ? static_cast<float>(c.weight[edge]) : 1.0f;
  const float edge_bias = has_edge && c.bias ? static_cast<float>(c.bias[edge]) : 0.0f;
  float edge_next = 0, edge_now = 0, edge_before = 0;
  if (warp == 0) edge_next = edge_of(0);
  __syncthreads();

  T* to = c.x + team * c.strides[0] + column;
  T* xhat = c.xhat ? c.xhat + team * c.strides[1] + column : nullptr;
  int s = 0, s_write = 0;
#pragma unroll 1
  for (int n = 0; n <= mine; ++n) {
    if (n < mine) {
      ptx::wait_ahead<S - 2>();
      // In one pass: distances from one of the warp's columns, which is at most 32 of its deviations from its mean.
      float h[V], sums[2] = {}, squares[2] = {};
      unpack(held(s, 0), h);
      const float from = __shfl_sync(0xffffffffu, h[0], 0);
      if (warp == 0) {
        edge_now = edge_next;
        edge_next = edge_of(n + 1);
        const float apart = has_edge ? edge_now - from : 0.0f;
        sums[0] = apart, squares[0] = apart * apart;
      }
      for_vectors([&](int i) {
        unpack(held(s, i), h);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          h[j] -= from;
          sums[j % 2] += h[j];
          squares[j % 2] += h[j] * h[j];
        }
      });
      s = s + 1 < S ? s + 1 : 0;
      // Both sums at once: one comes to be in the first lane, the other in lane 16.
      const float sum = sums[0] + sums[1], square = squares[0] + squares[1];
      float own = lane < 16 ? sum : square;
      own += __shfl_xor_sync(0xffffffffu, lane < 16 ? square : sum, 16);
      own = sum_of_group<16>(own);
      const float all_squares = __shfl_sync(0xffffffffu, own, 16);
      if (lane == 0) {
        const float apart = own * part_of_warp;
        partials[n % kPhases][warp] = {from + apart, positive(all_squares - own * apart)};
        ptx::barrier_arrive(&folded[n % kPhases]);
      }
    }
    if (n > 0) {
      const int m = n - 1;  // the row to write
      ptx::barrier_wait(&folded[m % kPhases], m / kPhases % 2);
      // Distances again: from the first warp's mean, so that the mean of equal numbers is that number.
      const State state = partials[m % kPhases][lane % kWarps];
      const float first = partials[m % kPhases][0].mean, apart = state.mean - first;
      const float distance = sum_of_group<kWarps>(apart * share);
      const float square = sum_of_group<kWarps>(state.squares + apart * apart * count) * part;
      const float mean = first + distance, rstd = rsqrtf(positive(square - distance * distance) + c.eps);
      if (c.rstd && thread == 0) c.rstd[team + static_cast<int64_t>(m) * teams] = rstd;
      for_vectors([&](int i) {
        float y[V], w[V], b[V];
        unpack(held(s_write, i), y);
#pragma unroll
        for (int j = 0; j < V; ++j) y[j] = (y[j] - mean) * rstd;
        if (xhat) store_once(xhat + i * kStep, pack<T, V>(y));
        unpack(weight[i], w);
        unpack(bias[i], b);
#pragma unroll
        for (int j = 0; j < V; ++j) y[j] = y[j] * w[j] + b[j];
        store_once(to + i * kStep, pack<T, V>(y));
      });
      if (has_edge) {
        const float y = (edge_before - mean) * rstd;
        if (xhat) xhat[edge - column] = static_cast<T>(y);
        to[edge - column] = static_cast<T>(y * edge_weight + edge_bias);
      }
      to += teams * c.strides[0];
      if (xhat) xhat += teams * c.strides[1];
      fetch(s_write);
      s_write = s_write + 1 < S ? s_write + 1 : 0;
    }
    edge_before = edge_now;
  }
  ptx::wait_ahead<0>();
#endif
}

}  // namespace

template <class T>
bool launch_stream_norm(const StreamNorm<T>& call) {
  const auto* properties = at::cuda::getCurrentDeviceProperties();
  constexpr int kPart = kThreads * kHeld;
  const int vectors = call.columns / kVectors;
  if (!has_sm90_code() || properties->sharedMemPerMultiprocessor < kBlocks * (kBytes + 2048)) return false;
  if (vectors <= kPart * 3 / 4 || vectors > kPart || call.rows > INT32_MAX / 2) return false;
  C10_CUDA_CHECK(cudaFuncSetAttribute(stream_norm_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const int blocks = properties->multiProcessorCount * kBlocks / kVectors * kVectors;
  const Launch launch(static_cast<unsigned>(std::min<int64_t>(blocks, call.rows)), kThreads, kBytes);
  launch(stream_norm_kernel<T>, call);
  return true;
}

template bool launch_stream_norm(const StreamNorm<c10::BFloat16>&);
template bool launch_stream_norm(const StreamNorm<c10::Half>&);

}  // namespace matmuls
#endif

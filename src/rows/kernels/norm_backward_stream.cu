// norm_backward_stream: norm_backward for rows that the general kernels do not serve well: rows too long for a cluster
// to prefetch the next one, and unaligned 16-bit rows of middle length.
//
// Persistent. A block keeps the weight of its columns and several rows in flight in shared memory, and the column sums
// over the rows in registers. A row is written after the next one is folded, so that no thread waits for its sums.
//
// Long rows: up to 64 blocks (a team) share one. They exchange sums through global memory, in messages that carry the
// number of their row. The GPU has room for more such teams than for clusters of as many blocks: 65536 16-bit columns
// on clusters of four blocks of 512 threads leave 12 of 132 multiprocessors idle. A team of which not all blocks run is
// closed (gpu/team_start.cuh): one of its blocks then computes all of the team's rows, with the same sums in the same
// order.
//
// Unaligned rows: one block each. All rows of a block have the same misalignment. The edge elements of a row go one
// each to threads of the first warp, so that vectors need no bounds test.
#ifdef __CUDACC__
#include "rows/kernels/norm_backward_stream.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "gpu/launch.cuh"
#include "gpu/team_start.cuh"
#include "gpu/vector_io.cuh"
#include "rows/kernel_sizes.h"

namespace matmuls {
namespace {

template <class T>
using Plan = StreamPlan<sizeof(T)>;

struct Message {
  uint64_t d, dxhat;  // a float32 and the number of its row each
};
static_assert(Plan<float>::kPhases * kMostStreamBlocks * sizeof(Message) + sizeof(TeamStart) <=
              StreamNormBackward<float>::kMessages * sizeof(uint64_t));

#if __CUDA_ARCH__ >= 900
__device__ void publish(Message* to, float2 v, uint32_t number) {
  const auto word = [&](float x) { return static_cast<uint64_t>(number) << 32 | __float_as_uint(x); };
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(word(v.x)), "l"(word(v.y)) : "memory");
}
// One poll of a letter, which may not have arrived yet.
struct PolledMessage {
  uint64_t d, dxhat;

  __device__ static PolledMessage at(const Message* from) {
    PolledMessage now;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(now.d), "=l"(now.dxhat) : "l"(from) : "memory");
    return now;
  }
  __device__ bool is(uint32_t number) const { return d >> 32 == number && dxhat >> 32 == number; }
  __device__ float2 numbers() const {
    return {__uint_as_float(static_cast<uint32_t>(d)), __uint_as_float(static_cast<uint32_t>(dxhat))};
  }
};

template <int lanes>
__device__ float2 sum_of(float2 v) {
#pragma unroll
  for (int o = lanes / 2; o > 0; o /= 2) {
    v.x += __shfl_xor_sync(0xffffffffu, v.x, o);
    v.y += __shfl_xor_sync(0xffffffffu, v.y, o);
  }
  return v;
}

// One value for each of the last rows, with the mbarrier that signals its arrival.
template <int phases, class V>
struct Ring {
  V at[phases];
  uint64_t barriers[phases];
  __device__ V& operator[](int n) { return at[n % phases]; }
  __device__ void arrive(int n) { ptx::mbarrier_arrive(&barriers[n % phases]); }
  __device__ void wait(int n) { ptx::mbarrier_wait(&barriers[n % phases], n / phases % 2); }
};
template <int warps>
struct Sums {
  float2 at[warps];
};

// All rows of a team by one block, without the team's other blocks: each row is read twice. The sums over a row are
// those of the team, added in the same order. Not inlined: the kernel keeps its registers.
template <class T, bool rms>
__device__ __noinline__ void compute_alone(const StreamNormBackward<T>& c, int blocks, int team, int teams) {
  using P = Plan<T>;
  constexpr int V = P::kVectors, NV = P::kHeld, kThreads = P::kThreads, kWarps = P::kWarps;
  // The rows in flight are not used any more: static memory would leave room for one block less per multiprocessor.
  extern __shared__ __align__(16) unsigned char shared[];
  auto* const warp_sums = reinterpret_cast<float2*>(shared);
  float2 *const block_sums = warp_sums + kWarps, *const row_mean = block_sums + kMostStreamBlocks;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int vectors = c.columns / V, rows = static_cast<int>(c.rows);
  const float share = 1.0f / static_cast<float>(c.columns);
  const auto read = [](const T* from, float (&numbers)[V]) {
    Words<T, V> words;
    *reinterpret_cast<uint4*>(&words) = *reinterpret_cast<const uint4*>(from);
    unpack(words, numbers);
  };
  // Calls use(column, g, h, w) for this thread's vectors of block `block` of the team.
  const auto for_each = [&](int64_t row, int block, const auto& use) {
#pragma unroll 1
    for (int i = 0; i < NV; ++i) {
      const int vector = block * P::kPart + thread + i * kThreads;
      if (vector >= vectors) break;
      float g[V], h[V], w[V];
      read(c.grad + row * c.strides[0] + vector * V, g);
      read(c.xhat + row * c.strides[1] + vector * V, h);
      if (c.weight) {
#pragma unroll
        for (int j = 0; j < V; ++j) w[j] = static_cast<float>(c.weight[vector * V + j]);
      } else {
#pragma unroll
        for (int j = 0; j < V; ++j) w[j] = 1;
      }
      use(vector * V, g, h, w);
    }
  };
  __syncthreads();
  for (int row = team; row < rows; row += teams) {
    for (int block = 0; block < blocks; ++block) {
      float2 sums[2] = {};
      for_each(row, block, [&](int, const float (&g)[V], const float (&h)[V], const float (&w)[V]) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float d = g[j] * w[j];
          if constexpr (!rms) sums[j % 2].x += d;
          sums[j % 2].y += d * h[j];
        }
      });
      const float2 sum = sum_of<32>({sums[0].x + sums[1].x, sums[0].y + sums[1].y});
      if (lane == 0) warp_sums[warp] = sum;
      __syncthreads();
      if (warp == 0) {
        const float2 all = sum_of<kWarps>(warp_sums[lane % kWarps]);
        if (lane == 0) block_sums[block] = all;
      }
      __syncthreads();
    }
    if (warp == 0) {
      float2 mean{};
      for (int from = lane; from < blocks; from += 32)
        mean = {mean.x + block_sums[from].x, mean.y + block_sums[from].y};
      mean = sum_of<32>(mean);
      if (lane == 0) *row_mean = {mean.x * share, mean.y * share};
    }
    __syncthreads();
    const float2 mean = *row_mean;
    const float scale = c.rstd[row];
    for (int block = 0; block < blocks; ++block)
      for_each(row, block, [&](int column, const float (&g)[V], const float (&h)[V], const float (&w)[V]) {
        float result[V];
        float* const sums = c.partial + static_cast<int64_t>(team) * 2 * c.columns + column;
#pragma unroll
        for (int j = 0; j < V; ++j) {
          result[j] = scale * (g[j] * w[j] - mean.x - h[j] * mean.y);
          if (!c.partial) continue;
          float dweight = row == team ? 0 : sums[j], dbias = row == team ? 0 : sums[c.columns + j];
          dbias += g[j];
          dweight += g[j] * h[j];
          sums[j] = dweight, sums[c.columns + j] = dbias;
        }
        store_once(c.dx + row * c.strides[2] + column, pack<T, V>(result));
      });
  }
}
#endif

// single: each block has its own rows, which may be unaligned. Otherwise `blocks` blocks share a row of whole vectors.
template <class T, bool rms, bool single>
__global__ void __launch_bounds__(Plan<T>::kThreads, Plan<T>::kBlocks)
    norm_backward_stream_kernel(const __grid_constant__ StreamNormBackward<T> c, const int blocks) {
#if __CUDA_ARCH__ >= 900
  using P = Plan<T>;
  constexpr int V = P::kVectors, NV = P::kHeld, S = P::kStages, kThreads = P::kThreads, kWarps = P::kWarps;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Ring<P::kPhases, Sums<kWarps>> folded;  // sums over a row's columns, per warp
  __shared__ Ring<P::kPhases, float2> totals;        // and of the whole row
  auto* const slots = reinterpret_cast<Words<T, V>*>(shared) + threadIdx.x;
  const auto weight = [&](int i) -> Words<T, V>& { return slots[i * kThreads]; };
  const auto held = [&](int s, int i, int k) -> Words<T, V>& { return slots[(NV + (s * NV + i) * 2 + k) * kThreads]; };
  const int team = single ? blockIdx.x : blockIdx.x / blocks, rank = single ? 0 : blockIdx.x % blocks;
  const int teams = single ? gridDim.x : gridDim.x / blocks;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int rows = static_cast<int>(c.rows);
  const int mine = rows > team ? (rows - team + teams - 1) / teams : 0;  // rows of this team

  if (thread == 0) {
    for (int p = 0; p < P::kPhases; ++p) {
      ptx::mbarrier_init(&totals.barriers[p]);
      ptx::mbarrier_init(&folded.barriers[p], kWarps);
    }
  }
  __syncthreads();
  Message* const messages = reinterpret_cast<Message*>(c.messages + static_cast<int64_t>(team) * c.kMessages);
  auto* const start = reinterpret_cast<TeamStart*>(messages + P::kPhases * kMostStreamBlocks);
  __shared__ TeamMode mode;
  if (!single && thread == 0) arrive_at_team(start);  // before the loads, behind which it would queue

  int head = 0, vectors = c.columns / V;  // columns before the first whole vector; whole vectors
  if constexpr (single) {
    const auto from = reinterpret_cast<uintptr_t>(c.grad + team * c.strides[0]);
    head = min(static_cast<int>((16 - from % 16) % 16 / sizeof(T)), c.columns);
    vectors = (c.columns - head) / V;
  }
  const int first = rank * P::kPart + thread;
  const auto has = [&](int i) { return first + i * kThreads < vectors; };
  const int column = head + first * V;  // of the first vector; the others follow every kStep columns
  constexpr int kStep = kThreads * V;
  // Edge column of a thread of the first warp.
  const int edge = thread < V ? thread : head + (vectors - 1) * V + thread;
  const bool has_edge = single && (thread < V ? edge < head : thread < 2 * V && edge < c.columns);

  const T* grad = c.grad + team * c.strides[0] + column;  // of the row to prefetch next
  const T* xhat = c.xhat + team * c.strides[1] + column;
  int fetched = 0;
  const auto fetch = [&](int s) {
    if (fetched < mine) {
#pragma unroll
      for (int i = 0; i < NV; ++i) {
        if (!has(i)) continue;
        ptx::cp_async(&held(s, i, 0), grad + i * kStep);
        ptx::cp_async(&held(s, i, 1), xhat + i * kStep);
      }
      grad += teams * c.strides[0];
      xhat += teams * c.strides[1];
      ++fetched;
    }
    ptx::cp_async_commit_group();
  };
  const auto edge_of = [&](int n) -> float2 {
    if (!has_edge || n >= mine) return {};
    const int64_t row = team + static_cast<int64_t>(n) * teams;
    return {static_cast<float>(c.grad[row * c.strides[0] + edge]),
            static_cast<float>(c.xhat[row * c.strides[1] + edge])};
  };
  const auto weight_of = [&](int j) { return c.weight ? static_cast<float>(c.weight[j]) : 1.0f; };

#pragma unroll
  for (int s = 0; s < S; ++s) {
#pragma unroll
    for (int i = 0; i < NV; ++i)
      if (!has(i)) held(s, i, 0) = {}, held(s, i, 1) = {};
    fetch(s);
  }
#pragma unroll
  for (int i = 0; i < NV; ++i) {
    float w[V] = {};
    if (has(i))
#pragma unroll
      for (int j = 0; j < V; ++j) w[j] = weight_of(column + i * kStep + j);
    weight(i) = pack<T, V>(w);
  }
  const float edge_weight = has_edge ? weight_of(edge) : 0.0f;
  float2 edge_next{}, edge_now{}, edge_before{}, edge_sums{};
  if (single && warp == 0) edge_next = edge_of(0);

  float dweight[NV][V] = {}, dbias[NV][V] = {}, rstd_before = 0;
  const float share = 1.0f / static_cast<float>(c.columns);
  const float* next_rstd = c.rstd + team;
  T* dx = c.dx + team * c.strides[2] + column;
  int s = 0, s_write = 0;
#pragma unroll 1
  for (int n = 0; n <= mine; ++n) {
    float rstd_now = 0;
    // Poll the messages of the row to write early: most have arrived, and the poll takes as long as folding a row.
    constexpr bool early = !single && sizeof(T) == 4;
    PolledMessage polled{};
    if (early && warp == 0 && n > 0 && lane < blocks)
      polled = PolledMessage::at(messages + (n - 1) % P::kPhases * kMostStreamBlocks + lane);
    if (n < mine) {
      rstd_now = __ldg(next_rstd);
      next_rstd += teams;
      ptx::cp_async_wait_group<S - 2>();
      float2 sums[2] = {};
      if (single && warp == 0) {
        edge_now = edge_next;
        edge_next = edge_of(n + 1);
        const float d = edge_now.x * edge_weight;
        sums[0] = {rms ? 0.0f : d, d * edge_now.y};
      }
#pragma unroll
      for (int i = 0; i < NV; ++i) {
        float g[V], h[V], w[V];
        unpack(held(s, i, 0), g);
        unpack(held(s, i, 1), h);
        unpack(weight(i), w);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float d = g[j] * w[j];
          if constexpr (!rms) sums[j % 2].x += d;
          sums[j % 2].y += d * h[j];
        }
      }
      s = s + 1 < S ? s + 1 : 0;
      const float2 sum = sum_of<32>({sums[0].x + sums[1].x, sums[0].y + sums[1].y});
      if (lane == 0) {
        folded[n].at[warp] = sum;
        folded.arrive(n);
      }
      if (!single && warp == 0) {
        folded.wait(n);
        const float2 all = sum_of<kWarps>(folded[n].at[lane % kWarps]);
        if (lane == 0) publish(messages + n % P::kPhases * kMostStreamBlocks + rank, all, n + 1);
      }
    }
    if (n > 0) {
      const int m = n - 1;  // the row to write
      float2 mean;
      if constexpr (single) {
        folded.wait(m);
        mean = sum_of<kWarps>(folded[m].at[lane % kWarps]);
      } else {
        if (warp == 0) {
          if (m == 0) {
            if (lane == 0) mode = wait_for_team(start, blocks, rank);
            __syncwarp();
            if (mode != TeamMode::together) {
              if (lane == 0) totals.arrive(0);
              break;
            }
          }
          mean = {};
          for (int from = lane; from < blocks; from += 32) {
            if (!early || from != lane) polled = {};
            while (!polled.is(n)) polled = PolledMessage::at(messages + m % P::kPhases * kMostStreamBlocks + from);
            const float2 one = polled.numbers();
            mean = {mean.x + one.x, mean.y + one.y};
          }
          __syncwarp();
          mean = sum_of<32>(mean);
          if (lane == 0) {
            totals[m] = mean;
            totals.arrive(m);
          }
        }
        totals.wait(m);
        if (m == 0 && mode != TeamMode::together) break;
        mean = totals[m];
      }
      mean.x *= share, mean.y *= share;
      const float scale = rstd_before;
#pragma unroll
      for (int i = 0; i < NV; ++i) {
        float g[V], h[V], w[V], result[V];
        unpack(held(s_write, i, 0), g);
        unpack(held(s_write, i, 1), h);
        unpack(weight(i), w);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          result[j] = scale * (g[j] * w[j] - mean.x - h[j] * mean.y);
          dbias[i][j] += g[j];
          dweight[i][j] += g[j] * h[j];
        }
        if (has(i)) store_once(dx + i * kStep, pack<T, V>(result));
      }
      if (single && warp == 0 && has_edge) {
        dx[edge - column] = static_cast<T>(scale * (edge_before.x * edge_weight - mean.x - edge_before.y * mean.y));
        edge_sums.x += edge_before.x * edge_before.y;
        edge_sums.y += edge_before.x;
      }
      dx += teams * c.strides[2];
      fetch(s_write);
      s_write = s_write + 1 < S ? s_write + 1 : 0;
    }
    edge_before = edge_now;
    rstd_before = rstd_now;
  }
  ptx::cp_async_wait_group<0>();
  if (!single && mine > 0 && mode != TeamMode::together) {
    if (mode == TeamMode::alone) compute_alone<T, rms>(c, blocks, team, teams);
    return;
  }
  if (!c.partial) return;
  float* const sums = c.partial + static_cast<int64_t>(team) * 2 * c.columns;
#pragma unroll
  for (int i = 0; i < NV; ++i) {
    if (!has(i)) continue;
    float* const to = sums + column + i * kStep;
    if constexpr (!single) {
      store_floats(to, dweight[i]);
      store_floats(to + c.columns, dbias[i]);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) to[j] = dweight[i][j], to[c.columns + j] = dbias[i][j];
    }
  }
  if (has_edge) sums[edge] = edge_sums.x, sums[c.columns + edge] = edge_sums.y;
#endif
}

template <auto kernel, class T>
void launch(const StreamNormBackward<T>& call, int teams, int blocks) {
  allow_shared_memory<kernel>();
  const Launch launch(teams * blocks, Plan<T>::kThreads, Plan<T>::kBytes);
  launch(kernel, call, blocks);
}

}  // namespace

template <class T>
void launch_stream_norm_backward(const StreamNormBackward<T>& call, int teams, int blocks, bool whole) {
  const auto go = [&]<bool rms>() {
    if constexpr (sizeof(T) == 2)
      if (!whole) return launch<norm_backward_stream_kernel<T, rms, true>>(call, teams, 1);
    C10_CUDA_CHECK(cudaMemsetAsync(call.messages, 0, sizeof(uint64_t) * call.kMessages * teams,
                                   c10::cuda::getCurrentCUDAStream()));
    return launch<norm_backward_stream_kernel<T, rms, false>>(call, teams, blocks);
  };
  return call.rms ? go.template operator()<true>() : go.template operator()<false>();
}

#define MATMULS_STREAM_NORM_BACKWARD(T) \
  template void launch_stream_norm_backward(const StreamNormBackward<T>&, int, int, bool);
MATMULS_STREAM_NORM_BACKWARD(float)
MATMULS_STREAM_NORM_BACKWARD(c10::BFloat16)
MATMULS_STREAM_NORM_BACKWARD(c10::Half)

}  // namespace matmuls
#endif

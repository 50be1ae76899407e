// The threads that share a row (a team): some lanes of a warp, a block, or a cluster of blocks; and how they merge
// their states.
#pragma once

#include "gpu/vector_io.cuh"
#include "rows/traits.h"

namespace matmuls {

constexpr int kMaxThreads = 1024;  // per block

// Sums and maxima over `lanes` adjacent lanes, a power of two.
struct Lanes {
  int lanes;
  template <class F>
  __device__ F sum(F v) const {
    F each[1] = {v};
    sums(each);
    return each[0];
  }
  // Sums several values at a time, so that their shuffles overlap.
  template <class F, int N>
  __device__ void sums(F (&v)[N]) const {
    const auto add = [&](int apart) {
#pragma unroll
      for (int n = 0; n < N; ++n) v[n] += __shfl_xor_sync(0xffffffffu, v[n], apart);
    };
    if (lanes == 32) {
#pragma unroll
      for (int o = 16; o > 0; o /= 2) add(o);
    } else {
#pragma unroll 1
      for (int o = lanes / 2; o > 0; o /= 2) add(o);
    }
  }
  template <class F>
  __device__ F max(F v) const {
    // One integer redux instruction. The bits of non-negative floats order as integers; those of negative floats order
    // in reverse, so `flip` reverses them.
    if (sizeof(F) == 4 && lanes == 32) {
      const auto flip = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
      return __int_as_float(flip(largest_of_warp(flip(__float_as_int(static_cast<float>(v))))));
    }
    for (int o = lanes / 2; o > 0; o /= 2) v = larger(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
  }
};
// The same for a number of lanes known at compile time.
template <int lanes>
struct FixedLanes {
  template <class F>
  __device__ F sum(F v) const {
    return sum_of_group<lanes>(v);
  }
  template <class F>
  __device__ F max(F v) const {
    if constexpr (lanes == 32) {
      return Lanes{32}.max(v);
    } else {
#pragma unroll
      for (int o = lanes / 2; o > 0; o /= 2) v = larger(v, __shfl_xor_sync(0xffffffffu, v, o));
      return v;
    }
  }
};

template <Scope scope>
struct Team {
  int rank, size;  // this thread's index in the team, and the team's size
  int64_t index;   // of this team, or of the block if it holds several teams
  int group;       // lanes that hold one state per warp, a power of two
  int merges = 0;  // merges so far

  __device__ Team() {
    rank = threadIdx.x;
    size = blockDim.x;
    index = blockIdx.x;
    group = 1 << (32 - __clz(static_cast<int>(blockDim.x - 1) / 32));
    if constexpr (scope == Scope::cluster) {
#if __CUDA_ARCH__ >= 900
      const unsigned blocks = ptx::cluster_blocks();
      rank += ptx::cluster_rank() * blockDim.x;
      size *= blocks;
      index /= blocks;
      if (threadIdx.x == 0) {
        for (int phase = 0; phase < kPhases; ++phase) ptx::mbarrier_init(mbarrier(phase));
        ptx::fence_mbarrier_init();
      }
      ptx::cluster_arrive();  // waited for before the first message
#endif
    }
  }

  __device__ int64_t count() const {  // teams, or blocks if a block holds several teams
#if __CUDA_ARCH__ >= 900
    if constexpr (scope == Scope::cluster) return gridDim.x / ptx::cluster_blocks();
#endif
    return gridDim.x;
  }

  // Merges the states of all threads; every thread gets the result. Alternating buffers need only one barrier per
  // merge.
  template <class Op, class State>
  __device__ State merge(const Op& op, State state) {
    state = merge_block(op, state);
#if __CUDA_ARCH__ >= 900
    if constexpr (scope == Scope::cluster) {
      publish(state);
      state = collect(op);
    }
#endif
    return state;
  }

  // Merges the states of a block. With `by_first_warp` only the first warp gets the result, to publish it: for the
  // cluster kernel (rows/kernels/cluster.cuh). In the persistent kernel, float32 softmax of 262144 columns fell from
  // 0.95 to 0.68 of a copy with it.
  template <bool by_first_warp = false, class Op, class State>
  __device__ State merge_block(const Op& op, State state) {
    if constexpr (scope == Scope::warp) return op.merge(state, Lanes{size});
    __shared__ State warps[2][kMaxThreads / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, phase = merges % 2;
    state = op.merge(state, Lanes{32});
    if (lane == 0) warps[phase][warp] = state;
    __syncthreads();
    ++merges;
    if (by_first_warp && warp > 0) return state;
    const int among =
        lane & (group - 1);  // the smallest group of lanes that holds all warps' states, repeated across the warp
    state = among < blockDim.x / 32 ? warps[phase][among] : Op::identity();
    state = op.merge(state, Lanes{group});
    return state;
  }

  // For a team without rows: other blocks of the cluster still wait for its arrival.
  __device__ void leave() {
#if __CUDA_ARCH__ >= 900
    if (scope == Scope::cluster && published == 0) ptx::cluster_wait();
#endif
  }

#if __CUDA_ARCH__ >= 900
  // Blocks of a cluster write their states to each other's shared memory (st.async), and each waits on an mbarrier for
  // the expected bytes. A cluster barrier would also wait for the stores of the previous row: 2 us per row, where this
  // takes a fraction of one.
  //
  // Four buffers suffice. A block publishes merge n after it has collected merge n - 2. By then all blocks have
  // published n - 2, hence collected n - 4, whose buffer n reuses. A block may publish a merge before it has collected
  // the previous one. No block exits before it has received everything sent to it.
  template <class State>
  __device__ void publish(const State& state) {
    const unsigned blocks = ptx::cluster_blocks();
    const int phase = published % kPhases;
    if (published++ == 0) ptx::cluster_wait();
    if (threadIdx.x == 0)
      ptx::mbarrier_arrive_expect_tx(mbarrier(phase), static_cast<unsigned>(blocks * sizeof(Message<State>)));
    if (threadIdx.x < blocks) {
      Message<State> mine;
      mine.state = state;
      const uint32_t to = ptx::mapa(&messages<State>(phase)[ptx::cluster_rank()], threadIdx.x);
      const uint32_t remote_mbarrier = ptx::mapa(mbarrier(phase), threadIdx.x);
#pragma unroll
      for (int w = 0; w < int(sizeof(mine) / 8); ++w) ptx::st_async(to + 8 * w, mine.words[w], remote_mbarrier);
    }
  }
  // For clusters of one block: st.async needs two or more.
  template <class State>
  __device__ void post_to_itself(const State& state) {
    const int phase = published % kPhases;
    if (published++ == 0) ptx::cluster_wait();
    if (threadIdx.x != 0) return;
    messages<State>(phase)[0].state = state;
    ptx::mbarrier_arrive(mbarrier(phase));
  }
  // Merges the states of all blocks, for the oldest message not yet collected.
  template <class Op>
  __device__ auto collect(const Op& op) {
    using State = decltype(Op::identity());
    const unsigned blocks = ptx::cluster_blocks(), lane = threadIdx.x % 32;
    const int phase = collected % kPhases;
    ptx::mbarrier_wait(mbarrier(phase), collected / kPhases % 2);
    ++collected;
    return op.merge(lane < blocks ? messages<State>(phase)[lane].state : Op::identity(), Lanes{32});
  }

 private:
  static constexpr int kPhases = 4;
  int published = 0, collected = 0;

  template <class State>
  union Message {
    State state;
    uint64_t words[(sizeof(State) + 7) / 8];
    __device__ Message() {}
  };
  template <class State>
  __device__ static Message<State>* messages(int phase) {
    __shared__ __align__(8) unsigned char bytes[kPhases][kMaxRanks * sizeof(Message<State>)];
    return reinterpret_cast<Message<State>*>(bytes[phase]);
  }
  __device__ static uint64_t* mbarrier(int phase) {
    __shared__ uint64_t barriers[kPhases];
    return &barriers[phase];
  }
#endif
};

}  // namespace matmuls

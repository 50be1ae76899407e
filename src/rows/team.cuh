// The threads that share a row: some lanes of a warp, a block, or a cluster of blocks.
#pragma once

#include "gpu/vector_io.cuh"

namespace matmuls {

enum class Scope { warp, block, cluster };

constexpr int kMaxThreads = 1024;  // of a block
constexpr int kMaxRanks = 16;      // blocks of a cluster; more than 8 need the device's permission

// Sums and maxima over `lanes` neighbours, a power of two.
struct Lanes {
  int lanes;
  template <class F>
  __device__ F sum(F v) const {
    F each[1] = {v};
    sums(each);
    return each[0];
  }
  // Several at a time: their shuffles wait for each other no more than one's do.
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
    if (sizeof(F) == 4 && lanes == 32) {  // one instruction for whole numbers, whose order the bits of v have but for
      const auto flip = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };  // those below 0: theirs is reversed
      return __int_as_float(flip(largest_of_warp(flip(__float_as_int(static_cast<float>(v))))));
    }
    for (int o = lanes / 2; o > 0; o /= 2) v = larger(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
  }
};
// The same over lanes that are known when this is compiled.
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
  int rank, size;  // this thread's place in its team
  int64_t index;   // of this team, or of the block that holds several
  int group;       // lanes that hold a state of each warp, a power of two
  int merges = 0;  // so far

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
        for (int phase = 0; phase < kPhases; ++phase) ptx::barrier_init(mailbox(phase));
        ptx::barrier_fence();
      }
      ptx::cluster_arrive();  // the first merge waits for the others
#endif
    }
  }

  __device__ int64_t count() const {  // of teams, or of the blocks that hold several
#if __CUDA_ARCH__ >= 900
    if constexpr (scope == Scope::cluster) return gridDim.x / ptx::cluster_blocks();
#endif
    return gridDim.x;
  }

  // The merge of all threads' states, the same in each. Buffers alternate, so that one barrier a merge is enough.
  template <class Op, class State>
  __device__ State merge(const Op& op, State state) {
    state = merge_block(op, state);
#if __CUDA_ARCH__ >= 900
    if constexpr (scope == Scope::cluster) {
      post(state);
      state = collect(op);
    }
#endif
    return state;
  }

  // Of one block; `by_first_warp`, which posts it, alone: so wide rows. Walking float32 softmax of 262144 columns took
  // that from 0.95 of a copy to 0.68.
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
    const int among = lane & (group - 1);  // as few lanes as there are warps hold them all, as often as fits
    state = among < blockDim.x / 32 ? warps[phase][among] : Op::identity();
    state = op.merge(state, Lanes{group});
    return state;
  }

  // A team without a row: its blocks are waited for all the same.
  __device__ void leave() {
#if __CUDA_ARCH__ >= 900
    if (scope == Scope::cluster && posted == 0) ptx::cluster_wait();
#endif
  }

#if __CUDA_ARCH__ >= 900
  // Blocks send their states to each other's shared memory, and each waits for the bytes that it is owed. A barrier of
  // the cluster would also wait for the stores of the row before: 2 us a row where this takes a fraction of one.
  // A block may post a merge before it has collected the one before, so others may lag by up to three, each in a buffer
  // of its own: it posts merge n after it has collected n - 2, for which all had posted n - 2 and so collected n - 4.
  // No block ends before it has received all that is sent to it.
  template <class State>
  __device__ void post(const State& state) {
    const unsigned blocks = ptx::cluster_blocks();
    const int phase = posted % kPhases;
    if (posted++ == 0) ptx::cluster_wait();
    if (threadIdx.x == 0) ptx::barrier_expect(mailbox(phase), static_cast<unsigned>(blocks * sizeof(Letter<State>)));
    if (threadIdx.x < blocks) {
      Letter<State> mine;
      mine.state = state;
      const uint32_t to = ptx::address_in(&letters<State>(phase)[ptx::cluster_rank()], threadIdx.x);
      const uint32_t remote_mailbox = ptx::address_in(mailbox(phase), threadIdx.x);
#pragma unroll
      for (int w = 0; w < int(sizeof(mine) / 8); ++w) ptx::send(to + 8 * w, mine.words[w], remote_mailbox);
    }
  }
  // The only block of its cluster: a cluster's stores are for two and more.
  template <class State>
  __device__ void post_to_itself(const State& state) {
    const int phase = posted % kPhases;
    if (posted++ == 0) ptx::cluster_wait();
    if (threadIdx.x != 0) return;
    letters<State>(phase)[0].state = state;
    ptx::barrier_arrive(mailbox(phase));
  }
  // The merge of all blocks, of the first post that is not collected yet.
  template <class Op>
  __device__ auto collect(const Op& op) {
    using State = decltype(Op::identity());
    const unsigned blocks = ptx::cluster_blocks(), lane = threadIdx.x % 32;
    const int phase = collected % kPhases;
    ptx::barrier_wait(mailbox(phase), collected / kPhases % 2);
    ++collected;
    return op.merge(lane < blocks ? letters<State>(phase)[lane].state : Op::identity(), Lanes{32});
  }

 private:
  static constexpr int kPhases = 4;
  int posted = 0, collected = 0;

  template <class State>
  union Letter {
    State state;
    uint64_t words[(sizeof(State) + 7) / 8];
    __device__ Letter() {}
  };
  template <class State>
  __device__ static Letter<State>* letters(int phase) {
    __shared__ __align__(8) unsigned char bytes[kPhases][kMaxRanks * sizeof(Letter<State>)];
    return reinterpret_cast<Letter<State>*>(bytes[phase]);
  }
  __device__ static uint64_t* mailbox(int phase) {
    __shared__ uint64_t barriers[kPhases];
    return &barriers[phase];
  }
#endif
};

}  // namespace matmuls

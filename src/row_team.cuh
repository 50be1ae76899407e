// The threads that share a row: some lanes of a warp, a block, or a cluster of blocks.
#pragma once

#include "device.cuh"

namespace matmuls {

enum class Scope { warp, block, cluster };

constexpr int kMaxThreads = 1024;  // of a block
constexpr int kMaxRanks = 16;      // blocks of a cluster; more than 8 need the device's permission

// Sums and maxima over `lanes` neighbours, a power of two.
struct Lanes {
  int lanes;
  template <class F>
  __device__ F sum(F v) const {
    for (int o = lanes / 2; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
  }
  template <class F>
  __device__ F max(F v) const {
    for (int o = lanes / 2; o > 0; o /= 2) v = larger(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
  }
};

template <Scope scope>
struct Team {
  int rank, size;  // this thread's place in its team
  int64_t index;   // of this team, or of the block that holds several
  int merges = 0;  // so far

  __device__ Team() {
    rank = threadIdx.x;
    size = blockDim.x;
    index = blockIdx.x;
    if constexpr (scope == Scope::cluster) {
#if __CUDA_ARCH__ >= 900
      const unsigned blocks = ptx::cluster_blocks();
      rank += ptx::cluster_rank() * blockDim.x;
      size *= blocks;
      index /= blocks;
      if (threadIdx.x == 0) {
        for (int phase = 0; phase < 2; ++phase) ptx::barrier_init(mailbox(phase));
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
    if constexpr (scope == Scope::warp) return op.merge(state, Lanes{size});
    __shared__ State warps[2][kMaxThreads / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, phase = merges % 2;
    state = op.merge(state, Lanes{32});
    if (lane == 0) warps[phase][warp] = state;
    __syncthreads();
    state = lane < blockDim.x / 32 ? warps[phase][lane] : Op::identity();
    state = op.merge(state, Lanes{32});
#if __CUDA_ARCH__ >= 900
    if constexpr (scope == Scope::cluster) state = merge_blocks(op, state);
#endif
    ++merges;
    return state;
  }

  // A team without a row: its blocks are waited for all the same.
  __device__ void leave() {
#if __CUDA_ARCH__ >= 900
    if (scope == Scope::cluster && merges == 0) ptx::cluster_wait();
#endif
  }

#if __CUDA_ARCH__ >= 900
 private:
  // Blocks send their states to each other's shared memory, and each waits for the bytes that it is owed. A barrier of
  // the cluster would also wait for the stores of the row before: 2 us a row where this takes a fraction of one.
  // A block that is one merge ahead writes the other buffer; to be two ahead it would need this block's next state,
  // which is sent after its last read of this one. No block ends before it has received all that is sent to it.
  __device__ static uint64_t* mailbox(int phase) {
    __shared__ uint64_t barriers[2];
    return &barriers[phase];
  }

  template <class Op, class State>
  __device__ State merge_blocks(const Op& op, const State& state) {
    union Letter {
      State state;
      uint64_t words[(sizeof(State) + 7) / 8];
      __device__ Letter() {}
    };
    __shared__ __align__(8) unsigned char letters[2][kMaxRanks * sizeof(Letter)];
    const unsigned blocks = ptx::cluster_blocks(), lane = threadIdx.x % 32;
    const int phase = merges % 2;
    Letter* const received = reinterpret_cast<Letter*>(letters[phase]);
    if (merges == 0) ptx::cluster_wait();
    if (threadIdx.x == 0) ptx::barrier_expect(mailbox(phase), static_cast<unsigned>(blocks * sizeof(Letter)));
    if (threadIdx.x < blocks) {
      Letter mine;
      mine.state = state;
      const uint32_t to = ptx::address_in(&received[ptx::cluster_rank()], threadIdx.x);
      const uint32_t remote_mailbox = ptx::address_in(mailbox(phase), threadIdx.x);
#pragma unroll
      for (int w = 0; w < int(sizeof(Letter) / 8); ++w) ptx::send(to + 8 * w, mine.words[w], remote_mailbox);
    }
    ptx::barrier_wait(mailbox(phase), merges / 2 % 2);
    return op.merge(lane < blocks ? received[lane].state : Op::identity(), Lanes{32});
  }
#endif
};

}  // namespace matmuls

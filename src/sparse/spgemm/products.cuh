// Products of two CSR matrices by row on a GPU: a group of lanes, or a block, walks over all products of a row of A.
//
// The products of a row have one order: A's nonzeros one after the other, and within each the nonzeros of B's row.
// Neighbouring lanes take neighbouring products, so that neither a short nor a long row of B leaves lanes idle.
#pragma once

#include <cstdint>

namespace matmuls::spgemm {

constexpr unsigned kWarp = 0xffffffffu;

template <class I>
struct Indices {
  const I *crow, *col, *order;  // order may be null

  __device__ int64_t place(int64_t p) const { return order == nullptr ? p : static_cast<int64_t>(order[p]); }
};

// Inclusive prefix sum over each group of L lanes. All lanes of the warp call it.
template <int L, class N>
__device__ N up_to_lane_of(N own) {
  const int lane = threadIdx.x % L;
#pragma unroll
  for (int step = 1; step < L; step *= 2) {
    const N left = __shfl_up_sync(kWarp, own, step, L);
    if (lane >= step) own += left;
  }
  return own;
}

// The largest of the numbers that the warp's lanes have.
template <class N>
__device__ N largest_of_warp(N x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const N other = __shfl_xor_sync(kWarp, x, step);
    x = x < other ? other : x;
  }
  return x;
}

// The part of a row of B that is used: all of it.
struct AllOfRow {
  __device__ void operator()(int64_t&, int64_t&) const {}
};

// Calls use(load(is_valid, e, p, q)) for the products of A's nonzeros [begin, end), for each group of L lanes those of
// its own: e counts the products, p is the nonzero of A and q that of B. All lanes of the warp call both together,
// those without a product with is_valid = false. `load` runs a product ahead, so that its reads are under way during
// `use`, if `load` has no arithmetic on what it reads. part(q, q_end) narrows the nonzeros of a row of B.
template <int L, class I, class Load, class Use, class Part = AllOfRow>
__device__ void for_products(const Indices<I>& a, const Indices<I>& b, int64_t begin, int64_t end, const Load& load,
                             const Use& use, const Part& part = {}) {
  const int lane = threadIdx.x % L;
  int64_t done = 0;
  auto waiting = load(false, 0, 0, 0);
  for (int64_t first = begin; __any_sync(kWarp, first < end); first += L) {
    int64_t q = 0, q_end = 0;
    if (first + lane < end) {
      const int64_t k = a.col[first + lane];
      q = b.crow[k], q_end = b.crow[k + 1];
      part(q, q_end);
    }
    const int64_t upto = up_to_lane_of<L>(q_end - q), total = __shfl_sync(kWarp, upto, L - 1, L);
    const int64_t rounds = L == 32 ? total : largest_of_warp(total), shift = q_end - upto;
    for (int64_t round = 0; round < rounds; round += L) {
      const int64_t e = round + lane;
      const int upto_here = static_cast<int>(min(max(upto - round, int64_t{0}), int64_t{L}));
      int j = 0;  // lanes whose products are all before e
#pragma unroll
      for (int step = L / 2; step > 0; step /= 2)
        if (__shfl_sync(kWarp, upto_here, j + step - 1, L) <= lane) j += step;
      const auto next = load(e < total, done + e, first + j, __shfl_sync(kWarp, shift, j, L) + e);
      use(waiting);
      waiting = next;
    }
    done += total;
  }
  use(waiting);
}

// The products of a row for a block of N threads: those of up to N nonzeros of A at a time.
template <int N>
struct BlockProducts {
  int64_t upto[N], shift[N], of_warps[N / 32];

  // Reads the nonzeros [first, min(first + N, end)) of A. Returns the number of products. All threads call it.
  template <class I>
  __device__ int64_t load(const Indices<I>& a, const Indices<I>& b, int64_t first, int64_t end) {
    const int t = threadIdx.x;
    int64_t q = 0, q_end = 0;
    if (first + t < end) {
      const int64_t k = a.col[first + t];
      q = b.crow[k], q_end = b.crow[k + 1];
    }
    const int64_t in_warp = up_to_lane_of<32>(q_end - q);
    __syncthreads();  // what an earlier call left has been read
    if (t % 32 == 31) of_warps[t / 32] = in_warp;
    __syncthreads();
    int64_t before = 0, all = 0;
    for (int w = 0; w < N / 32; ++w) before += w < t / 32 ? of_warps[w] : 0, all += of_warps[w];
    upto[t] = before + in_warp;
    shift[t] = q_end - upto[t];
    __syncthreads();
    return all;
  }

  // The loaded nonzero of A that product e belongs to. from: the answer for an earlier product.
  __device__ int nonzero_of(int64_t e, int from) const {
    if (e < upto[from]) return from;
    int low = from + 1, high = N - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (upto[middle] <= e)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
};

// Items [0, count) that blocks take as they get free: first() and then next(), the item or -1. All threads call them.
class Taken {
 public:
  __device__ Taken(unsigned long long* taken, int64_t count, int64_t* shared)
      : taken_(taken), count_(count), shared_(shared) {}

  __device__ int64_t first() { return started(blockIdx.x); }
  __device__ int64_t next() {
    __syncthreads();  // what is in shared memory of the item before has been read
    if (threadIdx.x == 0) *shared_ = next_;
    __syncthreads();
    return started(*shared_);
  }

 private:
  // The next item is taken when one begins: the answer is there when it ends.
  __device__ int64_t started(int64_t item) {
    if (item >= count_) return -1;
    if (threadIdx.x == 0) next_ = static_cast<int64_t>(gridDim.x + atomicAdd(taken_, 1ull));
    return item;
  }

  unsigned long long* taken_;
  int64_t count_, next_ = 0;
  int64_t* shared_;
};

// Narrows places [begin, end) of rising columns to those with columns from `low` to `high`. The reads of both searches
// are under way together.
template <class I>
__device__ void narrow(const I* columns, int64_t& begin, int64_t& end, I low, I high) {
  int64_t after = begin, size = end - begin;  // both answers are at most `size` places further
  while (size > 0) {
    const int64_t half = (size + 1) / 2;
    const I at_begin = columns[begin + half - 1], at_end = columns[after + half - 1];
    if (at_begin < low) begin += half;
    if (at_end <= high) after += half;
    size -= half;
  }
  end = after;
}

}  // namespace matmuls::spgemm

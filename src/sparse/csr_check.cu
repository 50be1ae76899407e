// csr_check on a GPU: one pass over all indices that validates them and collects the statistics of csr_check.h.
#ifdef __CUDACC__
#include "sparse/csr_check.h"

#include <ATen/Dispatch.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "glue/checks.h"

namespace matmuls {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1056;

// Zero-initialized accumulator in global memory:
//   row, column: 2^62 - index of the first row with decreasing offsets, of the first column out of range; 0: none
//   longest: nonzeros of the longest row
//   falls: nonzeros whose column is not above that of the nonzero before in the same row
//   beyond_two: nonzeros in the same aligned group of 4 columns as the nonzero two before
//   far: rows that begin kFar columns or more from the diagonal
//   blocks: arrival counter of the blocks
struct CsrCheckAccumulator {
  unsigned long long row, column, longest, falls, beyond_two, far, blocks;
};
constexpr unsigned long long kFirst = 1ull << 62;

__device__ unsigned long long larger(unsigned long long x, unsigned long long y) { return x > y ? x : y; }

__device__ void add(CsrCheckAccumulator* seen, const CsrCheckAccumulator& own) {
  if (own.longest > 0) atomicMax(&seen->longest, own.longest);
  if (own.falls != 0) atomicAdd(&seen->falls, own.falls);
  if (own.beyond_two > 0) atomicAdd(&seen->beyond_two, own.beyond_two);
  if (own.far > 0) atomicAdd(&seen->far, own.far);
  if (own.row > 0) atomicMax(&seen->row, own.row);
  if (own.column > 0) atomicMax(&seen->column, own.column);
}

template <class I>
__device__ void tell(const I* crow, const I* col, int64_t rows, int64_t nonzeros, const CsrCheckAccumulator& seen,
                     int64_t* facts) {
  const auto say = [&](Problem problem, int64_t where, int64_t found, int64_t longest = 0) {
    facts[0] = static_cast<int64_t>(problem), facts[1] = where, facts[2] = found, facts[3] = longest;
    facts[4] = seen.falls == 0, facts[5] = static_cast<int64_t>(seen.beyond_two);
    facts[6] = static_cast<int64_t>(seen.far);
  };
  if (crow[0] != 0) return say(Problem::first_offset, 0, crow[0]);
  if (crow[rows] != nonzeros) return say(Problem::last_offset, rows, crow[rows]);
  if (seen.row > 0) return say(Problem::decreasing, kFirst - seen.row, crow[kFirst - seen.row + 1]);
  if (seen.column > 0) return say(Problem::column, kFirst - seen.column, col[kFirst - seen.column]);
  say(Problem::none, 0, 0, static_cast<int64_t>(seen.longest));
}

struct Copies {
  int* crow;
  int* col;
};

// Each block adds its result to *seen; the last block to arrive writes `facts`. copied: also writes int32 copies of
// crow and col.
template <class I, bool copied>
__global__ void __launch_bounds__(kThreads)
    look_kernel(const I* crow, const I* col, int64_t rows, int64_t nonzeros, int64_t columns, CsrCheckAccumulator* seen,
                int64_t* facts, const Copies own_copies) {
  __shared__ CsrCheckAccumulator of_block;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  if (threadIdx.x == 0) of_block = {};
  if (copied && begin == 0) own_copies.crow[0] = static_cast<int>(crow[0]);
  CsrCheckAccumulator own{};
#pragma unroll 4
  for (int64_t r = begin; r < rows; r += step) {
    const int64_t first = crow[r], next = crow[r + 1], length = next - first;
    if constexpr (copied) own_copies.crow[r + 1] = static_cast<int>(next);
    if (length < 0)
      own.row = larger(own.row, kFirst - r);
    else
      own.longest = larger(own.longest, length);
    if (length <= 0 || first < 0 || first >= nonzeros) continue;
    const int64_t c = col[first];
    own.far += c - r >= kFar || r - c >= kFar;
    if (first > 0) own.falls -= c <= col[first - 1];
  }
#pragma unroll 4
  for (int64_t p = begin; p < nonzeros; p += step) {
    const int64_t c = col[p];
    if constexpr (copied) own_copies.col[p] = static_cast<int>(c);
    if (c < 0 || c >= columns) own.column = larger(own.column, kFirst - p);
    own.falls += p > 0 && c <= col[p - 1];
    own.beyond_two += p > 1 && c >> 2 == static_cast<int64_t>(col[p - 2]) >> 2;
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    own.longest = larger(own.longest, __shfl_xor_sync(0xffffffffu, own.longest, lanes));
    own.falls += __shfl_xor_sync(0xffffffffu, own.falls, lanes);
    own.beyond_two += __shfl_xor_sync(0xffffffffu, own.beyond_two, lanes);
    own.far += __shfl_xor_sync(0xffffffffu, own.far, lanes);
  }
  if (threadIdx.x % 32 != 0) own.longest = own.falls = own.beyond_two = own.far = 0;
  __syncthreads();
  add(&of_block, own);
  __syncthreads();
  if (threadIdx.x != 0) return;
  add(seen, of_block);
  __threadfence();
  if (atomicAdd(&seen->blocks, 1ull) + 1 < gridDim.x) return;
  __threadfence();
  const volatile CsrCheckAccumulator* const all = seen;
  tell(crow, col, rows, nonzeros, {all->row, all->column, all->longest, all->falls, all->beyond_two, all->far, 0},
       facts);
}

}  // namespace

at::Tensor csr_check_on_gpu(const at::Tensor& crow, const at::Tensor& col, int64_t columns, const at::Tensor& own_crow,
                            const at::Tensor& own_col) {
  const int64_t rows = crow.size(0) - 1, nonzeros = col.size(0);
  at::Tensor facts = empty({kFacts}, crow.options().dtype(at::kLong));
  const at::Tensor seen = empty({sizeof(CsrCheckAccumulator) / sizeof(int64_t)}, facts.options());
  const int64_t blocks = std::clamp<int64_t>((std::max(rows, nonzeros) + kThreads - 1) / kThreads, 1, kMostBlocks);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  auto* const at = reinterpret_cast<CsrCheckAccumulator*>(seen.mutable_data_ptr<int64_t>());
  C10_CUDA_CHECK(cudaMemsetAsync(at, 0, sizeof(CsrCheckAccumulator), stream));
  AT_DISPATCH_INDEX_TYPES(crow.scalar_type(), "csr_check", [&] {
    const index_t *offsets = crow.const_data_ptr<index_t>(), *places = col.const_data_ptr<index_t>();
    const bool copied = own_crow.defined();
    const Copies copies =
        copied ? Copies{own_crow.mutable_data_ptr<int>(), own_col.mutable_data_ptr<int>()} : Copies{nullptr, nullptr};
    const auto kernel = copied ? look_kernel<index_t, true> : look_kernel<index_t, false>;
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(offsets, places, rows, nonzeros, columns, at,
                                                                   facts.mutable_data_ptr<int64_t>(), copies);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return facts;
}

}  // namespace matmuls
#endif

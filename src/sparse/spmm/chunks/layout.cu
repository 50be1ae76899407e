// Cuts a matrix into chunks (layout.h) on a GPU. A first kernel counts each block's rows, so that the second writes in
// row order.
#ifdef __CUDACC__
#include "sparse/spmm/chunks/layout.h"

#include <algorithm>

#include "glue/handles.h"
#include "sparse/csr.cuh"

namespace matmuls {
namespace {

constexpr int64_t kMostBlocks = 1024;

struct Counts {
  int empty = 0, cut = 0, slots = 0;

  __device__ void operator+=(const Counts& x) { empty += x.empty, cut += x.cut, slots += x.slots; }
};

struct RowsToCut {
  const int* crow;
  int rows, each, piece;  // each: rows per block
  const int* names;

  __device__ int name(int64_t row) const { return names ? names[row] : static_cast<int>(row); }

  __device__ Counts count(int length) const {
    const int pieces = length > piece ? length / piece + (length % piece != 0) : 0;
    return {length == 0, pieces > 0, pieces};
  }
};

// Exclusive prefix sums over the block's threads, and totals.
__device__ Counts counts_before(const Counts& own, Counts& all) {
  const Before empty = count_before(own.empty), cut = count_before(own.cut), slots = count_before(own.slots);
  all = {empty.all, cut.all, slots.all};
  return {empty.before, cut.before, slots.before};
}

__global__ void __launch_bounds__(kSparseThreads) count_kernel(const RowsToCut m, Counts* of_blocks) {
  Counts own, all;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * m.each, end = min(first + m.each, int64_t{m.rows});
  for (int64_t row = first + threadIdx.x; row < end; row += kSparseThreads)
    own += m.count(m.crow[row + 1] - m.crow[row]);
  counts_before(own, all);
  if (threadIdx.x == 0) of_blocks[blockIdx.x] = all;
}

// A thread per row; a warp writes the pieces of its long rows.
__global__ void __launch_bounds__(kSparseThreads)
    cut_kernel(const RowsToCut m, const Counts* of_blocks, int nonzeros, int size, int chunks, int* begins, int* ends,
               int3* cut, int* empty, Counts* counts) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kSparseThreads + threadIdx.x; i <= chunks;
       i += static_cast<int64_t>(gridDim.x) * kSparseThreads)
    begins[i] = begin_of_chunk(m.crow, m.rows, min(i * size, int64_t{nonzeros}), m.piece);
  Counts known, done, all;
  for (unsigned b = threadIdx.x; b < blockIdx.x; b += kSparseThreads) known += of_blocks[b];
  counts_before(known, done);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * m.each, end = min(first + m.each, int64_t{m.rows});
  for (int64_t from = first; from < end; from += kSparseThreads, done += all) {
    const int64_t row = from + threadIdx.x;
    const int begin = row < end ? m.crow[row] : 0, length = row < end ? m.crow[row + 1] - begin : -1;
    const Counts own = m.count(length);
    Counts at = done;
    at += counts_before(own, all);
    if (own.empty) empty[at.empty] = m.name(row);
    if (own.cut) cut[at.cut] = make_int3(m.name(row), at.slots, own.slots);
    if (length > 0 && !own.cut) ends[begin + length - 1] = m.name(row);
    for (unsigned left = __ballot_sync(0xffffffffu, own.cut > 0); left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1, pieces = __shfl_sync(0xffffffffu, own.slots, lane);
      const int64_t row_begin = __shfl_sync(0xffffffffu, begin, lane);
      const int64_t row_end = row_begin + __shfl_sync(0xffffffffu, length, lane);
      const int slot = m.rows + __shfl_sync(0xffffffffu, at.slots, lane);
      for (int i = static_cast<int>(threadIdx.x) % 32; i < pieces; i += 32)
        ends[min(row_begin + (i + int64_t{1}) * m.piece, row_end) - 1] = slot + i;
    }
  }
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) *counts = done;
}

}  // namespace

void cut_on_gpu(const Pattern& p, int size, int piece, const at::Tensor& names, const Chunks& made) {
  const OperationGuard guard(kChunksOp, p.crow);
  const int64_t rows = p.rows();
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(ceil_of(rows, kSparseThreads), 1, kMostBlocks));
  const RowsToCut m{p.crow.const_data_ptr<int>(), static_cast<int>(rows), static_cast<int>(ceil_of(rows, blocks)),
                    piece, indices_or_null<int>(names)};
  const at::Tensor of_blocks = empty({blocks, 3}, p.crow.options());
  auto* const found = reinterpret_cast<Counts*>(of_blocks.mutable_data_ptr<int>());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cudaMemsetAsync(made.ends.mutable_data_ptr(), 0xff, made.ends.nbytes(), stream));
  count_kernel<<<blocks, kSparseThreads, 0, stream>>>(m, found);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  cut_kernel<<<blocks, kSparseThreads, 0, stream>>>(
      m, found, static_cast<int>(p.nonzeros()), size, static_cast<int>(made.begins.size(0) - 1),
      made.begins.mutable_data_ptr<int>(), made.ends.mutable_data_ptr<int>(),
      reinterpret_cast<int3*>(made.cut.mutable_data_ptr<int>()), made.empty.mutable_data_ptr<int>(),
      reinterpret_cast<Counts*>(made.counts.mutable_data_ptr<int>()));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace matmuls
#endif

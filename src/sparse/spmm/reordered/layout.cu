// Reordering of rows (layout.h) on a GPU: a thread per row; growing regions takes a launch per round.
#ifdef __CUDACC__
#include "sparse/spmm/reordered/layout.h"

#include <utility>

#include "glue/handles.h"
#include "gpu/launch.cuh"
#include "sparse/csr.cuh"

namespace matmuls {
namespace {

enum class Round { first, between, last };

unsigned blocks_of(int64_t rows) { return static_cast<unsigned>(ceil_of(rows, kSparseThreads)); }
__device__ int64_t thread() { return static_cast<int64_t>(blockIdx.x) * kSparseThreads + threadIdx.x; }

__global__ void __launch_bounds__(kSparseThreads)
    grow_kernel(const int* crow, const int* col, int rows, int size, Round round, const int* from, int* to) {
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (thread() >= rows) return;
  const int row = static_cast<int>(thread());
  const int region = round == Round::first ? seed(row, size) : grown(crow, col, row, from);
  to[row] = round == Round::last && region < 0 ? row / size : region;
}

__global__ void __launch_bounds__(kSparseThreads)
    reads_kernel(const int* crow, const int* col, int rows, const int* order, const Windows windows, int words,
                 unsigned* seen, unsigned long long* count) {
  const int64_t at = windows.row(thread());
  int found = 0;
  if (at < rows) {
    const int row = order ? order[at] : static_cast<int>(at);
    unsigned* const own = seen + thread() / windows.at_once * words;
    for (int p = crow[row]; p < crow[row + 1]; ++p) {
      const unsigned bit = 1u << col[p] % 32;
      found += (atomicOr(own + col[p] / 32, bit) & bit) == 0;
    }
  }
  found = sum_of_group<32>(found);
  if (threadIdx.x % 32 == 0 && found > 0) atomicAdd(count, static_cast<unsigned long long>(found));
}

__global__ void __launch_bounds__(kSparseThreads)
    move_kernel(const int* crow, const int* col, int rows, const int* order, const int* new_crow, int* new_col,
                int* place) {
  if (thread() >= rows) return;
  const int row = order[thread()], begin = crow[row], to = new_crow[thread()];
  for (int i = 0; i < crow[row + 1] - begin; ++i) new_col[to + i] = col[begin + i], place[to + i] = begin + i;
}

}  // namespace

void grow_on_gpu(const Pattern& p, int size, int rounds, const at::Tensor& regions, const at::Tensor& before) {
  const OperationGuard guard(kRegionsOp, p.crow);
  int *from = before.mutable_data_ptr<int>(), *to = regions.mutable_data_ptr<int>();
  if (rounds % 2 == 1) std::swap(from, to);  // so that the last round writes to `regions`
  for (int i = 0; i <= rounds; ++i, std::swap(from, to))
    launch_programmatic(grow_kernel, blocks_of(p.rows()), kSparseThreads, p.crow.const_data_ptr<int>(),
                        p.col.const_data_ptr<int>(), static_cast<int>(p.rows()), size,
                        i == 0        ? Round::first
                        : i == rounds ? Round::last
                                      : Round::between,
                        from, to);
}

void count_reads_on_gpu(const Pattern& p, const at::Tensor& order, const Windows& windows, const at::Tensor& seen,
                        const at::Tensor& count) {
  const OperationGuard guard(kReadsOp, p.crow);
  reads_kernel<<<blocks_of(windows.of(p.rows()) * windows.at_once), kSparseThreads, 0,
                 c10::cuda::getCurrentCUDAStream()>>>(
      p.crow.const_data_ptr<int>(), p.col.const_data_ptr<int>(), static_cast<int>(p.rows()),
      indices_or_null<int>(order), windows, static_cast<int>(seen.size(1)),
      reinterpret_cast<unsigned*>(seen.mutable_data_ptr<int>()),
      reinterpret_cast<unsigned long long*>(count.mutable_data_ptr<int64_t>()));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void move_rows_on_gpu(const Pattern& p, const at::Tensor& order, const at::Tensor& crow, const at::Tensor& col,
                      const at::Tensor& place) {
  const OperationGuard guard(kReorderOp, p.crow);
  move_kernel<<<blocks_of(p.rows()), kSparseThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      p.crow.const_data_ptr<int>(), p.col.const_data_ptr<int>(), static_cast<int>(p.rows()),
      order.const_data_ptr<int>(), crow.const_data_ptr<int>(), col.mutable_data_ptr<int>(),
      place.mutable_data_ptr<int>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace matmuls
#endif

// csr_spgemm_sampled on a GPU: out[p at (r, c)] = the sum over M's row c of M[c, j] * G[r, j].
//
// A group of kLanes lanes computes a nonzero of P and searches G's row for each column j, so that the order of a sum
// does not depend on the launch.
#ifdef __CUDACC__
#include <ATen/Dispatch.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "sparse/csr.cuh"
#include "sparse/spgemm/indices_of.cuh"

namespace matmuls::spgemm {

namespace {

constexpr int kLanes = 8;

template <class F, class I>
__global__ void __launch_bounds__(kSparseThreads)
    sampled_kernel(const Indices<I> p, const Indices<I> g, const Indices<I> m, const F* g_values, const F* m_values,
                   F* out, int64_t rows, int64_t nonzeros) {
  const int lane = threadIdx.x % kLanes;
  const int64_t groups = static_cast<int64_t>(gridDim.x) * (kSparseThreads / kLanes);
  const int64_t group = static_cast<int64_t>(blockIdx.x) * (kSparseThreads / kLanes) + threadIdx.x / kLanes;
  const int64_t rounds = (nonzeros + groups - 1) / groups;  // the same for all lanes: they meet in the shuffles
  for (int64_t round = 0; round < rounds; ++round) {
    const int64_t i = round * groups + group;
    F sum = 0;
    if (i < nonzeros) {
      const int64_t r = row_of(p.crow, rows, i), c = p.col[i];
      const int64_t begin = g.crow[r], end = g.crow[r + 1];
      for (int64_t q = m.crow[c] + lane; q < m.crow[c + 1]; q += kLanes) {
        const I column = m.col[q];
        int64_t low = begin, high = end;  // the first of G's row that is not before the column
        while (low < high) {
          const int64_t middle = low + (high - low) / 2;
          if (g.col[middle] < column)
            low = middle + 1;
          else
            high = middle;
        }
        if (low < end && g.col[low] == column) sum += m_values[m.place(q)] * g_values[g.place(low)];
      }
    }
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (i < nonzeros && lane == 0) out[p.place(i)] = sum;
  }
}

}  // namespace

void sampled_on_gpu(const Pattern& p, const Pattern& g, const Pattern& m, const at::Tensor& g_values,
                    const at::Tensor& m_values, const at::Tensor& out) {
  const int64_t groups = kSparseThreads / kLanes;
  const int64_t blocks = std::clamp<int64_t>(ceil_of(p.nonzeros(), groups), 1, 16384);
  AT_DISPATCH_FLOATING_TYPES(out.scalar_type(), "csr_spgemm_sampled", [&] {
    AT_DISPATCH_INDEX_TYPES(p.crow.scalar_type(), "csr_spgemm_sampled", [&] {
      sampled_kernel<scalar_t, index_t>
          <<<static_cast<unsigned>(blocks), kSparseThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
              indices_of<index_t>(p), indices_of<index_t>(g), indices_of<index_t>(m),
              g_values.const_data_ptr<scalar_t>(), m_values.const_data_ptr<scalar_t>(),
              out.mutable_data_ptr<scalar_t>(), p.rows(), p.nonzeros());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
}

}  // namespace matmuls::spgemm
#endif
